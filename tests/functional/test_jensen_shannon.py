import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import reference
from tests.functional.helpers import assert_matches, dtypes, examples, gradcheck, random_array, random_mask, seeds
from thrust_rllib.functional import jensen_shannon

MASKED = -1e30
heads = st.lists(st.integers(1, 4), min_size=1, max_size=3)


def team(seed, N=3, A=4, B=6, dtype=torch.float64, scale=2.0):
    rng = np.random.default_rng(seed)
    return [random_array(rng, (B, A), dtype, scale) for _ in range(N)]


@dtypes
@examples
@given(seed=seeds, N=st.integers(2, 4), sizes=heads, B=st.integers(1, 5))
def test_equals_the_loops(dtype, seed, N, sizes, B):
    logits = team(seed, N, sum(sizes), B, dtype)
    expected = reference.jensen_shannon([x.numpy() for x in logits], None, sizes)
    assert_matches(jensen_shannon(logits, head_sizes=sizes), expected)
    present = [torch.ones(B, dtype=torch.bool)] * N
    torch.testing.assert_close(jensen_shannon(logits, present, sizes), jensen_shannon(logits, None, sizes))


@dtypes
@examples
@given(seed=seeds, N=st.integers(2, 4), sizes=heads, p=st.sampled_from([0.0, 0.5, 0.8]))
def test_rows_that_a_pair_does_not_share_are_left_out(dtype, seed, N, sizes, p):
    rng = np.random.default_rng(seed)
    logits = team(seed, N, sum(sizes), dtype=dtype)
    masks = [random_mask(rng, 6, p) for _ in logits]
    expected = reference.jensen_shannon([x.numpy() for x in logits], [m.numpy() for m in masks], sizes)
    assert_matches(jensen_shannon(logits, masks, sizes), expected)


def test_equals_the_mixture_form_of_torch():
    p, q = (torch.distributions.Categorical(logits=x) for x in team(0, N=2))
    m = torch.distributions.Categorical(probs=(p.probs + q.probs) / 2)
    kl = torch.distributions.kl_divergence
    assert_matches(jensen_shannon([p.logits, q.logits]), ((kl(p, m) + kl(q, m)) / 2).mean())


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sizes", [[5], [2, 3], [1, 2, 2]], ids=str)
def test_gradients(masked, sizes):
    rng = np.random.default_rng(0)
    logits = [x.requires_grad_() for x in team(0, A=5, B=4)]
    masks = [random_mask(rng, 4, 0.8) for _ in logits] if masked else None
    assert gradcheck(lambda *x: jensen_shannon(x, masks, sizes), *logits)


@examples
@given(seed=seeds, sizes=heads, order=st.permutations(range(4)), masked=st.booleans(), scale=st.sampled_from([0.1, 30]))
def test_range_and_order_of_agents(seed, sizes, order, masked, scale):
    rng = np.random.default_rng(seed)
    logits = team(seed, 4, sum(sizes), scale=scale)
    masks = [random_mask(rng, 6) for _ in logits] if masked else None
    divergence = jensen_shannon(logits, masks, sizes)
    assert -1e-12 <= divergence <= math.log(2) + 1e-12
    shuffled = [logits[i] for i in order], [masks[i] for i in order] if masked else None
    torch.testing.assert_close(jensen_shannon(*shuffled, sizes), divergence)


@dtypes
@examples
@given(seed=seeds, sizes=heads, shift=st.floats(-20, 20))
def test_equal_policies_diverge_by_nothing(dtype, seed, sizes, shift):
    x = team(seed, 1, sum(sizes), dtype=dtype)[0].requires_grad_()
    divergence = jensen_shannon([x, x + shift, x], head_sizes=sizes)
    assert_matches(divergence, 0.0)
    assert torch.autograd.grad(divergence, x)[0].abs().max() < 1e-5
    if max(sizes) > 1:
        assert jensen_shannon([x, x * 3 + torch.arange(sum(sizes)), x], head_sizes=sizes) > 1e-4


@dtypes
@pytest.mark.parametrize("low", [MASKED, -torch.inf, torch.finfo(torch.float32).min])
def test_disjoint_policies_diverge_by_ln_2(dtype, low):
    first = torch.tensor([True, True, False, False, False])
    a, b = (
        x.masked_fill(~allowed, low).requires_grad_()
        for x, allowed in zip(team(1, 2, 5, dtype=dtype), [first, ~first], strict=True)
    )
    divergence = jensen_shannon([a, b])
    assert_matches(divergence, math.log(2))
    assert all((g.abs() < 1e-7).all() for g in torch.autograd.grad(divergence, [a, b]))  # nothing is left to gain
    # One disjoint and one equal head: the mean over heads.
    both = [torch.cat([x, torch.zeros_like(x)], 1) for x in (a, b)]
    assert_matches(jensen_shannon(both, head_sizes=[5, 5]), math.log(2) / 2)


