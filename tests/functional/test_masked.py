import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import reference
from tests.functional.helpers import (
    assert_matches,
    dtypes,
    examples,
    gradcheck,
    random_array,
    random_mask,
    seeds,
)
from thrust_rllib.functional import masked_mean, masked_moments, standardize

DIMS = [0, 1, 2, -1, (0, 2), (1, 2), (0, 1, 2)]
floors = pytest.mark.parametrize("floor", ["max", "add"])


@dtypes
@examples
@given(
    seed=seeds,
    shape=st.tuples(*[st.integers(1, 5)] * 3),
    dim=st.sampled_from(DIMS),
    p=st.sampled_from([0.0, 0.3, 0.8, 1.0]),
)
def test_moments_equal_the_reference(dtype, seed, shape, dim, p):
    rng = np.random.default_rng(seed)
    x, mask = random_array(rng, shape, dtype) + 3, random_mask(rng, shape, p)
    expected = [
        reference.over(lambda y, m, k=k: reference.masked_moments(y, m)[k], dim, x.numpy(), mask.numpy())
        for k in range(3)
    ]
    for actual, right in zip(masked_moments(x, mask, dim), expected, strict=True):
        assert_matches(actual, right)
    assert_matches(masked_mean(x, mask, dim), expected[0])
    everything = masked_moments(x, mask), reference.masked_moments(x.numpy(), mask.numpy())
    for actual, right in zip(*everything, strict=True):
        assert_matches(actual, right)


@dtypes
@floors
@examples
@given(seed=seeds, N=st.integers(1, 4), B=st.integers(3, 20), p=st.sampled_from([0.0, 0.6, 1.0]))
def test_standardisation_equals_the_reference(dtype, floor, seed, N, B, p):
    rng = np.random.default_rng(seed)
    x, mask = random_array(rng, (N, B), dtype), random_mask(rng, (N, B), p)
    # Two almost equal numbers alone would measure cancellation in float32, not the formula.
    mask[(mask.sum(1) == 2)] = False
    per_agent = standardize(x, mask, dim=1, floor=floor)
    for i in range(N):
        assert_matches(per_agent[i], reference.standardize(x[i].numpy(), mask[i].numpy(), floor))
    assert_matches(standardize(x, mask, floor=floor), reference.standardize(x.numpy(), mask.numpy(), floor))


def test_scopes_differ():
    x = random_array(np.random.default_rng(0), (3, 40)) * torch.tensor([[1.0], [10.0], [100.0]])
    per_agent, team = standardize(x, dim=1), standardize(x)
    assert_matches(per_agent.std(1, correction=0), [1.0, 1.0, 1.0])
    assert_matches(team.std(correction=0), 1.0)
    assert team[0].std() < 0.1


def test_golden_standardisation():
    x = torch.tensor([2.12, 1.00, 4.74, 2.00], dtype=torch.float64)
    y = standardize(x)
    assert_matches(y.mean(), 0.0)
    assert_matches(y.std(correction=0), 1.0)
    assert torch.equal(y.argsort(), x.argsort())
    assert_matches(y.std(), (4 / 3) ** 0.5)  # not the sample std


@dtypes
@floors
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_empty_single_and_constant_rows(dtype, floor, rows):
    x = torch.full((3, rows), 1e8 / 3, dtype=dtype)
    for dim in (None, 1, (0, 1)):
        y = standardize(x, dim=dim, floor=floor)
        assert y.shape == x.shape and y.dtype == dtype and (y == 0).all()
    if rows:
        mean, std, count = masked_moments(x)
        assert std == 0 and count == 3 * rows and mean == x[0, 0]
    # The plain formula does not survive this: its float32 mean is off by a rounding error.
    almost = x.clone()
    if rows > 1:
        almost[0, 0] += 8
        assert (standardize(almost, floor=floor) != 0).all()


def test_floors():
    x = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    assert_matches(standardize(x, floor="max", eps=4.0), [-0.25, 0.25])
    assert_matches(standardize(x, floor="add", eps=3.0), [-0.25, 0.25])
    assert_matches(standardize(x, floor="max", eps=0.5), [-1.0, 1.0])
    with pytest.raises(ValueError, match="'mean'; use 'max'"):
        standardize(x, floor="mean")


