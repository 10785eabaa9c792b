"""PettingZoo and RLlib environments as joint environments, and the way back."""

import os
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
from mpe2 import simple_speaker_listener_v4, simple_spread_v3
from pettingzoo import ParallelEnv
from pettingzoo.test import parallel_api_test, parallel_seed_test
from ray.rllib.examples.envs.classes.multi_agent import MultiAgentCartPole

from tests.envs.helpers import Pair, assert_same, play
from thrust_rllib.envs import (
    BucketBrigade,
    JointEnvMultiAgentEnv,
    JointEnvParallel,
    PettingZooJointEnv,
    RLlibJointEnv,
    SyncVectorJointEnv,
    list_envs,
    make_joint_env,
    make_vector_env,
)

BUILT_IN = [name for name in list_envs() if name not in ("debug/faulty", "debug/masked_actions")]


@pytest.mark.parametrize("name", [*BUILT_IN, "CartPole-v1", "pettingzoo:mpe2.simple_speaker_listener_v4"])
def test_parallel_api(name):
    parallel_api_test(JointEnvParallel(name), num_cycles=60)
    parallel_seed_test(lambda: JointEnvParallel(name))


@pytest.mark.parametrize(
    "inner",
    [
        lambda: "gymnasium:rware:rware-tiny-2ag-v2",
        lambda: "gymnasium:lbforaging:Foraging-8x8-2p-2f-coop-v3",
        lambda: RLlibJointEnv(MultiAgentCartPole({"num_agents": 2})),  # one falls before the other
    ],
    ids=["rware", "lbforaging", "rllib"],
)
def test_parallel_api_around_other_wrappers(inner):
    parallel_api_test(JointEnvParallel(inner()), num_cycles=40)
    parallel_seed_test(lambda: JointEnvParallel(inner()), num_cycles=5)


def test_parallel_api_with_masks():
    class Legal(JointEnvParallel):  # the API test samples without looking at the mask in its first step
        def step(self, actions):
            masks = {a: seen["action_mask"] for a, seen in self.last.items()}
            actions = {a: x if masks[a][x] else int(masks[a].argmax()) for a, x in actions.items()}
            self.last, *rest = super().step(actions)
            return self.last, *rest

        def reset(self, seed=None, options=None):
            self.last, infos = super().reset(seed)
            return self.last, infos

    parallel_api_test(Legal("debug/masked_actions"), num_cycles=40)
    parallel_seed_test(lambda: Legal("debug/masked_actions"))


@pytest.mark.parametrize("name", [*BUILT_IN, "debug/masked_actions", "CartPole-v1", "pettingzoo:simple_spread_v3"])
def test_round_trips(name):
    log = play(make_joint_env(name), 3, 60)
    assert_same(log, play(PettingZooJointEnv(JointEnvParallel(name)), 3, 60))
    assert_same(log, play(RLlibJointEnv(JointEnvMultiAgentEnv({"env": name})), 3, 60))
    around = RLlibJointEnv(JointEnvMultiAgentEnv(PettingZooJointEnv(JointEnvParallel(make_joint_env(name)))))
    assert_same(log, play(around, 3, 60))


def test_pettingzoo_environment_and_its_copy_from_around_agree():
    original, env = simple_spread_v3.parallel_env(max_cycles=6), make_joint_env("pettingzoo:mpe2.simple_spread_v3")
    first, _ = original.reset(seed=4)
    assert_same(first, env.reset_joint(4))
    for step in range(6):
        actions = dict.fromkeys(original.agents, step % 5)
        seen, rewards, *_ = original.step(actions)
        result = env.step_joint(actions)
        assert_same((seen, rewards), (dict(result.observations), dict(result.rewards)))
    np.testing.assert_array_equal(env.state(), original.state())
    env.close()


def test_pettingzoo_in_a_vector():
    env = make_vector_env("pettingzoo:mpe2.simple_speaker_listener_v4", {"max_cycles": 3}, 2)
    assert env.possible_agents == ["speaker_0", "listener_0"] and not env.stacked
    first = env.reset_joint([1, 1])
    np.testing.assert_array_equal(first["listener_0"][0], first["listener_0"][1])
    np.testing.assert_array_equal(first["listener_0"], env.reset_joint([1, 1])["listener_0"])
    actions = {agent: np.zeros(2, dtype=int) for agent in env.possible_agents}
    results = [env.step_joint(actions) for _ in range(3)]
    assert results[2].truncated.all() and not results[1].truncated.any()
    assert results[2].final_observations["listener_0"].shape == (2, 11)


