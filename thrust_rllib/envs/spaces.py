"""Spaces of a joint environment: checks of what is declared, and arrays of E elements of a space."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from thrust_rllib.envs.joint_env import JointEnv, VectorJointEnv

ARRAY_SPACES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
ACTION_MASK = "action_mask"
LINKS = "links"
"""Key of a Dict observation: whom the agent hears, [N] over all agents in the environment's order; 0: not at all."""


def check_spaces(env: JointEnv | VectorJointEnv) -> None:
    """Checks what an environment declares: agents, and for each an observation and an action space.

    Raises:
        TypeError: a member is missing or has the wrong type.
        ValueError: no agents, an agent twice, or an agent without a space.
    """
    name = type(env).__name__
    for attribute in ("possible_agents", "observation_spaces", "action_spaces"):
        if getattr(env, attribute, None) is None:
            raise TypeError(
                f"{name} has no {attribute}; set possible_agents (a list of agent ids), observation_spaces "
                "and action_spaces (dicts agent -> gymnasium space) in its __init__"
            )
    agents = env.possible_agents
    if not isinstance(agents, (list, tuple)):
        raise TypeError(
            f"{name}.possible_agents is a {type(agents).__name__}; needed: a list, whose order is the "
            "agents' order (a set or a dict view has none that every process shares)"
        )
    if not agents:
        raise ValueError(f"{name}.possible_agents is empty; needed: at least one agent id")
    for agent in agents:
        if isinstance(agent, bool) or not isinstance(agent, (str, int)):
            raise TypeError(f"{name}.possible_agents holds {agent!r}; needed: agent ids of type str or int")
    if len(set(agents)) != len(agents):
        raise ValueError(f"{name}.possible_agents holds an agent twice: {list(agents)}")
    for attribute in ("observation_spaces", "action_spaces"):
        declared = getattr(env, attribute)
        if not isinstance(declared, Mapping):
            raise TypeError(
                f"{name}.{attribute} is a {type(declared).__name__}; needed: a dict agent -> gymnasium space"
            )
        for agent in agents:
            if agent not in declared:
                raise ValueError(f"{name}.{attribute} has no space for agent {agent!r}; it has {list(declared)}")
            _check_space(declared[agent], f"{name}.{attribute}[{agent!r}]")


def _check_space(space: Any, where: str) -> None:
    if isinstance(space, spaces.Dict):
        for key, inner in space.spaces.items():
            _check_space(inner, f"{where}[{key!r}]")
    elif isinstance(space, spaces.Tuple):
        for index, inner in enumerate(space.spaces):
            _check_space(inner, f"{where}[{index}]")
    elif not isinstance(space, gym.Space):
        raise TypeError(f"{where} is {space!r}; needed: a gymnasium space")
    elif not isinstance(space, ARRAY_SPACES):
        raise TypeError(
            f"{where} is {space}; needed: Box, Discrete, MultiDiscrete or MultiBinary, or a Dict or Tuple of these"
        )


def equal_spaces(a: gym.Space, b: gym.Space) -> bool:
    """Whether two spaces are equal to the last bit of their bounds; gymnasium's == takes close bounds for equal."""
    return bool(a == b) and all(
        np.array_equal(x.low, y.low) and np.array_equal(x.high, y.high)
        for x, y in zip(_boxes(a), _boxes(b), strict=True)
    )


def _boxes(space: gym.Space) -> list[spaces.Box]:
    if isinstance(space, spaces.Box):
        return [space]
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        inner = space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces
        return [box for each in inner for box in _boxes(each)]
    return []


def identical_spaces(env: JointEnv | VectorJointEnv) -> bool:
    """Whether all agents have the same array spaces, so that their data fits one array [N, E, ...]."""
    first = env.possible_agents[0]
    observation, action = env.observation_spaces[first], env.action_spaces[first]
    if not isinstance(observation, ARRAY_SPACES) or not isinstance(action, ARRAY_SPACES):
        return False
    return all(
        equal_spaces(env.observation_spaces[agent], observation) and equal_spaces(env.action_spaces[agent], action)
        for agent in env.possible_agents
    )


