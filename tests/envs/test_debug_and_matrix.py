import gymnasium as gym
import numpy as np
import pytest

from thrust_rllib.envs import MatrixGame, make_vector_env, matrix_games
from thrust_rllib.envs.debug import Faulty, ObservationKinds


def discounted(rewards, gamma, tail=0.0):
    value = tail
    for reward in reversed(rewards):
        value = reward + gamma * value
    return value


def joint(env, *actions):
    return np.repeat(np.array(actions)[:, None], env.num_envs, axis=1)


@pytest.mark.parametrize(
    ("name", "config", "best", "per_step", "total"),
    [("climbing", {}, (0, 0), 11, 275), ("penalty", {}, (0, 2), 10, 250), ("penalty", {"k": -5}, (2, 0), 10, 250)],
)
def test_best_joint_action(name, config, best, per_step, total):
    env = make_vector_env(name, config, 2)
    env.reset_joint()
    results = [env.step_joint(joint(env, *best)) for _ in range(25)]
    rewards = np.array([r.rewards for r in results])
    assert (rewards == per_step).all() and rewards[:, 0, 0].sum() == total
    assert [r.truncated.all() for r in results] == [False] * 24 + [True]
    payoff = env.payoff
    assert payoff.max() == per_step == payoff[best]
    for i in range(3):
        for j in range(3):
            assert (env.step_joint(joint(env, i, j)).rewards == payoff[i, j]).all()


def test_payoffs_are_those_of_the_literature():
    assert matrix_games.CLIMBING == ((11, -30, 0), (-30, 7, 0), (0, 6, 5))
    assert make_vector_env("penalty", {}, 1).payoff.tolist() == [[-100, 0, 10], [0, 2, 0], [10, 0, -100]]
    with pytest.raises(ValueError, match=r"payoff has shape \(2, 3\); needed: a square matrix"):
        MatrixGame(payoff=np.zeros((2, 3)))


@pytest.mark.parametrize(
    ("first", "second", "reward"), [(0, (0, 1), 7), (1, (0, 0), 0), (1, (0, 1), 1), (1, (1, 0), 1), (1, (1, 1), 8)]
)
def test_two_step_game(first, second, reward):
    env = make_vector_env("two_step_game", {}, 3)
    assert env.reset_joint()[:, 0].tolist() == [[1, 0, 0, 1, 0], [1, 0, 0, 0, 1]]
    result = env.step_joint(joint(env, first, 1 - first))  # agent 1's first action does not matter
    assert (result.rewards == 0).all() and not result.terminated.any()
    assert result.observations[0, 0, 1 + first] == 1
    result = env.step_joint(joint(env, *second))
    assert (result.rewards == reward).all() and result.terminated.all() and not result.truncated.any()
    assert result.final_observations[0, 0, 1 + first] == 1 and result.observations[0, 0, 0] == 1


def test_constant_reward_has_the_value_of_a_never_ending_stream():
    env = make_vector_env("debug/constant_reward", {"episode_length": 5}, 1)
    env.reset_joint()
    results = [env.step_joint(np.zeros((2, 1), dtype=int)) for _ in range(5)]
    assert results[-1].truncated.all() and not results[-1].terminated.any()
    gamma, value = 0.9, 1 / (1 - 0.9)
    assert discounted([r.rewards[0, 0] for r in results], gamma, tail=value) == pytest.approx(value)
    np.testing.assert_array_equal(results[-1].final_observations, results[0].observations)


@pytest.mark.parametrize("ends", ["terminated", "truncated", ["terminated", "truncated"]])
def test_scripted_rewards(ends):
    env = make_vector_env("debug/scripted_rewards", {"ends": ends}, 2)
    assert env.reset_joint()[0, 0].tolist() == [1, 0, 0, 0]
    results = [env.step_joint(np.zeros((2, 2), dtype=int)) for _ in range(6)]
    assert [r.rewards[1, 1] for r in results] == [1, 2, 3, 1, 2, 3]
    kinds = [ends] * 2 if isinstance(ends, str) else ends
    for t, r in enumerate(results):
        assert r.terminated[:, 0].tolist() == [t % 3 == 2 and kind == "terminated" for kind in kinds]
        assert r.truncated[:, 0].tolist() == [t % 3 == 2 and kind == "truncated" for kind in kinds]
    assert results[2].final_observations[0, 0].tolist() == [0, 0, 0, 1]


def test_identity():
    env = make_vector_env("debug/identity", {"agents": 3}, 2)
    np.testing.assert_array_equal(env.reset_joint()[:, 1], np.eye(3))
    result = env.step_joint(joint(env, 0, 1, 0))
    np.testing.assert_array_equal(result.observations[:, 0], np.eye(3))
    assert result.rewards[:, 0].tolist() == [1, 1, 0]


def test_alignment():
    env = make_vector_env("debug/alignment", {"episode_length": 3, "agents": [0, 1]}, 2)
    seen = [env.reset_joint([1, 2])]
    rewards = []
    for _ in range(4):
        result = env.step_joint(np.zeros((2, 2), dtype=int))
        seen.append(result.observations)
        rewards.append(result.rewards[0, 0])
    assert [s[1, 0].tolist() for s in seen] == [[0, 0, 1], [0, 1, 1], [0, 2, 1], [1, 0, 1], [1, 1, 1]]
    assert rewards == [0, 1, 2, 0]
    assert env.reset_joint([3, None])[0].tolist() == [[0, 0, 0], [2, 0, 0]]


