"""Global states of environments as flat numbers: what a critic that sees more than its agent is given.

Shapes: E environments, S numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from thrust_rllib.envs.joint_env import VectorJointEnv
from thrust_rllib.envs.spaces import ARRAY_SPACES, batch_row, map_space
from thrust_rllib.envs.wrapped_state import global_state_of


def flat_state(space: gym.Space | None, state: Any, where: str) -> np.ndarray:
    """One global state, float32 [S]: numbers as they are, a Discrete one-hot, Dict and Tuple one part behind the other.

    Args:
        space: the environment's `state_space`; None: the state is an array of numbers, which is made flat.
        state: what `state()` returned.
        where: environment and moment, for messages.

    Raises:
        TypeError: no numbers.
        ValueError: empty, or no element of the declared space; what its bounds say of numbers is not looked at.
    """
    if space is None or isinstance(space, spaces.Box):
        array = _numbers(state, where)
        if space is not None and array.shape != space.shape:
            raise ValueError(f"{where}: state() has shape {array.shape}; state_space declares {space.shape}")
        return array.reshape(-1)
    try:
        return np.asarray(spaces.flatten(space, map_space(space, _element, state)), dtype=np.float32)
    except Exception as error:
        raise ValueError(f"{where}: state() returned {state!r}, which is no element of state_space {space}") from error


def flat_states(
    space: gym.Space | None, states: Any, num_envs: int, where: str, rows: np.ndarray | None = None
) -> np.ndarray:
    """The states of E environments, float32 [E, S]; arguments and errors as of `flat_state`.

    Args:
        space: see there.
        states: of all environments.
        num_envs: E.
        where: see there.
        rows: [K] the environments whose states are looked at, and returned as [K, S]; None for all.
    """
    picked = list(range(num_envs)) if rows is None else rows.tolist()
    if space is not None and not isinstance(space, spaces.Box):
        try:
            elements = [batch_row(space, states, index) for index in picked]
        except (IndexError, KeyError, TypeError) as error:
            raise ValueError(
                f"{where}: state() returned {states!r}; needed: {num_envs} elements of state_space {space}, as one "
                "array, or dict or tuple of arrays, with the environments first"
            ) from error
        return np.stack([flat_state(space, element, where) for element in elements])
    array = _numbers(states, where)
    if array.shape[:1] != (num_envs,) or (space is not None and array.shape[1:] != space.shape):
        needed = "..." if space is None else ", ".join(map(str, space.shape or ()))
        raise ValueError(
            f"{where}: state() has shape {array.shape}; needed: [environments, ...] = [{num_envs}, {needed}]"
        )
    return array.reshape(num_envs, -1)[picked]


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


def _element(space: gym.Space, part: Any) -> Any:
    """A part of a state, checked: Gymnasium would make anything flat that has as many numbers as its space."""
    if not isinstance(space, ARRAY_SPACES):
        return part
    array = np.asarray(part)
    if array.shape != (space.shape or ()):
        raise ValueError(f"shape {array.shape} in place of {space.shape}")
    if isinstance(space, spaces.Box):
        return array
    if array.dtype.kind not in "biu" or not space.contains(element := array.astype(space.dtype)):
        raise ValueError(f"{array} in {space}")
    return element


def _numbers(state: Any, where: str) -> np.ndarray:
    try:
        array = np.asarray(state)
    except ValueError:  # a ragged list
        array = np.asarray(None)
    if array.dtype.kind not in "biuf":
        raise TypeError(
            f"{where}: state() returned a {type(state).__name__} that makes no array of numbers; return one, or "
            "declare state_space"
        )
    if not array.size:
        raise ValueError(f"{where}: state() returned an array of shape {array.shape}; return at least one number")
    return array.astype(np.float32)  # a copy: the environment may write into its own


def state_size(env: VectorJointEnv) -> int | None:
    """S, the numbers of a flat global state; None where the environment has no `state()`.

    Args:
        env: is reset, since many environments have no state before.
    """
    env.reset_joint()
    try:
        states = global_state_of(env)
    except NotImplementedError:
        return None
    return flat_states(env.state_space, states, env.num_envs, type(env).__name__).shape[1]
