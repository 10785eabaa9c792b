"""Which agents a module plays, and how an environment's data reaches them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from thrust_rllib.connectors.action_decoding import ActionDecoder
from thrust_rllib.connectors.observation_encoding import ObservationEncoder
from thrust_rllib.envs.joint_env import VectorJointEnv
from thrust_rllib.envs.spaces import ACTION_MASK, batch_row, mask_length
from thrust_rllib.joint_batch import AgentID, ModuleID


class ModuleAgents:
    """The agents that one module plays: where they stand on the environment's agent axis, how data reaches them.

    Args:
        module_id: the module.
        agents: its agents, in the environment's order.
        all_agents: all agents of the environment, in its order.
        observation_spaces: {agent: space}.
        action_spaces: {agent: space}.
        stacked: whether the environment speaks in arrays [N, E, …] instead of dicts by agent.
        normalize_actions: see `ActionDecoder`.
        clip_actions: see `ActionDecoder`.

    Raises:
        ValueError: the agents' spaces differ, or have no encoding, or an action mask does not fit the actions.
    """

    def __init__(
        self,
        module_id: ModuleID,
        agents: list[AgentID],
        all_agents: list[AgentID],
        observation_spaces: Mapping[AgentID, gym.Space],
        action_spaces: Mapping[AgentID, gym.Space],
        stacked: bool,
        normalize_actions: bool,
        clip_actions: bool,
    ) -> None:
        first = agents[0]
        for agent in agents[1:]:
            for kind, spaces in (("observation", observation_spaces), ("action", action_spaces)):
                if spaces[agent] != spaces[first]:
                    raise ValueError(
                        f"agents {first!r} and {agent!r} share module {module_id!r} but their {kind} spaces differ: "
                        f"{spaces[first]} and {spaces[agent]}. Give each its own module, e.g. "
                        '.multi_agent(policies="per_agent").'
                    )
        try:
            self.encoder = ObservationEncoder(observation_spaces[first])
            self.decoder = ActionDecoder(action_spaces[first], normalize_actions, clip_actions)
        except ValueError as error:
            raise ValueError(f"agent {first!r}: {error}") from error
        if self.encoder.masked:
            _check_mask(first, observation_spaces[first], action_spaces[first])
        self.module_id = module_id
        self.agents = tuple(agents)
        self.observation_space = observation_spaces[first]
        self.action_space = action_spaces[first]
        self.action_shape = tuple(self.action_space.shape or ())
        self.stacked = stacked
        positions = [all_agents.index(agent) for agent in agents]
        contiguous = positions == list(range(positions[0], positions[0] + len(positions)))
        self.positions: Any = slice(positions[0], positions[-1] + 1) if contiguous else np.array(positions)

    def __len__(self) -> int:
        return len(self.agents)

    def encode(self, observations: Any) -> np.ndarray:
        """What the environment returned for all agents, as float32 [n, E, …] of these agents."""
        if self.stacked:
            return self.encoder.encode(observations[self.positions])
        return np.stack([self.encoder.encode(observations[agent]) for agent in self.agents])

    def encode_some(self, observations: Any, rows: np.ndarray) -> np.ndarray:
        """As `encode`, of some agents in some environments; the other observations are not looked at.

        Args:
            observations: what the environment returned for all agents.
            rows: bool [n, E] over these agents, at least one of them true.

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
        """The action masks [n, E, A] inside the observations, or None."""
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


def agents_of_modules(
    env: VectorJointEnv, module_of: Mapping[AgentID, ModuleID], normalize_actions: bool, clip_actions: bool
) -> list[ModuleAgents]:
    """One `ModuleAgents` per module, modules sorted by id, agents in the environment's order.

    Args:
        env: declares agents and spaces.
        module_of: {agent: module} for every agent.
        normalize_actions: see `ActionDecoder`.
        clip_actions: see `ActionDecoder`.

    Raises:
        ValueError: agents of one module with different spaces, a space without an encoding, or a mask that does not
            fit the actions.
    """
    agents = list(env.possible_agents)
    return [
        ModuleAgents(
            module_id=module_id,
            agents=[agent for agent in agents if module_of[agent] == module_id],
            all_agents=agents,
            observation_spaces=env.observation_spaces,
            action_spaces=env.action_spaces,
            stacked=env.stacked,
            normalize_actions=normalize_actions,
            clip_actions=clip_actions,
        )
        for module_id in sorted(set(module_of.values()))
    ]


def env_actions(modules: Sequence[ModuleAgents], actions: Sequence[np.ndarray]) -> Any:
    """Stored actions [n, E, …] of every module, decoded, in the form that the environment takes.

    Args:
        modules: all modules of the team.
        actions: per module.

    Returns:
        {agent: [E, …]}, or [N, E, …] for a stacked environment.
    """
    decoded = [agents.decoder.decode(mine) for agents, mine in zip(modules, actions, strict=True)]
    if not modules[0].stacked:
        return {
            agent: mine[j]
            for agents, mine in zip(modules, decoded, strict=True)
            for j, agent in enumerate(agents.agents)
        }
    if len(decoded) == 1:
        return decoded[0]
    stacked = np.empty((sum(map(len, modules)), *decoded[0].shape[1:]), decoded[0].dtype)
    for agents, mine in zip(modules, decoded, strict=True):
        stacked[agents.positions] = mine
    return stacked
