"""Which module plays which agent: the short forms of `.multi_agent(policies=…)` and their mapping function."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
from ray.rllib.policy.policy import PolicySpec

from thrust_rllib.envs.names import nearest
from thrust_rllib.joint_batch import AgentID, ModuleID


@dataclass(frozen=True)
class DeclaredTeam:
    """What an environment declares, as the modules will see it: agents in order, and their spaces."""

    possible_agents: list[AgentID]
    observation_spaces: dict[AgentID, gym.Space]
    action_spaces: dict[AgentID, gym.Space]
    stacked: bool = False


Team = str | dict[str, list[AgentID]]
SHARED_MODULE = "shared"


class AgentToModule:
    """RLlib's `policy_mapping_fn` as a table {agent: module}; the same in every process and episode."""

    def __init__(self, table: Mapping[AgentID, ModuleID]) -> None:
        self.table = dict(table)

    def __call__(self, agent_id: AgentID, episode: Any = None, **kwargs: Any) -> ModuleID:
        """The module of an agent.

        Raises:
            KeyError: an agent that the environment did not declare.
        """
        return self.table[agent_id]

    def __repr__(self) -> str:
        return f"AgentToModule({self.table})"


def is_team(policies: Any) -> bool:
    """Whether a value of `policies` is one of the short forms: "per_agent", "shared", {group: [agents]}."""
    if isinstance(policies, str):
        return True
    return (
        isinstance(policies, Mapping)
        and bool(policies)
        and all(isinstance(v, (list, tuple, set)) and not _is_policy_spec_tuple(v) for v in policies.values())
    )


def _is_policy_spec_tuple(value: Collection[Any]) -> bool:
    # RLlib's old form (class, observation space, action space, config) starts with a class or None.
    first = next(iter(value), None)
    return isinstance(value, tuple) and len(value) == 4 and (first is None or isinstance(first, type))


def team_table(team: Team, agents: Sequence[AgentID]) -> dict[AgentID, ModuleID]:
    """{agent: module} for a short form.

    Args:
        team: "per_agent" (a module per agent, named after it), "shared" (one module for all), or {group: [agents]}.
        agents: all agents of the environment.

    Raises:
        ValueError: another word; an unknown agent, an agent in two groups, or an agent in none.
    """
    if team == "per_agent":
        names = [str(agent) for agent in agents]
        for name in names:
            if re.search(r'[<>:"/\\|?]', name) or not name or name[-1] in " .":
                raise ValueError(
                    f"agent {name!r} cannot give its name to a module (RLlib makes folders of module names); group the "
                    'agents under other names: .multi_agent(policies={"left": ["…"], "right": ["…"]})'
                )
        if len(set(names)) != len(names):
            raise ValueError(f"two agents have the same name as text: {list(agents)}; rename one or group them")
        return dict(zip(agents, names, strict=True))
    if team == "shared":
        return dict.fromkeys(agents, SHARED_MODULE)
    if isinstance(team, str):
        raise ValueError(
            f"policies={team!r} is unknown{nearest(team, ['per_agent', 'shared'])} Needed: 'per_agent', 'shared', "
            "a dict {group: [agents]}, or RLlib's policies with policy_mapping_fn."
        )
    table: dict[AgentID, ModuleID] = {}
    for group, members in team.items():
        for agent in members:
            if agent not in agents:
                raise ValueError(
                    f"group {group!r} names agent {agent!r}, which the environment does not have"
                    f"{nearest(str(agent), map(str, agents))} Its agents: {list(agents)}"
                )
            if agent in table:
                raise ValueError(f"agent {agent!r} stands in two groups: {table[agent]!r} and {group!r}")
            table[agent] = group
    missing = [agent for agent in agents if agent not in table]
    if missing:
        raise ValueError(f"policies={team} leaves agents {missing} without a module; put each into one group")
    return {agent: table[agent] for agent in agents}


def forked_groups(agents: Sequence[AgentID], groups: int) -> dict[ModuleID, list[AgentID]]:
    """Cuts a team into groups of neighbours, for `.multi_agent(policies=…)`: agent i is in group floor(i · G / N).

    With `algo.warm_start(path, {group: "shared" for group in …}, group_noise=0.02)` all groups start from one module.

    Args:
        agents: all N agents of the environment, in its order.
        groups: G, from 1 to N.

    Returns:
        {"group_0": [agents], …}; sizes differ by at most 1.

    Raises:
        ValueError: agents that are no list of names, or G out of its range.

    Source: the forked groups of the seed's centralized trainer.
    """
    if isinstance(agents, str) or not isinstance(agents, Sequence):
        raise ValueError(f"agents={agents!r}; needed: a list of all agents of the environment")
    count = len(agents)
    if isinstance(groups, bool) or not isinstance(groups, int) or not 1 <= groups <= count:
        raise ValueError(f"groups={groups!r}; needed: a whole number from 1 to {count}, the number of agents")
    forked: dict[ModuleID, list[AgentID]] = {f"group_{g}": [] for g in range(groups)}
    for i, agent in enumerate(agents):
        forked[f"group_{i * groups // count}"].append(agent)
    return forked


def policy_specs(policies: Mapping[ModuleID, Any]) -> dict[ModuleID, PolicySpec]:
    """RLlib's `policies`, sorted; a configuration that comes from a checkpoint has tuples in them."""
    return {
        m: spec if isinstance(spec, PolicySpec) else PolicySpec(*(spec or ())) for m, spec in sorted(policies.items())
    }


def who_plays(
    mapping: Callable[..., Any], agents: Sequence[AgentID], policies: Collection[ModuleID]
) -> dict[AgentID, ModuleID]:
    """{agent: module} from a user's `policy_mapping_fn`, which is asked once, without an episode.

    Raises:
        ValueError: the function fails without an episode, or names a module that `policies` does not have.
    """
    table: dict[AgentID, ModuleID] = {}
    for agent in agents:
        try:
            module_id = mapping(agent, None)
        except Exception as error:
            raise ValueError(
                f"policy_mapping_fn({agent!r}, None) failed with {type(error).__name__}: {error}. One module plays "
                "an agent for the whole run: let the function decide by the agent id alone."
            ) from error
        if module_id not in policies:
            raise ValueError(
                f"policy_mapping_fn maps agent {agent!r} to module {module_id!r}, which is not in policies: "
                f"{sorted(policies)}{nearest(str(module_id), policies)} Let it name one of them; for a module per "
                "agent leave both policies and policy_mapping_fn out."
            )
        table[agent] = module_id
    return table


def mapped_table(
    mapping: Callable[..., Any], agents: Sequence[AgentID], policies: Mapping[ModuleID, PolicySpec]
) -> dict[AgentID, ModuleID]:
    """As `who_plays`; a module that plays no agent waits, if its `PolicySpec` has the spaces that it will see.

    Raises:
        ValueError: see `who_plays`; or a module plays no agent and its spaces are unknown.
    """
    table = who_plays(mapping, agents, policies)
    playing = set(table.values())
    idle = [
        m
        for m, spec in sorted(policies.items())
        if m not in playing and (spec.observation_space is None or spec.action_space is None)
    ]
    if idle:
        raise ValueError(
            f"modules {idle} play no agent: policy_mapping_fn maps the agents {list(agents)} to {sorted(playing)}. "
            "Leave them out of policies, and call algo.add_module when they are needed."
        )
    return table
