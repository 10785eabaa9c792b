"""Small environments, configurations and runners of the general door."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
from ray.rllib.env.multi_agent_env import MultiAgentEnv

from tests.support import make_learner, tiny_config

EPISODES = {"sampling": "episodes"}


def episodes_config(env="debug/random_observations", env_config=None, *, runners=None, **options):
    """`tiny_config` that samples episodes."""
    return tiny_config(env, env_config, runners={**EPISODES, **(runners or {})}, **options)


def episode_runner(config, **options):
    config.validate()
    return config.env_runner_cls(config=config, worker_index=0, **options)


def batch_of(config, runner, episodes):
    (batch,) = make_learner(config, runner.get_spaces())._batches(episodes)
    return batch


def weights(algo):
    return {
        m: {name: np.asarray(value) for name, value in state.items()}
        for m, state in algo.learner_group.get_weights().items()
    }


def assert_acts_with(acting, trained):
    """A runner's modules (without value heads) have the learner's weights."""
    assert acting.keys() == trained.keys()
    for module_id, state in acting.items():
        assert state
        for name, value in state.items():
            np.testing.assert_array_equal(np.asarray(value), trained[module_id][name])


class Lives(MultiAgentEnv):
    """Three agents: "early" acts in steps 0 and 1, "late" from step 2 on, "whole" always; 6 steps; each step pays 1."""

    def __init__(self, config=None):
        super().__init__()
        self.possible_agents = ["whole", "early", "late"]
        self.agents = list(self.possible_agents)
        self.observation_spaces = {a: gym.spaces.Box(0.0, 10.0, (2,)) for a in self.agents}
        self.action_spaces = {a: gym.spaces.Discrete(2) for a in self.agents}

    def _see(self, *agents):
        return {a: np.full(2, self.t, np.float32) for a in agents}

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self._see("whole", "early"), {}

    def step(self, actions):
        self.t += 1
        seen = self._see("whole", "late") if self.t >= 2 else self._see("whole", "early")
        flags = {"early": True} if self.t == 2 else {}
        return seen, dict.fromkeys(actions, 1.0), {**flags, "__all__": self.t == 6}, {"__all__": False}, {}


class Team(MultiAgentEnv):
    """Two agents that see noise and earn 1 in each of 5 steps."""

    def __init__(self, config=None):
        super().__init__()
        self.agents = self.possible_agents = ["a", "b"]
        self.observation_spaces = {a: gym.spaces.Box(-1.0, 1.0, (3,)) for a in self.agents}
        self.action_spaces = {a: gym.spaces.Discrete(2) for a in self.agents}
        self.random = np.random.default_rng(0)

    def _see(self):
        return {a: self.random.uniform(-1, 1, 3).astype(np.float32) for a in self.agents}

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self._see(), {}

    def step(self, actions):
        self.t += 1
        return self._see(), dict.fromkeys(actions, 1.0), {"__all__": False}, {"__all__": self.t == 5}, {}