def has_action_mask(space: gym.Space) -> bool:
    """Whether observations carry an action mask: a Dict with the key "action_mask", whatever else is in it."""
    return isinstance(space, spaces.Dict) and ACTION_MASK in space.spaces


def beside_action_mask(space: gym.Space) -> tuple[gym.Space, str | None]:
    """What a space holds beside its action mask, and under which key.

    | beside "action_mask" | result |
    |---|---|
    | "observation" (PettingZoo's convention) or "observations" (RLlib's) alone | that component and its key |
    | anything else | the Dict without the mask, None |
    | there is no mask | the space itself, None |
    """
    if not isinstance(space, spaces.Dict) or not has_action_mask(space):
        return space, None
    rest = OrderedDict((key, inner) for key, inner in space.spaces.items() if key != ACTION_MASK)
    if len(rest) == 1:
        (key, inner) = next(iter(rest.items()))
        if key in ("observation", "observations"):
            return inner, key
    return spaces.Dict(rest), None


def num_links(space: gym.Space) -> int:
    """N where observations tell whom their agent hears (`LINKS`, a Box with one axis beside something else), else 0."""
    if not isinstance(space, spaces.Dict) or LINKS not in space.spaces or _wrong_links(space):
        return 0
    return math.prod(space[LINKS].shape or ())


def check_links(space: gym.Space) -> None:
    """Checks that what an agent calls `LINKS` can be read as such, where messages are exchanged.

    Raises:
        ValueError: links of another kind, or nothing beside them.
    """
    if isinstance(space, spaces.Dict) and LINKS in space.spaces and (wrong := _wrong_links(space)):
        raise ValueError(wrong)


def _wrong_links(space: spaces.Dict) -> str | None:
    """Why a component that is called `LINKS` is none."""
    links = space[LINKS]
    if not isinstance(links, spaces.Box) or len(links.shape) != 1 or (links.low < 0).any():
        return (
            f"the observation has {LINKS!r} in {links}; needed: Box(0, 1, (number of agents,)), 0 for whom "
            "the agent does not hear"
        )
    if not set(space.spaces) - {LINKS, ACTION_MASK}:
        return (
            f"the observation holds {LINKS!r} and nothing to encode; give the agent something to observe, if only a "
            "constant"
        )
    return None


def head_sizes(space: gym.Space) -> tuple[int, ...] | None:
    """Categories of each head of a Discrete, or of a MultiDiscrete with one axis; None of another space."""
    if isinstance(space, spaces.Discrete):
        return (int(space.n),)
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
        return tuple(space.nvec.tolist())
    return None


def mask_length(action_space: gym.Space) -> int | None:
    """A, the number of logits a mask covers; None where the space cannot be masked."""
    if isinstance(action_space, spaces.Discrete):
        return int(action_space.n)
    if isinstance(action_space, spaces.MultiDiscrete):
        return int(action_space.nvec.sum())
    return None


def map_space(space: gym.Space, leaf: Callable[..., Any], *values: Any) -> Any:
    """Applies `leaf(space, *values)` to each array space inside `space`, keeping dicts and tuples."""
    if isinstance(space, spaces.Dict):
        return {key: map_space(s, leaf, *(v[key] for v in values)) for key, s in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(map_space(s, leaf, *(v[i] for v in values)) for i, s in enumerate(space.spaces))
    return leaf(space, *values)


def batch_row(space: gym.Space, batch: Any, index: int | np.ndarray) -> Any:
    """Element `index` of E batched elements of `space` (a view, or a numpy scalar); an array picks several (a copy)."""
    return map_space(space, lambda _, values: values[index], batch)


def batch_copy(space: gym.Space, batch: Any) -> Any:
    """A copy of E batched elements of `space`."""
    return map_space(space, lambda s, values: np.array(values, dtype=s.dtype), batch)


def element_nearest_zero(space: gym.Space) -> np.ndarray:
    """The element of an array space that is nearest to zero: zeros wherever the space holds them."""
    zeros = np.zeros(space.shape or (), dtype=space.dtype)
    if isinstance(space, spaces.Box):
        return np.clip(zeros, space.low, space.high)
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        start = np.asarray(space.start)
        size = space.n if isinstance(space, spaces.Discrete) else space.nvec
        return np.clip(zeros, start, start + size - 1)
    return zeros
