import itertools

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
from thrust_rllib.functional import cross_correlation, redundancy_penalty

normalizations = pytest.mark.parametrize("normalization", ["dimensions", "pairs"])


def team(seed, N=3, B=12, D=4, dtype=torch.float64):
    rng = np.random.default_rng(seed)
    widths = [D] * N if isinstance(D, int) else D
    return [random_array(rng, (B, d), dtype) for d in widths]


@dtypes
@examples
@given(
    seed=seeds,
    B=st.integers(0, 8),
    D_a=st.integers(1, 4),
    D_b=st.integers(1, 4),
    p=st.sampled_from([0.5, 1.0]),
)
def test_correlation_equals_the_reference(dtype, seed, B, D_a, D_b, p):
    rng = np.random.default_rng(seed)
    a, b, mask = (
        random_array(rng, (B, D_a), dtype),
        random_array(rng, (B, D_b), dtype),
        random_mask(rng, B, p),
    )
    expected = reference.cross_correlation(a.numpy(), b.numpy(), mask.numpy())
    actual = cross_correlation(a, b, mask)
    if dtype == torch.float64 or mask.sum() > 2:  # two almost equal rows: cancellation, not the formula
        assert_matches(actual, expected)
    if p == 1.0:
        torch.testing.assert_close(cross_correlation(a, b), actual)


@dtypes
@normalizations
@examples
@given(
    seed=seeds,
    widths=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    B=st.integers(0, 8),
    equal=st.booleans(),
)
def test_penalty_equals_the_double_loop(dtype, normalization, seed, widths, B, equal):
    features = team(seed, B=B, D=[widths[0]] * len(widths) if equal else widths, dtype=dtype)
    arrays = [z.numpy() for z in features]
    expected = reference.redundancy_penalty(arrays, None, normalization)
    if dtype == torch.float64 or B != 2:
        assert_matches(redundancy_penalty(features, None, normalization), expected)
    present = [torch.ones(B, dtype=torch.bool)] * len(widths)
    torch.testing.assert_close(
        redundancy_penalty(features, present, normalization),
        redundancy_penalty(features, None, normalization),
    )


@dtypes
@normalizations
@examples
@given(seed=seeds, widths=st.lists(st.integers(1, 4), min_size=2, max_size=4), p=st.sampled_from([0.0, 0.5, 0.8]))
def test_masked_penalty_equals_the_double_loop(dtype, normalization, seed, widths, p):
    rng = np.random.default_rng(seed)
    features = team(seed, B=12, D=widths, dtype=dtype)
    masks = [random_mask(rng, 12, p) for _ in widths]
    both = [int((a & b).sum()) for a, b in itertools.combinations(masks, 2)]
    expected = reference.redundancy_penalty([z.numpy() for z in features], [m.numpy() for m in masks], normalization)
    if dtype == torch.float64 or 2 not in both:
        assert_matches(redundancy_penalty(features, masks, normalization), expected)


@pytest.mark.parametrize("masked", [False, True])
def test_gradients(masked):
    rng = np.random.default_rng(0)
    features = [z.requires_grad_() for z in team(0, D=[2, 3, 2], B=6)]
    masks = [random_mask(rng, 6, 0.8) for _ in features] if masked else None
    assert gradcheck(lambda *z: redundancy_penalty(z, masks), *features)
    mask = masks[0] if masked else None
    assert gradcheck(lambda a, b: cross_correlation(a, b, mask), *features[:2])


@pytest.mark.parametrize("widths", [[2, 3, 2], [3, 3, 3]])
def test_widths_are_copied_to_a_device_once(monkeypatch, widths):
    with torch.inference_mode():
        redundancy_penalty(team(0, D=widths))  # what is kept must serve training as well
    features = [z.requires_grad_() for z in team(0, D=widths)]
    monkeypatch.setattr(torch, "tensor", None)
    monkeypatch.setattr(torch.Tensor, "to", None)
    redundancy_penalty(features).backward()
    assert all(z.grad.abs().sum() > 0 for z in features)


def test_correlation_of_known_columns():
    x = torch.linspace(-1, 1, 9, dtype=torch.float64)
    a, b = torch.stack([x, x.square()], 1), torch.stack([3 * x + 7, -x, torch.ones_like(x)], 1)
    assert_matches(cross_correlation(a, b), [[1.0, -1.0, 0.0], [0.0, 0.0, 0.0]])
    assert_matches(
        cross_correlation(a, b),
        np.corrcoef(torch.cat([a, b[:, :2], x[:, None]], 1).numpy().T)[:2, 2:] * [1, 1, 0],
    )


@dtypes
def test_identical_features(dtype):
    # One column each: perfectly redundant, 1 per pair.
    z = team(1, N=1, D=1, B=20, dtype=dtype)[0]
    assert_matches(redundancy_penalty([z, z, -2 * z + 1]), 3.0)
    assert_matches(redundancy_penalty([z, z, -2 * z + 1], normalization="pairs"), 1.0)
    # Orthogonal columns: only the D matching pairs of columns out of D^2 correlate.
    q = torch.linalg.qr(torch.cat([torch.ones(20, 1), random_array(np.random.default_rng(2), (20, 4))], 1))[0][:, 1:]
    assert_matches(redundancy_penalty([q.to(dtype), q.to(dtype)]), 1 / 4)


