"""Difference rewards against numbers by hand."""

import copy
import dataclasses

import numpy as np
import pytest

from tests.envs.helpers import Pair, assert_same
from thrust_rllib.envs import JointEnv, JointStepResult, make_joint_env, make_vector_env
from thrust_rllib.envs.bucket_brigade_policies import houses_from_observations
from thrust_rllib.envs.bucket_brigade_rules import SCENARIOS, night
from thrust_rllib.envs.difference import DIFFERENCE_REWARD, WithDifferenceRewards, difference_rewards
from thrust_rllib.envs.matrix_games import CLIMBING

REST = np.array([0, 0, 0])
AGENTS = [f"agent_{i}" for i in range(4)]
DEFAULTS = dict.fromkeys(AGENTS, REST)
FIRES = {"scenario": "hard", "rho": 0.3, "kappa": 0.7}
SCENARIO = dataclasses.replace(SCENARIOS["hard"], rho=0.3, kappa=0.7)


def team_term(houses):
    return SCENARIO.team_reward * (houses == 0).mean() - SCENARIO.team_penalty * (houses == 2).mean()


def seen_team_term(result):
    return team_term(houses_from_observations(result.observations["agent_0"][None, None], 4)[0])


def test_a_matrix_game():
    env = make_joint_env("climbing")
    env.reset_joint(0)
    for first in range(3):
        for second in range(3):
            found = difference_rewards(
                env, {"agent_0": first, "agent_1": second}, default_actions={"agent_0": 2, "agent_1": 0}
            )
            common = CLIMBING[first][second]
            assert found == {"agent_0": common - CLIMBING[2][second], "agent_1": common - CLIMBING[first][0]}


def test_the_wrapper_in_a_matrix_game():
    env = WithDifferenceRewards("climbing", {"episode_length": 3}, default_actions={"agent_0": 2, "agent_1": 2})
    env.reset_joint(0)
    result = env.step_joint({"agent_0": 0, "agent_1": 0})
    assert result.rewards == {"agent_0": 11.0, "agent_1": 11.0}
    assert result.extras[DIFFERENCE_REWARD] == {"agent_0": 11.0 - 0.0, "agent_1": 11.0 - 0.0}
    env.step_joint({"agent_0": 1, "agent_1": 1})
    assert env.step_joint({"agent_0": 1, "agent_1": 1}).over


def played(env, steps, seed=3, change=None):
    """What an environment answers to random actions; `change` is called before each step."""
    rng, log = np.random.default_rng(seed), [env.reset_joint(seed)]
    for _ in range(steps):
        actions = {agent: rng.integers((10, 2, 2)) for agent in AGENTS}
        if change is not None:
            change(env, actions)
        result = env.step_joint(actions)
        log.append((result.observations, result.rewards, result.terminated, result.over))
        if result.over:
            log.append(env.reset_joint())
    return log


def test_bucket_brigade_against_its_rules():
    """The same night with agent i at rest, by the rules' pure function and the very random numbers."""
    env = make_joint_env("bucket_brigade", FIRES)
    differences = []

    def compare(env, actions):
        inner = env.unwrapped
        found = difference_rewards(env, actions, seen_team_term, DEFAULTS)
        uniforms = copy.deepcopy(inner._streams).take(2)
        all_actions = np.stack([actions[a] for a in AGENTS])[:, None]

        def team(acts):
            after = night(
                inner._houses, inner._previous_houses, acts, uniforms[:, 0], uniforms[:, 1], SCENARIO, inner._night
            )
            return team_term(after.houses[0])

        for i, agent in enumerate(AGENTS):
            without = all_actions.copy()
            without[i, 0] = REST
            np.testing.assert_allclose(found[agent], team(all_actions) - team(without), rtol=0, atol=1e-9)
        differences.extend(found.values())

    played(env, 120, change=compare)
    assert np.count_nonzero(differences) > 5 and min(differences) >= 0  # to put fires out harms nobody


