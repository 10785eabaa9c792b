"""Costs of batches against loops in float64: means, and rewards that are paid less."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.constraints import reference
from tests.constraints.batches import KINDS, TEAMS, batch_with_costs, frozen
from tests.functional.helpers import examples, seeds
from tests.support import hand_batch, hand_streams
from thrust_rllib.joint_costs import mean_cost, penalised


def rewards_of(batch):
    return np.concatenate([streams.rewards for streams in batch.modules.values()], axis=1)


@examples
@given(seed=seeds, ragged=st.booleans(), dtype=st.sampled_from([np.float32, np.float64, np.int16]))
def test_the_mean_is_the_reference(seed, ragged, dtype):
    batches = [batch_with_costs(seed + k, steps=3 + k, envs=2 + k, dtype=dtype, ragged=ragged) for k in range(3)]
    for name in KINDS:
        expected = reference.mean_cost(batches, name)
        np.testing.assert_allclose(mean_cost(batches, name), expected, rtol=1e-12, atol=1e-12)


@examples
@given(seed=seeds, ragged=st.booleans(), weights=st.tuples(*[st.sampled_from([0.0, 0.5, -1.25, 30.0])] * 3))
def test_the_rewards_are_the_reference(seed, ragged, weights):
    batch = batch_with_costs(seed, ragged=ragged)
    before = rewards_of(batch).copy()
    weights = dict(zip(KINDS, weights, strict=True))
    after = penalised(batch, weights)
    found = rewards_of(after)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, reference.penalised_rewards(batch, weights), rtol=1e-6, atol=1e-5)
    np.testing.assert_array_equal(rewards_of(batch), before)
    absent = ~np.concatenate([s.present for s in batch.modules.values()], axis=1)
    np.testing.assert_array_equal(found[absent], before[absent])
    if any(weights.values()):
        assert (found != before).any()


def test_by_hand():
    rewards = np.array([[[1.0], [1.0]], [[1.0], [1.0]]])  # T = 2, two agents, one environment
    present = np.array([[[True], [True]], [[True], [False]]])
    modules = {"m": hand_streams(["a", "b"], np.zeros((2, 2, 1, 1)), rewards=rewards, present=present)}
    pair = np.zeros((2, 2, 2, 1))
    pair[0, 0, 1, 0], pair[0, 1, 0, 0], pair[1, 1, 0, 0] = 4.0, 8.0, 100.0
    pair[:, [0, 1], [0, 1]] = np.nan  # with oneself there is no pair
    extras = {"team": np.array([[1.0], [2.0]]), "agent": np.array([[[3.0], [5.0]], [[7.0], [100.0]]]), "pair": pair}
    batch = hand_batch(modules, extras=extras)
    assert [mean_cost([batch], name) for name in KINDS] == [1.5, 5.0, 4.0]
    for name, expected in {"team": [[0, 0], [-1, 1]], "agent": [[-2, -4], [-6, 1]], "pair": [[-3, -7], [1, 1]]}.items():
        assert rewards_of(penalised(batch, {name: 1.0}))[..., 0].tolist() == expected
    assert rewards_of(penalised(batch, {"team": 2.0, "agent": -1.0}))[..., 0].tolist() == [[2, 4], [4, 1]]


def test_other_arrays_are_shared_and_nothing_is_copied_for_nothing():
    batch = batch_with_costs(0)
    assert penalised(batch, {}) is batch and penalised(batch, {"team": 0.0, "not there": 0.0}) is batch
    after = penalised(batch, {"team": 1.0})
    for module_id, streams in batch.modules.items():
        own = after.modules[module_id]
        assert own.obs is streams.obs and own.present is streams.present and own.agents == streams.agents
        assert not np.shares_memory(own.rewards, streams.rewards)
    assert after.valid is batch.valid and all(after.extras[name] is batch.extras[name] for name in KINDS)
    after.check()


def test_a_signal_in_place_of_the_reward_is_paid_less_as_well():
    batch = batch_with_costs(1)
    difference = frozen(np.full((4, 3, 2), 2.0, np.float32))
    batch.extras["difference_reward"] = difference
    after = penalised(batch, {"agent": 0.5}, signals=("difference_reward", "not there"))
    found = after.extras["difference_reward"]
    expected = reference.penalised_rewards(batch, {"agent": 0.5}) - rewards_of(batch) + 2.0
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert found.dtype == np.float32 and (difference == 2.0).all() and "not there" not in after.extras
    batch.extras["difference_reward"] = frozen(np.zeros((4, 2), np.float32))
    with pytest.raises(ValueError, match=r"'difference_reward' have shape \(4, 2\).*\(4, 3, 2\)"):
        penalised(batch, {"agent": 0.5}, signals=("difference_reward",))


def test_numbers_of_whoever_is_absent_reach_nobody():
    batch = batch_with_costs(2)
    absent = ~np.concatenate([s.present for s in batch.modules.values()], axis=1)
    assert absent.any()
    poisoned = batch.extras["agent"].copy()
    poisoned[absent] = np.nan
    clean = mean_cost([batch], "agent"), rewards_of(penalised(batch, {"agent": 1.0}))
    batch.extras["agent"] = frozen(poisoned)
    assert mean_cost([batch], "agent") == clean[0]
    np.testing.assert_array_equal(rewards_of(penalised(batch, {"agent": 1.0})), clean[1])
    poisoned = poisoned.copy()
    poisoned[tuple(np.argwhere(~absent)[0])] = np.nan
    batch.extras["agent"] = poisoned
    with pytest.raises(ValueError, match="the cost 'agent' of a rollout adds up to nan; needed: finite numbers"):
        mean_cost([batch], "agent")


def test_a_row_in_which_nobody_acts_is_not_one_of_the_team():
    present = np.array([[[True], [False]], [[False], [False]], [[False], [True]]])
    streams = hand_streams(["a", "b"], np.zeros((3, 2, 1, 1)), present=present)
    batch = hand_batch({"m": streams}, extras={"team": np.array([[1.0], [np.nan], [4.0]])})
    assert batch.valid.all() and mean_cost([batch], "team") == 2.5


def test_no_row_counts():
    shape = 2, 1, 1
    streams = hand_streams(["a"], np.zeros((*shape, 1)), present=np.zeros(shape, bool))
    batch = hand_batch({"m": streams}, extras={"cost": np.ones(shape)})
    assert mean_cost([batch], "cost") is None
    assert penalised(batch, {"cost": 1.0}).modules["m"].rewards.tolist() == streams.rewards.tolist()


@pytest.mark.parametrize("use", [lambda b, name: mean_cost([b], name), lambda b, name: penalised(b, {name: 1.0})])
def test_wrong_costs(use):
    batch = batch_with_costs(3)
    with pytest.raises(ValueError) as error:
        use(batch, "agents")
    for part in ("the constraint 'agents'", "['agent', 'pair', 'team']", "did you mean 'agent'", "JointStepResult",
                 "extras={'agents': …}", "extras_from_infos"):  # fmt: skip
        assert part in str(error.value)
    steps, agents, envs = 4, sum(map(len, TEAMS.values())), 2
    for shape in [(steps,), (steps, agents), (steps, envs, 1), (steps, envs, agents), (steps, agents, envs, agents),
                  (steps + 1, envs), (agents, steps, envs), (steps, agents, agents, envs, 1)]:  # fmt: skip
        batch.extras["wrong"] = np.zeros(shape)
        with pytest.raises(ValueError, match=r"the cost 'wrong' has shape .*needed: numbers \[T, E\]"):
            use(batch, "wrong")
    for value, dtype in ((None, "object"), (1j, "complex128")):
        batch.extras["wrong"] = np.full((steps, envs), value)
        with pytest.raises(ValueError, match=f"dtype {dtype}"):
            use(batch, "wrong")
    empty = hand_batch({"m": hand_streams(["a"], np.zeros((1, 1, 1, 1)))})
    with pytest.raises(ValueError, match=r"it returns none\. In every step return"):
        use(empty, "cost")
