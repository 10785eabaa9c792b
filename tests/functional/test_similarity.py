import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import reference
from tests.functional.helpers import assert_matches, dtypes, examples, gradcheck, random_array, random_mask, seeds
from thrust_rllib.functional import linear_cka, redundancy_penalty


def team(seed, widths=(4, 4, 4), B=12, dtype=torch.float64):
    rng = np.random.default_rng(seed)
    return [random_array(rng, (B, d), dtype) for d in widths]


def rotation(seed, D):
    return torch.linalg.qr(random_array(np.random.default_rng(seed), (D, D)))[0]


@dtypes
@examples
@given(seed=seeds, widths=st.lists(st.integers(1, 4), min_size=2, max_size=4), B=st.integers(3, 8), equal=st.booleans())
def test_equals_the_kernel_form(dtype, seed, widths, B, equal):
    features = team(seed, [widths[0]] * len(widths) if equal else widths, B, dtype)
    assert_matches(linear_cka(features), reference.linear_cka([z.numpy() for z in features]))
    present = [torch.ones(B, dtype=torch.bool)] * len(widths)
    torch.testing.assert_close(linear_cka(features, present), linear_cka(features))


@dtypes
@examples
@given(seed=seeds, widths=st.lists(st.integers(1, 4), min_size=2, max_size=4), p=st.sampled_from([0.0, 0.5, 0.8]))
def test_masked_equals_the_kernel_form(dtype, seed, widths, p):
    rng = np.random.default_rng(seed)
    features = team(seed, widths, dtype=dtype)
    masks = [random_mask(rng, 12, p) for _ in widths]
    common = [int((a & b).sum()) for a, b in itertools.combinations(masks, 2)]
    if dtype == torch.float64 or 2 not in common:  # two almost equal rows: cancellation, not the formula
        expected = reference.linear_cka([z.numpy() for z in features], [m.numpy() for m in masks])
        assert_matches(linear_cka(features, masks), expected)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("widths, B", [([2, 3, 2], 12), ([5, 4, 6], 4)], ids=["many rows", "few rows"])
def test_gradients(masked, widths, B):
    rng = np.random.default_rng(0)
    features = [z.requires_grad_() for z in team(0, widths, B)]
    masks = [random_mask(rng, B, 0.8) for _ in features] if masked else None
    assert gradcheck(lambda *z: linear_cka(z, masks), *features)


@dtypes
@pytest.mark.parametrize("B", [4, 17, 18, 60])  # from 18 rows on columns are multiplied, below rows
def test_values_on_both_sides_of_the_change_of_method(dtype, B):
    features = team(1, [8, 5, 7], B, dtype)
    assert_matches(linear_cka(features), reference.linear_cka([z.numpy() for z in features]))


def test_known_values():
    # Orthonormal centred columns: each product of columns is known.
    q = torch.linalg.qr(torch.cat([torch.ones(20, 1), random_array(np.random.default_rng(2), (20, 4))], 1))[0][:, 1:]
    a, b, c, d = q.unbind(1)
    stack = lambda *columns: torch.stack(columns, 1)  # noqa: E731
    assert_matches(linear_cka([stack(a, b), stack(a, b)]), 1.0)
    assert_matches(linear_cka([stack(a, b), stack(c, d)]), 0.0)
    assert_matches(linear_cka([stack(a, b), stack(a, c)]), 0.5)  # 1 / (√2 √2)
    assert_matches(linear_cka([stack(a, b), stack(a)]), 1 / np.sqrt(2))
    assert_matches(linear_cka([stack(a, 3 * b), stack(a, c)]), 1 / np.sqrt((1 + 81) * 2))  # variances weigh
    assert_matches(linear_cka([stack(a), stack(a), stack(c)]), 1 / 3)  # a mean over the three pairs


@examples
@given(seed=seeds, order=st.permutations(range(4)), masked=st.booleans())
def test_range_and_order_of_agents(seed, order, masked):
    rng = np.random.default_rng(seed)
    features = team(seed, [1, 2, 3, 3])
    masks = [random_mask(rng, 12) for _ in features] if masked else None
    similarity = linear_cka(features, masks)
    assert 0 < similarity <= 1
    shuffled = [features[i] for i in order], [masks[i] for i in order] if masked else None
    torch.testing.assert_close(linear_cka(*shuffled), similarity)


