"""What an environment tells beside rewards: of the team, of each agent, of each pair of agents.

| of | a `JointEnv` gives | arrays of E environments | of a rollout |
|---|---|---|---|
| the team | value | [E, ...] | [T, E, ...] |
| agents | {agent: value} | [N, E, ...] | [T, N, E, ...] |
| pairs | {agent: {other: number}} | [N, N, E] | [T, N, N, E] |

Of arrays the shape says which, the longest first: a vector of the team with as many entries as there are agents and
environments would be taken for numbers of the agents. From a `JointEnv` such a vector is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from typing import Any

import numpy as np

from thrust_rllib.envs.joint_env import AgentID
from thrust_rllib.envs.presence import check_agents

_NUMBERS = frozenset((float, int, bool, np.float32, np.float64, np.int64, np.bool_, np.ndarray))


def extra_axes(shape: Sequence[int], num_agents: int, num_envs: int) -> int:
    """How many axes of agents an extra has in front of that of the environments: 0, 1 or 2.

    Args:
        shape: of one step, without T.
        num_agents: N.
        num_envs: E.
    """
    shape = tuple(shape)
    if shape == (num_agents, num_agents, num_envs):
        return 2
    return 1 if shape[:2] == (num_agents, num_envs) else 0


def check_shape(shape: Sequence[int], axes: int, num_agents: int, num_envs: int, name: str, where: str) -> None:
    """Checks that an extra cannot be taken for one of agents, or of pairs of agents, by its shape.

    Args:
        shape: of the value of one environment, or of one agent in it.
        axes: of agents, 0 or 1.
        num_agents: N.
        num_envs: E.
        name: of the extra.
        where: the beginning of an error message.

    Raises:
        ValueError: it can. (Of one agent the numbers are the same, whatever they are taken for.)
    """
    if num_agents > 1 and extra_axes((*(num_agents,) * axes, num_envs, *shape), num_agents, num_envs) != axes:
        whose, others = ("each agent", f"pairs of the {num_agents}") if axes else ("the team", f"the {num_agents}")
        raise ValueError(
            f"{where}: extras {name!r} of {whose} have shape {tuple(shape)}; from {num_envs} environments they cannot "
            f"be told from numbers of {others} agents. Return them with shape {(1, *shape)}, or take another number of "
            "environments (num_envs_per_env_runner)"
        )


def is_of_pairs(value: Any) -> bool:
    """Whether an extra of one environment is one of pairs: dicts in a dict."""
    if _is_mapping(value):
        for inner in value.values():
            if _is_mapping(inner):
                return True
    return False


def _is_mapping(value: Any) -> bool:
    """`isinstance(value, Mapping)`, which is slow for what is none."""
    kind = type(value)
    return kind is dict or (kind not in _NUMBERS and isinstance(value, Mapping))


def pair_rows(value: Mapping[AgentID, Mapping[AgentID, Any]], agents: Sequence[AgentID]) -> np.ndarray:
    """Pairs of one environment as numbers [N, N]; those that are left out are 0."""
    return np.array([[value.get(one, {}).get(other, 0) for other in agents] for one in agents])


def in_order(extra: np.ndarray, order: Sequence[int], num_envs: int) -> np.ndarray:
    """An extra of a rollout with its agents in another order; one of the team as it is.

    Args:
        extra: [T, ...].
        order: [N] for each agent of the new order its place in the old one.
        num_envs: E.
    """
    axes = extra_axes(extra.shape[1:], len(order), num_envs)
    if not axes or list(order) == list(range(len(order))):
        return extra
    extra = extra[:, order]
    return extra[:, :, order] if axes == 2 else extra


class ExtrasRecorder:
    """The arrays of a rollout's extras, 0 where an agent or an environment tells nothing."""

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        self._names: Set[str] | None = None

    def check_names(self, names: Set[str], where: str) -> None:
        """Checks which extras a step tells; not to be called for steps in which nobody acted.

        Args:
            names: of the extras.
            where: the beginning of an error message.

        Raises:
            ValueError: other ones than in an earlier step.
        """
        if self._names is None:
            self._names = frozenset(names)
        elif self._names != names:
            raise ValueError(
                f"{where}: extras are {sorted(names)}, in other steps {sorted(self._names)}; return the same names in "
                "every step"
            )

    def place(self, name: str, lead: tuple[int, ...], value: np.ndarray, where: str) -> np.ndarray:
        """The array of an extra, [*lead, *value.shape], which holds values of this type without loss.

        Args:
            name: of the extra.
            lead: the axes in front, such as (T,) for a step of all environments.
            value: an entry.
            where: the beginning of an error message.

        Raises:
            ValueError: an earlier value had another shape.
        """
        array = self.arrays.get(name)
        if array is None:
            array = self.arrays[name] = np.zeros((*lead, *value.shape), value.dtype)
        elif array.shape != (*lead, *value.shape):
            raise ValueError(
                f"{where}: extras {name!r} now give {(*lead, *value.shape)} for a rollout, before {array.shape}; "
                "return the same shape in every step"
            )
        elif array.dtype != value.dtype and (kind := np.result_type(array.dtype, value.dtype)) != array.dtype:
            array = self.arrays[name] = array.astype(kind)
        return array