@dtypes
@pytest.mark.parametrize("low", [MASKED, -torch.inf])
@pytest.mark.parametrize("sizes", [[6], [3, 3], [2, 4]], ids=str)
def test_masked_actions_give_finite_values_and_gradients(dtype, low, sizes):
    rng = np.random.default_rng(3)
    logits = []
    for x in team(2, 3, 6, dtype=dtype):
        allowed = random_mask(rng, (6, 6), 0.6)
        allowed[:, [0, 2, 3]] = True  # an action in each head
        logits.append(x.masked_fill(~allowed, low).requires_grad_())
    divergence = jensen_shannon(logits, head_sizes=sizes)
    finite = [x.detach().clamp(min=MASKED).numpy() for x in logits]
    assert_matches(divergence, reference.jensen_shannon(finite, None, sizes))
    for x, gradient in zip(logits, torch.autograd.grad(divergence, logits), strict=True):
        assert gradient.isfinite().all() and (gradient[x <= MASKED] == 0).all() and (gradient != 0).any()


def test_several_heads_are_a_lower_bound_of_the_joint_divergence():
    # The joint distribution of two heads of 2 and 3: all 6 pairs of categories.
    logits = team(4, 2, 5)
    joint = [(x[:, :2].log_softmax(-1).unsqueeze(2) + x[:, 2:].log_softmax(-1).unsqueeze(1)).flatten(1) for x in logits]
    split, whole = jensen_shannon(logits, head_sizes=[2, 3]), jensen_shannon(joint)
    assert split + 0.01 < whole < 2 * split


def test_a_gradient_step_moves_the_policies_apart_or_together():
    logits = [x.requires_grad_() for x in team(5, scale=0.5)]
    before = jensen_shannon(logits)
    gradients = torch.autograd.grad(before, logits)
    apart, together = (
        jensen_shannon([x + sign * g for x, g in zip(logits, gradients, strict=True)]) for sign in (1.0, -1.0)
    )
    assert together < before < apart


def test_a_pair_without_common_rows_gives_nothing():
    logits = [x.requires_grad_() for x in team(6)]
    early, late = torch.arange(6) < 3, torch.arange(6) >= 3
    divergence = jensen_shannon(logits[:2], [early, late])
    assert divergence == 0 and all((g == 0).all() for g in torch.autograd.grad(divergence, logits[:2]))
    only = jensen_shannon([x[:3] for x in logits[::2]])
    assert_matches(jensen_shannon(logits, [early, late, early]), (only / 3).detach())
    assert jensen_shannon([x[:0] for x in logits]) == 0


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf])
def test_absent_rows_never_leak(garbage):
    rng = np.random.default_rng(7)
    masks = [random_mask(rng, 6) for _ in range(3)]
    results = []
    for fill in (0.0, garbage):
        logits = [x.masked_fill(~m.unsqueeze(-1), fill).requires_grad_() for x, m in zip(team(7), masks, strict=True)]
        divergence = jensen_shannon(logits, masks)
        results.append([divergence.detach(), *torch.autograd.grad(divergence, logits)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert all((g[~m] == 0).all() and (g[m] != 0).any() for g, m in zip(results[1][1:], masks, strict=True))


def test_errors():
    x, mask = torch.zeros(5, 4), torch.ones(5, dtype=torch.bool)
    with pytest.raises(ValueError, match="jensen_shannon needs the logits of 2 agents or more, got 1"):
        jensen_shannon([x])
    with pytest.raises(ValueError, match=r"logits\[1\] has shape \(4, 4\), logits\[0\] has shape \(5, 4\)"):
        jensen_shannon([x, x[:4]])
    with pytest.raises(ValueError, match=r"logits\[1\] has shape \(5, 3\): needed \[B, 4\].*the same actions"):
        jensen_shannon([x, x[:, :3]])
    with pytest.raises(ValueError, match=r"logits\[0\] has shape \(5, 4\): needed \[B, 5\] for heads of \[2, 3\]"):
        jensen_shannon([x, x], head_sizes=[2, 3])
    with pytest.raises(ValueError, match="1 masks for 2 agents"):
        jensen_shannon([x, x], [mask])
