import math

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
from thrust_rllib.functional import (
    approximate_kl,
    clip_indicator,
    clipped_surrogate,
    explained_variance,
    value_loss_change_clipped,
)

shapes = st.lists(st.integers(1, 5), max_size=3).map(tuple)


@dtypes
@examples
@given(seed=seeds, shape=shapes, eps=st.sampled_from([0.05, 0.2, 1.0]))
def test_policy_terms_equal_the_reference(dtype, seed, shape, eps):
    rng = np.random.default_rng(seed)
    logp, logp_old = random_array(rng, shape, dtype, 0.3), random_array(rng, shape, dtype, 0.3)
    advantages = random_array(rng, shape, dtype)
    arrays = [x.numpy() for x in (logp, logp_old, advantages)]
    assert_matches(clipped_surrogate(logp, logp_old, advantages, eps), reference.clipped_surrogate(*arrays, eps))
    assert_matches(clip_indicator(logp, logp_old, eps), reference.clip_indicator(*arrays[:2], eps))
    assert_matches(approximate_kl(logp, logp_old), reference.approximate_kl(*arrays[:2]))


@dtypes
@examples
@given(seed=seeds, shape=shapes, clip=st.sampled_from([0.0, 0.2, 1.0, math.inf]))
def test_the_value_loss_equals_the_reference(dtype, seed, shape, clip):
    rng = np.random.default_rng(seed)
    values, old, targets = (random_array(rng, shape, dtype) for _ in range(3))
    arrays = [x.numpy() for x in (values, old, targets)]
    assert_matches(
        value_loss_change_clipped(values, old, targets, clip),
        reference.value_loss_change_clipped(*arrays, clip),
    )


def test_clip_as_a_tensor_is_the_number_element_by_element():
    rng = np.random.default_rng(0)
    a, b, c = (random_array(rng, (3, 4)) for _ in range(3))
    clips = torch.tensor([0.1, 0.5, math.inf], dtype=torch.float64).view(3, 1)
    for i, clip in enumerate([0.1, 0.5, math.inf]):
        for whole, row in [
            (clipped_surrogate(a, b, c, clips), clipped_surrogate(a[i], b[i], c[i], clip)),
            (clip_indicator(a, b, clips), clip_indicator(a[i], b[i], clip)),
            (value_loss_change_clipped(a, b, c, clips), value_loss_change_clipped(a[i], b[i], c[i], clip)),
        ]:
            assert torch.equal(whole[i], row)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y, z: clipped_surrogate(x, y, z, 0.2),
        lambda x, y, z: value_loss_change_clipped(x, y, z, 0.5),
        lambda x, y, z: value_loss_change_clipped(x, y, z, math.inf),
        lambda x, y, z: approximate_kl(x, y),
    ],
    ids=["surrogate", "value_change", "value_plain", "kl"],
)
def test_gradients(function):
    rng = np.random.default_rng(1)
    x, y, z = (random_array(rng, (4, 3)).requires_grad_() for _ in range(3))
    assert gradcheck(function, x, y, z)


def test_at_the_old_policy_the_surrogate_is_the_advantage_with_the_policy_gradient():
    rng = np.random.default_rng(2)
    logp, advantages = random_array(rng, (50,)).requires_grad_(), random_array(rng, (50,))
    surrogate = clipped_surrogate(logp, logp.detach(), advantages, 0.2)
    assert torch.equal(surrogate, advantages)
    surrogate.sum().backward()
    assert_matches(logp.grad, advantages)
    assert clip_indicator(logp, logp, 0.2).sum() == 0 and approximate_kl(logp, logp).abs().sum() == 0


def test_a_huge_clip_is_no_clip():
    rng = np.random.default_rng(3)
    logp, old, x = (random_array(rng, (50,)) for _ in range(3))
    for clip in (1e9, math.inf):
        assert torch.equal(clipped_surrogate(logp, old, x, clip), x * torch.exp(logp - old))
        assert clip_indicator(logp, old, clip).sum() == 0
        assert_matches(value_loss_change_clipped(logp, old, x, clip), (logp - x).square())


