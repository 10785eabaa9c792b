"""What holds for every vectorised environment, built-in or made of scalar ones."""

import copy

import gymnasium as gym
import numpy as np
import pytest

from tests.envs.helpers import Pair, assert_same, play, play_vector, row
from thrust_rllib.envs import (
    GymnasiumVectorJointEnv,
    SingleJointEnv,
    SyncVectorJointEnv,
    episode_over,
    list_envs,
    make_joint_env,
    make_vector_env,
)

BUILT_IN = [name for name in list_envs() if name != "debug/faulty"]


@pytest.mark.parametrize("num_envs", [1, 2, 5])
@pytest.mark.parametrize("name", BUILT_IN)
def test_environment_e_equals_a_single_one_seeded_alike(name, num_envs):
    together = make_vector_env(name, {}, num_envs)
    seeds = [100 + 7 * e for e in range(num_envs)]
    log = play_vector(together, seeds, steps=40)
    for e, seed in enumerate(seeds):
        alone = make_vector_env(name, {}, 1)
        assert_same(row(log, e, together.stacked), row(play_vector(alone, [seed], 40), 0, alone.stacked))


def assert_same_rows(left, right, steps):
    """Equal in every environment; final observations of those that did not end are nobody's business."""
    logs = [play_vector(env, [1, 2, 3], steps) for env in (left, right)]
    for e in range(3):
        assert_same(*(row(log, e, env.stacked) for log, env in zip(logs, (left, right), strict=True)))


@pytest.mark.parametrize("name", BUILT_IN)
def test_scalar_view_and_back_is_the_same_environment(name):
    direct = make_vector_env(name, {}, 3)
    around = SyncVectorJointEnv(lambda: make_joint_env(name), 3)
    assert around.stacked == direct.stacked
    assert_same_rows(direct, around, steps=40)


@pytest.mark.parametrize("name", BUILT_IN)
def test_state_gives_the_same_continuation(name):
    first, second = make_vector_env(name, {}, 3), make_vector_env(name, {}, 3)
    play_vector(first, [1, 2, 3], 17)
    state = first.get_state()
    kept = copy.deepcopy(state)
    second.reset_joint([9, 9, 9])
    second.set_state(state)
    no_seeds = [None] * 3
    ahead = play_vector(first, no_seeds, 40, action_seeds=[4, 5, 6])
    assert_same(ahead, play_vector(second, no_seeds, 40, action_seeds=[4, 5, 6]))
    assert_same_state(state, kept)
    second.set_state(state)
    assert_same(ahead, play_vector(second, no_seeds, 40, action_seeds=[4, 5, 6]))


def assert_same_state(left, right):
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same_state(left[key], right[key])
    elif isinstance(left, list):
        for one, other in zip(left, right, strict=True):
            assert_same_state(one, other)
    else:
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("name", BUILT_IN)
def test_observations_lie_in_their_spaces_and_results_have_their_shapes(name):
    env = make_vector_env(name, {}, 3)
    count = len(env.possible_agents)
    for entry in play_vector(env, [1, 2, 3], 30)[1:]:
        if isinstance(entry[0], str):
            continue
        observations, rewards, terminated, truncated = entry
        assert rewards.shape == terminated.shape == truncated.shape == (count, 3)
        assert rewards.dtype == np.float32 and terminated.dtype == truncated.dtype == bool
        for e in range(3):
            seen = row([observations], e, env.stacked)[0]
            for i, agent in enumerate(env.possible_agents):
                one = seen[i] if env.stacked else seen[agent]
                assert env.observation_spaces[agent].contains(one), (agent, one)


@pytest.mark.parametrize("name", BUILT_IN)
def test_returned_arrays_are_the_callers(name):
    env = make_vector_env(name, {}, 2)
    log = play_vector(env, [1, 2], 30)
    assert_same(log, play_vector(make_vector_env(name, {}, 2), [1, 2], 30))
    kept = copy.deepcopy(log)
    play_vector(env, [None, None], 30, action_seeds=[3, 4])
    assert_same(log, kept)


