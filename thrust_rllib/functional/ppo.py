"""PPO's losses and diagnostics, one number per element: callers take their own (masked) means."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from thrust_rllib.functional._checks import check_elementwise, check_fits_into
from thrust_rllib.functional.masked import masked_moments


def clipped_surrogate(logp: Tensor, logp_old: Tensor, advantages: Tensor, clip_param: float | Tensor) -> Tensor:
    """PPO's clipped surrogate objective, to be maximised (the policy loss is its negative mean).

    min(A r, A clip(r, 1 - eps, 1 + eps)) with r = exp(logp - logp_old)

    Args:
        logp: [...] log-probability of the taken action under the current policy.
        logp_old: [...] the same at sampling time.
        advantages: [...] A.
        clip_param: eps > 0, a number or a tensor that broadcasts to the elements.

    Returns:
        [...] the objective of every element.

    Raises:
        ValueError: the shapes do not pair up element by element.

    Source: Schulman et al. 2017, "Proximal policy optimization algorithms", equation 7.
    """
    check_elementwise("logp", logp, logp_old=logp_old, advantages=advantages)
    ratio = torch.exp(logp - logp_old)
    eps = _number("clip_param", clip_param, ratio)
    clipped = torch.clamp(ratio, 1 - eps, 1 + eps)
    return torch.minimum(advantages * ratio, advantages * clipped)


def clip_indicator(logp: Tensor, logp_old: Tensor, clip_param: float | Tensor) -> Tensor:
    """1.0 where the probability ratio left the clip range; its mean is the clip fraction.

    1[|exp(logp - logp_old) - 1| > eps], strictly

    Args:
        logp: [...] log-probability under the current policy.
        logp_old: [...] log-probability at sampling time.
        clip_param: eps, a number or a tensor that broadcasts to the elements.

    Returns:
        [...] 0.0 or 1.0, without gradient.

    Raises:
        ValueError: the shapes do not pair up element by element.
    """
    check_elementwise("logp", logp, logp_old=logp_old)
    distance = (torch.exp(logp - logp_old) - 1).abs()
    return (distance > _number("clip_param", clip_param, distance)).to(distance.dtype)


def approximate_kl(logp: Tensor, logp_old: Tensor) -> Tensor:
    """The k1 estimator of KL(old || new): unbiased, can be negative.

    logp_old - logp

    Args:
        logp: [...] log-probability under the current policy.
        logp_old: [...] log-probability at sampling time.

    Returns:
        [...] one sample of the divergence per element.

    Raises:
        ValueError: the shapes do not pair up element by element.

    Source: Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html
    """
    check_elementwise("logp", logp, logp_old=logp_old)
    return logp_old - logp


def value_loss_change_clipped(
    values: Tensor, values_old: Tensor, targets: Tensor, clip_range: float | Tensor
) -> Tensor:
    """Squared value error, pessimistic about a *change* of the value beyond the clip range. No factor 1/2.

    max((v - R)^2, (v_c - R)^2) with v_c = v_old + clip(v - v_old, -c, c)

    Not RLlib's `vf_clip_param`, which bounds the squared *error*: compose `torch.minimum(this, vf_clip_param)`.

    Args:
        values: [...] v, the current value.
        values_old: [...] v_old, the value at sampling time.
        targets: [...] R.
        clip_range: c >= 0, a number or a tensor that broadcasts to the elements; inf gives exactly (v - R)^2.

    Returns:
        [...] the loss of every element.

    Raises:
        ValueError: the shapes do not pair up element by element.

    Source: OpenAI baselines `ppo2`.
    """
    check_elementwise("values", values, values_old=values_old, targets=targets)
    error = (values - targets).square()
    if not isinstance(clip_range, Tensor) and math.isinf(clip_range):
        return error
    change = values - values_old
    c = _number("clip_range", clip_range, change)
    clipped = values_old + torch.clamp(change, -c, c)
    clipped_error = (clipped - targets).square()
    if isinstance(clip_range, Tensor):
        # v_old + (v - v_old) is v only up to rounding.
        clipped_error = torch.where(c.isinf(), error, clipped_error)
    return torch.maximum(error, clipped_error)


def explained_variance(
    values: Tensor, targets: Tensor, mask: Tensor | None = None, dim: int | tuple[int, ...] | None = None
) -> Tensor:
    """Share of the targets' variance that the values explain: 1 perfect, 0 as a constant, below 0 worse.

    1 - Var(R - v) / Var(R), population variance; 1.0 where Var(R) = 0

    Args:
        values: [...] v.
        targets: [...] R.
        mask: bool, the elements that count; the dimensions of `targets`, may broadcast. None means all.
        dim: the dimensions to reduce; None means all.

    Returns:
        The remaining dimensions; 1.0 where nothing counts.

    Raises:
        ValueError: the shapes differ.
    """
    check_elementwise("values", values, targets=targets)
    residual, target = _variance(targets - values, mask, dim), _variance(targets, mask, dim)
    constant = target == 0
    return torch.where(constant, 1.0, 1.0 - residual / target.masked_fill(constant, 1.0))


def _variance(x: Tensor, mask: Tensor | None, dim: int | tuple[int, ...] | None) -> Tensor:
    if mask is not None or not x.numel() or not x.is_floating_point():
        return masked_moments(x, mask, dim)[1].square()
    dims = tuple(range(x.dim())) if dim is None else dim
    # Shifted by its smallest element a constant is exactly 0, and so is its variance.
    return (x - x.amin(dims, keepdim=True)).var(dims, correction=0)


def _number(name: str, x: float | Tensor, elements: Tensor) -> Any:
    """`x` as it is if a number; checked and with dtype and device of the elements if a tensor."""
    if not isinstance(x, Tensor):
        return x
    check_fits_into(name, x, "the elements", elements.shape)
    return x.to(elements)
