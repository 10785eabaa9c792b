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
