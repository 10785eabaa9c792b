"""Gymnasium environments with a tuple entry for each agent, as joint environments."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from tests.envs.helpers import assert_same
from thrust_rllib.envs import GymnasiumJointEnv, TupleJointEnv, make_joint_env


class Three(gym.Env):
    """Three agents with spaces of their own; `change` may alter what step returns at time t."""

    metadata = {"render_modes": ["rgb_array"]}

    def __init__(self, change=None, infos=False, first=None, render_mode=None):
        self.observation_space = spaces.Tuple((spaces.Box(0, 9, (2,)), spaces.Discrete(10), spaces.Box(0, 9, (3,))))
        self.action_space = spaces.Tuple(
            (spaces.Discrete(3, start=1), spaces.Box(1, 2, (1,)), spaces.MultiDiscrete([2, 2]))
        )
        self.change, self.infos, self.first, self.render_mode = change, infos, first, render_mode
        self.t, self.acted = 0, []

    def _see(self):
        return (np.full(2, self.t, np.float32), np.int64(self.t), np.full(3, self.x, np.float32))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.acted, self.x = 0, [], self.np_random.uniform(0, 9)
        return (self._see(), {}) if self.first is None else self.first(self)

    def step(self, actions):
        assert isinstance(actions, tuple)
        self.acted.append(actions)
        self.t += 1
        infos = [{"cost": i, "t": self.t} for i in range(3)] if self.infos else {"cost": 4, "t": self.t}
        result = (self._see(), [1.0, np.float64(2.0), 3], self.t == 4, False, infos)
        return result if self.change is None else self.change(self, *result)

    def render(self):
        return np.zeros((4, 5, 3), np.uint8)


AGENTS = ["agent_0", "agent_1", "agent_2"]
ACTIONS = {"agent_0": 2, "agent_1": np.ones(1, np.float32), "agent_2": np.array([1, 0])}


def test_spaces_and_an_episode():
    env = make_joint_env(Three)
    assert type(env) is TupleJointEnv and env.possible_agents == AGENTS
    assert [type(env.observation_spaces[a]) for a in AGENTS] == [spaces.Box, spaces.Discrete, spaces.Box]
    assert env.action_spaces["agent_0"] == spaces.Discrete(3, start=1)
    seen = env.reset_joint(3)
    assert all(env.observation_spaces[a].contains(seen[a]) for a in AGENTS)
    for t in range(1, 5):
        result = env.step_joint(ACTIONS)
        assert result.rewards == {"agent_0": 1, "agent_1": 2, "agent_2": 3} and result.over == (t == 4)
        assert result.terminated == dict.fromkeys(AGENTS, t == 4) and not any(result.truncated.values())
        assert list(result.observations) == AGENTS and result.observations["agent_1"] == t
    assert_same(env.unwrapped.acted[0], tuple(ACTIONS.values()))
    with pytest.raises(RuntimeError, match="Three: step_joint was called but the episode is over"):
        env.step_joint(ACTIONS)


def test_seeds():
    env = TupleJointEnv(Three)
    first = env.reset_joint(3)
    following = env.reset_joint()
    assert_same(first, env.reset_joint(3))
    assert_same(following, env.reset_joint())
    assert first["agent_2"][0] != following["agent_2"][0]


def test_agents_that_end_one_by_one():
    ends = {1: ([0, 1, 0], False), 2: ([0, 1, 0], [True, False, False]), 3: (np.array([0, 0, 1]), False)}

    def change(env, seen, rewards, terminated, truncated, infos):
        return seen, rewards, *ends[env.t], infos

    env = TupleJointEnv(Three(change))
    env.reset_joint()
    result = env.step_joint(ACTIONS)
    assert result.terminated == {"agent_0": False, "agent_1": True, "agent_2": False} and not result.over
    assert list(result.observations) == AGENTS  # the last one of agent_1
    left = {agent: ACTIONS[agent] for agent in ("agent_0", "agent_2")}
    result = env.step_joint(left)
    assert result.truncated == {"agent_0": True, "agent_2": False} and not result.over
    assert result.rewards == {"agent_0": 1, "agent_2": 3} and list(result.observations) == list(left)
    np.testing.assert_array_equal(env.unwrapped.acted[1][1], np.ones(1))  # an element of Box(1, 2) for the absent one
    with pytest.warns(UserWarning, match="Three paid rewards .* in one episode: 4 to 'agent_1', 1 to 'agent_0'"):
        result = env.step_joint({"agent_2": ACTIONS["agent_2"]})
    assert result.over and result.terminated == {"agent_2": True} and result.rewards == {"agent_2": 3}
    assert env.action_spaces["agent_0"].contains(env.unwrapped.acted[2][0])
    assert list(env.reset_joint()) == AGENTS and len(env.step_joint(ACTIONS).rewards) == 3


def test_extras():
    env = TupleJointEnv(Three, extras_from_infos=["cost", "t"])
    env.reset_joint()
    assert env.step_joint(ACTIONS).extras == {"cost": 4, "t": 1}
    env = TupleJointEnv(Three, extras_from_infos=["cost"], infos=True)
    env.reset_joint()
    assert env.step_joint(ACTIONS).extras == {"cost": {"agent_0": 0, "agent_1": 1, "agent_2": 2}}
    assert env.infos["agent_2"] == {"cost": 2, "t": 1}
    env = TupleJointEnv(Three, extras_from_infos=["price"])
    env.reset_joint()
    with pytest.raises(ValueError, match=r"the info of agent 'agent_0' has no 'price'.*it has \['cost', 't'\]"):
        env.step_joint(ACTIONS)


class OldRender(Three):
    def render(self, mode="human"):
        return np.ones((2, 2, 3), np.uint8) if mode == "rgb_array" else True


def test_images():
    env = TupleJointEnv(Three, render_mode="rgb_array")
    env.reset_joint()
    assert env.render().shape == (4, 5, 3) and env.render_mode == "rgb_array"
    assert TupleJointEnv(OldRender).render().shape == (2, 2, 3)


def test_gymnasium_wrappers_stay_and_its_checker_goes(monkeypatch):
    spec = gym.envs.registration.EnvSpec("Three-v0", Three, max_episode_steps=2)
    monkeypatch.setitem(gym.registry, "Three-v0", spec)
    env = make_joint_env("gymnasium:Three-v0", {"extras_from_infos": ["cost"]})
    env.reset_joint(1)
    assert env.step_joint(ACTIONS).truncated == dict.fromkeys(AGENTS, False)  # Gymnasium's checker would warn here
    result = env.step_joint(ACTIONS)
    assert result.over and result.truncated == dict.fromkeys(AGENTS, True) and result.extras == {"cost": 4}
    for made in (gym.wrappers.PassiveEnvChecker(Three()), gym.make("Three-v0")):
        env = TupleJointEnv(made)
        env.reset_joint()
        env.step_joint(ACTIONS)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda env, o, r, d, c, i: (o, r, d, i), "step returned 4 values; needed.*old gym package"),
        (lambda env, o, r, d, c, i: (o, 1.0, d, c, i), "3 agents, but rewards are 1.0; return as many"),
        (lambda env, o, r, d, c, i: (o[:2], r, d, c, i), "but observations are"),
        (lambda env, o, r, d, c, i: (o, r, [False], c, i), r"but terminated are \[False\]"),
        (lambda env, o, r, d, c, i: (o, r, d, (True, False), i), r"but truncated are \(True, False\)"),
    ],
)
def test_what_a_step_must_return(change, says):
    env = TupleJointEnv(Three(change))
    env.reset_joint()
    with pytest.raises(TypeError, match=f"^Three: .*{says}"):
        env.step_joint(ACTIONS)


def test_other_errors():
    with pytest.raises(TypeError, match="Three: reset returned no pair .observations, info."):
        TupleJointEnv(Three(first=lambda env: env._see())).reset_joint()
    with pytest.raises(TypeError, match="but observations are {}"):
        TupleJointEnv(Three(first=lambda env: ({}, {}))).reset_joint()
    with pytest.raises(TypeError, match="CartPoleEnv has the spaces .*needed: Tuples of the same length"):
        TupleJointEnv("CartPole-v1")
    with pytest.raises(TypeError, match="TupleJointEnv got a dict; needed: a gymnasium.Env"):
        TupleJointEnv(dict)
    with pytest.raises(TypeError, match="an environment and settings for one, \\['infos'\\]"):
        TupleJointEnv(Three(), infos=True)
    env = TupleJointEnv(Three)
    env.reset_joint()
    with pytest.raises(ValueError, match=r"Three: no action for \['agent_1', 'agent_2'\]"):
        env.step_joint({"agent_0": 1})
    assert type(make_joint_env("CartPole-v1")) is GymnasiumJointEnv
