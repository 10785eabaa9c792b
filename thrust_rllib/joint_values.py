"""Values of a rollout before its update: of every observation, and of what follows truncated and last rows.

Letters as in `joint_batch`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from thrust_rllib.joint_batch import JointBatch, ModuleID
from thrust_rllib.rl_modules.memory import MemoryLayout
from thrust_rllib.sequences import ModuleSequences, TimeAxis

ValuesOf = Callable[[ModuleID, Tensor, ModuleSequences | None], Tensor]
"""(module id, observations [R, …], their sequences where the module is recurrent) to values [R], without gradient."""

VALUE_ROWS = 16_384
"""Rows of one forward pass for values, padding included: bounds the memory."""


def joint_values(
    batches: Sequence[JointBatch],
    values_of: ValuesOf,
    memories: Mapping[ModuleID, MemoryLayout],
    device: torch.device | str,
) -> dict[ModuleID, list[tuple[Tensor, Tensor]]]:
    """{module: [(values [T, n, E], values of what follows each row [T, n, E]) of each batch]}.

    What follows is 0 where nothing needs it.

    Args:
        batches: of one team.
        values_of: one forward pass of a module's critic.
        memories: {module: what its state is} of the recurrent modules.
        device: of the modules.

    Raises:
        ValueError: values that are not finite, or a batch that does not say where the sequences of a recurrent module
            begin and with which states.
    """
    for batch in batches:
        _check_states(batch, memories)
    axes = [TimeAxis.of(batch) for batch in batches] if memories else []
    return {m: _of_module(batches, axes, m, values_of, memories.get(m), device) for m in batches[0].modules}


def _check_states(batch: JointBatch, memories: Mapping[ModuleID, MemoryLayout]) -> None:
    for module_id, memory in memories.items():
        state_in = batch.modules[module_id].state_in
        if batch.sequence_rows is None or state_in is None:
            raise ValueError(
                f"module {module_id!r} is recurrent, but the rollout does not say where training sequences begin and "
                "with which states; fill JointBatch.sequence_rows and ModuleStreams.state_in, as the runners do"
            )
        if state_in.shape[2:] != (memory.size,):
            raise ValueError(
                f"module {module_id!r}: the states of the rollout have shape {state_in.shape[2:]}, needed "
                f"({memory.size},), the numbers of its own state; sample with the same module that is trained"
            )


def _of_module(
    batches: Sequence[JointBatch],
    axes: Sequence[TimeAxis],
    module_id: ModuleID,
    values_of: ValuesOf,
    memory: MemoryLayout | None,
    device: torch.device | str,
) -> list[tuple[Tensor, Tensor]]:
    """Per batch: values [T, n, E] of its observations, and [T, n, E] of what follows (0 where nothing is needed)."""
    streams = [batch.modules[module_id] for batch in batches]
    flat = [s.obs.reshape(-1, *s.obs.shape[3:]) for s in streams]
    flat += [s.bootstrap_obs.reshape(-1, *s.obs.shape[3:]) for s in streams]
    if memory is None:
        values = values_of(module_id, torch.from_numpy(np.concatenate(flat)), None).float().cpu()
        chunks: Sequence[Tensor] = values.split([len(f) for f in flat])
    else:
        found = [
            _in_time(batch, axis, module_id, np.concatenate([own, after]), values_of, memory, device)
            for batch, axis, own, after in zip(batches, axes, flat, flat[len(streams) :], strict=False)
        ]
        chunks = [own for own, _ in found] + [after for _, after in found]
    for chunk in chunks:
        if not torch.isfinite(chunk).all():
            raise ValueError(
                f"module {module_id!r} gives values that are not finite ({int((~torch.isfinite(chunk)).sum())} of "
                f"{chunk.numel()}); its weights or its observations have diverged. Lower lr or critic_lr, or normalise "
                "the observations with .env_runners(normalize_observations=True)."
            )
    result = []
    for batch, s, own, after in zip(batches, streams, chunks, chunks[len(streams) :], strict=False):
        steps, n, envs = s.rewards.shape
        following = torch.zeros(steps, envs, n)
        rows = torch.tensor(batch.bootstrap_rows)  # a copy: arrays out of Ray's object store are read-only
        following.view(steps * envs, n)[rows] = after.view(n, -1).T
        result.append((own.view(steps, n, envs), following.transpose(1, 2)))
    return result


def _in_time(
    batch: JointBatch,
    axis: TimeAxis,
    module_id: ModuleID,
    obs: np.ndarray,
    values_of: ValuesOf,
    memory: MemoryLayout,
    device: torch.device | str,
) -> tuple[Tensor, Tensor]:
    """Values of a recurrent module's observations [T, n, E] and of what follows [n, K], both flattened.

    `obs` are these, behind each other.
    """
    streams = batch.modules[module_id]
    n = len(streams.agents)
    sequences = dataclasses.replace(axis.sequences, present=axis.present(batch, module_id)).of_agents(
        slice(0, n), torch.tensor(streams.state_in, device=device), memory, {}, VALUE_ROWS
    )
    index = torch.from_numpy(axis.obs_index(batch, n).ravel())
    values = torch.zeros(len(obs))
    values[index] = values_of(module_id, torch.from_numpy(obs).index_select(0, index), sequences).float().cpu()
    own, following = values.split([streams.rewards.size, n * len(batch.bootstrap_rows)])
    return own, following
