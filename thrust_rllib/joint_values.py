"""Values of a rollout before its update: of every observation, and of what follows truncated and last rows.

Letters as in `joint_batch`.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from thrust_rllib.joint_batch import JointBatch, ModuleID
from thrust_rllib.ranks import ALONE, Ranks
from thrust_rllib.rl_modules.memory import MemoryLayout
from thrust_rllib.sequences import ModuleSequences, TimeAxis

ValuesOf = Callable[[ModuleID, Tensor, ModuleSequences | None], Tensor]
"""(module id, observations [R, …], their sequences where the module is recurrent) to values [R] or [R, V], without
gradient."""

VALUE_ROWS = 16_384
"""Rows of one forward pass for values, padding included: bounds the memory."""


def joint_values(
    batches: Sequence[JointBatch],
    values_of: ValuesOf,
    memories: Mapping[ModuleID, MemoryLayout],
    device: torch.device | str,
    ranks: Ranks = ALONE,
    num_values: int | None = None,
) -> dict[ModuleID, list[tuple[Tensor, Tensor]]]:
    """{module: [(values [T, n, E], values of what follows each row [T, n, E]) of each batch]}.

    With V values for each observation [T, n, E, V]. What follows is 0 where nothing needs it. Several learners share
    the work: rows of a feed-forward module, whole batches of a recurrent one. Their parts are summed.

    Args:
        batches: of one team.
        values_of: a module's critic; without a memory it is asked for at most `VALUE_ROWS` rows at a time, and shall
            leave them as they are.
        memories: {module: what its state is} of the recurrent modules.
        device: of the modules.
        ranks: the learners that have these batches.
        num_values: V, or None for one number without an axis of its own.

    Raises:
        ValueError: values that are not finite, or a batch that does not say where the sequences of a recurrent module
            begin and with which states.
    """
    for batch in batches:
        _check_states(batch, memories)
    shape = () if num_values is None else (num_values,)
    axes = [TimeAxis.of(batch) for batch in batches] if memories else []
    parts = {}
    for index, module_id in enumerate(batches[0].modules):
        if (memory := memories.get(module_id)) is None:
            parts[module_id] = _of_rows(batches, module_id, values_of, shape, ranks)
        else:
            mine = [(index * len(batches) + k) % ranks.size == ranks.rank for k in range(len(batches))]
            parts[module_id] = _of_sequences(batches, axes, mine, module_id, values_of, shape, memory, device)
    if ranks.size > 1:
        sizes = [len(values) for values in parts.values()]
        parts = dict(zip(parts, ranks.sum_(torch.cat(list(parts.values()))).split(sizes), strict=True))
    return {module_id: _in_place(batches, module_id, values) for module_id, values in parts.items()}


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


def _observations(batches: Sequence[JointBatch], module_id: ModuleID) -> list[np.ndarray]:
    """Observations [T·n·E, …] of each batch, then of each what follows its bootstrap rows [n·K, …]."""
    streams = [batch.modules[module_id] for batch in batches]
    return [x.reshape(-1, *x.shape[3:]) for x in (s.obs for s in streams)] + [
        s.bootstrap_obs.reshape(-1, *s.obs.shape[3:]) for s in streams
    ]


def _of_rows(
    batches: Sequence[JointBatch], module_id: ModuleID, values_of: ValuesOf, shape: tuple[int, ...], ranks: Ranks
) -> Tensor:
    """Values of all observations of a feed-forward module, in their order; 0 for those of other learners."""
    arrays = _observations(batches, module_id)
    ends = list(itertools.accumulate(len(x) for x in arrays))
    values = torch.zeros(ends[-1], *shape)
    mine = ranks.part(len(values))
    for start in range(mine.start, mine.stop, VALUE_ROWS):
        rows = slice(start, min(start + VALUE_ROWS, mine.stop))
        values[rows] = values_of(module_id, _joined(arrays, ends, rows), None).float().cpu()
    return values


def _joined(arrays: Sequence[np.ndarray], ends: Sequence[int], rows: slice) -> Tensor:
    """Some rows, at least one, of arrays that stand behind each other and end at `ends`; the others are not read."""
    first, last = bisect.bisect_right(ends, rows.start), bisect.bisect_left(ends, rows.stop)
    before = ends[first] - len(arrays[first])
    pieces = list(arrays[first : last + 1])
    pieces[-1] = pieces[-1][: len(pieces[-1]) - (ends[last] - rows.stop)]
    pieces[0] = pieces[0][rows.start - before :]
    dtype = np.result_type(*{x.dtype for x in arrays})
    if len(pieces) == 1 and pieces[0].dtype == dtype and pieces[0].flags.writeable:
        return torch.from_numpy(pieces[0])
    return torch.from_numpy(np.concatenate(pieces, dtype=dtype))  # a copy: arrays of Ray's object store are read-only


def _of_sequences(
    batches: Sequence[JointBatch],
    axes: Sequence[TimeAxis],
    mine: Sequence[bool],
    module_id: ModuleID,
    values_of: ValuesOf,
    shape: tuple[int, ...],
    memory: MemoryLayout,
    device: torch.device | str,
) -> Tensor:
    """Values of all observations of a recurrent module, in their order; 0 in the batches that are not `mine`."""
    flat = _observations(batches, module_id)
    own, after = [], []
    for batch, axis, is_mine, x, y in zip(batches, axes, mine, flat, flat[len(batches) :], strict=False):
        values = torch.zeros(len(x) + len(y), *shape)
        if is_mine:
            values = _in_time(batch, axis, module_id, np.concatenate([x, y]), values_of, shape, memory, device)
        own.append(values[: len(x)])
        after.append(values[len(x) :])
    return torch.cat([*own, *after])


def _in_place(batches: Sequence[JointBatch], module_id: ModuleID, values: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Per batch: values [T, n, E] of its observations, and [T, n, E] of what follows (0 where nothing is needed)."""
    if not torch.isfinite(values).all():
        raise ValueError(
            f"module {module_id!r} gives values that are not finite ({int((~torch.isfinite(values)).sum())} of "
            f"{values.numel()}); its weights or its observations have diverged. Lower lr or critic_lr, or normalise "
            "the observations with .env_runners(normalize_observations=True)."
        )
    streams = [batch.modules[module_id] for batch in batches]
    n = len(streams[0].agents)
    own, after = values.split([sum(s.rewards.size for s in streams), n * sum(len(b.bootstrap_rows) for b in batches)])
    afters = after.split([n * len(batch.bootstrap_rows) for batch in batches])
    sizes = [batch.valid.size for batch in batches]
    first_rows = itertools.accumulate(sizes, initial=0)
    rows = np.concatenate([first + batch.bootstrap_rows for first, batch in zip(first_rows, batches, strict=False)])
    each = values.shape[1:]
    following = torch.zeros(sum(sizes), n, *each)
    following[torch.from_numpy(rows)] = torch.cat([x.view(n, -1, *each) for x in afters], dim=1).transpose(0, 1)
    return [
        (x.view(*s.rewards.shape, *each), y.view(*batch.valid.shape, n, *each).transpose(1, 2))
        for batch, s, x, y in zip(
            batches, streams, own.split([s.rewards.size for s in streams]), following.split(sizes), strict=True
        )
    ]


def _in_time(
    batch: JointBatch,
    axis: TimeAxis,
    module_id: ModuleID,
    obs: np.ndarray,
    values_of: ValuesOf,
    shape: tuple[int, ...],
    memory: MemoryLayout,
    device: torch.device | str,
) -> Tensor:
    """Values of a recurrent module's observations [T, n, E] and of what follows [n, K], behind each other as `obs`."""
    streams = batch.modules[module_id]
    n = len(streams.agents)
    sequences = dataclasses.replace(axis.sequences, present=axis.present(batch, module_id)).of_agents(
        slice(0, n), torch.tensor(streams.state_in, device=device), memory, {}, VALUE_ROWS
    )
    index = torch.from_numpy(axis.obs_index(batch, n).ravel())
    values = torch.zeros(len(obs), *shape)
    values[index] = values_of(module_id, torch.from_numpy(obs).index_select(0, index), sequences).float().cpu()
    return values
