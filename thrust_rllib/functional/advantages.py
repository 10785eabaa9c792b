"""Generalised advantage estimation over streams with gaps, ends and truncations."""

from __future__ import annotations

import torch
from torch import Tensor

from thrust_rllib.functional._checks import check_fits_into, check_same_shape


@torch.no_grad()
def generalized_advantages(
    rewards: Tensor,
    values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    bootstrap_values: Tensor,
    gamma: float | Tensor,
    lambda_: float | Tensor,
    present: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and value targets of every stream (trailing index), backwards in time.

    delta_t = r_t + gamma V_next - V_t
    A_t     = delta_t + gamma lambda A_next
    R_t     = A_t + V_t

    "next" is the stream's next *present* row. What follows row t:

    | row t | V_next | A_next |
    |---|---|---|
    | terminated (even if also truncated) | 0 | 0 |
    | truncated | bootstrap_values[t] | 0 |
    | last present row of its stream | bootstrap_values[t] | 0 |
    | any other present row | values of the next present row | its advantage |
    | not present | skipped | passed through |

    A value of 0 after the last row (`gae_bootstrap="zero"`) is `bootstrap_values` of zeros.

    Args:
        rewards: [T, ...] reward of the step taken at row t, t = 0 .. T-1; any trailing shape, e.g. [T, N, E].
        values: [T, ...] V of the observation of row t.
        terminated: [T, ...] bool, the stream ended at row t.
        truncated: [T, ...] bool, the stream was cut at row t although it could have gone on.
        bootstrap_values: [T, ...] V of what follows row t; read only where the table says so.
        gamma: discount in [0, 1], a number or a tensor that broadcasts to rewards[0].
        lambda_: GAE's lambda in [0, 1], a number or a tensor that broadcasts to rewards[0].
        present: [T, ...] bool, the agent acted at row t; None means always. Other rows are never read.

    Returns:
        (advantages, value_targets), both [T, ...], without gradient, 0 where not present.

    Raises:
        ValueError: shapes differ, or gamma or lambda_ do not broadcast to rewards[0].

    Source: Schulman et al. 2016, "High-dimensional continuous control using generalized advantage
    estimation", equation 16.
    """
    if rewards.dim() == 0:
        raise ValueError("rewards has shape (), needed [T, ...]: put time in the first dimension.")
    for name, x in (
        ("values", values),
        ("terminated", terminated),
        ("truncated", truncated),
        ("bootstrap_values", bootstrap_values),
        ("present", present),
    ):
        if x is not None:
            check_same_shape("rewards", rewards, name, x)
    dtype = torch.result_type(rewards, values)
    gamma = _per_stream("gamma", gamma, rewards, dtype)
    lambda_ = _per_stream("lambda_", lambda_, rewards, dtype)
    if rewards.shape[0] == 0:
        return torch.empty_like(rewards, dtype=dtype), torch.empty_like(rewards, dtype=dtype)

    terminated, truncated = terminated.bool(), truncated.bool()
    if present is None:
        next_values = torch.cat([values[1:], values[-1:]])
        last = torch.zeros_like(terminated)
        last[-1] = True
    else:
        present = present.bool()
        next_row = _next_present_row(present)
        last = next_row == present.shape[0]
        next_values = values.gather(0, next_row.clamp(max=present.shape[0] - 1))
    next_values = bootstrap_values.where(truncated | last, next_values).masked_fill(terminated, 0)

    deltas = rewards + gamma * next_values - values
    decay = (gamma * lambda_ * torch.ones_like(deltas)).masked_fill(terminated | truncated | last, 0)
    if present is not None:
        deltas, decay = deltas.where(present, 0), decay.where(present, 1)

    advantages = torch.empty_like(deltas, dtype=dtype)
    following = torch.zeros_like(advantages[0])
    # Views of all rows are made at once: one kernel per step of time is left in the loop.
    rows = zip(deltas.to(dtype).unbind(), decay.to(dtype).unbind(), advantages.unbind(), strict=True)
    for delta, factor, advantage in reversed(list(rows)):
        following = torch.addcmul(delta, factor, following, out=advantage)
    targets = advantages + values
    return (advantages, targets) if present is None else (advantages.where(present, 0), targets.where(present, 0))


def _per_stream(name: str, factor: float | Tensor, rewards: Tensor, dtype: torch.dtype) -> float | Tensor:
    if not isinstance(factor, Tensor):
        return factor
    check_fits_into(name, factor, "rewards[0]", rewards.shape[1:])
    return factor.to(rewards.device, dtype)


def _next_present_row(present: Tensor) -> Tensor:
    """[T, ...] index of the first present row after t, or T where none follows."""
    T = present.shape[0]
    index = torch.arange(T, device=present.device).view(-1, *[1] * (present.dim() - 1))
    index = index.expand_as(present).where(present, T)
    from_here_on = index.flip(0).cummin(0).values.flip(0)
    return torch.cat([from_here_on[1:], torch.full_like(index[:1], T)])
