"""Between one environment's dicts by agent and the arrays of E environments, with checks of every value.

Shapes: E environments, N agents. Used by `SyncVectorJointEnv`; checks cost a dict look-up and two
comparisons per value, and the message of an error is made only when there is one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from thrust_rllib.envs.joint_env import AgentID
from thrust_rllib.envs.spaces import ACTION_MASK, element_nearest_zero, map_space


class _Leaf:
    """One array space inside an agent's observation space, and the way to it."""

    def __init__(self, agent: AgentID, index: int, path: tuple[Any, ...], space: gym.Space) -> None:
        self.agent, self.index, self.path = agent, index, path
        self.dtype, self.shape = np.dtype(space.dtype), tuple(space.shape or ())
        self.is_mask = path == (ACTION_MASK,)
        # What the agent shows while it is absent: an element of its space that is not read by anybody.
        self.absent = np.ones(self.shape, self.dtype) if self.is_mask else element_nearest_zero(space)

    def pick(self, observation: Any, where: str) -> Any:
        for depth, key in enumerate(self.path):
            try:
                observation = observation[key]
            except (KeyError, IndexError, TypeError) as error:
                raise ValueError(
                    f"{where}: the observation of agent {self.agent!r} has no entry "
                    f"{list(self.path[: depth + 1])}, "
                    "which its observation space declares"
                ) from error
        return observation

    def checked(self, value: Any, where: str) -> np.ndarray:
        """`value` as an array of the declared shape whose type converts without loss of kind."""
        inside = f" {list(self.path)}" if self.path else ""
        try:
            array = np.asarray(value)
        except ValueError:  # a ragged list
            array = np.asarray(None)
        if array.dtype.kind not in "biuf":
            raise TypeError(
                f"{where}: the observation{inside} of agent {self.agent!r} is a {type(value).__name__} that "
                f"makes no array of numbers; return an array of shape {self.shape} and type {self.dtype}"
            )
        if array.shape != self.shape:
            raise ValueError(
                f"{where}: the observation{inside} of agent {self.agent!r} has shape {array.shape}; its "
                f"observation space declares {self.shape}"
            )
        if array.dtype.kind == "f" and self.dtype.kind != "f":
            raise TypeError(
                f"{where}: the observation{inside} of agent {self.agent!r} has type {array.dtype}; its "
                f"observation space declares {self.dtype}, which would cut off the fractions"
            )
        return array


