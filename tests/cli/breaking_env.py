"""An environment that breaks while a run goes on: `tests.cli.breaking_env:Breaking`."""

import os
import time
from pathlib import Path

import numpy as np
from gymnasium import spaces

from thrust_rllib import JointEnv, JointStepResult


class Breaking(JointEnv):
    """Two agents, five steps an episode.

    Args:
        how: "raise", "hang", "exit" (of the process) or "never".
        at: in which step since it was built.
        alone_in: this process alone can build it; None: any.
        marker: a file; breaks only where there is none, and makes it: once, in one process. None: always.
    """

    def __init__(self, how="never", at=40, marker=None, alone_in=None):
        if alone_in not in (None, os.getpid()):
            raise OSError("there is no licence for another process")
        self.possible_agents = ["a", "b"]
        self.observation_spaces = {agent: spaces.Box(0, 1, (3,)) for agent in self.possible_agents}
        self.action_spaces = {agent: spaces.Discrete(2) for agent in self.possible_agents}
        self.how, self.at, self.marker = how, at, None if marker is None else Path(marker)
        self.total = self.t = 0

    def reset_joint(self, seed=None):
        self.t = 0
        return {agent: np.full(3, 0.5, np.float32) for agent in self.possible_agents}

    def step_joint(self, actions):
        self.t += 1
        self.total += 1
        if self.total == self.at and self._is_first():
            if self.how == "raise":
                raise OSError("the simulator lost its connection")
            if self.how == "exit":
                os._exit(1)
            while self.how == "hang":
                time.sleep(0.1)
        rewards = {agent: float(actions[agent]) for agent in self.possible_agents}
        seen = {agent: np.full(3, 0.1 * self.t, np.float32) for agent in self.possible_agents}
        return JointStepResult(rewards, seen, False, self.t == 5)

    def _is_first(self):
        if self.marker is None:
            return True
        try:
            self.marker.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True
