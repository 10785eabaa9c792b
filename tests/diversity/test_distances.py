import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.diversity import reference
from tests.functional.helpers import assert_matches, dtypes, examples, gradcheck, random_array, random_mask, seeds
from thrust_rllib.functional import (
    jensen_shannon,
    system_neural_diversity,
    time_averaged_total_variation,
    total_variation,
)

MASKED = -1e30
heads = st.lists(st.integers(1, 4), min_size=1, max_size=3)
categorical = pytest.mark.parametrize(
    ("function", "expected"),
    [
        (total_variation, reference.total_variation),
        (time_averaged_total_variation, reference.time_averaged),
    ],
    ids=["row by row", "averaged"],
)


def team(seed, N=3, A=4, R=6, dtype=torch.float64, scale=2.0):
    rng = np.random.default_rng(seed)
    return [random_array(rng, (R, A), dtype, scale) for _ in range(N)]


def normals(seed, N=3, k=2, R=6, dtype=torch.float64):
    return team(seed, N, k, R, dtype), [x.abs() + 0.25 for x in team(seed + 1, N, k, R, dtype, 1.0)]


def masks_for(seed, N, R=6, p=0.6):
    rng = np.random.default_rng(seed)
    return [random_mask(rng, R, p) for _ in range(N)]


def arrays(tensors):
    return None if tensors is None else [x.numpy() for x in tensors]


def logits_of(*probabilities):
    """[1, A] of each."""
    return [torch.tensor([p], dtype=torch.float64).log() for p in probabilities]


# --- categorical --------------------------------------------------------------------------------------------------


@categorical
@dtypes
@examples
@given(seed=seeds, N=st.integers(2, 4), sizes=heads, R=st.integers(0, 5), p=st.sampled_from([None, 0.0, 0.5, 0.8]))
def test_categorical_distances_equal_the_loops(function, expected, dtype, seed, N, sizes, R, p):
    logits = team(seed, N, sum(sizes), R, dtype)
    masks = None if p is None else masks_for(seed, N, R, p)
    if R == 0 and masks is None and function is time_averaged_total_variation:
        assert function(logits, masks, sizes) == 0
        return
    assert_matches(function(logits, masks, sizes), expected(arrays(logits), arrays(masks), sizes))
    assert_matches(function(torch.stack(logits), masks, sizes), expected(arrays(logits), arrays(masks), sizes))


def test_by_hand():
    first, second, third = [0.5, 0.5, 0.0], [0.2, 0.5, 0.3], [0.0, 0.0, 1.0]
    assert_matches(total_variation(logits_of(first, second)), 0.3)
    assert_matches(total_variation(logits_of(first, third)), 1.0)
    assert_matches(total_variation(logits_of(first, second, third)), (0.3 + 1.0 + 0.7) / 3)
    # Two agents that take turns: far apart in each row, equal on average.
    here, there = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).log(), torch.tensor([[0.0, 1.0], [1.0, 0.0]]).log()
    assert total_variation([here, there]) == 1 and time_averaged_total_variation([here, there]) == 0
    # A head of two that differs by 0.4, a head of three that is equal: the mean over heads.
    split = [
        torch.cat(pair, 1) for pair in zip(logits_of([0.9, 0.1], [0.5, 0.5]), logits_of(first, first), strict=True)
    ]
    assert_matches(total_variation(split, head_sizes=[2, 3]), 0.2)
    # The second agent was there in the first row only: it is compared there, with its whole average to the other's.
    rows = torch.tensor([[1.0, 0.0], [0.5, 0.5]]).log(), torch.tensor([[0.75, 0.25], [0.0, 1.0]]).log()
    masks = [torch.tensor([True, True]), torch.tensor([True, False])]
    assert total_variation(rows, masks) == pytest.approx(0.25)
    assert time_averaged_total_variation(rows, masks) == pytest.approx(0, abs=1e-7)


