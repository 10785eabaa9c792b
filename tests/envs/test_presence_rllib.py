"""Agents that join late, end early and wait: joint environments for RLlib, and the way back."""

import gymnasium as gym
import numpy as np
import pytest
from ray.rllib.env.multi_agent_env import MultiAgentEnv

from tests.envs.lives import FORMS, LIVES, JointLives, MultiLives, Turns, played
from tests.support import tiny_config
from thrust_rllib.envs import JointEnvMultiAgentEnv, RLlibJointEnv, SyncVectorJointEnv, make_joint_env, make_vector_env
from thrust_rllib.episode_runner import JointEpisodeRunner


@pytest.mark.parametrize("form", FORMS)
def test_multi_agent_env_with_agents_that_come_and_go(form):
    env = JointEnvMultiAgentEnv(make_joint_env(FORMS[form], {"lives": LIVES, "length": 4}))
    seen, infos = env.reset(seed=0)
    assert list(seen) == ["a", "c"] == list(infos) == env.agents
    seen, rewards, terminateds, truncateds, infos = env.step({"a": 0, "c": 0})
    assert list(seen) == ["a", "b", "c"] == list(infos) and rewards == {"a": 1, "c": 21}
    assert terminateds == truncateds == {"a": False, "c": False, "__all__": False}
    seen, rewards, terminateds, truncateds, _ = env.step({"a": 0, "b": 0, "c": 0})
    assert list(seen) == ["a", "b", "c"] and rewards == {"a": 2, "b": 12, "c": 22}
    assert terminateds == {"a": True, "b": False, "c": False, "__all__": False} and env.agents == ["b", "c"]
    seen, rewards, terminateds, truncateds, infos = env.step({"b": 0, "c": 0})
    assert list(seen) == ["b", "c"] and truncateds == {"b": True, "c": False, "__all__": False}
    seen, rewards, terminateds, truncateds, infos = env.step({"c": 0})
    # All agents that lived were truncated.
    assert list(seen) == ["c"] and truncateds == {"c": True, "__all__": True}
    assert terminateds == {"c": False, "__all__": False} and env.agents == []


def test_multi_agent_env_without_last_observations_and_with_mixed_ends():
    lives = {"a": (0, 1, "terminated"), "b": (0, 1, "truncated")}
    env = JointEnvMultiAgentEnv(JointLives(lives=lives, length=2, silent=["a"]))
    env.reset()
    env.step({"a": 0, "b": 0})
    seen, rewards, terminateds, truncateds, infos = env.step({"a": 0, "b": 0})
    assert list(seen) == ["b"] == list(infos) and rewards == {"a": 2, "b": 12}
    assert terminateds == {"a": True, "b": False, "__all__": True}
    assert truncateds == {"a": False, "b": True, "__all__": False}


def test_multi_agent_env_tells_the_extras_of_agents_that_are_gone():
    class Costly(JointLives):
        def step_joint(self, actions):
            result = super().step_joint(actions)
            result.extras = {"cost": {agent: 1.0 for agent in actions}, "time": self.plan.t}
            return result

    env = JointEnvMultiAgentEnv(Costly(lives={**LIVES, "a": (0, 0, "terminated")}, length=4, silent=["a"]))
    env.reset()
    infos = env.step({"a": 0, "c": 0})[4]
    assert infos["c"] == {"cost": 1.0, "time": 1} and infos["b"] == {"time": 1} and "a" not in infos
    assert infos["__common__"] == {"extras": {"cost": {"a": 1.0, "c": 1.0}, "time": 1}}


def test_multi_agent_env_of_turns():
    env = JointEnvMultiAgentEnv(Turns(3))
    assert list(env.reset()[0]) == ["a0"]
    seen, rewards, terminateds, _, infos = env.step({"a0": 0})
    assert (
        list(seen) == ["a1"] == list(infos) and rewards == {"a0": 1} and terminateds == {"a0": False, "__all__": False}
    )
    assert env.agents == ["a0", "a1"]
    env.step({"a1": 0})
    seen, rewards, terminateds, truncateds, _ = env.step({"a0": 0})
    assert seen == {} and rewards == {"a0": 1}
    assert terminateds == {"a0": True, "a1": True, "__all__": True}  # a1 waited
    assert truncateds == {"a0": False, "a1": False, "__all__": False}


