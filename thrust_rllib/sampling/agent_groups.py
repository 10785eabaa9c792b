"""Which agents stand side by side in one array, and how an environment's data reaches them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from thrust_rllib.connectors.action_decoding import ActionDecoder
from thrust_rllib.connectors.observation_encoding import ObservationEncoder
from thrust_rllib.envs.joint_env import VectorJointEnv
from thrust_rllib.envs.spaces import ACTION_MASK, batch_row, equal_spaces, mask_length
from thrust_rllib.joint_batch import AgentID, ModuleID
from thrust_rllib.teams import DeclaredTeam


class AgentGroup:
    """Agents whose data lies side by side in one array: those of one module, or of several that are alike.

    Alike are neighbouring modules (in the order of their ids) with the same number of agents and the same spaces.
    Letters: k agents of the group, module after module; n of each of its modules; E environments.

    Args:
        module_ids: the modules.
        agents: the k agents: those of the first module in the environment's order, then those of the next.
        all_agents: all agents of the environment, in its order.
        observation_space: of each of them.
        action_space: of each of them.
        stacked: whether the environment speaks in arrays [N, E, …] instead of dicts by agent.
        normalize_actions: see `ActionDecoder`.
        clip_actions: see `ActionDecoder`.

    Raises:
        ValueError: a space has no encoding, or an action mask does not fit the actions.

    Attributes:
        places: where each agent stands among all agents, and `positions`, the same as an index.
    """

    def __init__(
        self,
        module_ids: Sequence[ModuleID],
        agents: Sequence[AgentID],
        all_agents: Sequence[AgentID],
        observation_space: gym.Space,
        action_space: gym.Space,
        stacked: bool,
        normalize_actions: bool,
        clip_actions: bool,
    ) -> None:
        self._arguments = (all_agents, observation_space, action_space, stacked, normalize_actions, clip_actions)
        try:
            self.encoder = ObservationEncoder(observation_space)
            self.decoder = ActionDecoder(action_space, normalize_actions, clip_actions)
        except ValueError as error:
            raise ValueError(f"agent {agents[0]!r}: {error}") from error
        if self.encoder.masked:
            _check_mask(agents[0], observation_space, action_space)
        self.module_ids = tuple(module_ids)
        self.agents = tuple(agents)
        self.observation_space = observation_space
        self.action_space = action_space
        self.action_shape = tuple(action_space.shape or ())
        self.stacked = stacked
        self.places = positions = [list(all_agents).index(agent) for agent in agents]
        contiguous = positions == list(range(positions[0], positions[0] + len(positions)))
        self.positions: Any = slice(positions[0], positions[-1] + 1) if contiguous else np.array(positions)

    def __len__(self) -> int:
        return len(self.agents)

    @property
    def by_module(self) -> list[tuple[ModuleID, slice]]:
        """Each module and where its agents are among the k."""
        n = len(self.agents) // len(self.module_ids)
        return [(module_id, slice(i * n, (i + 1) * n)) for i, module_id in enumerate(self.module_ids)]

    def split(self) -> list[AgentGroup]:
        """A group for each module."""
        return [AgentGroup([module_id], self.agents[mine], *self._arguments) for module_id, mine in self.by_module]

    def encode(self, observations: Any) -> np.ndarray:
        """What the environment returned for all agents, as float32 [k, E, …] of these agents."""
        if self.stacked:
            return self.encoder.encode(observations[self.positions])
        return self.encoder.encode_agents([observations[agent] for agent in self.agents])

    def encode_some(self, observations: Any, rows: np.ndarray) -> np.ndarray:
        """As `encode`, of some agents in some environments; the other observations are not looked at.

        Args:
            observations: what the environment returned for all agents.
            rows: bool [k, E] over these agents, at least one of them true.

        Returns:
            float32 [m, …], one row for each of the m that are true.
        """
        if self.stacked:
            return self.encoder.encode(observations[self.positions][rows])
        return np.concatenate(
            [
                self.encoder.encode(batch_row(self.observation_space, observations[agent], mine))
                for agent, mine in zip(self.agents, rows, strict=True)
                if mine.any()
            ]
        )

    def masks(self, observations: Any) -> np.ndarray | None:
        """The action masks [k, E, A] inside the observations, or None."""
        if not self.encoder.masked:
            return None
        return np.stack([self.encoder.action_mask(observations[agent]) for agent in self.agents])


def _check_mask(agent: AgentID, observation_space: gym.Space, action_space: gym.Space) -> None:
    needed = mask_length(action_space)
    if needed is None:
        raise ValueError(
            f"agent {agent!r} has an action mask, but its action space {action_space} cannot be masked; "
            "needed: Discrete or MultiDiscrete"
        )
    given: gym.Space = observation_space[ACTION_MASK]  # type: ignore[index]
    if given.shape != (needed,):
        raise ValueError(
            f"agent {agent!r} declares the action mask {given} of shape {given.shape}, but its action space "
            f"{action_space} has {needed} choices; needed: a mask of shape ({needed},), such as "
            f"Box(0, 1, ({needed},), np.int8)"
        )


def agent_groups(
    env: VectorJointEnv | DeclaredTeam,
    module_of: Mapping[AgentID, ModuleID],
    normalize_actions: bool,
    clip_actions: bool,
) -> list[AgentGroup]:
    """The agents of all modules, modules sorted by id and agents of a module in the environment's order.

    Args:
        env: declares agents and spaces.
        module_of: {agent: module} for every agent.
        normalize_actions: see `ActionDecoder`.
        clip_actions: see `ActionDecoder`.

    Raises:
        ValueError: agents of one module with different spaces, a space without an encoding, or a mask that does not
            fit the actions.
    """
    every = list(env.possible_agents)
    teams = {m: [agent for agent in every if module_of[agent] == m] for m in sorted(set(module_of.values()))}
    for module_id, agents in teams.items():
        _check_same_spaces(env, module_id, agents)

    def alike(module_id: ModuleID, other: ModuleID) -> bool:
        one, two = teams[module_id][0], teams[other][0]
        return len(teams[module_id]) == len(teams[other]) and all(
            equal_spaces(spaces[one], spaces[two]) for spaces in (env.observation_spaces, env.action_spaces)
        )

    runs: list[list[ModuleID]] = []
    for module_id in teams:
        if runs and alike(runs[-1][0], module_id):
            runs[-1].append(module_id)
        else:
            runs.append([module_id])
    groups = []
    for module_ids in runs:
        agents = [agent for module_id in module_ids for agent in teams[module_id]]
        groups.append(
            AgentGroup(
                module_ids=module_ids,
                agents=agents,
                all_agents=every,
                observation_space=env.observation_spaces[agents[0]],
                action_space=env.action_spaces[agents[0]],
                stacked=env.stacked,
                normalize_actions=normalize_actions,
                clip_actions=clip_actions,
            )
        )
    return groups


def _check_same_spaces(env: VectorJointEnv | DeclaredTeam, module_id: ModuleID, agents: Sequence[AgentID]) -> None:
    first = agents[0]
    for agent in agents[1:]:
        for kind, spaces in (("observation", env.observation_spaces), ("action", env.action_spaces)):
            if not equal_spaces(spaces[agent], spaces[first]):
                raise ValueError(
                    f"agents {first!r} and {agent!r} share module {module_id!r} but their {kind} spaces differ: "
                    f"{spaces[first]} and {spaces[agent]}. Give each its own module, e.g. "
                    '.multi_agent(policies="per_agent").'
                )


def env_actions(groups: Sequence[AgentGroup], actions: Sequence[np.ndarray]) -> Any:
    """Stored actions [k, E, …] of every group, decoded, in the form that the environment takes.

    Args:
        groups: all agents of the team.
        actions: per group.

    Returns:
        {agent: [E, …]}, or [N, E, …] for a stacked environment.
    """
    decoded = [group.decoder.decode(mine) for group, mine in zip(groups, actions, strict=True)]
    if not groups[0].stacked:
        return {
            agent: mine[j] for group, mine in zip(groups, decoded, strict=True) for j, agent in enumerate(group.agents)
        }
    if len(groups) == 1 and isinstance(groups[0].positions, slice):
        return decoded[0]
    stacked = np.empty((sum(map(len, groups)), *decoded[0].shape[1:]), decoded[0].dtype)
    for group, mine in zip(groups, decoded, strict=True):
        stacked[group.positions] = mine
    return stacked


def by_agent(groups: Sequence[AgentGroup], arrays: Sequence[np.ndarray | None]) -> dict[AgentID, np.ndarray | None]:
    """Arrays [k, …] of groups, or None, as those […] of their agents."""
    pairs = zip(groups, arrays, strict=True)
    return {agent: None if x is None else x[i] for group, x in pairs for i, agent in enumerate(group.agents)}


def by_group(groups: Sequence[AgentGroup], arrays: Mapping[AgentID, Any]) -> list[Any]:
    """`by_agent` undone, for any groups in which an array or None belongs to all agents."""
    parts = [[arrays[agent] for agent in group.agents] for group in groups]
    return [None if mine[0] is None else np.stack(mine) for mine in parts]
