"""JointBatch: what it checks, and its views; joint_rows: hand-computed targets."""

import dataclasses

import numpy as np
import pytest
import torch

from tests.support import hand_batch, hand_streams
from thrust_rllib.functional import RunningMoments
from thrust_rllib.joint_batch import JointBatch
from thrust_rllib.joint_rows import joint_rows


def batch(steps=3, envs=2):
    obs = np.arange(steps * 2 * envs * 4, dtype=np.float32).reshape(steps, 2, envs, 4)
    return hand_batch(
        {
            "m": hand_streams(["a", 7], obs, bootstrap_obs=np.zeros((2, envs, 4))),
            "k": hand_streams(["b"], obs[:, :1, :, :2], bootstrap_obs=np.zeros((1, envs, 2))),
        },
        (steps - 1) * envs + np.arange(envs),
    )


def test_views_of_an_agents_own_stream():
    each = batch()
    assert each.agents == ("b", "a", 7) and each.num_steps == 3 and each.num_envs == 2
    stream = each.stream(7)
    assert stream.module_id == "m" and stream.obs.shape == (3, 2, 4) and stream.bootstrap_obs.shape == (2, 4)
    np.testing.assert_array_equal(stream.obs, each.modules["m"].obs[:, 1])
    assert np.shares_memory(stream.obs, each.modules["m"].obs)
    assert [s.agent_id for s in each.streams()] == ["b", "a", 7]
    assert len(each) == each.env_steps() == 6 and each.agent_steps() == 18
    with pytest.raises(KeyError, match="no agent 'c'.*'b', 'a', 7"):
        each.stream("c")


def test_padding_and_absence_are_not_counted():
    each = batch()
    each.valid[2, 1] = False
    each.modules["k"].present[0, 0, 0] = False
    assert each.env_steps() == 5 and each.agent_steps() == 5 + 5 + 4


@pytest.mark.parametrize(
    "field, shape",
    [
        ("obs", (3, 2, 1, 4)),
        ("actions", (3, 1, 2)),
        ("action_logp", (3, 2, 2, 1)),
        ("rewards", (2, 2, 2)),
        ("present", (3, 2)),
        ("terminated", (3, 3, 2)),
        ("truncated", (2, 3, 2)),
        ("bootstrap_obs", (2, 1, 4)),
        ("bootstrap_obs", (1, 2, 4)),
        ("obs", (3, 2)),
        ("action_mask", (3, 2, 1, 5)),
    ],
)
def test_wrong_shapes_are_errors_that_name_the_field(field, shape):
    each = batch()
    setattr(each.modules["m"], field, np.zeros(shape, np.float32))
    with pytest.raises(ValueError, match=f"{field} of module 'm' has .*{shape[0]}.*needed"):
        each.check()


def test_an_empty_rollout_is_an_error():
    each = batch()
    with pytest.raises(ValueError, match="empty"):
        dataclasses.replace(each, valid=np.ones((0, 2), bool)).check()
    with pytest.raises(ValueError, match="at least one module"):
        dataclasses.replace(each, modules={}).check()
    with pytest.raises(ValueError, match="episode_start"):
        dataclasses.replace(each, episode_start=np.ones((2, 2), bool)).check()


@pytest.mark.parametrize("rows", [[0, 6], [-1, 3], [5, 4], [3, 3]])
def test_bootstrap_rows_are_sorted_rows_of_the_batch(rows):
    with pytest.raises(ValueError, match="bootstrap_rows"):
        dataclasses.replace(batch(), bootstrap_rows=np.array(rows)).check()


def test_an_agent_in_two_modules_is_an_error():
    each = batch()
    each.modules["k"].agents = ("a",)
    with pytest.raises(ValueError, match="two modules"):
        each.check()


# --------------------------------------------------------------------------------------------- joint rows


def targets(rewards, ends, gamma, lambda_, value=0.5, bootstrap=True, normalizers=None):
    """Value targets and advantages of one agent whose values are all `value`; `ends` is what the last row is."""
    steps = len(rewards)
    flags = np.zeros((steps, 1, 1), bool)
    if ends in ("terminated", "truncated"):
        flags[-1] = True
    given = {ends: flags} if ends in ("terminated", "truncated") else {}
    rows = [] if ends == "terminated" else [steps - 1]
    streams = hand_streams(
        ["a"],
        np.zeros((steps, 1, 1, 2)),
        rewards=np.array(rewards, np.float32)[:, None, None],
        bootstrap_obs=np.zeros((1, len(rows), 2)),
        **given,
    )
    each = joint_rows(
        [hand_batch({"m": streams}, rows)],
        values_of=lambda module_id, obs, sequences: torch.full((len(obs),), value),
        memories={},
        normalizers=normalizers or {},
        gamma={"m": gamma},
        lambda_={"m": lambda_},
        bootstrap=bootstrap,
        standardize_rollout=False,
        device="cpu",
    )
    return each.value_targets[0].tolist(), each.advantages[0].tolist()


# Case 10 of the inputs: T = 3, rewards 1, 2, 3, values fixed at 0.5, γ = 0.9. Computed by hand:
#   λ = 0: R_t = r_t + γ V_{t+1};  λ = 1: the discounted return, with V after a row that does not terminate.
HAND = {
    ("terminated", 0.0): [1.45, 2.45, 3.0],
    ("terminated", 1.0): [1 + 0.9 * (2 + 0.9 * 3), 2 + 0.9 * 3, 3.0],
    ("truncated", 0.0): [1.45, 2.45, 3.45],
    ("truncated", 1.0): [1 + 0.9 * (2 + 0.9 * 3.45), 2 + 0.9 * 3.45, 3.45],
    ("cut", 0.0): [1.45, 2.45],
    ("cut", 1.0): [1 + 0.9 * 2.45, 2.45],
}


@pytest.mark.parametrize("ends, lambda_", HAND)
def test_case_10_hand_computed_targets(ends, lambda_):
    rewards = [1, 2] if ends == "cut" else [1, 2, 3]
    found, advantages = targets(rewards, ends, 0.9, lambda_)
    assert found == pytest.approx(HAND[ends, lambda_], abs=1e-6)
    assert advantages == pytest.approx([x - 0.5 for x in HAND[ends, lambda_]], abs=1e-6)


def test_the_seed_takes_zero_after_the_last_row():
    found, _ = targets([1, 2], "cut", 0.9, 0.0, bootstrap=False)
    assert found == pytest.approx([1.45, 2.0])


def test_values_are_read_in_the_units_of_the_rewards():
    # Moments with mean 10 and std 2: the network's 0.5 means 11.
    moments = RunningMoments(decay=0.5)
    moments.update(np.array([8.0, 12.0]))
    found, advantages = targets([1, 2], "cut", 0.9, 0.0, normalizers={"m": moments})
    raw = np.array([1 + 0.9 * 11, 2 + 0.9 * 11])
    assert advantages == pytest.approx(raw - 11, abs=1e-5)
    # The moments take in the targets first, then normalise them.
    count, mean, second = 2.0, 10.0, (64 + 144) / 2
    old = count * 0.5
    new_mean = (old * mean + raw.sum()) / (old + 2)
    new_var = (old * second + (raw**2).sum()) / (old + 2) - new_mean**2
    assert found == pytest.approx((raw - new_mean) / np.sqrt(new_var), abs=1e-5)
    assert float(moments.mean) == pytest.approx(new_mean, abs=1e-5)


def test_a_batch_is_a_dataclass_that_dm_tree_takes_for_a_leaf():
    import tree

    each = batch()
    assert isinstance(each, JointBatch) and tree.flatten([each]) == [each]
