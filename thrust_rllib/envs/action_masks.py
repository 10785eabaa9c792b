"""Action masks that an environment gives in its infos, put into the observations, where models look for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from thrust_rllib.envs.joint_env import AgentID
from thrust_rllib.envs.spaces import ACTION_MASK, has_action_mask, mask_length


class InfoMasks:
    """Agents whose mask is in infos[agent]["action_mask"]; their observation becomes {"observation", "action_mask"}.

    Masks are possible for Discrete and MultiDiscrete actions (its heads side by side) where the observation has
    none yet. Only the first infos tell whether there are any, so `reset` is called if they are possible.

    Args:
        observation_spaces: {agent: space}; those of agents with a mask are replaced.
        action_spaces: {agent: space}.
        reset: starts an episode and returns the infos {agent: info} of the agents that act first. An agent that
            is not among them is taken to have masks if some other has.
    """

    def __init__(
        self,
        observation_spaces: dict[AgentID, gym.Space],
        action_spaces: Mapping[AgentID, gym.Space],
        reset: Callable[[], Mapping[AgentID, Any]],
    ) -> None:
        self._lengths: dict[AgentID, int] = {}
        lengths = {
            agent: length
            for agent, space in action_spaces.items()
            if (length := mask_length(space)) is not None and not has_action_mask(observation_spaces[agent])
        }
        infos = reset() if lengths else {}
        found = {agent: ACTION_MASK in (info or {}) for agent, info in infos.items()}
        some = any(found.values())
        for agent, length in lengths.items():
            if found.get(agent, some):
                self._lengths[agent] = length
                observation_spaces[agent] = spaces.Dict(
                    {"observation": observation_spaces[agent], ACTION_MASK: spaces.Box(0, 1, (length,), np.int8)}
                )

    def put(self, agent: AgentID, observation: Any, info: Mapping[str, Any] | None) -> Any:
        """The observation with the mask of `info`; all ones where it has none: nothing is left to choose."""
        if agent not in self._lengths:
            return observation
        mask = (info or {}).get(ACTION_MASK)
        mask = np.ones(self._lengths[agent]) if mask is None else mask
        return {"observation": observation, ACTION_MASK: np.asarray(mask, dtype=np.int8)}


def open_mask(space: gym.Space, observation: Any) -> Any:
    """An observation whose mask, if it carries one, forbids nothing: the last one of an agent."""
    if not has_action_mask(space):
        return observation
    return {**observation, ACTION_MASK: np.ones_like(observation[ACTION_MASK])}


def without_choice(masks: np.ndarray, space: gym.Space) -> np.ndarray:
    """Which masks [..., A] allow nothing, in one dimension of a MultiDiscrete at least: bool [...]."""
    heads = space.nvec.tolist() if isinstance(space, spaces.MultiDiscrete) else [masks.shape[-1]]
    starts = np.cumsum([0, *heads[:-1]])
    return np.asarray(~np.logical_or.reduceat(masks, starts, axis=-1).all(axis=-1))