def test_bucket_brigade_by_hand():
    """One house burns and one agent works there with certain success: it saves 1/10 of the reward and a ruin."""
    env = make_joint_env("bucket_brigade", {"scenario": "hard", "kappa": 1.0, "rho": 0.0})
    env.reset_joint(0)
    env.unwrapped._houses[0, 4] = 1
    actions = {**DEFAULTS, "agent_2": np.array([4, 1, 0]), "agent_3": np.array([5, 1, 0])}
    found = difference_rewards(env, actions, seen_team_term, DEFAULTS)
    assert found == pytest.approx({"agent_0": 0, "agent_1": 0, "agent_2": 100 * 0.1 + 100 * 0.1, "agent_3": 0})
    both = {**actions, "agent_3": np.array([4, 1, 0])}
    assert set(difference_rewards(env, both, seen_team_term, DEFAULTS).values()) == {0.0}  # nobody is needed alone


def test_the_wrapper_keeps_the_rest_of_the_reward():
    plain = make_joint_env("bucket_brigade", FIRES)
    env = WithDifferenceRewards("bucket_brigade", FIRES, team_reward=seen_team_term, default_actions=DEFAULTS)
    rng = np.random.default_rng(0)
    plain.reset_joint(5)
    env.reset_joint(5)
    for _ in range(60):
        actions = {agent: rng.integers((10, 2, 2)) for agent in AGENTS}
        differences = difference_rewards(plain, actions, seen_team_term, DEFAULTS)
        expected, result = plain.step_joint(actions), env.step_joint(actions)
        assert result.rewards == expected.rewards
        for agent in AGENTS:
            own = expected.rewards[agent] - seen_team_term(expected)
            assert result.extras[DIFFERENCE_REWARD][agent] == pytest.approx(own + differences[agent], abs=1e-4)
        if result.over:
            assert_same(plain.reset_joint(), env.reset_joint())


def test_the_environment_goes_on_as_if_nothing_had_happened():
    plain, looked_at = (make_joint_env("bucket_brigade", FIRES) for _ in range(2))
    log = played(looked_at, 80, change=lambda env, actions: difference_rewards(env, actions, default_actions=DEFAULTS))
    assert_same(played(plain, 80), log)


def test_it_can_be_told_when_the_state_lacks_a_generator():
    """The check above does find an environment whose state leaves out its generator."""

    class Forgets(Pair):
        def get_state(self):
            return self.t

        def set_state(self, state):
            self.t = state

    env, plain = Forgets(), Forgets()
    first, other = env.reset_joint(0), plain.reset_joint(0)
    assert_same(first, other)
    difference_rewards(env, {"a0": 1, "a1": 0}, default_actions={"a0": 0, "a1": 0})
    with pytest.raises(AssertionError):
        assert_same(env.step_joint({"a0": 1, "a1": 0}).observations, plain.step_joint({"a0": 1, "a1": 0}).observations)


class Absentees(Pair):
    """Pays everybody the number of those that act; an agent may be left out."""

    def step_joint(self, actions):
        self.t += 1
        count = sum(int(action) for action in actions.values())
        return JointStepResult(dict.fromkeys(self.possible_agents, count), self._see(), self.t == self.length)


class Careless(Pair):
    """Hands out its own arrays as its state, goes on with those it is given, and writes into them and into actions."""

    def reset_joint(self, seed=None):
        seen = super().reset_joint(seed)
        self.total = np.zeros(1)
        return seen

    def get_state(self):
        return {"t": self.t, "rng": self.rng, "total": self.total}

    def set_state(self, state):
        self.t, self.rng, self.total = state["t"], state["rng"], state["total"]

    def step_joint(self, actions):
        for action in actions.values():
            action *= 10
        self.t += 1
        self.total += sum(float(action[0]) for action in actions.values())
        reward = float(self.total[0] + self.rng.normal())
        return JointStepResult(dict.fromkeys(self.possible_agents, reward), self._see(), self.t == self.length)


