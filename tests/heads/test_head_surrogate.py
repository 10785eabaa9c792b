"""The policy term with a ratio of each head's own, against loops in float64 and by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.functional.helpers import assert_matches, dtypes, examples, gradcheck, random_array, seeds
from thrust_rllib import functional as F
from thrust_rllib.functional.heads import HEAD_STATISTICS

NAN = float("nan")


def by_hand(logp, old, advantages, clip, has):
    """Loops: (surrogate [N, B], statistics without entropy [2, H, N, B])."""
    H, N, B = logp.shape
    surrogate, statistics = np.zeros((N, B)), np.zeros((2, H, N, B))
    for h in range(H):
        for n in range(N):
            for b in range(B):
                if not has[h, n]:
                    continue
                ratio, a, eps = np.exp(logp[h, n, b] - old[h, n, b]), advantages[n, b], clip[n]
                surrogate[n, b] += min(a * ratio, a * np.clip(ratio, 1 - eps, 1 + eps))
                statistics[:, h, n, b] = old[h, n, b] - logp[h, n, b], float(abs(ratio - 1) > eps)
    return surrogate, statistics


def test_two_heads_by_hand():
    """Ratios 3/2 and 1/2, eps 1/5: one ratio is 3/4, which is not clipped upwards; the heads are clipped at 6/5."""
    logp = torch.log(torch.tensor([[[1.5]], [[0.5]]], dtype=torch.float64))
    old, up, down = torch.zeros_like(logp), torch.ones(1, 1, dtype=torch.float64), -torch.ones(1, 1).double()
    assert float(F.per_head_surrogate(logp, old, up, 0.2)) == pytest.approx(1.2 + 0.5)
    assert float(F.per_head_surrogate(logp, old, down, 0.2)) == pytest.approx(-1.5 - 0.8)
    joint = F.clipped_surrogate(logp.sum(0), old.sum(0), up, 0.2)
    assert float(joint) == pytest.approx(0.75)
    # 5/4 and 4/5 hide each other in the joint ratio.
    logp = torch.log(torch.tensor([[[1.25]], [[0.8]]], dtype=torch.float64)).requires_grad_()
    assert F.clipped_surrogate(logp.sum(0), old.sum(0), up, 0.2).item() == pytest.approx(1.0)
    assert F.per_head_surrogate(logp, old, up, 0.2).item() == pytest.approx(1.2 + 0.8)
    (per_head,) = torch.autograd.grad(F.per_head_surrogate(logp, old, up, 0.2).sum(), logp)
    (joint,) = torch.autograd.grad(F.clipped_surrogate(logp.sum(0), old.sum(0), up, 0.2).sum(), logp)
    np.testing.assert_allclose(per_head.ravel(), [0.0, 0.8], atol=1e-12)  # the first head is clipped, alone
    np.testing.assert_allclose(joint.ravel(), [1.0, 1.0], rtol=1e-12)


@dtypes
@examples
@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 5), seeds)
def test_equals_loops(dtype, H, N, B, seed):
    rng = np.random.default_rng(seed)
    logp, old = random_array(rng, (2, H, N, B), dtype, scale=0.3)
    entropy, advantages = random_array(rng, (H, N, B), dtype), random_array(rng, (N, B), dtype)
    clip = torch.tensor(rng.uniform(0.1, 0.4, (N, 1)), dtype=torch.float32)
    counts = rng.integers(1, H + 1, N)
    counts[0] = H
    has = np.arange(H)[:, None] < counts
    heads = F.has_head(counts.tolist(), [1] * N)
    assert (heads is None) == (len(set(counts.tolist())) == 1)
    if heads is not None:
        np.testing.assert_array_equal(heads[..., 0], has)
        for x in (logp, old, entropy):
            x[~heads[..., 0]] = NAN  # what stands where no head is never matters
    numbers = [x.double().numpy() for x in (logp, old, advantages)]
    surrogate, statistics = by_hand(*numbers, clip[:, 0].to(dtype).double().numpy(), has)
    assert_matches(F.per_head_surrogate(logp, old, advantages, clip, heads), surrogate)
    found = F.head_statistics(logp, old, entropy, clip, heads)
    assert len(found) == len(HEAD_STATISTICS) and not found.requires_grad
    assert_matches(found[0], np.where(has[..., None], np.nan_to_num(entropy.double().numpy()), 0.0))
    assert_matches(found[1:], statistics)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_one_head_is_the_joint_formula_to_the_bit(dtype):
    rng = np.random.default_rng(0)
    logp, old, advantages = random_array(rng, (3, 4, 129), dtype)
    logp.requires_grad_()
    clip = torch.full((4, 1), 0.2)
    per_head = F.per_head_surrogate(logp[None], old[None], advantages, clip)
    joint = F.clipped_surrogate(logp, old, advantages, clip)
    assert torch.equal(per_head, joint)
    gradients = [torch.autograd.grad(x.mean(), logp)[0] for x in (per_head, joint)]
    assert torch.equal(*gradients)
    assert not torch.equal(
        F.per_head_surrogate(logp[None].repeat(2, 1, 1), old[None].repeat(2, 1, 1), advantages, clip), joint
    )


def test_gradients():
    rng = np.random.default_rng(1)
    logp, old = random_array(rng, (2, 3, 2, 5), scale=0.2)
    advantages = random_array(rng, (2, 5))
    heads = F.has_head([3, 1], [1, 1])
    assert gradcheck(lambda x: F.per_head_surrogate(x, old, advantages, 0.2, heads), logp.requires_grad_())
    logp = logp.detach().masked_fill(~heads, NAN).requires_grad_()
    (gradient,) = torch.autograd.grad(F.per_head_surrogate(logp, old, advantages, 0.2, heads).sum(), logp)
    assert gradient.isfinite().all() and (gradient[~heads.expand_as(logp)] == 0).all()


def test_heads_of_modules_are_stacked_and_padded():
    rng = np.random.default_rng(2)
    first, second = random_array(rng, (2, 5, 3)), random_array(rng, (1, 5, 1))
    stacked = F.stack_heads([first, second])
    assert stacked.shape == (3, 3, 5) and stacked.is_contiguous()
    assert torch.equal(stacked[:, :2], first.permute(2, 0, 1)) and torch.equal(stacked[0, 2], second[0, :, 0])
    assert (stacked[1:, 2] == 0).all()
    heads = F.has_head([3, 1], [2, 1])
    assert heads.shape == (3, 3, 1) and heads[:, :, 0].tolist() == [
        [True] * 3,
        [True, True, False],
        [True, True, False],
    ]


def test_shapes_that_do_not_belong_together_are_named():
    x, advantages = torch.zeros(2, 3, 4), torch.zeros(3, 4)
    with pytest.raises(ValueError, match=r"advantages has shape \(2, 4\)"):
        F.per_head_surrogate(x, x, torch.zeros(2, 4), 0.2)
    with pytest.raises(ValueError, match=r"needed \[heads, N, B\]"):
        F.per_head_surrogate(x[0], x[0], advantages, 0.2)
    with pytest.raises(ValueError, match=r"logp_old has shape \(1, 3, 4\)"):
        F.per_head_surrogate(x, x[:1], advantages, 0.2)
    with pytest.raises(ValueError, match=r"heads has shape \(2, 3\)"):
        F.per_head_surrogate(x, x, advantages, 0.2, torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="entropy has shape"):
        F.head_statistics(x, x, x[:1], 0.2)