@examples
@given(seed=seeds, order=st.permutations(range(4)), masked=st.booleans())
def test_the_order_of_agents_does_not_matter(seed, order, masked):
    rng = np.random.default_rng(seed)
    features = team(seed, D=[1, 2, 3, 3])
    masks = [random_mask(rng, 12) for _ in features] if masked else None
    shuffled = [features[i] for i in order], [masks[i] for i in order] if masked else None
    torch.testing.assert_close(redundancy_penalty(*shuffled), redundancy_penalty(features, masks))


@examples
@given(seed=seeds, rows=st.permutations(range(12)))
def test_the_order_of_joint_rows_does_not_matter_but_their_alignment_does(seed, rows):
    rng = np.random.default_rng(seed)
    common = random_array(rng, (12, 3))
    features = [common + 0.1 * z for z in team(seed, D=3)]
    penalty = redundancy_penalty(features)
    torch.testing.assert_close(redundancy_penalty([z[rows] for z in features]), penalty)
    misaligned = redundancy_penalty([features[0].roll(1, 0), *features[1:]])
    assert misaligned < penalty - 0.1


@normalizations
def test_range_and_ratio_of_the_normalizations(normalization):
    features = team(3, N=5)
    penalty = redundancy_penalty(features, normalization=normalization)
    assert 0 < penalty <= (10 if normalization == "dimensions" else 1)
    assert_matches(redundancy_penalty(features) / redundancy_penalty(features, normalization="pairs"), 10.0)


def test_scale_and_shift_of_columns_do_not_matter():
    features = team(4)
    penalty = redundancy_penalty(features)
    moved = [z * torch.tensor([1.0, -3.0, 50.0, 0.01]) + 7 for z in features]
    torch.testing.assert_close(redundancy_penalty(moved), penalty)
    assert abs(float(redundancy_penalty([features[0].square(), *features[1:]]) - penalty)) > 1e-3


def test_independent_features_have_an_expectation_of_about_one_over_rows():
    B = 32
    generator = torch.Generator().manual_seed(0)
    draws = [
        redundancy_penalty(list(torch.randn(2, B, 16, generator=generator, dtype=torch.float64))) for _ in range(200)
    ]
    mean = torch.stack(draws).mean()
    assert abs(mean * (B - 1) - 1) < 0.05  # 51,200 correlations: standard error 0.006
    assert mean * (B - 1) > 0.9  # not 0


@dtypes
@pytest.mark.parametrize("masked", [False, True])
def test_constant_columns_give_nothing_and_finite_gradients(dtype, masked):
    a, b = team(5, N=2, dtype=dtype)
    a[:, 1] = 1e8 / 3
    a[:, 2] = 0.0
    a.requires_grad_()
    masks = [torch.ones(12, dtype=torch.bool)] * 2 if masked else None
    corr = cross_correlation(a, b, masks[0] if masked else None)
    assert (corr[1:3] == 0).all() and (corr[0] != 0).all()
    penalty = redundancy_penalty([a, b], masks)
    (gradient,) = torch.autograd.grad(penalty, a)
    assert gradient.isfinite().all() and (gradient[:, 1:3] == 0).all() and (gradient[:, 0] != 0).any()


def test_a_pair_with_fewer_than_two_common_rows_gives_nothing():
    features = [z.requires_grad_() for z in team(6, N=2)]
    first = torch.arange(12) < 6
    for common in (0, 1):
        second = torch.arange(12) >= 6 - common
        penalty = redundancy_penalty(features, [first, second])
        gradients = torch.autograd.grad(penalty, features)
        assert penalty == 0 and all((g == 0).all() for g in gradients)
    assert_matches(redundancy_penalty(features, [first, torch.arange(12) >= 4]), 1.0)  # two rows: all +-1
    assert redundancy_penalty([z[:1] for z in features]) == 0 and redundancy_penalty([z[:0] for z in features]) == 0


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf])
def test_absent_rows_never_leak(garbage):
    rng = np.random.default_rng(7)
    masks = [random_mask(rng, 12) for _ in range(3)]
    results = []
    for fill in (0.0, garbage):
        features = [z.masked_fill(~m.unsqueeze(-1), fill).requires_grad_() for z, m in zip(team(7), masks, strict=True)]
        penalty = redundancy_penalty(features, masks)
        results.append([penalty.detach(), *torch.autograd.grad(penalty, features)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert all((g[~m] == 0).all() and (g[m] != 0).any() for g, m in zip(results[1][1:], masks, strict=True))


def test_errors():
    z, mask = torch.zeros(5, 2), torch.ones(5, dtype=torch.bool)
    with pytest.raises(ValueError, match="2 agents or more, got 1"):
        redundancy_penalty([z])
    with pytest.raises(ValueError, match="2 agents or more, got 0"):
        redundancy_penalty([])
    with pytest.raises(ValueError, match=r"features\[1\] has shape \(4, 2\), features\[0\] has shape \(5, 2\)"):
        redundancy_penalty([z, z[:4]])
    with pytest.raises(ValueError, match=r"features\[1\] has shape \(5,\)"):
        cross_correlation(z, z[:, 0])
    with pytest.raises(ValueError, match="1 masks for 2 agents"):
        redundancy_penalty([z, z], [mask])
    with pytest.raises(ValueError, match=r"masks\[1\] has shape \(4,\)"):
        redundancy_penalty([z, z], [mask, mask[:4]])
    with pytest.raises(ValueError, match=r"dtype torch.float32.*mask > 0"):
        redundancy_penalty([z, z], [mask.float(), mask])
    with pytest.raises(ValueError, match="'rows'; use 'dimensions' or 'pairs'"):
        redundancy_penalty([z, z], normalization="rows")
