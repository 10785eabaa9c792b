"""The rows of recurrent modules as padded sequences: where each row stands, and with which state a sequence begins.

Letters: R rows of some agents, B rows of one agent, n agents of a module, C training sequences, G segments of one
agent, S numbers of a module's state, L steps of a padded sequence, Q sequences.

A *training sequence* is a stretch of one environment's rows that stays whole in every minibatch. A *segment* is a part
of it without the start of an episode inside: what a cell runs through without a reset. Agents that do not act in a row
do not run through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from ray.rllib.core.columns import Columns
from torch import Tensor

from thrust_rllib.joint_batch import JointBatch, ModuleStreams
from thrust_rllib.minibatches import Units
from thrust_rllib.rl_modules.memory import MemoryLayout

STEP_COST = 64
"""What a step of a padded call costs, in its rows: few long calls are cheaper than many that pad nothing."""


@dataclass(frozen=True)
class PaddedSequences:
    """Q sequences, padded at their ends to L steps.

    rows: [Q, L] which row stands there; padding repeats the sequence's last one. segments: [Q] which these are.
    """

    rows: Tensor
    segments: Tensor


class SequenceLayout:
    """Padded sequences of the segments of n agents, longest first, in as few calls as padding allows.

    Args:
        begins: bool [B], rows that begin a segment; the first one does. Rows of a segment stand behind each other.
        present: bool [n, B], who acted; None for everybody, everywhere.
        num_agents: n.
        device: of the indices.
        max_rows: split calls of more than so many padded rows.
    """

    def __init__(
        self,
        begins: np.ndarray,
        present: np.ndarray | None,
        num_agents: int,
        device: torch.device | str,
        max_rows: int | None = None,
    ) -> None:
        self.calls: list[PaddedSequences] = []
        segment = np.cumsum(begins) - 1
        num_segments = int(segment[-1]) + 1
        every = num_segments * np.arange(num_agents)[:, None] + segment  # [n, B]
        if present is None:
            rows, segment = np.arange(every.size), every.ravel()
        else:
            rows = np.flatnonzero(present)
            segment = every.ravel()[rows]
        lengths = np.bincount(segment, minlength=num_agents * num_segments)
        first = np.cumsum(lengths) - lengths
        longest_first = np.argsort(-lengths, kind="stable")[: np.count_nonzero(lengths)]
        places = np.full(every.size, -1)
        start = 0
        for part in _calls(lengths[longest_first], max_rows):
            mine = longest_first[part]
            steps = np.arange(lengths[mine[0]])
            own = lengths[mine, None]
            padded = rows[first[mine, None] + np.minimum(steps, own - 1)]
            real = steps < own
            places[padded[real]] = start + np.flatnonzero(real)
            start += padded.size
            self.calls.append(PaddedSequences(*(torch.from_numpy(x).to(device) for x in (padded, mine))))
        if not self.calls:  # nobody acted: one step, which nobody reads, gives the outputs their shapes
            nowhere, start = torch.zeros(1, 1, dtype=torch.int64, device=device), 1
            self.calls.append(PaddedSequences(nowhere, nowhere[0]))
        self._everywhere = present is None
        places[places < 0] = start  # behind all outputs stands a row of zeros
        self._places = torch.from_numpy(places).to(device)

    def by_row(self, outputs: list[Tensor]) -> Tensor:
        """Outputs [Q, L, …] of all calls to [R, …]; 0 where an agent did not act."""
        flat = [x.flatten(0, 1) for x in outputs]
        if not self._everywhere:
            flat.append(flat[0].new_zeros(1, *flat[0].shape[1:]))
        return (flat[0] if len(flat) == 1 else torch.cat(flat)).index_select(0, self._places)


def _calls(lengths: np.ndarray, max_rows: int | None) -> Iterator[slice]:
    """Cuts sequences, longest first, into calls: where padding costs more than the steps of another call."""
    start, end = 0, len(lengths)
    while start < end:
        longest, shorter = lengths[start], lengths[start:]
        apart = (longest - shorter) * np.arange(end - start, 0, -1) > STEP_COST * shorter
        stop = start + int(apart.argmax()) if apart.any() else end
        most = stop - start if max_rows is None else max(1, max_rows // int(longest))
        for first in range(start, stop, most):
            yield slice(first, min(first + most, stop))
        start = stop


@dataclass(frozen=True)
class ModuleSequences:
    """One module's rows in sequences: their layout, the state [n·G, S] entering each segment, and what a state is."""

    layout: SequenceLayout
    states: Tensor
    memory: MemoryLayout

    def run(
        self, obs: Tensor, forward: Callable[[dict[str, Any]], dict[str, Tensor]], column: str = Columns.OBS
    ) -> dict[str, Tensor]:
        """Runs a module over the sequences.

        Args:
            obs: [R, …], of all agents behind each other.
            forward: a batch with observations [Q, L, …] and states [Q, …] to outputs [Q, L, …].
            column: what the observations are called there.

        Returns:
            The outputs by row, [R, …].
        """
        found: dict[str, list[Tensor]] = {}
        for call in self.layout.calls:
            batch = {
                column: obs.index_select(0, call.rows.flatten()).unflatten(0, call.rows.shape),
                Columns.STATE_IN: self.memory.unflatten(self.states.index_select(0, call.segments)),
            }
            for name, output in forward(batch).items():
                found.setdefault(name, []).append(output)
        return {name: self.layout.by_row(outputs) for name, outputs in found.items()}