def test_rendering_and_spaces_pass_through():
    env = PettingZooJointEnv(simple_speaker_listener_v4.parallel_env, render_mode="rgb_array")
    env.reset_joint(0)
    assert env.render().ndim == 3 and env.render_mode == "rgb_array"
    assert env.state_space == env.unwrapped.state_space
    env.close()
    picture = JointEnvParallel(BucketBrigade, scenario="easy")
    picture.reset(0)
    assert picture.render().dtype == np.uint8
    assert picture.state_space.contains(picture.state())


class Zoo(ParallelEnv):
    """Two agents; `script[t]` gives terminations and truncations of step t."""

    metadata = {"name": "zoo", "render_modes": []}

    def __init__(self, script=(), late=False, masks=False):
        self.possible_agents = ["b", "a"]
        self.script, self.late, self.masks = script, late, masks
        self.agents = []

    def observation_space(self, agent):
        return gym.spaces.Box(0, 1, (2 if agent == "b" else 3,))

    def action_space(self, agent):
        return gym.spaces.Discrete(3)

    def _see(self):
        return {a: np.full(self.observation_space(a).shape, 0.5, np.float32) for a in self.agents}

    def _infos(self):
        mask = {"action_mask": np.array([0, 1, 0], dtype=np.int64)}
        return {a: dict(mask, cost=2.0) if self.masks and a == "a" else {"cost": 1.0} for a in self.agents}

    def reset(self, seed=None, options=None):
        self.agents, self.t = (["b"] if self.late else ["b", "a"]), 0
        return self._see(), self._infos()

    def step(self, actions):
        ends = self.script[self.t] if self.t < len(self.script) else ({}, {})
        self.t += 1
        terminated, truncated = ({a: kind.get(a, False) for a in self.agents} for kind in ends)
        out = self._see(), dict.fromkeys(self.agents, 1.0), terminated, truncated, self._infos()
        self.agents = [a for a in self.agents if not (terminated[a] or truncated[a])]
        return out


ZERO = {"b": np.zeros(2, dtype=int), "a": np.zeros(2, dtype=int)}


def test_one_terminates_and_one_is_truncated_in_the_last_step():
    env = make_vector_env(lambda: Zoo([({}, {}), ({"b": True}, {"a": True})]), {}, 2)
    env.reset_joint()
    assert env.step_joint(ZERO).final_observations is None
    result = env.step_joint(ZERO)
    assert result.terminated.tolist() == [[True, True], [False, False]]
    assert result.truncated.tolist() == [[False, False], [True, True]]
    assert result.final_observations is not None
    assert env.step_joint(ZERO).final_observations is None  # a new episode runs


def test_agents_that_leave_early_or_come_late():
    env = make_vector_env(lambda: Zoo([({"b": True}, {})]), {}, 2)
    env.reset_joint()
    assert env.step_joint(ZERO).terminated.tolist() == [[True, True], [False, False]]
    assert env.step_joint(ZERO).present.tolist() == [[False, False], [True, True]]
    env = make_vector_env(Zoo, {"late": True}, 2)
    assert [space.shape for space in env.observation_spaces.values()] == [(2,), (3,)]  # of all possible agents
    env.reset_joint()
    assert env.acts_next().tolist() == [[True, True], [False, False]]


def test_masks_in_infos_become_part_of_the_observation():
    env = make_vector_env(Zoo, {"masks": True}, 2)
    space = env.observation_spaces["a"]
    assert space["action_mask"].shape == (3,) and env.observation_spaces["b"] == gym.spaces.Box(0, 1, (2,))
    seen = env.reset_joint()
    assert seen["a"]["action_mask"].tolist() == [[0, 1, 0]] * 2 and seen["a"]["observation"].shape == (2, 3)
    seen = env.step_joint(ZERO).observations
    assert seen["a"]["action_mask"].dtype == np.int8 and space.contains({k: v[0] for k, v in seen["a"].items()})


