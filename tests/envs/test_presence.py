"""Agents that join late, end early and wait: the contract of `JointEnv`, and adapters both ways."""

import copy

import gymnasium as gym
import numpy as np
import pytest
from mpe2 import simple_spread_v3
from pettingzoo.butterfly import cooperative_pong_v6, knights_archers_zombies_v11
from pettingzoo.test import parallel_api_test, parallel_seed_test
from pettingzoo.test.example_envs import generated_agents_parallel_v0
from ray.rllib.env.multi_agent_env import MultiAgentEnv

from tests.envs.helpers import Pair
from tests.envs.lives import FORMS, JointLives, MultiLives, ZooLives
from thrust_rllib.envs import (
    JointEnv,
    JointEnvMultiAgentEnv,
    JointEnvParallel,
    JointStepResult,
    PettingZooJointEnv,
    RLlibJointEnv,
    SingleJointEnv,
    SyncVectorJointEnv,
    VectorJointEnv,
    episode_over,
    make_joint_env,
    make_vector_env,
)
from thrust_rllib.envs.spaces import element_nearest_zero

# "a" is terminated in step 1 of 4, "b" comes in step 1 and is truncated in step 2, "c" is there all the time.
LIVES = {"a": (0, 1, "terminated"), "b": (1, 2, "truncated"), "c": (0, 3, "truncated")}
PRESENT = [[1, 1, 0, 0], [0, 1, 1, 0], [1, 1, 1, 1]]


def played(env, steps):
    """What `steps` steps of a vector environment return."""
    actions = np.zeros((len(env.possible_agents), env.num_envs), dtype=int)
    return [env.step_joint(actions) for _ in range(steps)]


# ------------------------------------------------------------------------------------------ the vector form


@pytest.mark.parametrize("form", FORMS)
def test_present_rewards_flags_and_observations(form):
    env = make_vector_env(FORMS[form], {"lives": LIVES, "length": 4}, 2)
    first = env.reset_joint([0, 1])
    assert first[:, 0].tolist() == [[0, 0, 0], [0, 0, 0], [0, 0, 2]]  # b is not born: zeros
    assert env.acts_next().tolist() == [[True, True], [False, False], [True, True]]
    results = played(env, 4)
    for e in range(2):
        present = [(np.ones(3, bool) if r.present is None else r.present[:, e]).astype(int) for r in results]
        assert np.array(present).T.tolist() == PRESENT
        assert np.array([r.rewards[:, e] for r in results]).T.tolist() == [
            [1, 2, 0, 0],
            [0, 12, 13, 0],
            [21, 22, 23, 24],
        ]
        assert np.array([r.terminated[:, e] for r in results]).T.tolist() == [[0, 1, 0, 0], [0] * 4, [0] * 4]
        assert np.array([r.truncated[:, e] for r in results]).T.tolist() == [[0] * 4, [0, 0, 1, 0], [0, 0, 0, 1]]
    over = [episode_over(r.terminated, r.truncated, r.present, r.over).tolist() for r in results]
    assert over == [[False] * 2] * 3 + [[True] * 2]
    seen = [r.observations[:, 0].tolist() for r in results]
    assert seen[0] == [[0, 1, 0], [0, 1, 1], [0, 1, 2]]
    assert seen[1] == [[0, 0, 0], [0, 2, 1], [0, 2, 2]]  # a was terminated: nobody reads what it saw last
    assert seen[2] == [[0, 0, 0], [0, 3, 1], [0, 3, 2]]  # b was truncated: its last observation
    assert seen[3] == [[1, 0, 0], [0, 0, 0], [1, 0, 2]]  # the next episode
    assert results[3].final_observations[:, 1].tolist() == [[0, 0, 0], [0, 0, 0], [0, 4, 2]]
    assert played(env, 1)[0].rewards[:, 0].tolist() == [1, 0, 21]


def test_everybody_always_is_told_by_none():
    env = SyncVectorJointEnv(Pair, 3)
    env.reset_joint()
    for result in played(env, 9):
        assert result.present is None and result.over is None


