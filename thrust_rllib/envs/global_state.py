"""Global states of environments as flat numbers: what a critic that sees more than its agent is given.

Shapes: E environments, S numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from thrust_rllib.envs.joint_env import VectorJointEnv
from thrust_rllib.envs.spaces import batch_row


def flat_state(space: gym.Space | None, state: Any, where: str) -> np.ndarray:
    """One global state, float32 [S]: numbers as they are, a Discrete one-hot, Dict and Tuple one part behind the other.

    Args:
        space: the environment's `state_space`; None: the state is an array of numbers, which is made flat.
        state: what `state()` returned.
        where: environment and moment, for messages.

    Raises:
        TypeError: no numbers.
        ValueError: not of the declared shape.
    """
    if space is None or isinstance(space, spaces.Box):
        array = _numbers(state, where)
        if space is not None and array.shape != space.shape:
            raise ValueError(f"{where}: state() has shape {array.shape}; state_space declares {space.shape}")
        return array.reshape(-1)
    try:
        return np.asarray(spaces.flatten(space, state), dtype=np.float32)
    except Exception as error:
        raise ValueError(f"{where}: state() returned {state!r}, which is no element of state_space {space}") from error


def flat_states(space: gym.Space | None, states: Any, num_envs: int, where: str) -> np.ndarray:
    """The states of E environments, float32 [E, S]; arguments and errors as of `flat_state`."""
    if space is not None and not isinstance(space, spaces.Box):
        try:
            rows = [batch_row(space, states, index) for index in range(num_envs)]
        except (IndexError, KeyError, TypeError) as error:
            raise ValueError(
                f"{where}: state() returned {states!r}; needed: {num_envs} elements of state_space {space}, as one "
                "array, or dict or tuple of arrays, with the environments first"
            ) from error
        return np.stack([flat_state(space, row, where) for row in rows])
    array = _numbers(states, where)
    if array.shape[:1] != (num_envs,) or (space is not None and array.shape[1:] != space.shape):
        needed = "..." if space is None else ", ".join(map(str, space.shape or ()))
        raise ValueError(
            f"{where}: state() has shape {array.shape}; needed: [environments, ...] = [{num_envs}, {needed}]"
        )
    return array.reshape(num_envs, -1)


def stack_states(states: Mapping[int, np.ndarray], names: Sequence[str]) -> np.ndarray:
    """Flat states of some environments in rows of their own, float32 [E, S]; zeros for the others.

    Args:
        states: {index of the environment: [S]}, at least one.
        names: of all E environments, for messages.

    Raises:
        ValueError: they differ in size.
    """
    first = next(iter(states))
    stacked = np.zeros((len(names), len(states[first])), np.float32)
    for row, state in states.items():
        if len(state) != stacked.shape[1]:
            raise ValueError(
                f"{names[row]}, environment {row}: state() has {len(state)} numbers, that of environment {first} "
                f"{stacked.shape[1]}; return as many in every step"
            )
        stacked[row] = state
    return stacked


def _numbers(state: Any, where: str) -> np.ndarray:
    try:
        return np.array(state, dtype=np.float32)  # a copy: the environment may write into its own
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{where}: state() returned a {type(state).__name__} that makes no array of numbers; return one, or "
            "declare state_space"
        ) from error


def state_size(env: VectorJointEnv) -> int | None:
    """S, the numbers of a flat global state; None where the environment has no `state()`.

    Args:
        env: is reset, since many environments have no state before.
    """
    env.reset_joint()
    try:
        states = env.state()
    except NotImplementedError:
        return None
    return math.prod(flat_states(env.state_space, states, env.num_envs, type(env).__name__).shape[1:])


def needs_state(env: VectorJointEnv, name: str) -> int:
    """S, where a critic is to read the global state.

    Args:
        env: is reset.
        name: what the user called it.

    Raises:
        ValueError: it has no `state()`.
    """
    size = state_size(env)
    if size is None:
        raise ValueError(
            f"critic_config input='state', but the environment {name!r} has no state(). Give its class a method "
            "state() that returns an array of numbers, or let the critic read the agents' joined observations: "
            "critic_config={'input': 'observations'}"
        )
    return size