@examples
@given(seed=seeds, scale=st.floats(1e-2, 1e2), shift=st.floats(-10, 10))
def test_rotation_scale_and_shift_of_one_agent_do_not_matter(seed, scale, shift):
    features = team(seed)
    moved = [scale * features[0] @ rotation(seed, 4) + shift, *features[1:]]
    torch.testing.assert_close(linear_cka(moved), linear_cka(features))
    assert_matches(linear_cka([features[0], moved[0]]), 1.0)
    # Where the penalty on correlations of single columns is far from its largest value.
    assert redundancy_penalty([features[0], moved[0]]) < 0.8
    stretched = [features[0] * torch.tensor([10.0, 1.0, 1.0, 1.0]), *features[1:]]
    assert abs(float(linear_cka(stretched) - linear_cka(features))) > 1e-6


@examples
@given(seed=seeds, rows=st.permutations(range(12)))
def test_the_order_of_joint_rows_does_not_matter_but_their_alignment_does(seed, rows):
    common = random_array(np.random.default_rng(seed), (12, 4))
    features = [common + 0.1 * z for z in team(seed)]
    similarity = linear_cka(features)
    torch.testing.assert_close(linear_cka([z[rows] for z in features]), similarity)
    assert linear_cka([features[0].roll(1, 0), *features[1:]]) < similarity - 0.1


def test_independent_features_have_an_expectation_of_about_width_over_width_plus_rows():
    B, D = 64, 16
    generator = torch.Generator().manual_seed(0)
    draws = [linear_cka(list(torch.randn(2, B, D, generator=generator, dtype=torch.float64))) for _ in range(100)]
    assert abs(torch.stack(draws).mean() / (D / (D + B)) - 1) < 0.03


@dtypes
@pytest.mark.parametrize("masked", [False, True])
def test_constant_features_give_nothing_and_finite_gradients(dtype, masked):
    a, b = team(5, [4, 4], dtype=dtype)
    masks = [torch.ones(12, dtype=torch.bool)] * 2 if masked else None
    assert linear_cka([a, b], masks) > 0.01
    for constant in (0.0, 1e8 / 3):
        features = [torch.full_like(a, constant).requires_grad_(), b.clone().requires_grad_()]
        similarity = linear_cka(features, masks)
        assert similarity == 0
        assert all(g.isfinite().all() for g in torch.autograd.grad(similarity, features))


def test_a_pair_with_fewer_than_two_common_rows_gives_nothing():
    features = [z.requires_grad_() for z in team(6, [4, 4])]
    first = torch.arange(12) < 6
    for common in (0, 1):
        second = torch.arange(12) >= 6 - common
        similarity = linear_cka(features, [first, second])
        assert similarity == 0 and all((g == 0).all() for g in torch.autograd.grad(similarity, features))
    assert_matches(linear_cka(features, [first, torch.arange(12) >= 4]), 1.0)  # two rows span one line each
    assert linear_cka([z[:1] for z in features]) == 0 and linear_cka([z[:0] for z in features]) == 0


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf])
def test_absent_rows_never_leak(garbage):
    rng = np.random.default_rng(7)
    masks = [random_mask(rng, 12) for _ in range(3)]
    results = []
    for fill in (0.0, garbage):
        features = [z.masked_fill(~m.unsqueeze(-1), fill).requires_grad_() for z, m in zip(team(7), masks, strict=True)]
        similarity = linear_cka(features, masks)
        results.append([similarity.detach(), *torch.autograd.grad(similarity, features)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert all((g[~m] == 0).all() and (g[m] != 0).any() for g, m in zip(results[1][1:], masks, strict=True))


def test_errors():
    z, mask = torch.zeros(5, 2), torch.ones(5, dtype=torch.bool)
    with pytest.raises(ValueError, match="linear_cka needs the features of 2 agents or more, got 1"):
        linear_cka([z])
    with pytest.raises(ValueError, match=r"features\[1\] has shape \(4, 2\), features\[0\] has shape \(5, 2\)"):
        linear_cka([z, z[:4]])
    with pytest.raises(ValueError, match="1 masks for 2 agents"):
        linear_cka([z, z], [mask])
    with pytest.raises(ValueError, match=r"dtype torch.float32.*mask > 0"):
        linear_cka([z, z], [mask.float(), mask])