@categorical
@examples
@given(seed=seeds, sizes=heads, order=st.permutations(range(4)), masked=st.booleans(), scale=st.sampled_from([0.1, 30]))
def test_range_order_of_agents_and_averages(function, expected, seed, sizes, order, masked, scale):
    logits = team(seed, 4, sum(sizes), scale=scale)
    masks = masks_for(seed, 4) if masked else None
    spread = function(logits, masks, sizes)
    assert -1e-12 <= spread <= 1 + 1e-12
    shuffled = [logits[i] for i in order], [masks[i] for i in order] if masked else None
    torch.testing.assert_close(function(*shuffled, sizes), spread)
    if not masked:  # a mean of distances is never less than the distance of the means
        assert time_averaged_total_variation(logits, None, sizes) <= total_variation(logits, None, sizes) + 1e-12


def test_between_divergence_and_its_root():
    # TV² / 2 <= JS <= TV ln 2 for two agents, row by row.
    for seed in range(20):
        logits = team(seed, 2, 5, 1)
        tv, js = total_variation(logits), jensen_shannon(logits)
        assert tv**2 / 2 - 1e-12 <= js <= tv * math.log(2) + 1e-12 and tv > 0.05


def test_mean_of_heads_is_a_lower_bound_of_the_joint_distance():
    logits = team(4, 2, 5)
    joint = [(x[:, :2].log_softmax(-1).unsqueeze(2) + x[:, 2:].log_softmax(-1).unsqueeze(1)).flatten(1) for x in logits]
    split, whole = total_variation(logits, head_sizes=[2, 3]), total_variation(joint)
    assert split + 0.01 < whole < 2 * split


@dtypes
@pytest.mark.parametrize("low", [MASKED, -torch.inf])
@pytest.mark.parametrize("sizes", [[6], [3, 3], [2, 4]], ids=str)
def test_masked_actions_have_probability_zero(dtype, low, sizes):
    rng = np.random.default_rng(3)
    logits = []
    for x in team(2, 3, 6, dtype=dtype):
        allowed = random_mask(rng, (6, 6), 0.6)
        allowed[:, [0, 2, 3]] = True
        logits.append(x.masked_fill(~allowed, low).requires_grad_())
    spread = total_variation(logits, head_sizes=sizes)
    assert_matches(spread, reference.total_variation([x.detach().numpy() for x in logits], None, sizes))
    for x, gradient in zip(logits, torch.autograd.grad(spread, logits), strict=True):
        assert gradient.isfinite().all() and (gradient[x <= MASKED] == 0).all() and (gradient != 0).any()


# --- normals ------------------------------------------------------------------------------------------------------


@dtypes
@examples
@given(
    seed=st.integers(0, 2**31),
    N=st.integers(2, 4),
    k=st.integers(1, 3),
    R=st.integers(0, 5),
    p=st.sampled_from([None, 0.0, 0.6]),
)
def test_neural_diversity_equals_the_loops(dtype, seed, N, k, R, p):
    means, stds = normals(seed, N, k, R, dtype)
    masks = None if p is None else masks_for(seed, N, R, p)
    expected = reference.neural_diversity(arrays(means), arrays(stds), arrays(masks))
    assert_matches(system_neural_diversity(means, stds, masks), expected)


def test_neural_diversity_by_hand():
    zero, one = torch.zeros(1, 2, dtype=torch.float64), torch.ones(1, 2, dtype=torch.float64)
    assert_matches(system_neural_diversity([zero, 3 * one], [one, 5 * one]), math.sqrt(2 * 9 + 2 * 16))
    # One agent of three is apart by 2: two pairs of three.
    means = [zero, zero, torch.tensor([[2.0, 0.0]], dtype=torch.float64)]
    assert_matches(system_neural_diversity(means, [one] * 3), 4 / 3)


def test_neural_diversity_is_the_distance_of_optimal_transport():
    # In one dimension W2² is the mean squared difference of the quantiles.
    u = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    quantile = torch.erfinv(2 * u - 1) * math.sqrt(2)
    (m, n), (s, t) = (0.3, -1.1), (0.5, 1.7)
    exact = ((m + s * quantile) - (n + t * quantile)).square().mean().sqrt()
    found = system_neural_diversity(
        [torch.tensor([[m]]), torch.tensor([[n]])], [torch.tensor([[s]]), torch.tensor([[t]])]
    )
    assert found == pytest.approx(float(exact), abs=1e-4)


