"""Rewards that an environment pays to agents after their own end: nobody can learn from them."""

from __future__ import annotations

import warnings
from typing import Any

from thrust_rllib.envs.joint_env import AgentID


class LateRewards:
    """Adds up such rewards over an episode and tells them once.

    Args:
        name: of the environment, for the warning.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._sums: dict[AgentID, Any] = {}
        self._told = False

    def add(self, agent: AgentID, reward: Any) -> None:
        """Takes in a reward; zeros do not count."""
        if reward:
            self._sums[agent] = self._sums.get(agent, 0) + reward

    def tell(self) -> None:
        """Warns, in the first episode that has such rewards; called when an episode is over or given up."""
        if self._sums and not self._told:
            self._told = True
            paid = ", ".join(f"{reward:g} to {agent!r}" for agent, reward in self._sums.items())
            warnings.warn(
                f"{self._name} paid rewards to agents after their own end, in one episode: {paid}. They are left out, "
                "since an agent that has ended has no step to learn from; pay them in its last step, or end it later",
                stacklevel=2,
            )
        self._sums.clear()
