"""Advantages and value targets of a rollout in the units of the rewards, beside what they are computed from.

Letters as in `joint_batch`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from thrust_rllib.functional import generalized_advantages
from thrust_rllib.joint_batch import JointBatch, ModuleID
from thrust_rllib.valid_rows import ValidRows


class AgentColumns(NamedTuple):
    """Numbers of all agents, each [N, M] on the host: as `JointRows` has them, value targets not normalised."""

    action_logp: Tensor
    values: Tensor
    advantages: Tensor
    value_targets: Tensor
    present: Tensor


def joint_advantages(
    batches: Sequence[JointBatch],
    values: Mapping[ModuleID, Sequence[tuple[Tensor, Tensor]]],
    valid: ValidRows,
    *,
    mean: Tensor,
    std: Tensor,
    gamma: Tensor,
    lambda_: Tensor,
    bootstrap: bool,
) -> AgentColumns:
    """Generalised advantages along time, and the valid rows of all batches behind each other.

    Environments of batches of the same T are computed side by side: the loop over time is run once for all of them.

    Args:
        batches: of one team.
        values: {module: [(values [T, n, E], values of what follows each row [T, n, E]) of each batch]}, in the
            network's units.
        valid: of the batches.
        mean: [N, 1], a value of 0 in the units of the rewards.
        std: [N, 1], what a value of 1 is more than that.
        gamma: discount [N, 1].
        lambda_: GAE's λ [N, 1].
        bootstrap: False takes the value after a truncated or last row as 0.
    """
    parts: list[list[np.ndarray]] = [[]] * len(batches)
    for alike in _of_equal_length(batches):
        together = [batches[k] for k in alike]
        own, following = (
            _side_by_side([[x[k][part].numpy() for k in alike] for x in values.values()]) for part in (0, 1)
        )
        logp, rewards, present, terminated, truncated = (
            _side_by_side([[getattr(batch.modules[m], name) for batch in together] for m in values])
            for name in ("action_logp", "rewards", "present", "terminated", "truncated")
        )
        advantages, targets = generalized_advantages(
            rewards,
            own * std + mean,
            terminated,
            truncated,
            following * std + mean if bootstrap else torch.zeros_like(following),
            gamma,
            lambda_,
            present,
        )
        columns = [x.numpy() for x in AgentColumns(logp, own, advantages, targets, present)]
        start = 0
        for k, batch in zip(alike, together, strict=True):
            parts[k] = [x[:, :, start : start + batch.num_envs] for x in columns]
            start += batch.num_envs
    return AgentColumns(*(torch.from_numpy(valid.join(column)) for column in zip(*parts, strict=True)))


def _of_equal_length(batches: Sequence[JointBatch]) -> list[list[int]]:
    """Numbers of the batches, those of the same T together."""
    found: dict[int, list[int]] = {}
    for k, batch in enumerate(batches):
        found.setdefault(batch.num_steps, []).append(k)
    return list(found.values())


def _side_by_side(arrays: Sequence[Sequence[np.ndarray]]) -> Tensor:
    """Arrays [T, n, E] of each module and each batch to [T, N, E of all batches]."""
    agents = np.cumsum([0] + [own[0].shape[1] for own in arrays])
    dtype = np.result_type(*{x.dtype for own in arrays for x in own})
    joined = np.empty((len(arrays[0][0]), agents[-1], sum(x.shape[2] for x in arrays[0])), dtype)
    for own, start, stop in zip(arrays, agents, agents[1:], strict=False):
        np.concatenate(own, axis=2, out=joined[:, start:stop])
    return torch.from_numpy(joined)