class Masks(Zoo):
    """Agent "b" has two categories to choose, and masks in its infos; "a" has an observation with a mask in it."""

    def observation_space(self, agent):
        if agent == "b":
            return super().observation_space(agent)
        mask = gym.spaces.Box(0, 1, (3,), np.int8)
        return gym.spaces.Dict(
            {"observations": gym.spaces.Box(0, 1, (3,)), "goal": gym.spaces.Discrete(2), "action_mask": mask}
        )

    def action_space(self, agent):
        return gym.spaces.MultiDiscrete([2, 3]) if agent == "b" else gym.spaces.Discrete(3)

    def _see(self):
        seen = {"b": np.zeros(2, np.float32)}
        seen["a"] = {"observations": np.zeros(3, np.float32), "goal": 1, "action_mask": np.array([1, 0, 0], np.int8)}
        return seen

    def _infos(self):
        return {a: {"action_mask": np.array([1, 0, 0, 1, 0] if a == "b" else [0, 1, 0])} for a in self.agents}


def test_an_observation_with_a_mask_stays_as_it_is_and_two_categories_can_be_masked():
    env = make_vector_env(Masks, {}, 2)
    assert env.observation_spaces["a"] == Masks().observation_space("a")
    assert env.observation_spaces["b"]["action_mask"].shape == (5,)
    seen = env.reset_joint()
    assert seen["a"]["action_mask"].tolist() == [[1, 0, 0]] * 2 and seen["a"]["goal"].tolist() == [1, 1]
    assert seen["b"]["action_mask"].tolist() == [[1, 0, 0, 1, 0]] * 2 and seen["b"]["observation"].shape == (2, 2)


def test_extras_from_infos():
    env = SyncVectorJointEnv(lambda: PettingZooJointEnv(Zoo, masks=True, extras_from_infos=["cost"]), 2)
    env.reset_joint()
    assert env.step_joint(ZERO).extras["cost"].tolist() == [[1, 1], [2, 2]]
    env = PettingZooJointEnv(Zoo, extras_from_infos=["danger"])
    env.reset_joint()
    with pytest.raises(ValueError, match=r"info of agent 'b' has no 'danger'.*\['cost'\]"):
        env.step_joint({"b": 0, "a": 0})


def test_extras_go_into_infos():
    def change(env, r):
        r.extras = {"cost": {"a0": 1.0, "a1": 2.0}, "time": env.t}
        return r

    parallel = JointEnvParallel(Pair(change=change))
    parallel.reset(1)
    assert parallel.step({"a0": 0, "a1": 0})[4] == {"a0": {"cost": 1.0, "time": 1}, "a1": {"cost": 2.0, "time": 1}}
    rllib = JointEnvMultiAgentEnv(Pair(change=change))
    rllib.reset(seed=1)
    assert rllib.step({"a0": 0, "a1": 0})[4]["a1"] == {"cost": 2.0, "time": 1}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: PettingZooJointEnv(3), "got a int; needed: a ParallelEnv"),
        (lambda: PettingZooJointEnv(dict), "got a dict; needed: a ParallelEnv. Turn-based"),
        (lambda: PettingZooJointEnv(Zoo(), late=True), r"settings for one, \['late'\]"),
        (lambda: JointEnvParallel(Pair(), length=3), r"settings for one, \['length'\]"),
        (lambda: RLlibJointEnv(Pair()), "got a Pair; needed: an RLlib MultiAgentEnv"),
    ],
)
def test_wrong_type(make, says):
    with pytest.raises(TypeError, match=says):
        make()


ORDER = """
import gymnasium as gym, numpy as np
from ray.rllib.env.multi_agent_env import MultiAgentEnv
from mpe2 import simple_spread_v3
from thrust_rllib.envs import PettingZooJointEnv, RLlibJointEnv
class Old(MultiAgentEnv):
    def __init__(self):
        self._agent_ids = {"wolf", "sheep", "dog", "cat", "owl"}
        self.observation_space = self.action_space = gym.spaces.Discrete(2)
        super().__init__()
class New(Old):
    def __init__(self):
        super().__init__()
        self._agent_ids, self.possible_agents = set(), ["wolf", "cat"]
print(RLlibJointEnv(Old()).possible_agents, RLlibJointEnv(New()).possible_agents,
      PettingZooJointEnv(simple_spread_v3.parallel_env).possible_agents)
"""


def test_agent_order_does_not_depend_on_the_hash_seed():
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", ORDER],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in (0, 1, 2)
    ]
    seen = {process.communicate(timeout=120)[0] for process in runs}
    assert seen == {"['cat', 'dog', 'owl', 'sheep', 'wolf'] ['wolf', 'cat'] ['agent_0', 'agent_1', 'agent_2']\n"}
