"""Who plays what, and how each module's observations and actions are encoded: both ends of the general door ask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from ray.rllib.env.utils.infinite_lookback_buffer import InfiniteLookbackBuffer

from thrust_rllib.connectors.action_decoding import ActionDecoder
from thrust_rllib.connectors.observation_encoding import ObservationEncoder
from thrust_rllib.envs.spaces import map_space, mask_length
from thrust_rllib.joint_batch import AgentID, ModuleID


@dataclass(frozen=True)
class ModuleCodec:
    """One module's agents (in the environment's order), their spaces, and the way in and out.

    num_logits: A where observations carry an action mask, else None.
    """

    agents: tuple[AgentID, ...]
    observation_space: gym.Space
    action_space: gym.Space
    encoder: ObservationEncoder
    decoder: ActionDecoder
    num_logits: int | None

    def encode(self, observations: Sequence[Any]) -> tuple[np.ndarray, np.ndarray | None]:
        """R observations as float32 [R, …], and their action masks [R, A] or None."""
        return self.encode_stacked(self.stack(observations))

    def stack(self, observations: Sequence[Any]) -> Any:
        """R observations as an array [R, …], or dicts and tuples of such."""
        return map_space(self.observation_space, lambda _, *values: np.asarray(values), *observations)

    def slice(self, buffer: InfiniteLookbackBuffer, first: int, count: int) -> Any:
        """`count` observations of an agent's episode, stacked; number 0 is the first one behind the lookback."""
        first += buffer.lookback
        if isinstance(buffer.data, list):
            return self.stack(buffer.data[first : first + count])
        return map_space(self.observation_space, lambda _, values: values[first : first + count], buffer.data)

    def join(self, parts: Sequence[Any]) -> Any:
        """Stacked observations behind each other."""
        return map_space(self.observation_space, lambda _, *arrays: np.concatenate(arrays), *parts)

    def encode_stacked(self, stacked: Any) -> tuple[np.ndarray, np.ndarray | None]:
        """As `encode`, of what is stacked already."""
        return self.encoder.encode(stacked), self.encoder.action_mask(stacked) if self.encoder.masked else None


@dataclass(frozen=True)
class TeamCodec:
    """All modules, sorted by id; `module_of` is {agent: module} in the environment's order of agents."""

    module_of: dict[AgentID, ModuleID]
    modules: dict[ModuleID, ModuleCodec]

    @classmethod
    def of(
        cls,
        module_of: Mapping[AgentID, ModuleID],
        observation_spaces: Mapping[AgentID, gym.Space],
        action_spaces: Mapping[AgentID, gym.Space],
        normalize_actions: bool,
        clip_actions: bool,
    ) -> TeamCodec:
        """From the agents' spaces; agents of one module have equal ones (checked with the configuration)."""
        modules = {}
        for module_id in sorted(set(module_of.values())):
            agents = tuple(agent for agent, m in module_of.items() if m == module_id)
            observation_space, action_space = observation_spaces[agents[0]], action_spaces[agents[0]]
            encoder = ObservationEncoder(observation_space)
            modules[module_id] = ModuleCodec(
                agents=agents,
                observation_space=observation_space,
                action_space=action_space,
                encoder=encoder,
                decoder=ActionDecoder(action_space, normalize_actions, clip_actions),
                num_logits=mask_length(action_space) if encoder.masked else None,
            )
        return cls(dict(module_of), modules)
