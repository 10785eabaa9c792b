"""Auxiliary targets: scalars that the environment knows, predicted from each agent's features.

Letters: K targets, N agents, m modules, M joint rows, B rows of a minibatch, D width of a module's features.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from thrust_rllib.envs.names import nearest
from thrust_rllib.functional import huber_error, relative_accuracy, squared_error
from thrust_rllib.joint_batch import AgentID, JointBatch, ModuleID

if TYPE_CHECKING:
    from thrust_rllib.joint_rows import ModuleRows
    from thrust_rllib.module_axis import ModuleAxis
    from thrust_rllib.rl_modules.auxiliary_heads import AuxiliaryHeads
    from thrust_rllib.valid_rows import ValidRows

ERRORS = {"mse": squared_error, "huber": huber_error}


@dataclass(frozen=True)
class AuxiliaryTarget:
    """A scalar among the environment's extras that every agent learns to predict from its features.

    Each module gets a linear head for it; the head's loss reaches the policy's encoder, too. Frozen modules' features
    are predicted from without being moved. Targets are taken as they are: let the environment give numbers of about
    the size of 1.

    Args:
        name: of the extra: one number for the team ([T, E]) or one for each agent ([T, N, E]).
        loss: "mse" (mean of (p - y)²) or "huber" (with δ = 1, for targets with outliers).
        weight: of the loss, ≥ 0; a number or a schedule [[0, value], [step, value], …].

    Raises:
        ValueError: another loss, no usable name, or a weight that is none.
    """

    name: str
    loss: Literal["mse", "huber"] = "mse"
    weight: float | Sequence[Sequence[float]] = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or "/" in self.name:
            raise ValueError(
                f"AuxiliaryTarget: name is {self.name!r}; needed: the name of one of the environment's extras, without "
                "'/', since it is part of a metric's name"
            )
        if self.loss not in ERRORS:
            raise ValueError(f"AuxiliaryTarget {self.name!r}: loss is {self.loss!r}; needed: 'mse' or 'huber'")
        if not _is_weight(self.weight):
            raise ValueError(
                f"AuxiliaryTarget {self.name!r}: weight is {self.weight!r}; needed: a finite number ≥ 0, or a schedule "
                "[[0, value], [step, value], …] of such numbers with rising steps"
            )


def as_auxiliary_targets(value: Any) -> tuple[AuxiliaryTarget, ...]:
    """The option `auxiliary_targets`: objects, or dicts of their arguments (in which Tune can search).

    Raises:
        ValueError: something else, an argument that does not exist, or two targets of one name.
    """
    if isinstance(value, (str, Mapping, AuxiliaryTarget)) or not isinstance(value, Iterable):
        raise ValueError(
            f"auxiliary_targets={value!r}; needed: a tuple of AuxiliaryTarget objects, "
            "(AuxiliaryTarget('distance'),), or of dicts of their arguments"
        )
    targets = tuple(_as_target(given) for given in value)
    names = [target.name for target in targets]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"auxiliary_targets has {twice} more than once; give each target once, with one weight")
    return targets


def _as_target(given: Any) -> AuxiliaryTarget:
    if isinstance(given, Mapping):
        known = [field.name for field in dataclasses.fields(AuxiliaryTarget)]
        for key in given:
            if key not in known:
                raise ValueError(f"an auxiliary target has no {key!r}; it has {known}{nearest(str(key), known)}")
        if "name" not in given:
            raise ValueError(f"the auxiliary target {dict(given)} lacks 'name', that of an extra")
        return AuxiliaryTarget(**given)
    if not isinstance(given, AuxiliaryTarget):
        raise ValueError(
            f"auxiliary_targets has {given!r}; needed: AuxiliaryTarget(name, …) or a dict of its arguments"
        )
    return given


def auxiliary_rows(batches: Sequence[JointBatch], valid: ValidRows, names: Sequence[str], present: Tensor) -> Tensor:
    """The targets of all valid joint rows, out of the extras of the batches.

    Args:
        batches: of one update.
        valid: their valid rows.
        names: of the K extras.
        present: [N, M] bool, on the host.

    Returns:
        [K, N, M] float32 on the host, agents in the order of `JointBatch.agents`; 0 where an agent is absent.

    Raises:
        ValueError: an extra is missing, is neither [T, E] nor [T, N, E], holds something else than real numbers, or is
            not finite where an agent acted.
    """
    parts = [valid.join([_of_agents(name, batch) for batch in batches]) for name in names]
    rows = torch.from_numpy(np.stack(parts)) if parts else torch.zeros(0, *present.shape)
    rows = rows.where(present, 0)
    for name, mine in zip(names, rows, strict=True):
        if not bool(mine.isfinite().all()):
            agent = batches[0].agents[int((~mine.isfinite()).any(1).nonzero()[0])]
            raise ValueError(
                f"auxiliary target {name!r} is not finite for agent {agent!r}, who acted; let the environment give a "
                "finite number (of float32) at every step"
            )
    return rows


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
    | accuracy | [K, m] | 1 − median relative error, in [0, 1], see `functional.relative_accuracy`      |
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


def _of_agents(name: str, batch: JointBatch) -> np.ndarray:
    """An extra as float32 [T, N, E]."""
    if name not in batch.extras:
        raise ValueError(
            f"auxiliary target {name!r} is not among the rollout's extras {sorted(batch.extras)}"
            f"{nearest(name, batch.extras)} Let the environment return it in JointStepResult.extras at every step"
        )
    values = np.asarray(batch.extras[name])
    needed = (batch.num_steps, len(batch.agents), batch.num_envs)
    if values.shape not in (needed, needed[::2]):
        raise ValueError(
            f"auxiliary target {name!r} has shape {values.shape}; needed: a number for the team, [T, E] = "
            f"{needed[::2]}, or one for each agent, [T, N, E] = {needed}"
        )
    if values.dtype.kind not in "biuf":
        raise ValueError(
            f"auxiliary target {name!r} has dtype {values.dtype}; needed: real numbers. Let the environment return "
            "floats at every step (None stands for no number)"
        )
    with np.errstate(over="ignore"):  # what is too large for float32 is told as not finite
        numbers = values.astype(np.float32)
    return np.broadcast_to(numbers[:, None] if numbers.ndim == 2 else numbers, needed)


def _is_weight(value: Any) -> bool:
    def fine(number: Any) -> bool:
        whole = isinstance(number, (int, float)) and not isinstance(number, bool)
        return whole and math.isfinite(number) and number >= 0

    if not isinstance(value, (list, tuple)):
        return fine(value)
    pairs = [pair for pair in value if isinstance(pair, (list, tuple)) and len(pair) == 2 and all(map(fine, pair))]
    steps = [pair[0] for pair in pairs]
    return (
        len(pairs) == len(value) >= 2 and steps[0] == 0 and all(a < b for a, b in zip(steps, steps[1:], strict=False))
    )