def test_rllib_round_trip_with_agents_that_come_and_go():
    direct = make_vector_env(JointLives, {"lives": LIVES, "length": 4}, 2)
    around = SyncVectorJointEnv(lambda: RLlibJointEnv(JointEnvMultiAgentEnv(JointLives(lives=LIVES, length=4))), 2)
    np.testing.assert_array_equal(direct.reset_joint(), around.reset_joint())
    for one, other in zip(played(direct, 9), played(around, 9), strict=True):
        for name in ("rewards", "observations", "terminated", "truncated"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), name)
        assert (one.present is None) == (other.present is None)
        if one.present is not None:
            np.testing.assert_array_equal(one.present, other.present)
            np.testing.assert_array_equal(one.over, other.over)


@pytest.mark.parametrize(
    "ends, expected",
    [(({"__all__": True}, {}), [1, 0]), (({"__all__": True}, {"y": True}), [0, 1]), (({}, {"__all__": True}), [0, 1])],
)
def test_all_ends_agents_that_wait(ends, expected):
    class Wait(MultiAgentEnv):
        """x acts in step 1, y in step 2, in which the episode ends."""

        def __init__(self, config=None):
            self.possible_agents = ["x", "y"]
            self.observation_space, self.action_space = gym.spaces.Box(0, 1, (1,)), gym.spaces.Discrete(2)
            super().__init__()

        def reset(self, *, seed=None, options=None):
            self.t = 0
            return {"x": np.zeros(1, np.float32)}, {}

        def step(self, action_dict):
            self.t += 1
            if self.t == 1:
                return (
                    {"y": np.zeros(1, np.float32)},
                    {"x": 0.0},
                    {"__all__": False},
                    {"__all__": False},
                    {"y": {"note": 1}},
                )
            return {"y": np.zeros(1, np.float32)}, {"y": 1.0}, *ends, {}

    env = RLlibJointEnv(Wait())
    env.reset_joint()
    env.step_joint({"x": 0})
    assert env.infos == {"y": {"note": 1}}
    result = env.step_joint({"y": 0})
    assert [result.terminated["y"], result.truncated["y"]] == [bool(x) for x in expected]
    assert result.terminated["x"] or result.truncated["x"]
    assert result.over is True


@pytest.mark.parametrize("flag", ["no", "", 1.5], ids=repr)
@pytest.mark.parametrize("place", ["terminateds", "truncateds"])
def test_flags_that_are_no_bools_are_refused(place, flag):
    class Texts(MultiLives):
        def step(self, action_dict):
            *rest, _, _, infos = super().step(action_dict)
            flags = {"terminateds": {"c": True}, "truncateds": {}}
            return *rest, *{**flags, place: {"a": flag, "c": True}}.values(), infos

    env = RLlibJointEnv(Texts({"lives": LIVES, "length": 4}))
    env.reset_joint()
    with pytest.raises(TypeError, match=f"Texts: {place} of agent 'a' is {flag!r}; return a bool"):
        env.step_joint({"a": 0, "c": 0})


class CutOff(Turns):
    """The game is cut off in its third step; the flags and the last observation are the mover's alone."""

    takes_turns = True

    def __init__(self):
        super().__init__(3)

    def step_joint(self, actions):
        result = super().step_joint(actions)
        if self.t == self.length:
            (mover,) = actions
            result.observations = {mover: np.array([self.t], np.float32)}
            result.terminated, result.truncated, result.over = {mover: False}, {mover: True}, True
        return result


def test_who_waits_where_the_mover_is_truncated_needs_a_last_observation():
    config = tiny_config(CutOff, num_envs=1)
    config.validate()
    runner = JointEpisodeRunner(config=config, worker_index=0)
    with pytest.raises(ValueError, match="agent 'a1' was truncated without a last observation.*return one, or let it"):
        runner.sample(num_episodes=1)
