"""What the learner reads: the valid joint rows of all batches as tensors, with advantages and targets.

Letters: N agents (module after module, the order of the agent axis), n agents of one module, M joint rows, V values of
a row: N, or 1 of the team.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from thrust_rllib.auxiliary_targets import auxiliary_rows
from thrust_rllib.functional import RunningMoments, stack_heads, standardize
from thrust_rllib.joint_batch import AgentID, JointBatch, ModuleID, ModuleStreams
from thrust_rllib.joint_values import ValuesOf
from thrust_rllib.minibatches import Units
from thrust_rllib.ranks import ALONE, Ranks
from thrust_rllib.rl_modules.joint_input import Speakers
from thrust_rllib.rl_modules.learner_modules import TEAM_CRITIC
from thrust_rllib.rl_modules.memory import MemoryLayout
from thrust_rllib.sequences import ModuleSequences, RowSequences, SequenceLayout, row_sequences
from thrust_rllib.team_credit import INDEPENDENT, CriticPlan, Scale, estimate
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
class CriticRows:
    """What values are trained on.

    | field   | shape       | meaning                                                                          |
    |---------|-------------|----------------------------------------------------------------------------------|
    | columns | [2, V, M]   | the network's value before the update, and the value's target, in its units      |
    | present | [V, M] bool | the row counts; None where each does                                             |
    | view    |             | the rows of the team's critic: one agent that sees the whole team; None where    |
    |         |             | the agents' own modules give the values                                          |
    | order   | [V] int     | which of that critic's values stands there; None where it has one                |
    """

    columns: Tensor
    present: Tensor | None
    view: ModuleRows | None = None
    order: Tensor | None = None

    def select(self, rows: Tensor, present: Tensor | None = None) -> CriticRows:
        """The given rows [B]; `present` where these are selected already."""
        if present is None and self.present is not None:
            present = self.present.index_select(1, rows)
        view = None if self.view is None else self.view.select(rows)
        return CriticRows(self.columns.index_select(2, rows), present, view, self.order)

    def without_inputs(self) -> CriticRows:
        """The same rows without what the critic reads."""
        return CriticRows(self.columns, self.present)


@dataclass(frozen=True)
class JointRows:
    """Joint rows of all agents; a joint minibatch is the same type with B rows.

    | field         | shape        | meaning                                               |
    |---------------|--------------|-------------------------------------------------------|
    | modules       |              | {module id: `ModuleRows`}                             |
    | columns       | [2, N, M]    | log-probability at sampling time, and advantage       |
    | present       | [N, M] bool  | the agent acted                                       |
    | critic        |              | `CriticRows`                                          |
    | sequences     |              | the training sequences of the rows; None where no     |
    |               |              | module is recurrent. A minibatch holds whole ones     |
    | head_logp     | [H, N, M]    | log-probability at sampling time head by head, 0      |
    |               |              | where an agent has no such head; or None              |
    | auxiliary     | [K, N, M]    | auxiliary targets, or None                            |
    | speakers      |              | who exchanges messages; None where nobody does        |
    | everybody     |              | `present` is true everywhere, in all rows of the      |
    |               |              | update                                                |
    """

    modules: dict[ModuleID, ModuleRows]
    columns: Tensor
    present: Tensor
    critic: CriticRows
    sequences: RowSequences | None = None
    head_logp: Tensor | None = None
    auxiliary: Tensor | None = None
    speakers: Speakers | None = None
    everybody: bool = False

    @property
    def action_logp(self) -> Tensor:
        """[N, M]."""
        return self.columns[0]

    @property
    def advantages(self) -> Tensor:
        """[N, M]."""
        return self.columns[1]

    @property
    def values(self) -> Tensor:
        """[V, M]."""
        return self.critic.columns[0]

    @property
    def value_targets(self) -> Tensor:
        """[V, M]."""
        return self.critic.columns[1]

    def __len__(self) -> int:
        return self.present.shape[1]

    def without_inputs(self) -> JointRows:
        """The same rows with what losses read, and without what networks read."""
        modules = {module_id: module.without_inputs() for module_id, module in self.modules.items()}
        return dataclasses.replace(self, modules=modules, critic=self.critic.without_inputs(), sequences=None)

    def units(self) -> Units:
        """What minibatches are made of: rows, or whole training sequences."""
        return Units.single_rows(len(self)) if self.sequences is None else self.sequences.units()

    def select(self, rows: Tensor) -> JointRows:
        """A joint minibatch: the given rows [B] (indices on the host), the same for every agent."""
        sequences = None if self.sequences is None else self.sequences.select(rows.numpy())
        rows = rows.to(self.present.device)
        present = self.present.index_select(1, rows)
        return JointRows(
            {module_id: module.select(rows) for module_id, module in self.modules.items()},
            self.columns.index_select(2, rows),
            present,
            self.critic.select(rows, present if self.critic.present is self.present else None),
            sequences,
            None if self.head_logp is None else self.head_logp.index_select(2, rows),
            None if self.auxiliary is None else self.auxiliary.index_select(2, rows),
            self.speakers,
            self.everybody,
        )

    def module_sequences(self) -> dict[ModuleID, ModuleSequences]:
        """The sequences of every module that runs in them, the team's critic among them.

        What remembers in the exchange of messages has none: that has run along time before.
        """
        found: dict[ModuleID, ModuleSequences] = {}
        if self.sequences is None:
            return found
        layouts: dict[int, SequenceLayout] = {}
        in_exchange = () if self.speakers is None else self.speakers.remembering_modules
        start = 0
        for module_id, module in self.modules.items():
            agents = slice(start, start + len(module.agents))
            start = agents.stop
            if module.memory is not None and module_id not in in_exchange:
                assert module.state_in is not None
                found[module_id] = self.sequences.of_agents(agents, module.state_in, module.memory, layouts)
        view = self.critic.view
        if view is not None and view.memory is not None:
            assert view.state_in is not None
            found[TEAM_CRITIC] = self.sequences.of_team().of_agents(slice(0, 1), view.state_in, view.memory, {})
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
    plan: CriticPlan = INDEPENDENT,
    auxiliary: Sequence[str] = (),
    per_head: bool = False,
    speakers: Speakers | None = None,
    heard: Sequence[JointBatch] | None = None,
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
        normalizers: {who answers for values: running moments of their targets}; one without trains on raw targets.
        gamma: discount per module.
        lambda_: GAE's λ per module.
        bootstrap: False takes the value after a truncated or last row as 0 (the seed).
        standardize_rollout: step 5.
        device: of the result.
        ranks: the learners that have these batches; they share step 1, and do the rest alike.
        plan: whose values, and which credit.
        auxiliary: names of the extras that are auxiliary targets.
        per_head: log-probabilities head by head are needed.
        speakers: who exchanges messages.
        heard: `exchanged_rollouts`, from which values are computed that agents' own modules give; None: `batches`.

    Raises:
        ValueError: no batch, batches of different teams or shapes, values that are not finite, a batch that does not
            say where sequences begin and with which states, or one without what `auxiliary` or `per_head` ask for.
    """
    modules = _check_same_team(batches)
    sizes = {m: len(agents) for m, agents in modules.items()}
    streams = plan.streams(sizes)
    normalized = [normalizers.get(m) for m in streams]
    valid = ValidRows.of(batches)
    in_exchange = () if speakers is None else speakers.remembering_modules
    found = estimate(
        batches if heard is None else heard,
        plan,
        valid,
        values_of=values_of,
        memories={m: layout for m, layout in memories.items() if m not in in_exchange},
        scale=_scale(normalized, streams),
        gamma=_column([gamma[m] for m in modules], sizes),
        lambda_=_column([lambda_[m] for m in modules], sizes),
        bootstrap=bootstrap,
        device=device,
        ranks=ranks,
    )
    head_logp = _head_logp(batches, valid, found.present).to(device) if per_head else None
    targets = auxiliary_rows(batches, valid, auxiliary, found.present).to(device) if auxiliary else None
    start = 0
    for moments, size in zip(normalized, streams.values(), strict=True):
        if moments is not None:
            mine = slice(start, start + size)
            moments.update(found.value_targets[mine].numpy(), found.value_present[mine].numpy())
        start += size
    scale = _scale(normalized, streams)
    advantages = found.advantages
    if standardize_rollout:
        advantages = standardize(advantages, found.present, dim=1, floor="max")
    present = found.present.to(device)
    value_present: Tensor | None = present
    if found.value_present is not found.present:
        value_present = None if found.value_present.all() else found.value_present.to(device)
    view = order = None
    if found.team:
        anybody = found.present.any(0, keepdim=True)
        team = found.team[0].modules[TEAM_CRITIC].agents
        view = _module_rows(found.team, valid, TEAM_CRITIC, team, anybody, memories.get(TEAM_CRITIC), device)
        if (places := plan.value_order(batches[0].agents)) is not None:
            order = torch.tensor(places, device=device)
    return JointRows(
        modules={
            m: _module_rows(batches, valid, m, agents, mine, memories.get(m), device)
            for (m, agents), mine in zip(modules.items(), found.present.split(list(sizes.values())), strict=True)
        },
        columns=torch.stack([found.action_logp, advantages]).to(device),
        present=present,
        critic=CriticRows(
            torch.stack([found.values, (found.value_targets - scale.mean) / scale.std]).to(device),
            value_present,
            view,
            order,
        ),
        sequences=_sequences(found.team or batches, found.present) if memories else None,
        head_logp=head_logp,
        auxiliary=targets,
        speakers=speakers,
        everybody=bool(found.present.all()),
    )