def test_environments_differ():
    plans = iter(
        [{"a": (0, 1, "terminated"), "b": (0, 2, "terminated")}, {"a": (0, 5, "terminated"), "b": (0, 5, "truncated")}]
    )
    env = SyncVectorJointEnv(lambda: JointLives(lives=next(plans), length=6, says_over=False), 2)
    env.reset_joint()
    results = played(env, 4)
    assert results[0].present is None and results[1].present is None
    assert results[2].present.tolist() == [[False, True], [True, True]] and results[2].over.tolist() == [True, False]
    assert results[3].present is None and results[2].final_observations is not None  # environment 0 began anew


@pytest.mark.parametrize("form", FORMS)
def test_an_episode_goes_on_while_nobody_is_there(form):
    lives = {"a0": (0, 2, "terminated"), "a1": (5, 9, "terminated")}
    env = make_vector_env(FORMS[form], {"lives": lives, "length": 10}, 1)
    env.reset_joint()
    steps = 10 if form != "pettingzoo" else 3  # no agents: a PettingZoo episode is over
    results = played(env, steps)
    over = [bool(episode_over(r.terminated, r.truncated, r.present, r.over)[0]) for r in results]
    assert over == [False] * (steps - 1) + [True]
    if steps == 10:
        assert np.array([r.present[:, 0] for r in results]).sum(axis=0).tolist() == [3, 5]


def test_over_by_itself():
    lives = {"a0": (0, 2, "terminated"), "a1": (5, 9, "terminated")}
    for env in (
        JointLives(lives=lives, length=10, says_over=False),
        RLlibJointEnv(MultiLives({"lives": lives, "length": 10, "key": False})),
    ):
        vector = SyncVectorJointEnv(lambda env=env: env, 1)
        vector.reset_joint()
        assert [r.over is not None and bool(r.over[0]) for r in played(vector, 3)] == [False, False, True]


def test_every_possible_agent_has_ended_though_all_is_false():
    class Never(MultiLives):
        def step(self, action_dict):
            *rest, terminated, truncated, infos = super().step(action_dict)
            return *rest, {**terminated, "__all__": False}, truncated, infos

    env = make_vector_env(Never, {"lives": LIVES, "length": 4}, 1)
    env.reset_joint()
    assert [bool(episode_over(r.terminated, r.truncated, r.present, r.over)[0]) for r in played(env, 4)] == [
        False
    ] * 3 + [True]


class Turns(JointEnv):
    """a0 and a1 alternate for `length` steps; the mover is paid 1, and both are flagged at the end."""

    def __init__(self, length=19):
        self.possible_agents = ["a0", "a1"]
        self.observation_spaces = {a: gym.spaces.Box(0, 99, (1,)) for a in self.possible_agents}
        self.action_spaces = {a: gym.spaces.Discrete(2) for a in self.possible_agents}
        self.length = length

    def _see(self):
        return {f"a{self.t % 2}": np.array([self.t], np.float32)}

    def reset_joint(self, seed=None):
        self.t = 0
        return self._see()

    def step_joint(self, actions):
        mover = f"a{self.t % 2}"
        assert list(actions) == [mover]
        self.t += 1
        over = self.t == self.length
        return JointStepResult({mover: 1.0}, {} if over else self._see(), dict.fromkeys(self.possible_agents, over))


def test_agents_that_wait():
    env = SyncVectorJointEnv(Turns, 1)
    env.reset_joint()
    results = played(env, 20)
    assert [r.present[:, 0].tolist() for r in results[:2]] == [[True, False], [False, True]]
    assert [bool(r.over[0]) for r in results] == [t == 18 for t in range(20)]
    assert results[18].terminated[:, 0].tolist() == [True, True]  # a1 waits, and its game is over
    assert np.sum([r.rewards[:, 0] for r in results[:19]], axis=0).tolist() == [10, 9]


