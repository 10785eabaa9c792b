"""Agents that an environment names anew in each episode: errors, and constant metrics with `Seats`."""

from __future__ import annotations

import gymnasium as gym
import pytest
from ray.rllib.env.multi_agent_env import MultiAgentEnv

from tests.support import tiny_config
from tests.test_docs import flatten
from thrust_rllib.envs import Seats

DOORS = ["arrays", "episodes"]


class Guests(MultiAgentEnv):
    """Two or three guests, none of whom ever comes again, in episodes of 5 steps; the third comes after two of them."""

    def __init__(self, config):
        super().__init__()
        self.observation_space, self.action_space = gym.spaces.Box(0.0, 1.0, (3,)), gym.spaces.Discrete(2)
        self.known = 0
        if config.get("declares"):
            self.possible_agents = self.agents = ["guest_0", "guest_1"]

    def get_observation_space(self, agent):
        return self.observation_space

    def get_action_space(self, agent):
        return self.action_space

    def _welcome(self, count):
        self.agents = [*self.agents, *(f"guest_{self.known + i}" for i in range(count))]
        self.known += count
        return {agent: self.observation_space.sample() for agent in self.agents}

    def reset(self, *, seed=None, options=None):
        self.observation_space.seed(seed)
        self.agents, self.t = [], 0
        return self._welcome(2), {}

    def step(self, actions):
        acted, self.t = list(self.agents), self.t + 1
        assert set(actions) == set(acted)
        seen = self._welcome(self.t == 2 and self.known % 2 == 0)
        return seen, dict.fromkeys(acted, 1.0), {"__all__": self.t == 5}, {"__all__": False}, {}


@pytest.mark.parametrize("door", DOORS)
def test_an_environment_that_declares_nobody_is_an_early_error(door):
    config = tiny_config(Guests, policies="shared", runners={"sampling": door})
    with pytest.raises(ValueError, match=r"Guests names no agents; .*named anew in each episode need fixed seats"):
        config.validate()


@pytest.mark.parametrize("door", DOORS)
def test_an_undeclared_guest_is_an_error(build, door):
    algo = build(tiny_config(Guests, {"declares": True}, policies="shared", runners={"sampling": door}))
    with pytest.raises((RuntimeError, ValueError), match=r"'guest_2'.* possible_agents .*need fixed seats: .*Seats"):
        algo.train()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("door", DOORS)
def test_with_seats_the_metrics_stay_the_same(build, door):
    config = tiny_config(Seats, {"env": Guests, "seats": 3}, policies="shared", runners={"sampling": door})
    algo = build(config)
    paths = []
    for _ in range(5):
        result = algo.train()
        paths.append({path for path in flatten(result) if not path.startswith(("config/", "perf/"))})
    guests = max(env.unwrapped.env.known for env in algo.env_runner.env.envs)
    assert guests > 60 and paths[1] == paths[2] == paths[3] == paths[4] and paths[0] <= paths[1]
    assert not any("guest" in path for path in paths[-1])
    steps = result["env_runners"]["agent_steps"]
    assert steps["seat_0"] == steps["seat_1"] == 5.0 and 0.0 < steps["seat_2"] <= 3.0