@dataclass(frozen=True)
class RowSequences:
    """Which sequences joint rows belong to; on the host, since layouts are made there.

    | field   | shape       | meaning                                                        |
    |---------|-------------|----------------------------------------------------------------|
    | unit    | [M] int     | number of the training sequence                                |
    | fresh   | [M] bool    | the first step of an episode: every memory begins anew         |
    | begins  | [M] bool    | fresh, or the first row of its training sequence               |
    | present | [N, M] bool | who acted; None for everybody, everywhere                      |
    """

    unit: np.ndarray
    fresh: np.ndarray
    begins: np.ndarray
    present: np.ndarray | None

    def select(self, rows: np.ndarray) -> RowSequences:
        """Of the given rows."""
        present = None if self.present is None else self.present[:, rows]
        return RowSequences(self.unit[rows], self.fresh[rows], self.begins[rows], present)

    def of_team(self) -> RowSequences:
        """The same rows for one who acts where anybody does."""
        if self.present is None:
            return self
        anybody = np.asarray(self.present.any(0, keepdims=True))
        return replace(self, present=None if anybody.all() else anybody)

    def units(self) -> Units:
        """All rows, sequence after sequence, each in the order of time: what minibatches are made of."""
        return Units(torch.from_numpy(np.argsort(self.unit, kind="stable")), torch.from_numpy(np.bincount(self.unit)))

    def of_agents(
        self,
        agents: slice,
        state_in: Tensor,
        memory: MemoryLayout,
        layouts: dict[int, SequenceLayout],
        max_rows: int | None = None,
    ) -> ModuleSequences:
        """Of some agents, whose rows stand behind each other.

        Args:
            agents: which.
            state_in: [n, C, S], the state entering each training sequence.
            memory: what a state is.
            layouts: those made before for the same rows; modules with alike rows share one.
            max_rows: see `SequenceLayout`.
        """
        num_agents = agents.stop - agents.start
        present = None if self.present is None else self.present[agents]
        key = num_agents if present is None else agents.start
        if key not in layouts:
            layouts[key] = SequenceLayout(self.begins, present, num_agents, state_in.device, max_rows)
        return ModuleSequences(layouts[key], self.entering(state_in, memory).flatten(0, 1), memory)

    def entering(self, state_in: Tensor, memory: MemoryLayout) -> Tensor:
        """The states [n, G, S] entering each segment, of those [n, C, S] entering the training sequences."""
        first = np.flatnonzero(self.begins)
        states = state_in.index_select(1, torch.from_numpy(self.unit[first]).to(state_in.device))
        fresh = torch.from_numpy(self.fresh[first]).to(state_in.device)
        initial = torch.from_numpy(memory.initial).to(state_in.device)
        return torch.where(fresh[:, None], initial, states)


