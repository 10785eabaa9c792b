"""What the learner reads: the valid joint rows of all batches as tensors, with advantages and targets.

Letters: N agents (module after module, the order of the agent axis), n agents of one module, M joint rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from thrust_rllib.functional import RunningMoments, standardize
from thrust_rllib.joint_advantages import joint_advantages
from thrust_rllib.joint_batch import AgentID, JointBatch, ModuleID, ModuleStreams
from thrust_rllib.joint_values import ValuesOf, joint_values
from thrust_rllib.minibatches import Units
from thrust_rllib.ranks import ALONE, Ranks
from thrust_rllib.rl_modules.memory import MemoryLayout
from thrust_rllib.sequences import ModuleSequences, RowSequences, SequenceLayout, row_sequences
from thrust_rllib.valid_rows import ValidRows


@dataclass(frozen=True)
class ModuleRows:
    """Rows of the agents that one module plays: obs [n, M, …], actions [n, M, …], action_mask [n, M, A] or None.

    origin: [n, M, 2] episode and step of each row, as `ModuleStreams` has them, or None. memory: of a recurrent module
    what its state is, and state_in [n, C, S] the state entering each training sequence of the whole rollout.
    """

    agents: tuple[AgentID, ...]
    obs: Tensor
    actions: Tensor
    action_mask: Tensor | None
    origin: Tensor | None = None
    memory: MemoryLayout | None = None
    state_in: Tensor | None = None

    def select(self, rows: Tensor) -> ModuleRows:
        """The given rows [B] of every agent."""
        mask, origin = self.action_mask, self.origin
        return ModuleRows(
            self.agents,
            self.obs.index_select(1, rows),
            self.actions.index_select(1, rows),
            None if mask is None else mask.index_select(1, rows),
            None if origin is None else origin.index_select(1, rows),
            self.memory,
            self.state_in,
        )

    def without_inputs(self) -> ModuleRows:
        """The same rows without what the network reads: observations of no width, no mask, no memory."""
        nothing = self.obs.new_empty(*self.obs.shape[:2], 0)
        return ModuleRows(self.agents, nothing, self.actions, None, self.origin)


@dataclass(frozen=True)
class JointRows:
    """Joint rows of all agents; a joint minibatch is the same type with B rows.

    | field         | shape        | meaning                                               |
    |---------------|--------------|-------------------------------------------------------|
    | modules       |              | {module id: `ModuleRows`}                             |
    | columns       | [4, N, M]    | the four float fields below in one tensor             |
    | action_logp   | [N, M]       | log-probability at sampling time                      |
    | values        | [N, M]       | the network's value before the update, in its units   |
    | advantages    | [N, M]       |                                                       |
    | value_targets | [N, M]       | in the network's units                                |
    | present       | [N, M] bool  | the agent acted                                       |
    | sequences     |              | the training sequences of the rows; None where no     |
    |               |              | module is recurrent. A minibatch holds whole ones     |
    """

    modules: dict[ModuleID, ModuleRows]
    columns: Tensor
    present: Tensor
    sequences: RowSequences | None = None

    @property
    def action_logp(self) -> Tensor:
        """[N, M]."""
        return self.columns[0]

    @property
    def values(self) -> Tensor:
        """[N, M]."""
        return self.columns[1]

    @property
    def advantages(self) -> Tensor:
        """[N, M]."""
        return self.columns[2]

    @property
    def value_targets(self) -> Tensor:
        """[N, M]."""
        return self.columns[3]

    def __len__(self) -> int:
        return self.present.shape[1]

    def without_inputs(self) -> JointRows:
        """The same rows with what losses read, and without what networks read."""
        modules = {module_id: module.without_inputs() for module_id, module in self.modules.items()}
        return JointRows(modules, self.columns, self.present)

    def units(self) -> Units:
        """What minibatches are made of: rows, or whole training sequences."""
        return Units.single_rows(len(self)) if self.sequences is None else self.sequences.units()

    def select(self, rows: Tensor) -> JointRows:
        """A joint minibatch: the given rows [B] (indices on the host), the same for every agent."""
        sequences = None if self.sequences is None else self.sequences.select(rows.numpy())
        rows = rows.to(self.present.device)
        return JointRows(
            {module_id: module.select(rows) for module_id, module in self.modules.items()},
            self.columns.index_select(2, rows),
            self.present.index_select(1, rows),
            sequences,
        )

    def module_sequences(self) -> dict[ModuleID, ModuleSequences]:
        """The sequences of every recurrent module."""
        found: dict[ModuleID, ModuleSequences] = {}
        if self.sequences is None:
            return found
        layouts: dict[int, SequenceLayout] = {}
        start = 0
        for module_id, module in self.modules.items():
            agents = slice(start, start + len(module.agents))
            start = agents.stop
            if module.memory is not None:
                assert module.state_in is not None
                found[module_id] = self.sequences.of_agents(agents, module.state_in, module.memory, layouts)
        return found


def joint_rows(
    batches: Sequence[JointBatch],
    *,
    values_of: ValuesOf,
    memories: Mapping[ModuleID, MemoryLayout],
    normalizers: Mapping[ModuleID, RunningMoments],
    gamma: Mapping[ModuleID, float],
    lambda_: Mapping[ModuleID, float],
    bootstrap: bool,
    standardize_rollout: bool,
    device: torch.device | str,
    ranks: Ranks = ALONE,
) -> JointRows:
    """Turns batches into joint rows.

    In this order:

    1. values of all observations and of what follows truncated and last rows, module by module (a recurrent one takes
       one more step of its cell for what follows, from its state behind the row);
    2. advantages and value targets along time, in the units of the rewards;
    3. rows of all batches behind each other, padding left out;
    4. value targets into the network's units (where values are normalised, the moments take them in first);
    5. advantages standardised per agent over the whole rollout, if so configured.

    Args:
        batches: rollouts of the same modules and agents; T and E may differ.
        values_of: (module id, obs [R, …], sequences of a recurrent module or None) to values [R], without gradient, in
            the network's units.
        memories: {module: what its state is} of the recurrent modules.
        normalizers: {module: running moments of its value targets}; a module without one trains on raw targets.
        gamma: discount per module.
        lambda_: GAE's λ per module.
        bootstrap: False takes the value after a truncated or last row as 0 (the seed).
        standardize_rollout: step 5.
        device: of the result.
        ranks: the learners that have these batches; they share step 1, and do the rest alike.

    Raises:
        ValueError: no batch, batches of different teams or shapes, values that are not finite, or a batch that does not
            say where sequences begin and with which states.
    """
    modules = _check_same_team(batches)
    values = joint_values(batches, values_of, memories, device, ranks)
    sizes = [len(modules[m]) for m in modules]

    def per_agent(numbers: Sequence[float]) -> Tensor:
        """One number per module to a column [N, 1]."""
        return torch.tensor(numbers, dtype=torch.float32).repeat_interleave(torch.tensor(sizes))[:, None]

    normalized = [normalizers.get(m) for m in modules]
    mean = per_agent([0.0 if moments is None else float(moments.mean) for moments in normalized])
    std = per_agent([1.0 if moments is None else float(moments.std) for moments in normalized])

    valid = ValidRows.of(batches)
    logp, raw, advantages, targets, present = joint_advantages(
        batches,
        values,
        valid,
        mean=mean,
        std=std,
        gamma=per_agent([gamma[m] for m in modules]),
        lambda_=per_agent([lambda_[m] for m in modules]),
        bootstrap=bootstrap,
    )

    start = 0
    for moments, size in zip(normalized, sizes, strict=True):
        if moments is not None:
            mine = slice(start, start + size)
            moments.update(targets[mine].numpy(), present[mine].numpy())
        start += size
    mean = per_agent([0.0 if moments is None else float(moments.mean) for moments in normalized])
    std = per_agent([1.0 if moments is None else float(moments.std) for moments in normalized])
    targets = (targets - mean) / std
    if standardize_rollout:
        advantages = standardize(advantages, present, dim=1, floor="max")
    return JointRows(
        modules={
            m: _module_rows(batches, valid, m, agents, mine, memories.get(m), device)
            for (m, agents), mine in zip(modules.items(), present.split(sizes), strict=True)
        },
        columns=torch.stack([logp, raw, advantages, targets]).to(device),
        present=present.to(device),
        sequences=_sequences(batches, present) if memories else None,
    )


def _check_same_team(batches: Sequence[JointBatch]) -> dict[ModuleID, tuple[AgentID, ...]]:
    if not batches:
        raise ValueError("the rollout is empty: no batch came from the runners")
    teams = [{m: streams.agents for m, streams in batch.modules.items()} for batch in batches]
    for team in teams[1:]:
        if team != teams[0]:
            raise ValueError(f"batches of different teams in one update: {teams[0]} and {team}")
    return teams[0]


def _sequences(batches: Sequence[JointBatch], present: Tensor) -> RowSequences:
    """Of the joint rows of all batches."""
    parts, numbers = [row_sequences(batch) for batch in batches], [0]
    for batch in batches:
        assert batch.sequence_rows is not None
        numbers.append(numbers[-1] + len(batch.sequence_rows))
    return RowSequences(
        unit=np.concatenate([part.unit + first for part, first in zip(parts, numbers, strict=False)]),
        fresh=np.concatenate([part.fresh for part in parts]),
        begins=np.concatenate([part.begins for part in parts]),
        present=None if present.all() else present.numpy(),
    )


def _module_rows(
    batches: Sequence[JointBatch],
    valid: ValidRows,
    module_id: ModuleID,
    agents: tuple[AgentID, ...],
    present: Tensor,
    memory: MemoryLayout | None,
    device: torch.device | str,
) -> ModuleRows:
    everywhere = bool(present.all())

    def field(name: str, absent: int = 0) -> Tensor:
        joined = torch.from_numpy(valid.join([getattr(batch.modules[module_id], name) for batch in batches]))
        if not everywhere:  # numbers without meaning would reach gradients as 0 times infinity
            joined[~present] = absent
        return joined.to(device)

    streams: ModuleStreams = batches[0].modules[module_id]
    states = np.concatenate([batch.modules[module_id].state_in for batch in batches], axis=1) if memory else None
    return ModuleRows(
        agents=agents,
        obs=field("obs"),
        actions=field("actions"),
        action_mask=None if streams.action_mask is None else field("action_mask", absent=1),
        origin=None if streams.origin is None else field("origin"),
        memory=memory,
        state_in=None if memory is None else torch.from_numpy(states).to(device),
    )
