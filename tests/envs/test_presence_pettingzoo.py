"""Agents that join late and end early: PettingZoo environments as joint ones, and the way back."""

import copy

import numpy as np
import pytest
from mpe2 import simple_spread_v3
from pettingzoo.butterfly import cooperative_pong_v6, knights_archers_zombies_v11
from pettingzoo.test import parallel_api_test, parallel_seed_test
from pettingzoo.test.example_envs import generated_agents_parallel_v0

from tests.envs.helpers import Pair
from tests.envs.lives import FORMS, LIVES, JointLives, Turns, ZooLives, played
from thrust_rllib.envs import JointEnvParallel, PettingZooJointEnv, make_joint_env, make_vector_env


def test_pettingzoo_that_has_no_possible_agents_or_a_space_for_the_late():
    with pytest.raises(ValueError, match="has no possible_agents; set it"):
        PettingZooJointEnv(generated_agents_parallel_v0.parallel_env)

    class Forgets(ZooLives):
        def action_space(self, agent):
            return {"a": 1, "c": 1}[agent]

    with pytest.raises(ValueError, match="Forgets has no action space for agent 'b'; .*also those that come late"):
        PettingZooJointEnv(Forgets, lives=LIVES, length=4)


def test_infos_and_render_of_pettingzoo():
    env = PettingZooJointEnv(ZooLives, lives=LIVES, length=4)
    env.reset_joint(0)
    assert env.infos == {"a": {"kind": "reset"}, "c": {"kind": "reset"}}
    env.step_joint({"a": 0, "c": 0})
    assert env.infos["c"] == {"kind": "step"}
    with pytest.raises(
        ValueError, match='ZooLives was made without a render mode; make it with render_mode="rgb_array"'
    ):
        env.render()
    drawn = PettingZooJointEnv(simple_spread_v3.parallel_env, render_mode="rgb_array")
    drawn.reset_joint(0)
    assert drawn.render().dtype == np.uint8 and drawn.render().ndim == 3
    drawn.close()


def test_masks_of_agents_that_come_late():
    class Masks(ZooLives):
        def step(self, actions):
            *rest, infos = super().step(actions)
            return *rest, {a: {"action_mask": np.array([0, 1])} for a in self.agents}

        def reset(self, seed=None, options=None):
            seen, _ = super().reset()
            return seen, {a: {"action_mask": np.array([0, 1])} for a in seen}

    env = make_vector_env(Masks, {"lives": LIVES, "length": 4}, 1)
    seen = env.reset_joint()
    assert [seen[a]["action_mask"].tolist() for a in "abc"] == [[[0, 1]], [[1, 1]], [[0, 1]]]
    result = env.step_joint({a: np.ones(1, dtype=int) for a in "abc"})
    assert result.observations["b"]["action_mask"].tolist() == [[0, 1]]
    results = [env.step_joint({a: np.ones(1, dtype=int) for a in "abc"}) for _ in range(2)]
    assert results[1].observations["b"]["action_mask"].tolist() == [[1, 1]]


@pytest.mark.parametrize(
    "make",
    [
        lambda: knights_archers_zombies_v11.parallel_env(max_cycles=60),
        lambda: cooperative_pong_v6.parallel_env(max_cycles=8, render_mode="rgb_array"),
        lambda: simple_spread_v3.parallel_env(max_cycles=8),
    ],
    ids=["knights_archers_zombies", "cooperative_pong", "simple_spread"],
)
def test_third_party_environments(make):
    around = JointEnvParallel(PettingZooJointEnv(make()))
    parallel_api_test(around, num_cycles=40)
    around.close()
    parallel_seed_test(lambda: JointEnvParallel(PettingZooJointEnv(make())), num_cycles=5)
    env = PettingZooJointEnv(make())
    first, again = copy.deepcopy(env.reset_joint(7)), env.reset_joint(7)
    for agent in first:
        np.testing.assert_array_equal(first[agent], again[agent])
    env.close()


def test_an_agent_of_a_third_party_environment_dies_early():
    env = make_vector_env(lambda: knights_archers_zombies_v11.parallel_env(max_cycles=400), {}, 1)
    env.reset_joint([0])
    died = False
    for _ in range(420):
        (result,) = played(env, 1)
        died |= result.present is not None and not result.present.all()
        assert np.isfinite(result.rewards).all()
    env.close()
    assert died


@pytest.mark.parametrize("form", FORMS)
def test_parallel_contract_with_agents_that_come_and_go(form):
    def make():
        return JointEnvParallel(make_joint_env(FORMS[form], {"lives": LIVES, "length": 4}))

    parallel_api_test(make(), num_cycles=20)
    parallel_seed_test(make, num_cycles=4)
    env = make()
    assert set(env.reset(seed=0)[0]) == {"a", "c"} == set(env.agents) and env.agents == ["a", "c"]
    seen, rewards, terminated, truncated, infos = env.step({"a": 0, "c": 0})
    assert env.agents == ["a", "b", "c"] == list(seen) == list(infos) and rewards == {"a": 1, "b": 0, "c": 21}
    assert terminated == truncated == {"a": False, "b": False, "c": False}
    seen, rewards, terminated, truncated, _ = env.step({"a": 0, "b": 0, "c": 0})
    assert env.agents == ["b", "c"] and terminated == {"a": True, "b": False, "c": False} and "a" in seen
    seen, rewards, terminated, truncated, _ = env.step({"b": 0, "c": 0})
    assert env.agents == ["c"] and truncated == {"b": True, "c": False} and set(rewards) == {"b", "c"} == set(seen)
    env.step({"c": 0})
    assert env.agents == [] and env.step({}) == ({}, {}, {}, {}, {})


def test_what_a_parallel_env_cannot_be():
    env = JointEnvParallel(Turns())
    env.reset()
    with pytest.raises(
        ValueError, match=r"Turns, step 1 of its episode: agents \['a0'\] wait; in a PettingZoo Parallel"
    ):
        env.step({"a0": 0})
    env = JointEnvParallel(JointLives(lives={"a0": (0, 0, "terminated"), "a1": (2, 3, "terminated")}, length=4))
    env.reset()
    with pytest.raises(ValueError, match="step 1 .*nobody acts, but the episode goes on"):
        env.step({"a0": 0})
    with pytest.raises(ValueError, match="actions have no entry for agent 'a1'"):
        env = JointEnvParallel(Pair())
        env.reset()
        env.step({"a0": 0})
