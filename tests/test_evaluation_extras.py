"""Extras of played episodes: the last step's and the mean over the steps, where every number is known beforehand."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

from thrust_rllib.envs import make_vector_env
from thrust_rllib.envs.joint_env import JointEnv, JointStepResult, VectorJointEnv
from thrust_rllib.envs.sync_vector import SyncVectorJointEnv
from thrust_rllib.evaluation import PlayedEpisodes, play_policy

AGENTS = ["a", "b", "c"]


def code(e, k, t):
    """A number that tells which environment, episode and step (from 1) it is from."""
    return 100 * e + 10 * k + t


def told(e, k, t):
    """What one environment tells: of the team, of each agent [N], of pairs [N, N]."""
    base = code(e, k, t)
    return {
        "number": float(base),
        "connected": t % 2 == 1,
        "count": np.int64(base),
        "vector": np.array([base, -base, 1, 0, 2.5]),
        "of_agents": base + np.array([0.1, 0.2, 0.3]),
        "vector_of_agents": np.array([[base, i] for i in range(3)], np.float32),
        "of_pairs": base * np.arange(9).reshape(3, 3),
    }


def schedule(e, k):
    """The length of environment e's k-th episode."""
    return 1 + (2 * e + 3 * k) % 5


class Scripted(VectorJointEnv):
    """Says `told`; the k-th episode of environment e has `schedule(e, k)` steps. Agents and actions do nothing.

    Args:
        num_envs: E.
        absent: (agent, step) of which everything is NaN, as are the agent's pairs.
    """

    def __init__(self, num_envs, absent=None):
        self.num_envs, self.possible_agents, self.absent = num_envs, AGENTS, absent
        self.observation_spaces = dict.fromkeys(AGENTS, gym.spaces.Box(0, 1, (1,)))
        self.action_spaces = dict.fromkeys(AGENTS, gym.spaces.Discrete(2))

    def reset_joint(self, seeds=None):
        self.t, self.k = np.zeros(self.num_envs, int), np.zeros(self.num_envs, int)
        return self._see()

    def _see(self):
        return {agent: np.zeros((self.num_envs, 1), np.float32) for agent in AGENTS}

    def step_joint(self, actions):
        self.t += 1
        rows = [told(e, self.k[e], self.t[e]) for e in range(self.num_envs)]
        extras = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        for name, axes in {"of_agents": 1, "vector_of_agents": 1, "of_pairs": 2}.items():
            extras[name] = np.moveaxis(extras[name], 0, axes)
        present = None
        if self.absent is not None:
            agent, step = self.absent
            present = np.ones((3, self.num_envs), bool)
            present[agent, self.t == step] = False
            extras["of_pairs"] = extras["of_pairs"].astype(float)
            for name in ("of_agents", "vector_of_agents"):
                extras[name][~present] = np.nan
            extras["of_pairs"][agent, :, self.t == step] = np.nan
        over = self.t == [schedule(e, k) for e, k in enumerate(self.k)]
        self.k[over] += 1
        self.t[over] = 0
        return JointStepResult(
            np.ones((3, self.num_envs), np.float32), self._see(), over, False, extras, present=present, over=over
        )


def act(observations):
    return {agent: np.zeros(len(seen), int) for agent, seen in observations.items()}


def episodes(num_envs, shares):
    """(environment, episode) in the order of the result."""
    return [(e, k) for e in range(num_envs) for k in range(shares[e])]


@pytest.mark.parametrize("num_episodes, shares", [(8, [3, 3, 2]), (2, [1, 1, 0]), (9, [3, 3, 3])])
def test_last_steps_and_means_are_those_of_the_script(num_episodes, shares):
    # E = N: [E] and [E, 5] of the team, [N, E, 2] of agents and [N, N, E] of pairs have to be told from each other.
    played = play_policy(Scripted(3), act, num_episodes)
    wanted = episodes(3, shares)
    lengths = [schedule(e, k) for e, k in wanted]
    assert played.lengths.tolist() == lengths and len(set(lengths)) > 1
    assert played.final_extras.keys() == played.mean_extras.keys() == told(0, 0, 1).keys()
    for name in played.final_extras:
        final = np.stack([np.asarray(told(e, k, schedule(e, k))[name]) for e, k in wanted])
        steps = [[told(e, k, t)[name] for t in range(1, schedule(e, k) + 1)] for e, k in wanted]
        mean = np.stack([np.sum(values, axis=0, dtype=float) / len(values) for values in steps])
        np.testing.assert_array_equal(played.final_extras[name], final, err_msg=name)
        np.testing.assert_allclose(played.mean_extras[name], mean, rtol=1e-14, err_msg=name)
        assert played.final_extras[name].dtype == final.dtype and played.mean_extras[name].dtype == np.float64


def test_numbers_worked_out_by_hand():
    played = play_policy(Scripted(2), act, 3)
    # Environment 0 plays 1 and 4 steps, environment 1 has 3.
    assert played.lengths.tolist() == [1, 4, 3]
    assert played.final_extras["number"].tolist() == [1.0, 14.0, 103.0]
    assert played.mean_extras["number"].tolist() == [1.0, 12.5, 102.0]
    assert played.final_extras["connected"].tolist() == [True, False, True]
    assert played.mean_extras["connected"].tolist() == [1.0, 0.5, 2 / 3]
    assert played.final_extras["of_pairs"][1].tolist() == [[0, 14, 28], [42, 56, 70], [84, 98, 112]]
    assert {name: values.shape for name, values in played.mean_extras.items()} == {
        "number": (3,), "connected": (3,), "count": (3,), "vector": (3, 5),
        "of_agents": (3, 3), "vector_of_agents": (3, 3, 2), "of_pairs": (3, 3, 3),
    }  # fmt: skip


