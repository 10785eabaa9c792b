"""The gradients of several learners become those of one: their sum, in one message for all optimizer passes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thrust_rllib.optimizer_pass import OptimizerPass
from thrust_rllib.ranks import Ranks


def sum_gradients(passes: Sequence[OptimizerPass], numbers: Tensor, ranks: Ranks) -> Tensor:
    """Replaces each pass's gradients by their sum over the learners.

    A parameter has a gradient where it has one for any learner, as it would for one learner with all rows; no gradient
    travels as zeros. So every learner sends the same number of numbers, whatever its rows are.

    Args:
        passes: whose gradients were computed, not clipped yet.
        numbers: [k] of which the mean over the learners travels along: what all of them must decide alike. Computed
            from the same rows they are equal but for the rounding of unlike machines.
        ranks: the learners.

    Returns:
        [k], the mean.
    """
    if ranks.size == 1:
        return numbers
    params = [p for optimizer_pass in passes for p in optimizer_pass.all_params]
    grads = [g for optimizer_pass in passes for g in optimizer_pass.all_grads]
    flat = [p.new_zeros(p.numel()) if g is None else g.flatten() for p, g in zip(params, grads, strict=True)]
    has_gradient = torch.tensor([float(g is not None) for g in grads], device=numbers.device)
    sizes = [*(p.numel() for p in params), len(grads), len(numbers)]
    *summed, learners, total = ranks.sum_(torch.cat([*flat, has_gradient, numbers])).split(sizes)
    found = iter(
        g.view_as(p).to(p.dtype) if n else None for g, p, n in zip(summed, params, learners.tolist(), strict=True)
    )
    for optimizer_pass in passes:
        optimizer_pass.all_grads = [next(found) for _ in optimizer_pass.all_params]
    return total / ranks.size