def test_waiting_agents_may_be_paid_and_a_state_remembers_who_acts():
    class Paid(Turns):
        def step_joint(self, actions):
            result = super().step_joint(actions)
            result.rewards = dict.fromkeys(self.possible_agents, 1.0)
            return result

        def get_state(self):
            return self.t

        def set_state(self, state):
            self.t = state

    env = SyncVectorJointEnv(Paid, 2)
    env.reset_joint()
    assert played(env, 1)[0].rewards.tolist() == [[1, 1], [1, 1]]
    state = copy.deepcopy(env.get_state())
    expected = [r.present.tolist() for r in played(env, 5)]
    other = SyncVectorJointEnv(Paid, 2)
    other.reset_joint()
    other.set_state(state)
    assert [r.present.tolist() for r in played(other, 5)] == expected
    assert other.acts_next().tolist() == env.acts_next().tolist()


def test_absent_agents_show_an_element_of_their_space_and_may_do_everything():
    mask = gym.spaces.Box(0, 1, (3,), np.int8)
    odd = gym.spaces.Dict({"observation": gym.spaces.Discrete(4, start=2), "action_mask": mask})

    class Odd(JointLives):
        def __init__(self):
            super().__init__(lives=LIVES, length=4)
            self.observation_spaces = {
                "a": odd,
                "b": odd,
                "c": gym.spaces.Tuple((gym.spaces.Box(3, 9, (2,)), gym.spaces.MultiDiscrete([2, 3], start=[1, -5]))),
            }
            self.action_spaces = dict.fromkeys(self.possible_agents, gym.spaces.Discrete(3))
            self.plan.action_spaces = self.action_spaces

        def reset_joint(self, seed=None):
            return self._see(super().reset_joint())

        def step_joint(self, actions):
            result = super().step_joint(actions)
            result.observations = self._see(result.observations)
            return result

        def _see(self, seen):
            masked = {"observation": 3, "action_mask": np.array([0, 1, 0], np.int8)}
            gone = {"observation": 5, "action_mask": np.zeros(3, np.int8)}
            masked_now = {a: gone if self.plan.t == 3 else masked for a in ("a", "b")}
            every = {**masked_now, "c": (np.full(2, 4, np.float32), np.array([1, -3]))}
            return {a: every[a] for a in seen}

    env = SyncVectorJointEnv(Odd, 1)
    seen = env.reset_joint()
    assert seen["b"]["observation"].tolist() == [2] and seen["b"]["action_mask"].tolist() == [[1, 1, 1]]
    assert seen["a"]["action_mask"].tolist() == [[0, 1, 0]]
    actions = {agent: np.ones(1, dtype=int) for agent in "abc"}
    results = [env.step_joint(actions) for _ in range(4)]
    assert results[1].observations["a"]["action_mask"].tolist() == [[1, 1, 1]]
    assert results[2].observations["b"]["observation"].tolist() == [5]  # truncated: the last one, but no mask is left
    assert results[2].observations["b"]["action_mask"].tolist() == [[1, 1, 1]]
    for result in results:
        for agent, space in env.observation_spaces.items():
            row = (
                {k: v[0] for k, v in result.observations[agent].items()}
                if agent != "c"
                else tuple(v[0] for v in result.observations[agent])
            )
            assert space.contains(row), (agent, row)


def test_element_nearest_zero():
    for space, expected in [
        (gym.spaces.Box(-1, 1, (2,)), [0, 0]),
        (gym.spaces.Box(np.float32([2, -9]), np.float32([3, -4])), [2, -4]),
        (gym.spaces.Discrete(3, start=-5), -3),
        (gym.spaces.MultiDiscrete([2, 3], start=[4, -1]), [4, 0]),
        (gym.spaces.MultiBinary(2), [0, 0]),
    ]:
        element = element_nearest_zero(space)
        assert element.tolist() == expected and space.contains(element if element.shape else element[()])