def stack_extras(
    names: Sequence[str],
    agents: Sequence[AgentID],
    extras: Sequence[Mapping[str, Any]],
    present: np.ndarray | None,
) -> dict[str, np.ndarray]:
    """{name: [E, ...], [N, E, ...] or [N, N, E]} of what E environments gave; 0 for absent agents.

    Args:
        names: of the environments, for messages.
        agents: in order.
        extras: `JointStepResult.extras` of each environment.
        present: bool [N, E], who acted; None for everybody.

    Raises:
        TypeError: something else than numbers.
        ValueError: the environments give different names or shapes, an agent that acted has no entry, or an array
            would be taken for something else.
    """
    stacked: dict[str, np.ndarray] = {}
    if not any(extras):
        return stacked
    for row, given in enumerate(extras):
        acted = agents if present is None else [a for a, acts in zip(agents, present[:, row], strict=True) if acts]
        check_extras(given, agents, acted, partial(_place, names[row], row))
        if given.keys() != extras[0].keys():
            raise ValueError(
                f"{names[row]}: environment {row} returned extras {sorted(given)}, environment 0 "
                f"{sorted(extras[0])}; return the same names in every step"
            )
    for name in extras[0]:
        values = [given[name] for given in extras]
        if not _is_mapping(values[0]):
            stacked[name] = array = numbers(values, name, names[0])
            check_shape(array.shape[1:], 0, len(agents), len(extras), name, names[0])
        elif any(map(is_of_pairs, values)):
            for row, given in enumerate(values):
                if not is_of_pairs(given):  # nobody's, or not as in the other environments
                    _check_pairs(name, given, agents, partial(_place, names[row], row))
            pairs = np.stack([pair_rows(given, agents) for given in values], axis=-1)
            stacked[name] = numbers(pairs, name, names[0])
        elif known := [value for given in values for value in given.values()]:  # else nobody acted
            nothing = np.zeros_like(known[0])
            rows = [[given.get(agent, nothing) for given in values] for agent in agents]
            stacked[name] = array = numbers(rows, name, names[0])
            check_shape(array.shape[2:], 1, len(agents), len(extras), name, names[0])
    return stacked


def _place(env: str, row: int) -> str:
    return f"{env}, environment {row}"


def numbers(values: Any, name: str, where: str) -> np.ndarray:
    """An array of an extra's values.

    Args:
        values: of one or several agents or environments.
        name: of the extra.
        where: the beginning of an error message.

    Raises:
        TypeError: they make none, or none of numbers.
    """
    try:
        array = np.asarray(values)
    except ValueError:  # of different shapes
        array = np.asarray(None)
    if array.dtype.kind not in "biuf":
        raise TypeError(
            f"{where}: extras {name!r} are {values!r}, which make no array of numbers; return numbers, or arrays of "
            "the same shape"
        )
    return array


def check_extras(extras: Any, agents: Sequence[AgentID], acted: Sequence[AgentID], where: Callable[[], str]) -> None:
    """Checks what one environment told in one step; numbers and shapes are looked at where they become arrays.

    Args:
        extras: `JointStepResult.extras`.
        agents: all of them.
        acted: those that acted.
        where: makes the beginning of an error message.

    Raises:
        TypeError: no dict.
        ValueError: an unknown agent, or one that acted has no entry.
    """
    if not _is_mapping(extras):
        raise TypeError(f"{where()}: extras are a {type(extras).__name__}; return a dict {{name: value}}")
    for name, value in extras.items():
        if not _is_mapping(value):
            continue
        check_agents(value, agents, f"extras {name!r}", where)
        for agent in acted:
            if agent not in value:
                raise ValueError(
                    f"{where()}: extras {name!r} have no entry for agent {agent!r}, which acted in this step; return "
                    "one for every agent that acts"
                )
        if is_of_pairs(value):
            _check_pairs(name, value, agents, where)


def _check_pairs(name: str, given: Mapping[AgentID, Any], agents: Sequence[AgentID], where: Callable[[], str]) -> None:
    for agent, row in given.items():
        check_agents(row, agents, f"extras {name!r} of agent {agent!r}", where)
        for other, value in row.items():
            if np.ndim(value):
                raise ValueError(
                    f"{where()}: extras {name!r} of the pair {agent!r}, {other!r} have shape {np.shape(value)}; return "
                    "one number for each pair"
                )


def pick_extras(names: Sequence[str], agents: Iterable[AgentID], infos: Mapping[AgentID, Any]) -> dict[str, Any]:
    """{name: {agent: value}} from the infos of the agents that acted.

    Raises:
        ValueError: an agent's info lacks a name.
    """
    for agent in agents:
        for name in names:
            if name not in (infos.get(agent) or {}):
                raise ValueError(
                    f"the info of agent {agent!r} has no {name!r}, which extras_from_infos asks for; it has "
                    f"{sorted(infos.get(agent) or {})}"
                )
    return {name: {agent: infos[agent][name] for agent in agents} for name in names}
