"""Auxiliary targets: scalars that the environment knows, as an option and as numbers of a rollout.

Letters: K targets, N agents, M joint rows; others as in `joint_batch`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from thrust_rllib.envs.names import nearest
from thrust_rllib.functional import huber_error, squared_error
from thrust_rllib.joint_batch import JointBatch
from thrust_rllib.options import named_objects
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
    return named_objects("auxiliary_targets", value, AuxiliaryTarget)


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