def test_extras_of_absent_agents_are_zero():
    class Costly(JointLives):
        def step_joint(self, actions):
            result = super().step_joint(actions)
            result.extras = {"cost": {agent: np.ones(2) for agent in actions}}
            return result

    env = SyncVectorJointEnv(lambda: Costly(lives=LIVES, length=4), 1)
    env.reset_joint()
    assert played(env, 1)[0].extras["cost"][:, 0].tolist() == [[1, 1], [0, 0], [1, 1]]

    class Forgets(Costly):
        def step_joint(self, actions):
            result = super().step_joint(actions)
            del result.extras["cost"]["c"]
            return result

    env = SyncVectorJointEnv(lambda: Forgets(lives=LIVES, length=4), 1)
    env.reset_joint()
    with pytest.raises(ValueError, match="extras 'cost' have no entry for agent 'c', which acted"):
        played(env, 1)


# ---------------------------------------------------------------------------------------------- clear errors


def change_step(at, change):
    """`LIVES` whose step `at` (from 1) is altered by `change(result)`."""

    class Altered(JointLives):
        def step_joint(self, actions):
            result = super().step_joint(actions)
            if self.plan.t == at:
                change(result)
            return result

    return lambda: Altered(lives=LIVES, length=4)


def drop(field, agent):
    return lambda result: getattr(result, field).pop(agent)


def put(field, **entries):
    return lambda result: getattr(result, field).update(entries)


def over(value):
    return lambda result: setattr(result, "over", value)


ZEROS = np.zeros(3, np.float32)


@pytest.mark.parametrize(
    ("at", "change", "says"),
    [
        (
            1,
            drop("rewards", "c"),
            r"step 1 .*rewards have no entry for agent 'c', which acted in this step; .*\['a', 'c'\]",
        ),
        (3, put("rewards", a=0.0), "step 3 .*rewards have an entry .0.0. for agent 'a', which ended earlier"),
        (3, put("observations", a=ZEROS), "step 3 .*observations have an entry .* for agent 'a', which ended earlier"),
        (3, drop("observations", "b"), "step 3 .*no entry for agent 'b', which is truncated; return the last one"),
        (2, drop("terminated", "b"), "step 2 .*terminated flags have no entry for agent 'b', which acted"),
        (2, drop("truncated", "c"), "step 2 .*truncated flags have no entry for agent 'c', which acted"),
        (2, over(True), "step 2 .*the episode is over .*agent 'b' is neither terminated nor truncated; set one"),
        (1, put("rewards", z=1.0), r"step 1 .*rewards name \['z'\], which are not in possible_agents"),
    ],
)
def test_errors_name_agent_environment_and_step(at, change, says):
    env = SyncVectorJointEnv(change_step(at, change), 1)
    env.reset_joint()
    with pytest.raises(ValueError, match=f"Altered, environment 0, {says}"):
        played(env, 4)
    for adapter in (JointEnvParallel, JointEnvMultiAgentEnv):
        env = adapter(change_step(at, change)())
        env.reset()
        with pytest.raises(ValueError, match=f"Altered, {says}"):
            for _ in range(4):
                env.step({agent: 0 for agent in "abc" if agent in env.agents})


def test_nobody_in_the_first_step_is_an_error():
    class Empty(JointLives):
        def reset_joint(self, seed=None):
            return {}

    with pytest.raises(ValueError, match="Empty, environment 0, reset_joint: observations are empty"):
        SyncVectorJointEnv(lambda: Empty(lives=LIVES, length=4), 1).reset_joint()


def test_entries_that_change_nothing():
    """Flags of agents that have ended or are not born, one flag for all, an agent that comes in the last step."""

    def all_flags(result):
        result.terminated = dict.fromkeys("abc", False)
        result.truncated = {"a": True, "b": True, "c": False}

    env = SyncVectorJointEnv(change_step(3, all_flags), 1)
    env.reset_joint()
    assert [r.truncated[:, 0].tolist() for r in played(env, 3)][2] == [False, True, False]

    class Late(JointLives):
        def step_joint(self, actions):
            result = super().step_joint(actions)
            if self.plan.t == 2:
                return JointStepResult(result.rewards, {**result.observations, "b": ZEROS}, True)
            return result

    env = SyncVectorJointEnv(lambda: Late(says_over=False, lives={**LIVES, "b": (3, 3, "truncated")}, length=4), 1)
    env.reset_joint()
    results = played(env, 3)
    assert results[1].over.tolist() == [True] and results[1].terminated[:, 0].tolist() == [True, False, True]
    assert results[2].rewards[:, 0].tolist() == [1, 0, 21]


