"""`play_episodes` and the recipe: what is learned at once, and episodes counted as they were played."""

import numpy as np
import pytest

from thrust_rllib import JointPPOConfig
from thrust_rllib.evaluation import play_episodes
from thrust_rllib.recipes import recipe


def trained(env, steps):
    config = recipe(JointPPOConfig().environment(env))
    # Nothing that an agent does changes what comes next (gamma 0), and a deviation of 1 has to shrink in short time.
    config.training(gamma=0.0, lr=[[0, 3e-3], [steps, 0.0]], train_batch_size_per_learner=512, minibatch_size=128)
    algo = config.debugging(seed=0).build_algo()
    for _ in range(steps // 512):
        algo.train()
    return algo


def test_learns_to_match_observations(ray_session):
    algo = trained("debug/match_observation", steps=10_000)
    played = play_episodes(algo, 32)
    algo.stop()
    assert played.lengths.tolist() == [16] * 32
    assert (played.returns.mean(axis=0) > 15.9).all()  # 16 at best, 4 at random


def test_learns_to_match_targets(ray_session):
    algo = trained("debug/match_target", steps=30_000)
    played = play_episodes(algo, 32)
    algo.stop()
    assert (played.returns.mean(axis=0) / 16 > -0.01).all()  # 0 at best; always acting 0 gets -1/3


@pytest.fixture(scope="module")
def untrained(ray_session):
    config = recipe(JointPPOConfig().environment("bucket_brigade", env_config={"scenario": "trivial_cooperation"}))
    algo = config.debugging(seed=0).build_algo()
    yield algo
    algo.stop()


@pytest.mark.parametrize("num_episodes, num_envs", [(1, None), (7, 3), (10, 4), (300, None)])
def test_plays_the_episodes_asked_for(untrained, num_episodes, num_envs):
    played = play_episodes(untrained, num_episodes, num_envs=num_envs)
    assert played.returns.shape == (num_episodes, 4) and played.lengths.shape == (num_episodes,)
    assert played.agents == [f"agent_{i}" for i in range(4)]
    assert (played.lengths >= 13).all()  # 12 nights, ends after the 13th at the earliest
    np.testing.assert_allclose(played.team_returns, played.returns.sum(axis=1))
    np.testing.assert_allclose(played.team_reward_per_step, played.team_returns / played.lengths)


@pytest.mark.parametrize("explore", [False, True])
def test_the_seed_decides_everything(untrained, explore):
    first, second, other = (play_episodes(untrained, 8, seed=seed, explore=explore) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first.returns, second.returns)
    if explore:
        assert (first.returns != other.returns).any()


def test_playing_does_not_change_the_training(ray_session):
    def weights(with_evaluation):
        config = recipe(JointPPOConfig().environment("debug/match_observation"))
        config.training(train_batch_size_per_learner=256, minibatch_size=64, num_epochs=1).debugging(seed=0)
        algo = config.build_algo()
        for _ in range(2):
            algo.train()
            if with_evaluation:
                play_episodes(algo, 5, explore=True)
        state = algo.learner_group.get_weights()
        algo.stop()
        return [v for m in sorted(state) for _, v in sorted(state[m].items())]

    for mine, other in zip(weights(True), weights(False), strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(other))


def test_other_settings_of_the_environment(untrained):
    played = play_episodes(untrained, 4, env_config={"scenario": "trivial_cooperation", "min_nights": 3})
    assert (played.lengths < 13).any()


def test_no_episode_is_an_error(untrained):
    with pytest.raises(ValueError, match="num_episodes is 0"):
        play_episodes(untrained, 0)
