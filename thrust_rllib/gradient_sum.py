"""The gradients of several learners become those of one: their sum, in one message for all optimizer passes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thrust_rllib.joint_losses import Decisive
from thrust_rllib.optimizer_pass import OptimizerPass, laid_out_as
from thrust_rllib.ranks import Ranks


def sum_gradients(passes: Sequence[OptimizerPass], decisive: Decisive, ranks: Ranks) -> Decisive:
    """Replaces each pass's gradients by their sum over the learners.

    A parameter has a gradient where it has one for any learner, as it would for one learner with all rows; no gradient
    travels as zeros. So every learner sends the same number of numbers, whatever its rows are.

    Args:
        passes: whose gradients were computed, not clipped yet.
        decisive: of this minibatch. Computed from the same rows it is equal but for the rounding of unlike machines;
            its mean over the learners travels along, so that all decide alike.
        ranks: the learners.

    Returns:
        The mean.
    """
    if ranks.size == 1:
        return decisive
    numbers = decisive.flat()
    params = [p for optimizer_pass in passes for p in optimizer_pass.all_params]
    grads = [g for optimizer_pass in passes for g in optimizer_pass.all_grads]
    flat = [p.new_zeros(p.numel()) if g is None else g.flatten() for p, g in zip(params, grads, strict=True)]
    has_gradient = torch.tensor([float(g is not None) for g in grads], device=numbers.device)
    sizes = [*(p.numel() for p in params), len(grads), len(numbers)]
    *summed, learners, total = ranks.sum_(torch.cat([*flat, has_gradient, numbers])).split(sizes)
    found = iter(
        laid_out_as(g.view_as(p), p) if n else None for g, p, n in zip(summed, params, learners.tolist(), strict=True)
    )
    for optimizer_pass in passes:
        optimizer_pass.all_grads = [next(found) for _ in optimizer_pass.all_params]
    return Decisive.of_flat(total / ranks.size)