def test_small_distances_are_kept_in_float32():
    mean = torch.full((4, 64), 100.0)
    found = system_neural_diversity([mean, mean + 1e-3], [mean * 0 + 1] * 2)
    assert found == pytest.approx(8e-3, rel=0.02)


# --- gradients, absence, errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sizes", [[5], [2, 3]], ids=str)
def test_gradients_of_logits(masked, sizes):
    logits = [x.requires_grad_() for x in team(0, A=5, R=4)]
    masks = masks_for(0, 3, 4, 0.8) if masked else None
    assert gradcheck(lambda *x: total_variation(x, masks, sizes), *logits)
    assert gradcheck(lambda *x: time_averaged_total_variation(x, masks, sizes), *logits)


@pytest.mark.parametrize("masked", [False, True])
def test_gradients_of_normals(masked):
    means, stds = normals(0, R=4)
    masks = masks_for(0, 3, 4, 0.8) if masked else None
    inputs = [x.requires_grad_() for x in (*means, *stds)]
    assert gradcheck(lambda *x: system_neural_diversity(x[:3], x[3:], masks), *inputs)


def test_equal_agents_are_at_distance_zero_with_a_gradient_of_zero():
    x, std = team(5, 1)[0].requires_grad_(), torch.ones(6, 4, dtype=torch.float64)
    for spread in (
        total_variation([x, x, x]),
        time_averaged_total_variation([x, x]),
        system_neural_diversity([x, x], [std, std]),
    ):
        assert spread == 0 and (torch.autograd.grad(spread, x)[0] == 0).all()
    assert total_variation([x, 2 * x, x]) > 0.01 and system_neural_diversity([x, 2 * x], [std, std]) > 0.01


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    "function",
    [
        total_variation,
        time_averaged_total_variation,
        lambda x, masks: system_neural_diversity(x, [torch.ones_like(z) for z in x], masks),
        lambda x, masks: system_neural_diversity([torch.ones_like(z) for z in x], x, masks),
    ],
    ids=["row by row", "averaged", "means", "stds"],
)
def test_absent_rows_never_leak(function, garbage):
    masks, results = masks_for(7, 3), []
    for fill in (0.0, garbage):
        inputs = [x.masked_fill(~m.unsqueeze(-1), fill).requires_grad_() for x, m in zip(team(7), masks, strict=True)]
        spread = function(inputs, masks)
        results.append([spread.detach(), *torch.autograd.grad(spread, inputs)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)) and results[0][0] > 0
    for gradient, mask in zip(results[1][1:], masks, strict=True):
        assert (gradient[~mask] == 0).all() and (gradient[mask] != 0).any()


def test_a_gradient_step_moves_the_policies_apart_or_together():
    for function in (total_variation, lambda x: system_neural_diversity(x, [torch.ones_like(z) for z in x])):
        inputs = [x.requires_grad_() for x in team(5, scale=0.5)]
        before = function(inputs)
        gradients = torch.autograd.grad(before, inputs)
        apart, together = (
            function([x + sign * g for x, g in zip(inputs, gradients, strict=True)]) for sign in (1.0, -1.0)
        )
        assert together < before < apart


def test_errors():
    x, mask = torch.zeros(5, 4), torch.ones(5, dtype=torch.bool)
    for function in (total_variation, time_averaged_total_variation):
        name = function.__name__
        with pytest.raises(ValueError, match=f"{name} needs the logits of 2 agents or more, got 1"):
            function([x])
        with pytest.raises(ValueError, match=r"logits\[1\] has shape \(5, 3\), .*the same actions"):
            function([x, x[:, :3]])
        with pytest.raises(ValueError, match=r"logits\[0\] has shape \(5, 4\): needed \[R, 5\] for heads of \[2, 3\]"):
            function([x, x], head_sizes=[2, 3])
        with pytest.raises(ValueError, match="1 masks for 2 agents"):
            function([x, x], [mask])
    with pytest.raises(ValueError, match="system_neural_diversity needs the means of 2 agents"):
        system_neural_diversity([x], [x])
    with pytest.raises(ValueError, match=r"means\[1\] has shape \(5, 3\)"):
        system_neural_diversity([x, x[:, :3]], [x, x])
    with pytest.raises(ValueError, match="give stds the shape of means"):
        system_neural_diversity([x, x], [x[:, :3], x[:, :3]])