def test_an_environment_that_writes_into_its_state_and_its_actions():
    zero = {a: np.zeros(1) for a in ("a0", "a1")}
    plain, looked_at, env = Careless(), Careless(), WithDifferenceRewards(Careless(), default_actions=zero)
    for each in (plain, looked_at, env):
        each.reset_joint(7)
    for t in range(3):
        actions = [{"a0": np.array([1.0]), "a1": np.array([float(t)])} for _ in range(4)]
        found = difference_rewards(looked_at, actions[0], default_actions=zero)
        assert found == pytest.approx({"a0": 10.0, "a1": 10.0 * t}) and actions[0]["a0"] == 1
        expected, result = plain.step_joint(actions[1]), env.step_joint(actions[2])
        assert result.extras[DIFFERENCE_REWARD] == pytest.approx(found)
        assert result.rewards == expected.rewards == looked_at.step_joint(actions[3]).rewards
        assert_same(result.observations, expected.observations)


def test_without_default_actions_the_agent_is_left_out():
    env = Absentees()
    env.reset_joint(0)
    assert difference_rewards(env, {"a0": 1, "a1": 0}) == {"a0": 1.0, "a1": 0.0}
    wrapped = WithDifferenceRewards(Absentees())
    wrapped.reset_joint(0)
    assert wrapped.step_joint({"a0": 1, "a1": 1}).extras[DIFFERENCE_REWARD] == {"a0": 1.0, "a1": 1.0}


def test_through_a_vector():
    def make():
        return WithDifferenceRewards("climbing", default_actions={"agent_0": 2, "agent_1": 0})

    env = make_vector_env(make, {}, 2)
    env.reset_joint([0, 1])
    result = env.step_joint(np.array([[0, 1], [0, 2]]))
    expected = [[11 - 0, 0 - 5], [11 - 11, 0 - -30]]
    assert result.extras[DIFFERENCE_REWARD].tolist() == expected


def test_the_last_agent_is_missed_whole():
    """Without it nobody is paid, and the team's reward is 0."""
    env = Absentees()
    env.reset_joint(0)
    assert difference_rewards(env, {"a0": 1})["a0"] == 1.0

    class OnlyThose(Absentees):
        def step_joint(self, actions):
            result = super().step_joint(actions)
            result.rewards = dict.fromkeys(actions, 2.0)
            return result

    env = OnlyThose()
    env.reset_joint(0)
    assert difference_rewards(env, {"a0": 1}) == {"a0": 2.0}


class NoCopy(JointEnv):
    possible_agents = ["a"]
    observation_spaces = action_spaces = {"a": None}

    def reset_joint(self, seed=None):
        return {"a": 0}

    def step_joint(self, actions):
        return JointStepResult({"a": 0.0}, {"a": 0}, False)


def test_errors():
    env = make_joint_env("climbing")
    env.reset_joint(0)
    actions = {"agent_0": 0, "agent_1": 0}
    before = env.get_state()
    with pytest.raises(ValueError, match=r"MatrixGame|Climbing does not step without an action of agent 'agent_0'"):
        difference_rewards(env, actions)
    assert env.get_state()["acting"] == before["acting"]
    with pytest.raises(ValueError, match="default_actions have no entry for agent 'agent_1'"):
        difference_rewards(env, actions, default_actions={"agent_0": 0})
    with pytest.raises(ValueError, match=r"default_actions have no entry for \['agent_1'\]"):
        WithDifferenceRewards(env, default_actions={"agent_0": 0})
    with pytest.raises(NotImplementedError, match="NoCopy cannot be saved; override get_state"):
        difference_rewards(NoCopy(), {"a": 0})
    with pytest.raises(NotImplementedError, match="play each step again, and NoCopy cannot be saved"):
        WithDifferenceRewards(NoCopy())
    with pytest.raises(NotImplementedError, match="play each step again, and .* has no get_state and no set_state"):
        WithDifferenceRewards("pettingzoo:mpe2.simple_spread_v3")
    with pytest.raises(TypeError, match="got an environment and settings"):
        WithDifferenceRewards(env, {"episode_length": 3})
    defaults = {"agent_0": 0, "agent_1": 0}
    twice = WithDifferenceRewards(WithDifferenceRewards(env, default_actions=defaults), default_actions=defaults)
    with pytest.raises(ValueError, match="tells the extra 'difference_reward' itself"):
        twice.step_joint(actions)
