"""Whose value and whose reward an advantage is made of: independent critics or one of the team, and four credits.

Letters: N agents, M joint rows, V values of a row: N with independent critics or one value per agent, 1 of a team.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from thrust_rllib.joint_advantages import AgentColumns, joint_advantages
from thrust_rllib.joint_batch import AgentID, JointBatch, ModuleID
from thrust_rllib.joint_values import ValuesOf, joint_values
from thrust_rllib.ranks import ALONE, Ranks
from thrust_rllib.rl_modules.learner_modules import TEAM_CRITIC
from thrust_rllib.rl_modules.memory import MemoryLayout
from thrust_rllib.team_lives import all_agents, who_follows
from thrust_rllib.team_rewards import difference_rewards, team_rewards, with_rewards
from thrust_rllib.team_view import TeamView, for_each_agent, team_batch, with_memory
from thrust_rllib.valid_rows import ValidRows

ValuePairs = list[tuple[Tensor, Tensor]]
"""Of each batch values, and values of what follows each row."""


@dataclass(frozen=True)
class CriticPlan:
    """Which critic, and which credit.

    | critic        | values of a row                                                   |
    |---------------|-------------------------------------------------------------------|
    | "independent" | each module's own, of what its agent sees                         |
    | "mean"        | one of the team: the mean of those of the agents that are present |
    | "central"     | of `TEAM_CRITIC`, which sees `view`: one of the team, or with     |
    | "set"         | credit "own" one per agent                                        |

    | credit       | advantage of agent i, from rewards and values of                             |
    |--------------|------------------------------------------------------------------------------|
    | "own"        | its own reward, its own value                                                |
    | "shared"     | the team's reward (Σ_i r_i / N, 0 for the absent), the team's value or its own |
    | "agent"      | its own reward along the team's rows, the team's value                       |
    | "difference" | as "agent", or with independent critics as "own", with `difference_reward`   |

    A value of the team is trained on the return of the team's reward, whatever the credit.

    Args:
        critic: see the table.
        credit: see the table.
        view: of the team's critic.
        max_seq_len: of that critic, if it has a memory.
    """

    critic: str = "independent"
    credit: str = "own"
    view: TeamView | None = None
    max_seq_len: int | None = None

    @property
    def of_team(self) -> bool:
        """Whether there is one value of the team."""
        return self.critic == "mean" or (self.critic != "independent" and self.credit != "own")

    @property
    def has_network(self) -> bool:
        """Whether a network of the team's own gives the values."""
        return self.critic in ("central", "set")

    def value_order(self, agents: Sequence[AgentID]) -> list[int] | None:
        """Which of the network's values belongs to each agent; None where it has one for the team."""
        if self.of_team or self.view is None:
            return None
        return [self.view.value_of(agent) for agent in agents]

    def streams(self, modules: Mapping[ModuleID, int]) -> dict[ModuleID, int]:
        """{who answers for values: how many of the V} of a team with {module: number of agents}."""
        if self.critic == "independent":
            return dict(modules)
        return {TEAM_CRITIC: 1 if self.of_team else sum(modules.values())}


INDEPENDENT = CriticPlan()


def on_another_scale(
    here: Collection[ModuleID], there: Collection[ModuleID], module_id: ModuleID, source: ModuleID
) -> bool:
    """Whether values of a module that was trained in another run are numbers of another scale here.

    Moments of the team's values are taken for a module's own where it had none; not the other way round.

    Args:
        here: who has moments of value targets, `TEAM_CRITIC` for the values of a team.
        there: the same of the other run.
        module_id: the module.
        source: what it was called there.
    """

    def whose(moments: Collection[ModuleID], name: ModuleID) -> str:
        return "own" if name in moments else "team" if TEAM_CRITIC in moments else "raw"

    found = whose(here, module_id), whose(there, source)
    return found[0] != found[1] and found != ("own", "team")


@dataclass(frozen=True)
class Scale:
    """From a network's values to the units of rewards: value · std + mean, columns [V, 1]."""

    mean: Tensor
    std: Tensor


@dataclass(frozen=True)
class Estimates:
    """Numbers of all valid rows.

    | field                                | shape  | meaning                                                   |
    |--------------------------------------|--------|-----------------------------------------------------------|
    | action_logp, advantages, present     | [N, M] | of the agents                                             |
    | values, value_targets, value_present | [V, M] | in the network's units, in those of rewards; who counts   |
    | team                                 |        | the batches as the team's own critic sees them; or none   |
    """

    action_logp: Tensor
    advantages: Tensor
    present: Tensor
    values: Tensor
    value_targets: Tensor
    value_present: Tensor
    team: list[JointBatch] = dataclasses.field(default_factory=list)

    @classmethod
    def of_agents(cls, columns: AgentColumns, team: Sequence[JointBatch] = ()) -> Estimates:
        """With a value of each agent."""
        return cls(**columns._asdict(), value_present=columns.present, team=list(team))