def test_best_answers_of_the_learnable_ones():
    match = make_vector_env("debug/match_observation", {}, 4)
    seen = match.reset_joint(range(4))
    for _ in range(20):
        result = match.step_joint(seen.argmax(axis=-1))
        assert (result.rewards == 1).all()
        assert (seen.sum(axis=-1) == 1).all()
        seen = result.observations
    assert (match.step_joint((seen.argmax(axis=-1) + 1) % 4).rewards == 0).all()
    target = make_vector_env("debug/match_target", {"size": 2}, 4)
    seen = target.reset_joint(range(4))
    for _ in range(20):
        result = target.step_joint(seen)
        np.testing.assert_allclose(result.rewards, 0, atol=1e-12)
        seen = result.observations
    np.testing.assert_allclose(target.step_joint(seen + 0.5).rewards, -0.25, atol=1e-5)


def test_multi_discrete_and_shapes():
    env = make_vector_env("debug/multi_discrete", {}, 2)
    env.reset_joint([0, 1])
    actions = np.zeros((4, 2, 2), dtype=int)
    actions[1, 0, 1] = 1
    assert env.step_joint(actions).rewards.tolist() == [[1, 1], [0, 1], [1, 1], [1, 1]]
    assert make_vector_env("debug/random_observations", {}, 4).reset_joint().shape == (3, 4, 5)


def test_mixed_spaces():
    env = make_vector_env("debug/mixed_spaces", {}, 2)
    seen = env.reset_joint([0, 1])
    assert [v.shape for v in seen.values()] == [(2, 3), (2, 4), (2, 5), (2, 6)]
    assert env.action_spaces["agent_1"] == gym.spaces.Discrete(3, start=1)
    actions = dict(
        agent_0=np.array([0, 1]),
        agent_1=np.array([1, 3]),
        agent_2=np.array([[0, 0], [0, 2]]),
        agent_3=np.array([[0, 0], [1, 1]], dtype=np.float32),
    )
    assert env.step_joint(actions).rewards.tolist() == [[1, 0], [1, 0], [1, 0], [0, -1]]


def test_observation_kinds():
    env = ObservationKinds(2, kinds=("discrete", "discrete", "dict", "image", "tuple", "multi_binary"))
    seen = env.reset_joint([0, 1])
    assert env.possible_agents == ["discrete", "discrete_1", "dict", "image", "tuple", "multi_binary"]
    assert seen["image"].dtype == np.uint8 and seen["image"].shape == (2, 8, 8, 3)
    assert seen["dict"]["position"].shape == (2, 2) and seen["tuple"][1].shape == (2,)
    assert seen["image"].max() > 200  # the whole range is used


def test_masked_actions():
    env = make_vector_env("debug/masked_actions", {}, 3)
    seen = env.reset_joint([0, 1, 2])
    for _ in range(15):
        masks = seen["agent_0"]["action_mask"]
        assert (masks.sum(axis=1) == 1).all() and (seen["agent_1"]["action_mask"] == 1).all()
        result = env.step_joint({"agent_0": masks.argmax(axis=1), "agent_1": np.array([0, 1, 2])})
        assert (result.rewards == 1).all()
        seen = result.observations
    illegal = (seen["agent_0"]["action_mask"].argmax(axis=1) + [0, 1, 0]) % 4
    with pytest.raises(ValueError, match="agent 'agent_0' of environment 1 took action .* which its mask .* forbids"):
        env.step_joint({"agent_0": illegal, "agent_1": np.zeros(3, dtype=int)})


def test_faulty():
    values = {}
    for fault in ("nan_observation", "nan_reward", "outside", "none"):
        env = Faulty(fault, step=2)
        env.reset_joint()
        results = [env.step_joint({"agent_0": 0, "agent_1": 0}) for _ in range(5)]
        assert results[4].truncated
        values[fault] = [(r.observations["agent_1"][1], r.rewards["agent_1"]) for r in results]
        assert values[fault][0] == (0, 1)
    assert np.isnan(values["nan_observation"][1][0]) and np.isnan(values["nan_reward"][1][1])
    assert values["outside"][1][0] == 7 and values["none"][1] == (0, 1)
    env = make_vector_env("debug/faulty", {"step": 1}, 2)
    env.reset_joint()
    with pytest.raises(RuntimeError, match="Faulty, environment 0, step 1 .*lost its connection"):
        env.step_joint(np.zeros((2, 2), dtype=int))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"ends": "over"}, "ends is 'over'; needed"),
        ({"ends": ["terminated"]}, "for each of 2 agents"),
        ({"episode_length": 0}, "episode_length is 0"),
        ({"agents": []}, "there are no agents"),
    ],
)
def test_bad_settings(config, says):
    with pytest.raises(ValueError, match=says):
        make_vector_env("debug/constant_reward", config, 1)
    with pytest.raises(RuntimeError, match="before reset_joint"):
        make_vector_env("debug/constant_reward", {}, 1).step_joint(np.zeros((2, 1), dtype=int))