def test_an_agent_that_does_not_act_counts_as_0_whatever_stands_there():
    played = play_policy(Scripted(2, absent=(1, 3)), act, 3)  # b, in every episode's third step
    assert played.lengths.tolist() == [1, 4, 3]
    np.testing.assert_allclose(played.mean_extras["of_agents"][1], [12.6, (11.2 + 12.2 + 0 + 14.2) / 4, 12.8])
    np.testing.assert_allclose(played.mean_extras["vector_of_agents"][2, 1], [(101 + 102) / 3, 2 / 3])
    np.testing.assert_allclose(
        played.final_extras["of_agents"], [[1.1, 1.2, 1.3], [14.1, 14.2, 14.3], [103.1, 0, 103.3]]
    )
    np.testing.assert_allclose(played.final_extras["of_pairs"][2], 103 * np.array([[0, 1, 2], [0, 0, 0], [6, 7, 8]]))
    np.testing.assert_allclose(played.mean_extras["of_pairs"][2, 1, 0], 3 * (101 + 102) / 3)
    assert played.mean_extras["number"].tolist() == [1.0, 12.5, 102.0]


class Leaves(JointEnv):
    """Dicts; "b" leaves after the first of three steps, then nobody acts, then "a" is back: steps a b, nobody, a."""

    def __init__(self):
        self.possible_agents = ["a", "b"]
        self.observation_spaces = dict.fromkeys(self.possible_agents, gym.spaces.Box(0, 1, (1,)))
        self.action_spaces = dict.fromkeys(self.possible_agents, gym.spaces.Discrete(2))

    def _see(self, agents):
        return {agent: np.zeros(1, np.float32) for agent in agents}

    def reset_joint(self, seed=None):
        self.t = 0
        return self._see("ab")

    def step_joint(self, actions):
        self.t += 1
        extras = {"load": {agent: 2.0 * self.t for agent in actions}, "near": {"a": {"b": self.t}, "b": {}}}
        if not actions:
            extras = {}
        seen = self._see({1: "", 2: "a", 3: ""}[self.t])
        ended = {agent: agent == "b" or self.t == 3 for agent in actions}
        return JointStepResult(dict.fromkeys(actions, 1.0), seen, ended, False, extras, over=self.t == 3)


def test_dicts_of_agents_that_come_and_go():
    played = play_policy(SyncVectorJointEnv(Leaves, 2), lambda seen: np.zeros(seen.shape[:2], int), 4)
    assert played.lengths.tolist() == [3] * 4
    np.testing.assert_allclose(played.final_extras["load"], [[6.0, 0.0]] * 4)
    np.testing.assert_allclose(played.mean_extras["load"], [[(2 + 0 + 6) / 3, 2 / 3]] * 4)
    np.testing.assert_allclose(played.mean_extras["near"], [[[0, (1 + 0 + 3) / 3], [0, 0]]] * 4)


def test_extras_of_a_built_in_environment():
    env, seen = make_vector_env("spread", {"max_cycles": 4}, 5), []
    step = env.step_joint

    def noted(actions):
        result = step(actions)
        seen.append({name: np.array(values, float) for name, values in result.extras.items()})
        return result

    env.step_joint = noted
    played = play_policy(env, lambda observations: np.full(observations.shape[:2], 3), 5, seed=2)
    assert len(seen) == 4
    for name, axes in {"covered": 0, "collisions": 1, "touching": 2}.items():
        steps = np.moveaxis(np.stack([extras[name] for extras in seen]), axes + 1, 0)
        np.testing.assert_array_equal(played.final_extras[name], steps[:, -1])
        np.testing.assert_allclose(played.mean_extras[name], steps.mean(axis=1))
    assert played.final_extras["collisions"].shape == (5, 3) and played.final_extras["touching"].shape == (5, 3, 3)


def test_without_extras_there_are_none():
    played = play_policy(
        make_vector_env("debug/match_observation", {}, 2), lambda seen: np.zeros(seen.shape[:2], int), 3
    )
    assert played.final_extras == {} == played.mean_extras and played.means().final_extras == {}
    bare = PlayedEpisodes(["a"], np.zeros((2, 1)), np.ones(2, int))
    assert bare.final_extras == {} == bare.mean_extras


def test_means_over_episodes_are_of_the_teams_numbers_alone():
    means = play_policy(Scripted(2), act, 3).means()
    assert means.final_extras.keys() == means.mean_extras.keys() == {"number", "connected", "count"}
    assert means.final_extras["number"].mean == pytest.approx((1 + 14 + 103) / 3)
    assert means.mean_extras["connected"].mean == pytest.approx((1 + 0.5 + 2 / 3) / 3)
    assert means.mean_extras["number"].standard_error == pytest.approx(np.std([1, 12.5, 102], ddof=1) / np.sqrt(3))


@pytest.mark.parametrize(
    "change, error, message",
    [
        (lambda extras: {"number": extras["number"]}, ValueError, "return the same names in every step"),
        (lambda extras: extras | {"number": extras["vector"]}, ValueError, "return the same shape in every step"),
        (lambda extras: extras | {"number": 3.0}, ValueError, r"extras 'number' have shape \(\); needed"),
        (lambda extras: extras | {"number": ["x"] * 2}, TypeError, "make no array of numbers"),
    ],
)
def test_extras_that_do_not_fit_are_errors(change, error, message):
    env = Scripted(2)
    step, count = env.step_joint, iter(range(100))

    def changed(actions):
        result = step(actions)
        if next(count) == 1:
            result.extras = change(result.extras)
        return result

    env.step_joint = changed
    with pytest.raises(error, match=message):
        play_policy(env, act, 4)