def _head_logp(batches: Sequence[JointBatch], valid: ValidRows, present: Tensor) -> Tensor:
    """[H, N, M], 0 where an agent is absent."""
    parts = []
    for module_id in batches[0].modules:
        recorded = [batch.modules[module_id].head_logp for batch in batches]
        own = [logp for logp in recorded if logp is not None]
        if len(own) < len(recorded):
            raise ValueError(
                f"ratio='per_head' needs log-probabilities head by head, and the rollout has none of module "
                f"{module_id!r} (ModuleStreams.head_logp); sample it with ratio='per_head', too"
            )
        parts.append(torch.from_numpy(valid.join(own)))
    return stack_heads(parts).where(present, 0.0)


def _column(numbers: Sequence[float], sizes: Mapping[ModuleID, int]) -> Tensor:
    """One number per module to a column [N, 1]."""
    return torch.tensor(numbers, dtype=torch.float32).repeat_interleave(torch.tensor(list(sizes.values())))[:, None]


def _scale(normalized: Sequence[RunningMoments | None], streams: Mapping[ModuleID, int]) -> Scale:
    return Scale(
        mean=_column([0.0 if moments is None else float(moments.mean) for moments in normalized], streams),
        std=_column([1.0 if moments is None else float(moments.std) for moments in normalized], streams),
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