def test_the_clip_is_pessimistic_and_stops_the_gradient():
    logp = torch.tensor([0.5, 0.5, -0.5, -0.5], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    surrogate = clipped_surrogate(logp, torch.zeros_like(logp), advantages, 0.2)
    up, down = math.exp(0.5), math.exp(-0.5)
    assert_matches(surrogate, [1.2, -up, down, -0.8])
    surrogate.sum().backward()
    assert_matches(logp.grad, [0.0, -up, down, 0.0])


def test_clip_fraction_is_strict():
    ratio = torch.tensor([1.5, 0.5, 1.25, math.nextafter(1.5, 2)], dtype=torch.float64)
    # exp(log(x)) is not exactly x: compare with the ratios that exp really gives.
    logp = ratio.log()
    exact = torch.exp(logp)
    for k in range(4):
        distance = float((exact[k] - 1).abs())
        assert clip_indicator(logp[k], torch.zeros_like(logp[k]), distance) == 0
        assert clip_indicator(logp[k], torch.zeros_like(logp[k]), math.nextafter(distance, 0)) == 1


def test_value_clip_has_no_half_and_takes_the_worse():
    values, old, targets = (torch.tensor(x, dtype=torch.float64) for x in ([1.0, 1.0], [0.0, 0.0], [2.0, 0.5]))
    # v_c = 0.2: errors (1, 3.24) and (.25, .09).
    assert_matches(value_loss_change_clipped(values, old, targets, 0.2), [3.24, 0.25])


def test_an_infinite_range_never_reads_the_old_value():
    values = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    old, targets = torch.full((2,), torch.nan, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for clip in (math.inf, torch.tensor(math.inf)):
        loss = value_loss_change_clipped(values, old, targets, clip)
        assert torch.equal(loss, values.square())
        (gradient,) = torch.autograd.grad(loss.sum(), values)
        assert torch.equal(gradient, 2 * values)


@dtypes
@examples
@given(seed=seeds, masked=st.booleans(), N=st.integers(1, 4), B=st.integers(1, 9))
def test_explained_variance_equals_the_reference(dtype, seed, masked, N, B):
    rng = np.random.default_rng(seed)
    values, targets = random_array(rng, (N, B), dtype), random_array(rng, (N, B), dtype)
    mask = random_mask(rng, (N, B)) if masked else torch.ones(N, B, dtype=torch.bool)
    given_mask = mask if masked else None
    # The ratio of two variances amplifies rounding when few rows make Var(R) small.
    keep = mask.sum(1) > 2
    arrays = values.numpy(), targets.numpy(), mask.numpy()
    expected = reference.over(reference.explained_variance, 1, *arrays)
    actual = explained_variance(values, targets, given_mask, dim=1)
    if dtype == torch.float64:
        assert_matches(actual, expected)
    else:
        torch.testing.assert_close(actual[keep].double(), torch.tensor(expected)[keep], rtol=1e-4, atol=1e-4)
    if mask.sum() > 2:
        assert_matches(explained_variance(values, targets, given_mask), reference.explained_variance(*arrays))


@dtypes
def test_explained_variance_of_known_cases(dtype):
    targets = random_array(np.random.default_rng(4), (200,), dtype)
    assert explained_variance(targets, targets) == 1
    assert_matches(explained_variance(targets + 5, targets), 1.0)
    assert_matches(explained_variance(torch.zeros_like(targets), targets), 0.0)
    assert_matches(explained_variance(-targets, targets), -3.0)
    constant = torch.full((200,), 1e8 / 3, dtype=dtype)
    assert explained_variance(targets, constant) == 1
    nothing = torch.zeros(200, dtype=torch.bool)
    assert explained_variance(targets, targets.flip(0), nothing) == 1


def test_explained_variance_never_reads_masked_rows():
    rng = np.random.default_rng(5)
    values, targets, mask = random_array(rng, (3, 20)), random_array(rng, (3, 20)), random_mask(rng, (3, 20))
    expected = explained_variance(values, targets, mask, dim=1)
    values, targets = values.masked_fill(~mask, torch.nan), targets.masked_fill(~mask, torch.inf)
    assert torch.equal(explained_variance(values, targets, mask, dim=1), expected)


def test_a_column_against_a_row_is_an_error_not_a_matrix():
    row, col = torch.zeros(5), torch.zeros(5, 1)
    message = r"shape \(5,\), \w+ has shape \(5, 1\): give both the same number of dimensions"
    for call in (
        lambda: clipped_surrogate(row, col, row, 0.2),
        lambda: clipped_surrogate(row, row, col, 0.2),
        lambda: clip_indicator(row, col, 0.2),
        lambda: approximate_kl(row, col),
        lambda: value_loss_change_clipped(row, row, col, 0.2),
        lambda: value_loss_change_clipped(row, col, row, math.inf),
        lambda: explained_variance(row, col),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_other_shape_errors():
    with pytest.raises(ValueError, match=r"\(5,\), logp_old has shape \(4,\): these do not broadcast"):
        approximate_kl(torch.zeros(5), torch.zeros(4))
    with pytest.raises(ValueError, match=r"clip_param has shape \(3,\), the elements has shape \(5,\)"):
        clipped_surrogate(torch.zeros(5), torch.zeros(5), torch.zeros(5), torch.ones(3))
    with pytest.raises(ValueError, match=r"clip_range has shape \(5, 1\)"):
        value_loss_change_clipped(torch.zeros(5), torch.zeros(5), torch.zeros(5), torch.ones(5, 1))
