"""Losses of auxiliary targets: what the heads predict from features, and how far it is off.

Letters: K targets, N agents, m modules, B rows of a minibatch, D width of a module's features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thrust_rllib.auxiliary_targets import ERRORS
from thrust_rllib.functional import relative_accuracy
from thrust_rllib.joint_batch import AgentID, ModuleID
from thrust_rllib.joint_rows import ModuleRows
from thrust_rllib.module_axis import ModuleAxis
from thrust_rllib.rl_modules.auxiliary_heads import AuxiliaryHeads


def auxiliary_predictions(
    heads: AuxiliaryHeads, features: Mapping[AgentID, Tensor], modules: Mapping[ModuleID, ModuleRows]
) -> Tensor:
    """What the heads predict on a joint minibatch, or on one learner's rows of it.

    Args:
        heads: the learner's.
        features: {agent: [B, D]}, `TeamOutputs.features`.
        modules: `JointRows.modules`, for who is played by which module.

    Returns:
        [K, N, B], agents in the order of the modules.
    """
    parts = []
    for module_id, mine in modules.items():
        stacked = torch.stack([features[agent] for agent in mine.agents])  # [n, B, D]
        parts.append(heads.predict(module_id, stacked).movedim(-1, 0))
    return torch.cat(parts, dim=1)


@dataclass(frozen=True)
class AuxiliaryLosses:
    """Of one joint minibatch.

    | field    | shape  | meaning                                                                       |
    |----------|--------|-------------------------------------------------------------------------------|
    | weighted | [m]    | Σ_k weight_k · loss_k of each module: belongs to the actor's loss             |
    | losses   | [K, m] | before their weights, without gradient                                        |
    | accuracy | [K, m] | 1 − median relative error, in [0, 1]: `functional.relative_accuracy`          |
    """

    weighted: Tensor
    losses: Tensor
    accuracy: Tensor


def auxiliary_losses(
    predictions: Tensor,
    targets: Tensor,
    present: Tensor | None,
    *,
    kinds: Sequence[str],
    weights: Tensor,
    axis: ModuleAxis,
) -> AuxiliaryLosses:
    """Losses of the K targets, each a mean over a module's own present rows, as the policy's are.

    loss[k, m] = mean over the rows (i, b) of module m's agents of error_k(p[k, i, b], y[k, i, b])

    Args:
        predictions: [K, N, B] of `auxiliary_predictions`.
        targets: [K, N, B].
        present: [N, B] bool, or None where everybody acted everywhere. What stands elsewhere never matters.
        kinds: "mse" or "huber" of each target.
        weights: [K].
        axis: modules on the agent axis.
    """
    if present is not None:
        predictions, targets = predictions.where(present, 0.0), targets.where(present, 0.0)
    errors = torch.stack([ERRORS[kind](p, y) for kind, p, y in zip(kinds, predictions, targets, strict=True)])
    counts = axis.num_agents * predictions.shape[-1] if present is None else axis.sum(present.to(errors.dtype))
    losses = axis.sum(errors) / counts.clamp(min=1.0)
    return AuxiliaryLosses(
        weighted=(weights[:, None] * losses).sum(0),
        losses=losses.detach(),
        accuracy=_accuracy(predictions.detach(), targets, present, axis.sizes),
    )


def _accuracy(predictions: Tensor, targets: Tensor, present: Tensor | None, sizes: list[int]) -> Tensor:
    """[K, m]."""
    if len(set(sizes)) == 1:  # all modules at once
        p, y = (x.unflatten(1, (len(sizes), -1)).flatten(2) for x in (predictions, targets))
        return relative_accuracy(p, y, None if present is None else present.reshape(len(sizes), -1))
    parts = [x.split(sizes, dim=1) for x in (predictions, targets)]
    masks = [None] * len(sizes) if present is None else [mask.flatten() for mask in present.split(sizes)]
    return torch.stack(
        [relative_accuracy(p.flatten(1), y.flatten(1), mask) for p, y, mask in zip(*parts, masks, strict=True)], dim=1
    )