# ------------------------------------------------------------------------------------------------ PettingZoo


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


# ----------------------------------------------------------------------------------------------------- RLlib


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


# ------------------------------------------------------------------------- a vectorised environment as a single one


class Herd(VectorJointEnv):
    """ "late" acts from step 1 on, "early" in steps 0 and 1, "long" in all four."""

    def __init__(self, num_envs=1, foresees=True):
        self.num_envs, self.foresees, self.stacked = num_envs, foresees, True
        self.possible_agents = ["late", "early", "long"]
        self.observation_spaces = {a: gym.spaces.Box(0, 9, (1,)) for a in self.possible_agents}
        self.action_spaces = {a: gym.spaces.Discrete(2, start=1) for a in self.possible_agents}
        self.t = 0

    def _here(self):
        return np.array([self.t >= 1, self.t <= 1, True])[:, None] & np.ones(self.num_envs, bool)

    def acts_next(self):
        return self._here() if self.foresees else None

    def _see(self):
        return np.full((3, self.num_envs, 1), self.t, np.float32)

    def reset_joint(self, seeds=None):
        self.t = 0
        return self._see()

    def step_joint(self, actions):
        assert set(np.ravel(actions)) <= {1, 2}
        present, end = self._here(), self.t == 3
        self.t += 1
        terminated = np.array([end, self.t == 2, end])[:, None] & present
        final = self._see()
        seen = self.reset_joint() if end else final
        return JointStepResult(present * np.float32(2), seen, terminated, final_observations=final, present=present)


def test_single_view_of_agents_that_come_and_go():
    env = SingleJointEnv(Herd())
    assert list(env.reset_joint(0)) == ["early", "long"]
    result = env.step_joint({"early": 1, "long": 2})
    assert result.rewards == {"early": 2, "long": 2} and set(result.observations) == {"late", "early", "long"}
    assert result.terminated is False and result.over is False
    result = env.step_joint(dict.fromkeys(env.possible_agents, 1))
    assert result.terminated == {"late": False, "early": True, "long": False} and result.present is None
    assert set(result.observations) == {"late", "early", "long"}
    result = env.step_joint({"late": 1, "long": 1})
    assert set(result.observations) == {"late", "long"} == set(result.rewards)
    result = env.step_joint({"late": 1, "long": 1})
    assert result.terminated == {"late": True, "long": True} and result.over is True
    assert [float(x[0]) for x in result.observations.values()] == [4, 4]
    assert list(env.reset_joint()) == ["early", "long"]


def test_single_view_and_back_is_the_same():
    direct, around = Herd(2), SyncVectorJointEnv(lambda: SingleJointEnv(Herd()), 2)
    direct.reset_joint()
    around.reset_joint()
    actions = np.ones((3, 2), dtype=int)
    for _ in range(9):
        one, other = direct.step_joint(actions), around.step_joint(actions)
        present = np.ones((3, 2), bool) if other.present is None else other.present
        np.testing.assert_array_equal(one.present, present)
        for name in ("rewards", "terminated"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        assert (other.over is not None and other.over.all()) == bool(one.terminated[2].all())


def test_single_view_where_nothing_is_foreseen():
    env = SingleJointEnv(Herd(foresees=False))
    env.reset_joint()
    with pytest.raises(ValueError, match="Herd: agent 'late' was shown an observation but did not act.*acts_next"):
        env.step_joint(dict.fromkeys(env.possible_agents, 1))
    assert Herd.__mro__[1].acts_next(env.env) is None