def estimate(
    batches: Sequence[JointBatch],
    plan: CriticPlan,
    valid: ValidRows,
    *,
    values_of: ValuesOf,
    memories: Mapping[ModuleID, MemoryLayout],
    scale: Scale,
    gamma: Tensor,
    lambda_: Tensor,
    bootstrap: bool,
    device: torch.device | str,
    ranks: Ranks = ALONE,
) -> Estimates:
    """Values of all rows, then advantages and value targets along time.

    Args:
        batches: of one team.
        plan: which critic and which credit.
        valid: of the batches.
        values_of: see `joint_values`; asked for the modules that give values.
        memories: {module: what its state is} of the recurrent ones among them.
        scale: of the values.
        gamma: discount [N, 1]; where there is a value of the team the same for all.
        lambda_: GAE's λ, as gamma.
        bootstrap: see `joint_advantages`.
        device: of the modules.
        ranks: the learners.

    Raises:
        ValueError: see `joint_values`; credit="difference" without its extra.
    """

    def values_in(batches: Sequence[JointBatch], num_values: int | None = None) -> dict[ModuleID, ValuePairs]:
        mine = {m: memory for m, memory in memories.items() if m in batches[0].modules}
        return joint_values(batches, values_of, mine, device, ranks, num_values)

    def advantages_of(batches: Sequence[JointBatch], values: Mapping[ModuleID, ValuePairs]) -> AgentColumns:
        n = sum(len(streams.agents) for streams in batches[0].modules.values())
        return joint_advantages(
            batches,
            values,
            valid,
            mean=scale.mean.expand(n, 1),
            std=scale.std.expand(n, 1),
            gamma=gamma[:n],
            lambda_=lambda_[:n],
            bootstrap=bootstrap,
        )

    if plan.critic == "independent":
        batches = [with_rewards(batch, plan.credit) for batch in batches]
        return Estimates.of_agents(advantages_of(batches, values_in(batches)))

    team = [team_batch(batch, plan.view, team_rewards(batch), plan.max_seq_len) for batch in batches]
    if (memory := memories.get(TEAM_CRITIC)) is not None:
        team = with_memory(team, memory.initial)
    if not plan.of_team:
        assert plan.view is not None
        seen = (
            team if memory is None else [for_each_agent(own, batch) for own, batch in zip(team, batches, strict=True)]
        )
        values = values_in(seen, len(batches[0].agents))[TEAM_CRITIC]
        return Estimates.of_agents(advantages_of(batches, _of_agents(values, batches[0], plan.view)), team)

    values = _mean_values(batches, values_in(batches)) if plan.critic == "mean" else values_in(team)[TEAM_CRITIC]
    whole = advantages_of(team, {TEAM_CRITIC: values})
    logp, present = (
        torch.from_numpy(valid.join([all_agents(batch, name) for batch in batches]))
        for name in ("action_logp", "present")
    )
    if plan.credit == "shared":
        advantages = whole.advantages.expand_as(logp)
    else:
        agents = [_agents_along_team(batch, own, plan.credit) for batch, own in zip(batches, team, strict=True)]
        n = len(batches[0].agents)
        alike = [(x.expand(-1, n, -1), after.expand(-1, n, -1)) for x, after in values]
        advantages = advantages_of(agents, {TEAM_CRITIC: alike}).advantages
    return Estimates(
        action_logp=logp,
        advantages=advantages.where(present, 0.0),
        present=present,
        values=whole.values,
        value_targets=whole.value_targets,
        value_present=whole.present,
        team=team if plan.has_network else [],
    )


def _of_agents(values: ValuePairs, batch: JointBatch, view: TeamView) -> dict[ModuleID, ValuePairs]:
    """Values of the team's critic [T, 1 or N, E, N], the last axis in its view's order, as those of the modules."""
    agents = batch.agents
    columns = [view.value_of(agent) for agent in agents]
    once = values[0][0].shape[1] == 1
    who = [0] * len(agents) if once else list(range(len(agents)))
    own = [tuple(x[:, who, :, columns].transpose(0, 1) for x in pair) for pair in values]
    sizes = [len(streams.agents) for streams in batch.modules.values()]
    parts = [zip(x.split(sizes, 1), after.split(sizes, 1), strict=True) for x, after in own]
    return dict(zip(batch.modules, map(list, zip(*parts, strict=True)), strict=True))


def _mean_values(batches: Sequence[JointBatch], values: Mapping[ModuleID, ValuePairs]) -> ValuePairs:
    """The mean over the agents present, and over those that follow: [T, 1, E] twice for each batch."""
    found = []
    for k, batch in enumerate(batches):
        own, after = (torch.cat([parts[k][i] for parts in values.values()], dim=1) for i in (0, 1))
        rows = torch.from_numpy(who_follows(batch))
        seen = after.transpose(0, 1).flatten(1).gather(1, rows.clamp(min=0))  # [N, K]
        following = torch.zeros(batch.valid.size)
        following[torch.from_numpy(batch.bootstrap_rows)] = mean_over_agents(seen, rows >= 0, dim=0)[0]
        present = torch.from_numpy(all_agents(batch, "present"))
        found.append((mean_over_agents(own, present), following.view(batch.num_steps, 1, batch.num_envs)))
    return found


def mean_over_agents(values: Tensor, present: Tensor, dim: int = 1) -> Tensor:
    """The mean along the agents' axis, which stays with length 1, over those that are present; 0 where nobody is."""
    count = present.sum(dim, keepdim=True).clamp(min=1)
    return values.where(present, 0.0).sum(dim, keepdim=True) / count


def _agents_along_team(batch: JointBatch, team: JointBatch, credit: str) -> JointBatch:
    """All agents' rewards along the rows of the team, which end where the team's end."""
    streams = team.modules[TEAM_CRITIC]
    shape = (batch.num_steps, len(batch.agents), batch.num_envs)
    rewards = difference_rewards(batch) if credit == "difference" else all_agents(batch, "rewards")
    present = all_agents(batch, "present")
    along = {name: np.broadcast_to(getattr(streams, name), shape) for name in ("present", "terminated", "truncated")}
    agents = dataclasses.replace(
        streams,
        agents=batch.agents,
        rewards=np.where(present, rewards, np.float32(0.0)),
        action_logp=np.zeros(shape, np.float32),
        **along,
    )
    return dataclasses.replace(team, modules={TEAM_CRITIC: agents})
