"""Agents that join late, end early and wait: `JointEnv` in its vector form, and back to a single one."""

import copy

import gymnasium as gym
import numpy as np
import pytest

from tests.envs.helpers import Pair
from tests.envs.lives import FORMS, LIVES, JointLives, MultiLives, Turns, played
from thrust_rllib.envs import (
    JointStepResult,
    RLlibJointEnv,
    SingleJointEnv,
    SyncVectorJointEnv,
    VectorJointEnv,
    episode_over,
    make_vector_env,
)
from thrust_rllib.envs.spaces import element_nearest_zero

PRESENT = [[1, 1, 0, 0], [0, 1, 1, 0], [1, 1, 1, 1]]


# --- the vector form --------------------------------------------------------------------------------------------------


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


# --- a vectorised environment as a single one -------------------------------------------------------------------------


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