def test_seed_restarts_one_stream_only():
    env = make_vector_env("bucket_brigade", {"scenario": "hard"}, 3)
    first = env.reset_joint([1, 2, 3])
    again = env.reset_joint([None, 2, None])
    np.testing.assert_array_equal(first[:, 1], again[:, 1])
    third = make_vector_env("bucket_brigade", {"scenario": "hard"}, 1)
    third.reset_joint([3])
    np.testing.assert_array_equal(third.reset_joint()[:, 0], again[:, 2])


def test_gymnasium_vector_form_equals_the_scalar_one():
    fast = GymnasiumVectorJointEnv("CartPole-v1", 3)
    slow = make_vector_env("CartPole-v1", {}, 3)
    assert fast.stacked and slow.stacked
    assert_same_rows(fast, slow, steps=120)
    fast.close()
    with pytest.raises(TypeError, match="no arrays"):
        GymnasiumVectorJointEnv("Blackjack-v1", 2)


def test_gymnasium_step_that_terminates_at_the_limit_is_terminated():
    class Both(gym.Env):
        observation_space = gym.spaces.Box(0, 1, (1,))
        action_space = gym.spaces.Discrete(2)

        def reset(self, seed=None, options=None):
            return np.zeros(1, np.float32), {}

        def step(self, action):
            return np.ones(1, np.float32), 1.0, True, True, {}

    env = make_vector_env(Both, {}, 1)
    env.reset_joint([0])
    result = env.step_joint(np.zeros((1, 1), dtype=int))
    assert result.terminated.all() and not result.truncated.any()
    assert result.final_observations[0, 0, 0] == 1 and result.observations[0, 0, 0] == 0


def test_single_view_returns_the_last_observation_and_then_the_one_that_waited():
    env = SingleJointEnv(make_vector_env("debug/alignment", {"episode_length": 2}, 1))
    with pytest.raises(RuntimeError, match="no episode was started"):
        env.step_joint(dict.fromkeys(env.possible_agents, 0))
    env.reset_joint(0)
    env.step_joint(dict.fromkeys(env.possible_agents, 0))
    last = env.step_joint(dict.fromkeys(env.possible_agents, 0))
    assert last.observations["agent_1"].tolist() == [0, 2, 1] and last.truncated["agent_1"]
    with pytest.raises(RuntimeError, match="the episode is over; call reset_joint"):
        env.step_joint(dict.fromkeys(env.possible_agents, 0))
    assert env.reset_joint()["agent_1"].tolist() == [1, 0, 1]
    assert env.reset_joint()["agent_1"].tolist() == [2, 0, 1]  # without a step between: a further episode
    assert env.reset_joint(0)["agent_1"].tolist() == [0, 0, 1]
    with pytest.raises(ValueError, match="actions have no entry for \\['agent_2'\\]"):
        env.step_joint({"agent_0": 0, "agent_1": 0})
    with pytest.raises(ValueError, match="needed: num_envs=1"):
        SingleJointEnv(make_vector_env("climbing", {}, 2))


def test_single_view_state_between_episodes():
    env, other = (make_joint_env("debug/random_observations", {"episode_length": 3}) for _ in range(2))
    play(env, 5, 2)
    env.step_joint(dict.fromkeys(env.possible_agents, 1))  # now an observation waits
    other.set_state(env.get_state())
    assert_same(env.reset_joint(), other.reset_joint())


def test_sync_vector_saves_scalar_environments():
    env, other = SyncVectorJointEnv(Pair, 2), SyncVectorJointEnv(Pair, 2)
    play_vector(env, [1, 2], 6)
    other.set_state(env.get_state())
    ahead = [play_vector(e, [None, None], 9, action_seeds=[1, 2]) for e in (env, other)]
    assert_same(*ahead)


def test_episode_over():
    end = np.array([[True, False, True, False], [True, True, False, False]])
    nobody = np.zeros_like(end)
    assert episode_over(end, nobody).tolist() == [True, False, False, False]
    assert episode_over(end, ~end).all()
    assert episode_over(end[0], nobody[0]).tolist() == end[0].tolist()
    present = np.array([[True, False, True, False], [True, True, False, False]])
    assert episode_over(end, nobody, present).tolist() == [True, True, True, False]