@examples
@given(seed=seeds, scale=st.floats(0.1, 100), shift=st.floats(-100, 100))
def test_standardisation_ignores_scale_and_shift(seed, scale, shift):
    x = random_array(np.random.default_rng(seed), (2, 9))
    torch.testing.assert_close(standardize(scale * x + shift, eps=0.0), standardize(x, eps=0.0))


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf])
def test_masked_numbers_never_leak_not_even_into_gradients(garbage):
    rng = np.random.default_rng(1)
    mask = random_mask(rng, (3, 8), 0.5)
    mask[2] = False  # one agent with no row at all
    clean = random_array(rng, (3, 8)).masked_fill(~mask, 0)
    weights = random_array(rng, (3, 8))
    for function in (
        lambda x: masked_mean(x, mask, dim=1),
        lambda x: masked_mean(x, mask),
        lambda x: masked_moments(x, mask, dim=1)[1],
        lambda x: (weights * standardize(x, mask, dim=1)).sum(1),
        lambda x: (weights * standardize(x, mask, floor="add")).sum(1),
    ):
        results = []
        for x in (clean, clean.masked_fill(~mask, garbage)):
            x.requires_grad_()
            y = function(x)
            results.append((y.detach(), *torch.autograd.grad(y.sum(), x)))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])
        assert (results[1][1][~mask] == 0).all() and (results[1][1][mask] != 0).any()


def test_nothing_present_gives_zero():
    x, nothing = torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool)
    assert torch.equal(masked_mean(x, nothing, dim=1), torch.zeros(2))
    assert [float(y) for y in masked_moments(x, nothing)] == [0, 0, 0]
    assert masked_mean(torch.ones(0)) == 0 and masked_mean(torch.ones(2, 0), dim=1).tolist() == [0, 0]


def test_an_unmasked_nan_is_not_hidden():
    x = torch.tensor([1.0, torch.nan])
    assert masked_mean(x).isnan() and masked_moments(x)[1].isnan() and standardize(x).isnan().all()


def test_the_mask_broadcasts_over_dimensions_of_size_one():
    x = random_array(np.random.default_rng(2), (4, 3))
    rows = torch.tensor([True, False, True, True])
    assert_matches(masked_mean(x, rows.unsqueeze(-1), dim=0), x[rows].mean(0))
    assert_matches(masked_mean(x, rows.unsqueeze(-1)), x[rows].mean())
    assert masked_moments(x, rows.unsqueeze(-1))[2] == 9


def test_gradients():
    rng = np.random.default_rng(3)
    x, mask = random_array(rng, (3, 5)).requires_grad_(), random_mask(rng, (3, 5))
    assert gradcheck(lambda y: masked_mean(y, mask, dim=1), x)
    assert gradcheck(lambda y: masked_moments(y, mask)[:2], x)
    for floor in ("max", "add"):
        assert gradcheck(lambda y, floor=floor: standardize(y, mask, 1, floor), x)
    constant = torch.ones(3, 5, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(masked_moments(constant)[1], constant)
    assert (gradient == 0).all()


def test_numbers_without_fraction_are_averaged_as_floats():
    assert masked_mean(torch.tensor([1, 2])) == 1.5
    assert masked_mean(torch.tensor([True, False, True, True])) == 0.75


def test_errors_name_shapes_and_remedy():
    x = torch.zeros(4, 3)
    for function in (masked_mean, masked_moments, standardize):
        with pytest.raises(ValueError, match=r"mask has shape \(4,\), x has shape \(4, 3\).*unsqueeze"):
            function(x, torch.ones(4, dtype=torch.bool))
        with pytest.raises(ValueError, match=r"mask has shape \(4, 2\), x has shape \(4, 3\)"):
            function(x, torch.ones(4, 2, dtype=torch.bool))
        with pytest.raises(ValueError, match=r"dtype torch.float32.*mask > 0"):
            function(x, torch.ones(4, 3))
