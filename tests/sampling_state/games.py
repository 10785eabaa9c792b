"""Environments whose state can be saved, in the forms of several libraries; with it their random numbers."""

from __future__ import annotations

import copy

import gymnasium as gym
import numpy as np
from pettingzoo import AECEnv, ParallelEnv
from ray.rllib.env.multi_agent_env import MultiAgentEnv

from tests.envs.lives import LIVES, JointLives, MultiLives, Turns, ZooLives
from thrust_rllib import JointEnv, JointStepResult

PLAN = {"lives": LIVES, "length": 4, "silent": ("a",)}


class Saves:
    """get_state and set_state of `plan`, which is all that changes in the forms of `Plan`."""

    def get_state(self):
        return {"plan": {"t": self.plan.t, "episode": self.plan.episode}, "agents": list(getattr(self, "agents", ()))}

    def set_state(self, state):
        vars(self.plan).update(state["plan"])
        if isinstance(self, ZooLives):
            self.agents = list(state["agents"])


class SavedJointLives(Saves, JointLives):
    """As a `JointEnv`."""

    def __init__(self):
        super().__init__(**PLAN)


class SavedZooLives(Saves, ZooLives):
    """As a PettingZoo environment."""

    def __init__(self):
        super().__init__(**PLAN)


class SavedMultiLives(Saves, MultiLives):
    """As an RLlib environment."""

    def __init__(self, config=None):
        super().__init__(PLAN)


class SavedTurns(Turns):
    """Two agents take turns; five of them stand open where a rollout is cut."""

    def __init__(self):
        super().__init__(length=11)
        self.t = 0

    def get_state(self):
        return self.t

    def set_state(self, state):
        self.t = state


class Walk(JointEnv):
    """Two agents walk at random, with a generator of the environment's own; paid what they see times their action."""

    def __init__(self, length=9):
        self.possible_agents = ["a", "b"]
        self.observation_spaces = {a: gym.spaces.Box(-np.inf, np.inf, (2,)) for a in self.possible_agents}
        self.action_spaces = {a: gym.spaces.Discrete(3) for a in self.possible_agents}
        self.length, self.rng = length, np.random.default_rng()
        self.t, self.places = 0, {}

    def see(self):
        for agent in self.possible_agents:  # into the same arrays, which a saved state must not share
            self.places[agent] += self.rng.standard_normal(2, np.float32)
        return self.places

    def reset_joint(self, seed=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.t, self.places = 0, {a: np.zeros(2, np.float32) for a in self.possible_agents}
        return self.see()

    def step_joint(self, actions):
        self.t += 1
        rewards = {a: float(self.places[a][0] * actions[a]) for a in self.possible_agents}
        return JointStepResult(rewards, self.see(), False, self.t == self.length, extras={"cost": self.t})


class CarelessWalk(Walk):
    """Its state shares arrays with it."""

    def get_state(self):
        return {"t": self.t, "places": self.places, "rng": self.rng.bit_generator.state}

    def set_state(self, state):
        self.t, self.places = state["t"], state["places"]
        self.rng.bit_generator.state = state["rng"]


class SavedWalk(CarelessWalk):
    """Its state is a copy."""

    def get_state(self):
        return copy.deepcopy(super().get_state())

    def set_state(self, state):
        super().set_state(copy.deepcopy(state))


class BrokenWalk(SavedWalk):
    """Its state cannot be taken back."""

    def set_state(self, state):
        self.t = -1000
        raise OSError("the simulator refuses")


class LiveWalk(SavedWalk):
    """Its state cannot be pickled."""

    def get_state(self):
        return {**super().get_state(), "rng": (x for x in ())}


class Alone(gym.Env):
    """A Gymnasium environment with a state; `forwarding` wraps it in a wrapper that has none."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self):
        self.t, self.rng = 0, np.random.default_rng()

    def _see(self):
        return self.rng.standard_normal(1, np.float32)

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.t = 0
        return self._see(), {}

    def step(self, action):
        self.t += 1
        return self._see(), float(action), False, self.t == 5, {}

    def get_state(self):
        return {"t": self.t, "rng": copy.deepcopy(self.rng.bit_generator.state)}

    def set_state(self, state):
        self.t = state["t"]
        self.rng.bit_generator.state = state["rng"]


class Together(Alone):
    """The same with two agents in Tuples, of whom the second ends after two steps."""

    observation_space = gym.spaces.Tuple([gym.spaces.Box(-np.inf, np.inf, (1,))] * 2)
    action_space = gym.spaces.Tuple([gym.spaces.Discrete(2)] * 2)

    def _see(self):
        return tuple(self.rng.standard_normal((2, 1), np.float32))

    def step(self, action):
        self.t += 1
        ends = [self.t == 5, self.t in (2, 5)]
        return self._see(), [float(a) for a in action], ends, [False, False], {}


class InTurn(AECEnv):
    """Two players in turn, of whom each sees how many steps have been played."""

    metadata = {"name": "in_turn", "render_modes": []}
    render_mode = None
    possible_agents = ["p0", "p1"]

    def observation_space(self, agent):
        return gym.spaces.Box(0, 99, (1,))

    def action_space(self, agent):
        return gym.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        self.agents = list(self.possible_agents)
        self.t = 0
        self._describe(0.0)

    def _describe(self, paid):
        self.rewards = {a: paid * (i + 1) for i, a in enumerate(self.agents)}
        self.terminations = dict.fromkeys(self.agents, self.t >= 7)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos = {a: {} for a in self.agents}
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.agent_selection = self.agents[self.t % len(self.agents)] if self.agents else None

    def observe(self, agent):
        return np.array([self.t], np.float32)

    def step(self, action):
        if action is None:
            self.agents = [a for a in self.agents if a != self.agent_selection]
            self._describe(0.0)
            return
        self.t += 1
        self._describe(float(action))

    def get_state(self):
        return {"t": self.t, "agents": list(self.agents)}

    def set_state(self, state):
        self.t, self.agents = state["t"], list(state["agents"])
        self._describe(0.0)


class Forwarding(ParallelEnv):
    """A wrapper that lets everything through and counts steps, which it does not save."""

    def __init__(self, env):
        self.env, self.steps = env, 0

    def __getattr__(self, name):
        return getattr(self.env, name)

    def observation_space(self, agent):
        return self.env.observation_space(agent)

    def action_space(self, agent):
        return self.env.action_space(agent)

    def reset(self, seed=None, options=None):
        self.steps = 0
        return self.env.reset(seed, options)

    def step(self, actions):
        self.steps += 1
        return self.env.step(actions)


class Unsaved(MultiAgentEnv):
    """An RLlib environment without a state, with random numbers of its own."""

    def __init__(self, config=None):
        super().__init__()
        self.walk = Walk()
        self.possible_agents = self.agents = self.walk.possible_agents
        self.observation_spaces, self.action_spaces = self.walk.observation_spaces, self.walk.action_spaces

    def reset(self, *, seed=None, options=None):
        return copy.deepcopy(self.walk.reset_joint(seed)), {}

    def step(self, actions):
        result = self.walk.step_joint(actions)
        return copy.deepcopy(result.observations), result.rewards, {"__all__": False}, {"__all__": result.truncated}, {}
