"""The vectorised speaker and listener against mpe2's own."""

import numpy as np
import pytest

from thrust_rllib.envs import make_joint_env, make_vector_env
from thrust_rllib.envs.speaker_listener import COLORS, LISTENER, SPEAKER, SpeakerListener

MPE2 = "pettingzoo:mpe2.simple_speaker_listener_v4"


def difference(left, right):
    return float(np.abs(np.asarray(left, np.float64) - np.asarray(right, np.float64)).max())


def observed(mine, theirs):
    return max(difference(mine[agent], theirs[agent]) for agent in (SPEAKER, LISTENER))


def play_both(mine, theirs, steps, seed=0):
    """The largest difference of observations, states and rewards; and the goals of the episodes."""
    rng = np.random.default_rng(seed)
    seeds = [seed + 10 * e for e in range(mine.num_envs)]
    worst, goals = observed(mine.reset_joint(seeds), theirs.reset_joint(seeds)), []
    for _ in range(steps):
        actions = {SPEAKER: rng.integers(3, size=mine.num_envs), LISTENER: rng.integers(5, size=mine.num_envs)}
        one, other = mine.step_joint(actions), theirs.step_joint(actions)
        worst = max(worst, observed(one.observations, other.observations), difference(one.rewards, other.rewards))
        np.testing.assert_array_equal(np.broadcast_to(one.truncated, (2, mine.num_envs)), other.truncated)
        assert not np.any(one.terminated) and not other.terminated.any()
        assert (one.final_observations is None) == (other.final_observations is None)
        if one.final_observations is not None:
            worst = max(worst, observed(one.final_observations, other.final_observations))
        worst = max(worst, difference(mine.state(), theirs.state()))
        goals.append(mine._goals.copy())
    return worst, np.array(goals)


@pytest.mark.parametrize("settings", [{}, {"max_cycles": 4}])
def test_it_is_mpe2s_world(settings):
    """Many episodes with the same seeds and actions, resets without seeds among them."""
    mine, theirs = SpeakerListener(3, **settings), make_vector_env(MPE2, settings, 3)
    assert mine.observation_spaces == theirs.observation_spaces and mine.action_spaces == theirs.action_spaces
    assert mine.state_space == theirs.state_space and mine.possible_agents == theirs.possible_agents
    for seed in (0, 1):
        worst, goals = play_both(mine, theirs, 110, seed)
        assert worst < 1e-6
        assert set(goals.ravel()) == {0, 1, 2}


def test_another_world_is_told_apart():
    mine, theirs = SpeakerListener(2), make_vector_env(MPE2, {}, 2)
    mine._begin = lambda envs, begin=mine._begin: (begin(envs), mine._goals.__setitem__(envs, 0))
    worst, _ = play_both(mine, theirs, 60)
    assert worst > 0.1


def test_a_word_is_heard_in_the_next_step_and_forgotten_with_the_episode():
    env = make_joint_env("speaker_listener", {"max_cycles": 2})
    seen = env.reset_joint(0)
    assert seen[LISTENER][8:].tolist() == [0, 0, 0] and seen[SPEAKER] in COLORS.astype(np.float32)
    assert env.step_joint({SPEAKER: 2, LISTENER: 0}).observations[LISTENER][8:].tolist() == [0, 0, 1]
    assert env.step_joint({SPEAKER: 1, LISTENER: 0}).observations[LISTENER][8:].tolist() == [0, 1, 0]
    assert env.reset_joint()[LISTENER][8:].tolist() == [0, 0, 0]


def test_payment_by_hand():
    env = SpeakerListener(1)
    env.reset_joint([0])
    env._goals[0], env._landmarks[0] = 1, [(1, 1), (0.5, -0.5), (0, 0)]
    env._position[0], env._velocity[0] = (0, 0), (1, 0)
    result = env.step_joint({SPEAKER: np.array([0]), LISTENER: np.array([1])})
    assert result.rewards[:, 0] == pytest.approx([-(0.4**2 + 0.5**2)] * 2)
    np.testing.assert_allclose(result.observations[LISTENER][0, :2], [0.75 - 0.5, 0], atol=1e-7)


def test_it_goes_on_from_a_saved_state():
    env = SpeakerListener(2, max_cycles=3)
    env.reset_joint([4, 5])
    rng = np.random.default_rng(0)
    actions = [{SPEAKER: rng.integers(3, size=2), LISTENER: rng.integers(5, size=2)} for _ in range(10)]
    for action in actions[:2]:
        env.step_joint(action)
    saved, ways = env.get_state(), []
    for _ in range(2):
        env.set_state(saved)
        ways.append([env.step_joint(action).rewards for action in actions])
    np.testing.assert_array_equal(*ways)
    assert len(np.unique(ways[0])) > 10


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_cycles": 0}, "max_cycles is 0; needed: at least 1"),
        ({"num_envs": 0}, "num_envs is 0; needed: at least 1"),
    ],
)
def test_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        SpeakerListener(**settings)
