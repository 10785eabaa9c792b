"""What PettingZoo's and RLlib's environments return: its form, and infos as extras of a `JointStepResult`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from thrust_rllib.envs.joint_env import AgentID


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


def returned_dicts(env: Any, method: str, returned: Any, names: Sequence[str]) -> tuple[Mapping[AgentID, Any], ...]:
    """What `env.reset` or `env.step` returned, if it is one dict by agent for each of `names`.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(returned, (tuple, list)) or len(returned) != len(names):
        what = f"{len(returned)} values" if isinstance(returned, (tuple, list)) else f"a {type(returned).__name__}"
        raise TypeError(f"{type(env).__name__}.{method} returned {what}; return ({', '.join(names)})")
    for name, given in zip(names, returned, strict=True):
        if type(given) is not dict and not isinstance(given, Mapping):
            raise TypeError(
                f"{type(env).__name__}.{method} returned {name} as a {type(given).__name__}; return a dict agent -> "
                "value"
            )
    return tuple(returned)
