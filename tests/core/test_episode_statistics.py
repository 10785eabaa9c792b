"""Episode statistics of whole rollouts against a loop over single steps."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from thrust_rllib.sampling.episode_statistics import EpisodeStatistics

AGENTS = ["a", "b", "c"]


def statistics(envs, window=10_000):
    return EpisodeStatistics(AGENTS, {"a": "left", "b": "right", "c": "left"}, envs, window)


def by_hand(rollouts, keep, envs):
    """Finished episodes (returns, steps, length, seconds), counts per agent."""
    returns, steps = np.zeros((3, envs)), np.zeros((3, envs), int)
    length, started = np.zeros(envs, int), np.zeros(envs)
    finished, counts = [], np.zeros(3, int)
    for rewards, present, over, times in rollouts:
        for t in range(len(over)):
            for e in range(envs):
                returns[:, e] += rewards[t, :, e]
                steps[:, e] += present[t, :, e]
                counts += present[t, :, e] * keep[e]
                length[e] += 1
                if over[t, e]:
                    if keep[e]:
                        finished.append((returns[:, e].copy(), steps[:, e].copy(), length[e], times[t] - started[e]))
                    returns[:, e], steps[:, e], length[e], started[e] = 0, 0, 0, times[t]
    return finished, counts


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), envs=st.integers(1, 4), lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_they_equal_a_loop_over_steps(seed, envs, lengths):
    rng = np.random.default_rng(seed)
    keep = rng.random(envs) < 0.7
    mine, clock, rollouts = statistics(envs), 0.0, []
    for length in lengths:
        times = clock + np.cumsum(rng.random(length))
        clock = times[-1]
        present = rng.random((length, 3, envs)) < 0.8
        rewards = rng.normal(size=(length, 3, envs)).astype(np.float32)
        rollouts.append((rewards, present, rng.random((length, envs)) < 0.3, times))
        mine.add(*rollouts[-1][:3], keep, times)
    expected, counts = by_hand(rollouts, keep, envs)
    num_finished, agent_steps = mine.pop_counts()
    assert num_finished == len(expected) == len(mine._finished)
    np.testing.assert_array_equal(agent_steps, counts)
    for (returns, steps, length, seconds), right in zip(mine._finished, expected, strict=True):
        np.testing.assert_allclose(returns, right[0], atol=1e-12)
        np.testing.assert_array_equal(steps, right[1])
        assert length == right[2] and abs(seconds - right[3]) < 1e-9


def test_a_huge_reward_of_one_episode_is_not_in_the_next():
    mine = statistics(1)
    rewards = np.array([1e20, 0.5, 0.5, 1.0], np.float32)[:, None, None].repeat(3, axis=1)
    over = np.array([[True], [False], [True], [False]])
    mine.add(rewards, np.ones((4, 3, 1), bool), over, np.ones(1, bool), np.arange(4.0))
    mine.add(rewards[3:], np.ones((1, 3, 1), bool), over[2:3], np.ones(1, bool), np.array([4.0]))
    assert [episode[0].tolist() for episode in mine._finished][1:] == [[1.0] * 3, [2.0] * 3]