def row_sequences(batch: JointBatch) -> RowSequences:
    """Of the valid rows of a batch that says where sequences begin, in the order of time; `present` is left out."""
    unit, begins = _units(batch)
    valid = batch.valid
    return RowSequences(unit[valid], batch.episode_start[valid], (begins | batch.episode_start)[valid], None)


def _units(batch: JointBatch) -> tuple[np.ndarray, np.ndarray]:
    """[T, E] number of the training sequence of each row, and bool [T, E] whether it begins there."""
    steps, envs = batch.valid.shape
    begins = np.zeros(steps * envs, bool)
    begins[batch.sequence_rows] = True
    begins = begins.reshape(steps, envs)
    since = np.maximum.accumulate(np.where(begins, np.arange(steps)[:, None], 0), axis=0)
    number = np.cumsum(begins.ravel()).reshape(steps, envs) - 1
    return np.take_along_axis(number, since, axis=0), begins


def is_followed(streams: ModuleStreams, valid: np.ndarray) -> np.ndarray:
    """Bool [n, T, E]: rows behind which an agent's value goes on, though its next row is not in this batch.

    Args:
        streams: of a module with n agents.
        valid: bool [T, E].
    """
    acted = (streams.present & valid[:, None]).swapaxes(0, 1)
    steps = acted.shape[1]
    last = steps - 1 - acted[:, ::-1].argmax(axis=1)  # [n, E], where the agent acted at all
    ends = streams.truncated.swapaxes(0, 1) | (np.arange(steps)[:, None] == last[:, None])
    return np.asarray(acted & ends & ~streams.terminated.swapaxes(0, 1))


@dataclass(frozen=True)
class TimeAxis:
    """The valid rows of a batch column by column, and an extra step behind each row that is bootstrapped from.

    Letters: K bootstrap rows, P = valid rows + K.

    | field     | shape    | meaning                                                                  |
    |-----------|----------|--------------------------------------------------------------------------|
    | rows      | [P] int  | row t·E + e                                                              |
    | extra     | [P] int  | which of the K bootstrap rows this extra step follows, −1 for a row itself |
    | sequences |          | of the P steps                                                           |
    """

    rows: np.ndarray
    extra: np.ndarray
    sequences: RowSequences

    @classmethod
    def of(cls, batch: JointBatch) -> TimeAxis:
        """See the class."""
        steps, envs = batch.valid.shape
        unit, begins = _units(batch)
        own = np.flatnonzero(batch.valid)
        rows = np.concatenate([own, batch.bootstrap_rows])
        extra = np.concatenate([np.full(len(own), -1), np.arange(len(batch.bootstrap_rows))])
        order = np.lexsort((extra, rows // envs, rows % envs))
        rows, extra = rows[order], extra[order]
        is_row = extra < 0
        fresh = batch.episode_start.ravel()[rows] & is_row
        sequences = RowSequences(unit.ravel()[rows], fresh, fresh | (begins.ravel()[rows] & is_row), None)
        return cls(rows, extra, sequences)

    def present(self, batch: JointBatch, module_id: str) -> np.ndarray:
        """Bool [n, P]: steps that the agents' memories run through; an extra one only where its value is needed."""
        streams = batch.modules[module_id]
        n = len(streams.agents)
        acted = (streams.present & batch.valid[:, None]).swapaxes(0, 1)  # [n, T, E]
        follows = is_followed(streams, batch.valid)
        return np.where(self.extra < 0, acted.reshape(n, -1)[:, self.rows], follows.reshape(n, -1)[:, self.rows])

    def obs_index(self, batch: JointBatch, num_agents: int) -> np.ndarray:
        """[n, P] places among observations [T, n, E] flattened, with bootstrap observations [n, K] behind them."""
        steps, envs = batch.valid.shape
        agent = np.arange(num_agents)[:, None]
        own = ((self.rows // envs) * num_agents + agent) * envs + self.rows % envs
        following = steps * num_agents * envs + agent * len(batch.bootstrap_rows) + self.extra
        return np.where(self.extra < 0, own, following)
