import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import reference
from tests.functional.helpers import assert_matches, dtypes, examples, random_array, random_mask, seeds
from thrust_rllib.functional import generalized_advantages


def rollout(rng, shape, dtype=torch.float64, p_end=0.2):
    return {
        "rewards": random_array(rng, shape, dtype),
        "values": random_array(rng, shape, dtype),
        "terminated": random_mask(rng, shape, p_end),
        "truncated": random_mask(rng, shape, p_end),
        "bootstrap_values": random_array(rng, shape, dtype),
    }


def column(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def no_ends(x):
    return torch.zeros_like(x, dtype=torch.bool)


@dtypes
@examples
@given(
    seed=seeds,
    shape=st.lists(st.integers(1, 4), max_size=2).map(tuple),
    T=st.integers(1, 12),
    masked=st.booleans(),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    lambda_=st.sampled_from([0.0, 0.8, 1.0]),
)
def test_equals_the_loop_over_streams(dtype, seed, shape, T, masked, gamma, lambda_):
    rng = np.random.default_rng(seed)
    data = rollout(rng, (T, *shape), dtype)
    present = random_mask(rng, (T, *shape), 0.6) if masked else None
    advantages, targets = generalized_advantages(**data, gamma=gamma, lambda_=lambda_, present=present)
    expected = reference.generalized_advantages(
        **{k: v.numpy() for k, v in data.items()},
        gamma=gamma,
        lambda_=lambda_,
        present=None if present is None else present.numpy(),
    )
    assert advantages.dtype == targets.dtype == dtype
    assert_matches(advantages, expected[0])
    assert_matches(targets, expected[1])


@dtypes
def test_gamma_and_lambda_per_agent(dtype):
    rng = np.random.default_rng(0)
    data = rollout(rng, (9, 3, 4), dtype)
    gamma, lambda_ = torch.tensor([0.5, 0.9, 1.0]).view(3, 1), torch.tensor([1.0, 0.3, 0.95]).view(3, 1)
    advantages, _ = generalized_advantages(**data, gamma=gamma, lambda_=lambda_)
    for i in range(3):
        alone = {k: v[:, i] for k, v in data.items()}
        expected, _ = generalized_advantages(**alone, gamma=float(gamma[i]), lambda_=float(lambda_[i]))
        torch.testing.assert_close(advantages[:, i], expected)
    others, _ = generalized_advantages(**data, gamma=gamma.flip(0), lambda_=lambda_)
    assert not torch.allclose(others[:, 0], advantages[:, 0])


def test_golden_values():
    rewards, values = column(1, 2, 3, 4), column(0.5, 1, 1.5, 2)
    terminated = torch.tensor([False, True, False, False])
    zero = torch.zeros(4, dtype=torch.float64)
    advantages, targets = generalized_advantages(
        rewards, values, terminated, no_ends(rewards), zero, gamma=0.9, lambda_=0.8
    )
    assert_matches(advantages, [2.12, 1.00, 4.74, 2.00])
    assert_matches(targets, [2.62, 2.00, 6.24, 4.00])


def test_all_steps_terminal_gives_reward_minus_value():
    rewards, values = column(1, -2, 0.5), column(0.25, 0.5, -0.5)
    ends = torch.ones(3, dtype=torch.bool)
    advantages, targets = generalized_advantages(
        rewards, values, ends, no_ends(rewards), column(7, 7, 7), gamma=0.99, lambda_=0.95
    )
    assert_matches(advantages, [0.75, -2.5, 1.0])
    assert_matches(targets, rewards)


@examples
@given(seed=seeds, gamma=st.floats(0, 1))
def test_lambda_one_is_the_discounted_return_minus_the_value(seed, gamma):
    rng = np.random.default_rng(seed)
    data = rollout(rng, (6, 2), p_end=0.0)
    advantages, targets = generalized_advantages(**data, gamma=gamma, lambda_=1.0)
    returns = data["bootstrap_values"][-1]
    for t in reversed(range(6)):
        returns = data["rewards"][t] + gamma * returns
        assert_matches(targets[t], returns)
        assert_matches(advantages[t], returns - data["values"][t])


@examples
@given(seed=seeds, gamma=st.floats(0, 1))
def test_lambda_zero_is_the_one_step_error(seed, gamma):
    rng = np.random.default_rng(seed)
    data = rollout(rng, (6, 2), p_end=0.0)
    advantages, _ = generalized_advantages(**data, gamma=gamma, lambda_=0.0)
    r, v = data["rewards"], data["values"]
    assert_matches(advantages[:-1], r[:-1] + gamma * v[1:] - v[:-1])


@pytest.mark.parametrize("lambda_", [0.0, 0.5, 1.0])
def test_the_true_value_of_a_constant_reward_has_no_advantage(lambda_):
    gamma = 0.75
    ones = torch.ones(50, 3, dtype=torch.float64)
    value = ones / (1 - gamma)
    cut = random_mask(np.random.default_rng(1), (50, 3), 0.1)
    advantages, targets = generalized_advantages(ones, value, no_ends(ones), cut, value, gamma, lambda_)
    assert_matches(advantages, torch.zeros_like(ones))
    # With the bootstrap taken away (the seed's "zero") the same value is wrong at every cut.
    without, _ = generalized_advantages(ones, value, no_ends(ones), cut, 0 * value, gamma, lambda_)
    assert (without[cut] < -2).all() and (without[-1] < -2).all()


def test_bootstrap_is_read_only_at_truncated_and_last_rows():
    rng = np.random.default_rng(2)
    data = rollout(rng, (8, 5))
    present = random_mask(rng, (8, 5))
    last = torch.zeros_like(present)
    for s in range(5):
        rows = present[:, s].nonzero()
        if len(rows):
            last[rows[-1], s] = True
    read = present & (last | data["truncated"]) & ~data["terminated"]
    expected = generalized_advantages(**data, gamma=0.9, lambda_=0.8, present=present)
    data["bootstrap_values"] = data["bootstrap_values"].masked_fill(~read, torch.nan)
    actual = generalized_advantages(**data, gamma=0.9, lambda_=0.8, present=present)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    place = tuple(read.nonzero()[0])
    data["bootstrap_values"][place] += 1.0
    changed, _ = generalized_advantages(**data, gamma=0.9, lambda_=0.8, present=present)
    assert changed[place] != expected[0][place]


def test_terminated_wins_over_truncated():
    rng = np.random.default_rng(3)
    data = rollout(rng, (8, 5))
    both = generalized_advantages(**data | {"truncated": data["terminated"]}, gamma=0.9, lambda_=0.8)
    only = generalized_advantages(**data | {"truncated": no_ends(data["rewards"])}, gamma=0.9, lambda_=0.8)
    torch.testing.assert_close(both, only, rtol=0, atol=0)
    cut = generalized_advantages(
        **data | {"truncated": data["terminated"], "terminated": no_ends(data["rewards"])},
        gamma=0.9,
        lambda_=0.8,
    )
    assert not torch.allclose(cut[0], only[0])


@examples
@given(seed=seeds)
def test_absent_rows_are_as_if_cut_out_and_whatever_they_hold_never_leaks(seed):
    rng = np.random.default_rng(seed)
    data = rollout(rng, (10,))
    present = random_mask(rng, (10,), 0.5)
    for name in ("rewards", "values", "bootstrap_values"):
        data[name] = data[name].masked_fill(~present, torch.nan)
    advantages, targets = generalized_advantages(**data, gamma=0.9, lambda_=0.8, present=present)
    kept = {k: v[present] for k, v in data.items()}
    expected = generalized_advantages(**kept, gamma=0.9, lambda_=0.8)
    assert_matches(advantages[present], expected[0])
    assert_matches(targets[present], expected[1])
    assert (advantages[~present] == 0).all() and (targets[~present] == 0).all()


def test_an_episode_knows_nothing_of_the_next_one():
    rng = np.random.default_rng(4)
    data = rollout(rng, (6, 1), p_end=0.0)
    before, _ = generalized_advantages(**data, gamma=0.9, lambda_=0.8)
    data["truncated"][2] = True
    first, _ = generalized_advantages(**data, gamma=0.9, lambda_=0.8)
    data["rewards"][3:] += 10
    second, _ = generalized_advantages(**data, gamma=0.9, lambda_=0.8)
    assert torch.equal(first[:3], second[:3])
    assert not torch.allclose(first[:3], before[:3])


def test_no_rows_and_no_gradient():
    empty = torch.zeros(0, 3)
    advantages, targets = generalized_advantages(empty, empty, no_ends(empty), no_ends(empty), empty, 0.9, 0.8)
    assert advantages.shape == targets.shape == (0, 3)
    values = torch.ones(4, requires_grad=True)
    advantages, targets = generalized_advantages(values, values, no_ends(values), no_ends(values), values, 0.9, 0.8)
    assert not advantages.requires_grad and not targets.requires_grad


@pytest.mark.parametrize("name", ["values", "terminated", "truncated", "bootstrap_values", "present"])
def test_shape_errors_name_both_shapes(name):
    data = rollout(np.random.default_rng(5), (4, 2)) | {"present": torch.ones(4, 2, dtype=torch.bool)}
    data[name] = data[name][:, :1]
    with pytest.raises(ValueError, match=rf"rewards has shape \(4, 2\), {name} has shape \(4, 1\)"):
        generalized_advantages(**data, gamma=0.9, lambda_=0.8)


def test_errors_of_time_and_gamma():
    data = rollout(np.random.default_rng(6), (4, 2))
    with pytest.raises(ValueError, match=r"gamma has shape \(4, 1\), rewards\[0\] has shape \(2,\)"):
        generalized_advantages(**data, gamma=torch.ones(4, 1), lambda_=0.8)
    with pytest.raises(ValueError, match=r"put time in the first dimension"):
        generalized_advantages(**{k: v[0, 0] for k, v in data.items()}, gamma=0.9, lambda_=0.8)