def leaves_of(agent: AgentID, index: int, path: tuple[Any, ...], space: gym.Space) -> list[_Leaf]:
    """All array spaces inside a space."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        inner = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        return [leaf for key, part in inner for leaf in leaves_of(agent, index, (*path, key), part)]
    return [_Leaf(agent, index, path, space)]


class ObservationCopy:
    """Checks one agent's observations against their space and copies them.

    Args:
        agent: its id.
        space: of its observations.
    """

    def __init__(self, agent: AgentID, space: gym.Space) -> None:
        self._leaves = leaves_of(agent, 0, (), space)

    def __call__(self, observation: Any, where: Callable[[], str]) -> Any:
        """A copy of the observation.

        Raises:
            TypeError: no numbers, or fractions where the space has none.
            ValueError: another shape than the space's, or an entry is missing.
        """
        for leaf in self._leaves:
            value = leaf.pick(observation, where()) if leaf.path else observation
            if type(value) is not np.ndarray or value.dtype != leaf.dtype or value.shape != leaf.shape:
                leaf.checked(value, where())
        return observation.copy() if type(observation) is np.ndarray else copy.deepcopy(observation)


class ObservationBatch:
    """Makes the arrays that hold the observations of E environments, and fills them row by row.

    Args:
        agents: the agents in order.
        observation_spaces: agent -> space.
        num_envs: E.
        stacked: one array [N, E, ...] in place of a dict of arrays [E, ...].
    """

    def __init__(
        self,
        agents: Sequence[AgentID],
        observation_spaces: Mapping[AgentID, gym.Space],
        num_envs: int,
        stacked: bool,
    ) -> None:
        self.agents, self.spaces, self.num_envs, self.stacked = (
            list(agents),
            observation_spaces,
            num_envs,
            stacked,
        )
        self.leaves: list[_Leaf] = []
        for index, agent in enumerate(agents):
            self.leaves += leaves_of(agent, index, (), observation_spaces[agent])

    def zeros(self) -> tuple[Any, list[np.ndarray]]:
        """The structure to hand out, and its arrays [E, ...] in the order of the leaves."""
        if self.stacked:
            leaf = self.leaves[0]
            stacked = np.zeros((len(self.agents), self.num_envs, *leaf.shape), dtype=leaf.dtype)
            return stacked, list(stacked)
        arrays: list[np.ndarray] = []

        def make(space: gym.Space) -> np.ndarray:
            arrays.append(np.zeros((self.num_envs, *(space.shape or ())), dtype=space.dtype))
            return arrays[-1]

        return {agent: map_space(self.spaces[agent], make) for agent in self.agents}, arrays

    def write(self, arrays: list[np.ndarray], row: int, observations: Mapping[AgentID, Any], where: Where) -> None:
        """Writes the observations of all agents in one environment.

        Args:
            arrays: from `zeros`.
            row: the environment's index.
            observations: {agent: observation}.
            where: makes the beginning of an error message.

        Raises:
            KeyError: an agent is missing.
        """
        for leaf, array in zip(self.leaves, arrays, strict=True):
            value = observations[leaf.agent]
            if leaf.path:
                value = leaf.pick(value, where())
            if type(value) is not np.ndarray or value.dtype != leaf.dtype or value.shape != leaf.shape:
                value = leaf.checked(value, where())
            array[row] = value

    def write_some(
        self,
        arrays: list[np.ndarray],
        row: int,
        observations: Mapping[AgentID, Any],
        where: Callable[[], str],
        shown: Collection[AgentID],
        unmasked: Collection[AgentID] = (),
    ) -> None:
        """As `write`, of the agents that are `shown`; the others show the element of their space nearest to zero.

        Args:
            arrays: see `write`.
            row: see `write`.
            observations: see `write`; of those that are shown at least.
            where: see `write`.
            shown: agents.
            unmasked: agents that choose no more: all is allowed to them, whatever their mask says.
        """
        for leaf, array in zip(self.leaves, arrays, strict=True):
            if leaf.agent not in shown or (leaf.is_mask and leaf.agent in unmasked):
                array[row] = leaf.absent
                continue
            value = observations[leaf.agent]
            array[row] = leaf.checked(leaf.pick(value, where()) if leaf.path else value, where())


class Where:
    """Says which environment and step an error is about, when asked."""

    __slots__ = ("name", "row", "step")

    def __init__(self, name: str, row: int, step: int) -> None:
        self.name, self.row, self.step = name, row, step

    def __call__(self) -> str:
        """The beginning of an error message."""
        moment = "reset_joint" if self.step == 0 else f"step {self.step} of its episode"
        return f"{self.name}, environment {self.row}, {moment}"


def split_actions(
    actions: Any,
    agents: Sequence[AgentID],
    action_spaces: Mapping[AgentID, gym.Space],
    num_envs: int,
    stacked: bool,
) -> list[dict[AgentID, Any]]:
    """One dict of actions per environment, from arrays [N, E, ...] or {agent: [E, ...]}.

    The actions are copied: an environment may keep what it gets.

    Raises:
        ValueError: an agent is missing or a shape does not fit.
    """
    if stacked:
        space = action_spaces[agents[0]]
        batch = np.array(actions)
        if batch.shape != (len(agents), num_envs, *(space.shape or ())):
            raise ValueError(
                f"actions have shape {batch.shape}; needed: [agents, environments, ...] = "
                f"{(len(agents), num_envs, *(space.shape or ()))}"
            )
        return [dict(zip(agents, row, strict=True)) for row in batch.swapaxes(0, 1)]
    if not isinstance(actions, Mapping) or any(agent not in actions for agent in agents):
        got = list(actions) if isinstance(actions, Mapping) else type(actions).__name__
        raise ValueError(f"actions are {got}; needed: a dict of arrays [E, ...] for each of {list(agents)}")
    columns = [_rows(action_spaces[agent], actions[agent], agent, num_envs) for agent in agents]
    return [dict(zip(agents, row, strict=True)) for row in zip(*columns, strict=True)]


def _rows(space: gym.Space, values: Any, agent: AgentID, num_envs: int) -> list[Any]:
    """The E elements of a batch of elements of `space`."""
    if isinstance(space, spaces.Dict):
        columns = {key: _rows(inner, values[key], agent, num_envs) for key, inner in space.spaces.items()}
        return [{key: column[row] for key, column in columns.items()} for row in range(num_envs)]
    if isinstance(space, spaces.Tuple):
        parts = [_rows(inner, values[i], agent, num_envs) for i, inner in enumerate(space.spaces)]
        return [tuple(part[row] for part in parts) for row in range(num_envs)]
    batch = np.array(values)
    if batch.shape != (num_envs, *(space.shape or ())):
        raise ValueError(
            f"actions of agent {agent!r} have shape {batch.shape}; needed: [environments, ...] = "
            f"{(num_envs, *(space.shape or ()))}"
        )
    return list(batch)
