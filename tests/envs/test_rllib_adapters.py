"""RLlib environments as joint environments, and the way back: ends, agents and spaces."""

import gymnasium as gym
import numpy as np
import pytest
from ray.rllib.env.multi_agent_env import MultiAgentEnv

from tests.envs.helpers import Pair
from tests.support import make_runner, tiny_config
from thrust_rllib.envs import JointEnvMultiAgentEnv, JointStepResult, make_joint_env, make_vector_env


class Multi(MultiAgentEnv):
    """An RLlib environment whose second step returns what the config says."""

    def __init__(self, config=None):
        config = config or {}
        self.possible_agents = config.get("agents", ["y", "x"])
        self.observation_space = gym.spaces.Box(0, 1, (2,))
        self.action_space = gym.spaces.Discrete(2)
        self.config, self.t = config, 0
        super().__init__()

    def _see(self):
        return {a: np.zeros(2, np.float32) for a in self.possible_agents}

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self._see(), {}

    def step(self, action_dict):
        self.t += 1
        rewards = dict.fromkeys(self.possible_agents, 1.0)
        terminateds, truncateds = {"__all__": False}, {"__all__": False}
        if self.t == 2:
            terminateds, truncateds = self.config.get("ends", (terminateds, truncateds))
            rewards = self.config.get("rewards", rewards)
        return self._see(), rewards, terminateds, truncateds, {}


@pytest.mark.parametrize(
    ("terminateds", "truncateds", "expected"),
    [
        ({"__all__": True}, {}, ("terminated", "terminated")),
        ({"__all__": True}, {"__all__": False}, ("terminated", "terminated")),
        ({"__all__": False}, {"__all__": True}, ("truncated", "truncated")),
        ({"y": True, "__all__": True}, {"x": True, "__all__": False}, ("terminated", "truncated")),
        ({"y": True, "__all__": False}, {"x": True, "__all__": True}, ("terminated", "truncated")),
        ({"y": True}, {"x": True}, ("terminated", "truncated")),  # no "__all__" at all
        ({"y": True, "x": True, "__all__": False}, {}, ("terminated", "terminated")),
        ({"__all__": True}, {"__all__": True}, ("terminated", "terminated")),
    ],
)
def test_all_of_rllib(terminateds, truncateds, expected):
    env = make_vector_env(Multi, {"ends": (terminateds, truncateds)}, 2)
    assert env.possible_agents == ["y", "x"]
    env.reset_joint()
    actions = np.zeros((2, 2), dtype=int)
    assert env.step_joint(actions).final_observations is None
    result = env.step_joint(actions)
    assert result.terminated[:, 1].tolist() == [kind == "terminated" for kind in expected]
    assert result.truncated[:, 1].tolist() == [kind == "truncated" for kind in expected]


def test_rllib_errors_and_agent_order():
    env = make_vector_env(Multi, {"rewards": {"y": 1.0}}, 2)
    env.reset_joint()
    env.step_joint(np.zeros((2, 2), dtype=int))
    with pytest.raises(ValueError, match="Multi, environment 0, step 2 .*rewards have no entry for agent 'x'"):
        env.step_joint(np.zeros((2, 2), dtype=int))
    env = make_vector_env(Multi, {"ends": ({"y": True, "__all__": False}, {})}, 1)
    env.reset_joint()
    env.step_joint(np.zeros((2, 1), dtype=int))
    assert env.step_joint(np.zeros((2, 1), dtype=int)).terminated.tolist() == [[True], [False]]
    with pytest.raises(ValueError, match="Multi, environment 0, step 3 .*entry .* for agent 'y', which ended earlier"):
        env.step_joint(np.zeros((2, 1), dtype=int))
    assert make_vector_env(Multi, {"agents": [1, 0]}, 1).possible_agents == [1, 0]
    with pytest.raises(ValueError, match="Multi names no agents; set self.possible_agents"):
        make_joint_env(Multi, {"agents": []})
    with pytest.raises(ValueError, match='got a dict without "env"'):
        JointEnvMultiAgentEnv({"scenario": "easy"})


def test_missing_space_of_rllib():
    class NoSpace(Multi):
        def __init__(self, config=None):
            super().__init__(config)
            self.action_spaces = {"y": gym.spaces.Discrete(2)}

    with pytest.raises(ValueError, match="NoSpace has no action space for agent 'x'"):
        make_joint_env(NoSpace)


def test_joint_env_for_rllib_sets_all():
    cases = [
        ((False, False), (False, False)),
        ((True, False), (True, False)),
        ((False, True), (False, True)),
        (({"a0": True, "a1": False}, {"a0": False, "a1": True}), (True, False)),
    ]
    for flags, (terminated, truncated) in cases:
        env = JointEnvMultiAgentEnv(Pair(change=lambda _, r, f=flags: JointStepResult(r.rewards, r.observations, *f)))
        env.reset(seed=0)
        _, _, terminateds, truncateds, infos = env.step({"a0": 0, "a1": 1})
        assert (terminateds["__all__"], truncateds["__all__"]) == (terminated, truncated)
        assert set(terminateds) == set(truncateds) == {"a0", "a1", "__all__"} and set(infos) == {"a0", "a1"}
        if isinstance(flags[0], dict):
            assert truncateds["a1"] and not truncateds["a0"] and not terminateds["a1"]


def test_rllibs_convention_for_action_masks_is_honoured():
    class MaskedMulti(Multi):
        def __init__(self, config=None):
            super().__init__(config)
            mask = gym.spaces.Box(0, 1, (2,), np.float32)
            self.observation_space = gym.spaces.Dict({"observations": gym.spaces.Box(0, 1, (3,)), "action_mask": mask})
            self.taken = []

        def _see(self):
            seen = {"observations": np.zeros(3, np.float32), "action_mask": np.array([0, 1], np.float32)}
            return {agent: dict(seen) for agent in self.possible_agents}

        def step(self, action_dict):
            self.taken += action_dict.values()
            return super().step(action_dict)

    runner = make_runner(tiny_config(MaskedMulti))
    (batch,) = runner.sample(num_timesteps=40)
    assert all(set(env.unwrapped.taken) == {1} for env in runner.env.envs)
    assert all(stream.obs.shape[2:] == (3,) and (stream.actions == 1).all() for stream in batch.streams())
