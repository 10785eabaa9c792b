"""What an environment tells beside rewards: of the team, of each agent, of each pair of agents.

| of | a `JointEnv` gives | arrays of E environments | of a rollout |
|---|---|---|---|
| the team | value | [E, ...] | [T, E, ...] |
| agents | {agent: value} | [N, E, ...] | [T, N, E, ...] |
| pairs | {agent: {other: number}} | [N, N, E] | [T, N, N, E] |

Of arrays the shape says which, the longest first: a vector of the team with as many entries as there are agents and
environments would be taken for numbers of the agents.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from thrust_rllib.envs.joint_env import AgentID
from thrust_rllib.envs.presence import check_agents


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


def is_of_pairs(value: Any) -> bool:
    """Whether an extra of one environment is one of pairs: dicts in a dict."""
    return isinstance(value, Mapping) and any(isinstance(inner, Mapping) for inner in value.values())


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
    """The arrays of a rollout's extras; what is not told in a step is 0 there."""

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}

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
        ValueError: the environments give different names, or an agent that acted has no entry.
    """
    stacked: dict[str, np.ndarray] = {}
    if not any(extras):
        return stacked
    for row, given in enumerate(extras):
        if given.keys() != extras[0].keys():
            raise ValueError(
                f"{names[row]}: environment {row} returned extras {sorted(given)}, environment 0 "
                f"{sorted(extras[0])}; return the same names in every step"
            )
    for name, value in extras[0].items():
        if not isinstance(value, Mapping):
            stacked[name] = np.array([given[name] for given in extras])
            continue
        values = [given[name] for given in extras]
        for row, given in enumerate(values):
            acted = agents if present is None else [a for a, acts in zip(agents, present[:, row], strict=True) if acts]
            _check_extra(f"{names[row]}, environment {row}", name, given, agents, acted)
        if any(map(is_of_pairs, values)):
            for row, given in enumerate(values):
                _check_pairs(f"{names[row]}, environment {row}", name, given, agents)
            stacked[name] = np.stack([pair_rows(given, agents) for given in values], axis=-1)
            continue
        known = [number for given in values for number in given.values()]
        nothing = np.zeros_like(known[0]) if known else 0.0
        stacked[name] = np.array([[given.get(agent, nothing) for given in values] for agent in agents])
    return stacked


def _check_extra(where: str, name: str, given: Any, agents: Sequence[AgentID], acted: Sequence[AgentID]) -> None:
    check_agents(given, agents, f"extras {name!r}", lambda: where)
    for agent in acted:
        if agent not in given:
            raise ValueError(
                f"{where}: extras {name!r} have no entry for agent {agent!r}, which acted in this step; return one for "
                "every agent that acts"
            )


def _check_pairs(where: str, name: str, given: Mapping[AgentID, Any], agents: Sequence[AgentID]) -> None:
    for agent, row in given.items():
        check_agents(row, agents, f"extras {name!r} of agent {agent!r}", lambda: where)
        for other, value in row.items():
            if np.ndim(value):
                raise ValueError(
                    f"{where}: extras {name!r} of the pair {agent!r}, {other!r} have shape {np.shape(value)}; return "
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
