import itertools

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.envs.helpers import assert_same, play_vector, row
from thrust_rllib.envs import list_envs, make_joint_env, make_vector_env

STATELESS = "thrust_rllib.envs.memory_tasks:stateless_cartpole"
RLLIB_STATELESS = "ray.rllib.examples.envs.classes.stateless_cartpole:StatelessCartPole"


def with_all_cues(name, config):
    """An environment for each cue, and what is seen first."""
    count = config["num_cues"]
    env = make_vector_env(name, config, count)
    env.reset_joint(range(count))
    env.set_state(env.get_state() | {"_cues": np.arange(count)})
    return env, env._observe(np.arange(count))


def play(env, seen, policy):
    """One episode. `policy` takes what one agent has seen so far, [steps, E, K + 1], and the agent's place.

    Returns:
        What was seen [steps + 1, N, E, K + 1], rewards [steps, N, E], the last result.
    """
    all_seen, rewards = [seen], []
    while True:
        actions = [policy(np.stack(all_seen)[:, i], i) for i in range(len(seen))]
        result = env.step_joint(np.stack(actions))
        rewards.append(result.rewards)
        over = result.final_observations is not None
        all_seen.append(result.final_observations if over else result.observations)
        if over:
            return np.stack(all_seen), np.stack(rewards), result


def act_on_first(so_far, agent):
    """The first cue that this agent was shown, in every step (0 while there was none)."""
    return so_far[..., :-1].sum(axis=0).argmax(axis=-1)


def ones_at(places, shape):
    """Zeros, but for these places [step, environment, number]."""
    array = np.zeros(shape, dtype=np.float32)
    for place in places:
        array[place] = 1
    return array


@pytest.mark.parametrize(("delay", "num_cues"), [(1, 2), (2, 4), (8, 4), (32, 3)])
def test_rules_of_recall(delay, num_cues):
    env, first = with_all_cues("recall", {"delay": delay, "num_cues": num_cues})
    seen, rewards, last = play(env, first, act_on_first)
    shown = {(0, e, e) for e in range(num_cues)} | {(delay, e, num_cues) for e in range(num_cues)}
    expected = ones_at(shown, (delay + 2, num_cues, num_cues + 1))
    np.testing.assert_array_equal(seen[:, 0], expected)
    assert last.terminated.all() and not last.truncated.any() and len(rewards) == delay + 1
    assert (rewards[:-1] == 0).all() and (rewards[-1] == 1).all()
    assert (last.observations[0, :, :-1].sum(axis=-1) == 1).all()  # the next episode shows a cue again
    _, rewards, _ = play(*with_all_cues("recall", env_config(env)), lambda so_far, _: act_on_first(so_far, 0) == 0)
    assert rewards.sum(axis=0)[0].tolist() == [0.0] * num_cues  # always a wrong one


def env_config(env):
    extra = len(env.possible_agents)
    return {"delay": env.episode_length - extra, "num_cues": env.num_cues}


@pytest.mark.parametrize(("delay", "num_cues"), [(1, 2), (4, 2), (5, 3)])
def test_rules_of_relay(delay, num_cues):
    env, first = with_all_cues("relay", {"delay": delay, "num_cues": num_cues})
    assert env.possible_agents == ["speaker", "listener"]

    def twisted(so_far, agent):
        """The speaker says another number than its cue; the listener knows the code."""
        shift = 1 if agent == 0 else -1
        return (act_on_first(so_far, agent) + shift) % num_cues

    seen, rewards, last = play(env, first, twisted)
    shape = (delay + 3, num_cues, num_cues + 1)
    cues = range(num_cues)
    np.testing.assert_array_equal(seen[:, 0], ones_at({(0, e, e) for e in cues}, shape))
    heard = {(1, e, (e + 1) % num_cues) for e in cues} | {(delay + 1, e, num_cues) for e in cues}
    np.testing.assert_array_equal(seen[:, 1], ones_at(heard, shape))
    assert last.terminated.all() and len(rewards) == delay + 2
    assert (rewards[:-1] == 0).all() and (rewards[-1] == 1).all()
    # A listener that takes the number for the cue itself is wrong each time.
    naive = {0: lambda x: (act_on_first(x, 0) + 1) % num_cues, 1: lambda x: act_on_first(x, 1)}
    _, rewards, _ = play(*with_all_cues("relay", env_config(env)), lambda so_far, agent: naive[agent](so_far))
    assert rewards.sum() == 0


def memoryless(tables):
    """A policy that looks at the last observation only: `tables` gives each agent's action by (cues..., now, blank)."""

    def policy(so_far, agent):
        last = so_far[-1]
        kind = np.where(last.any(axis=-1), last.argmax(axis=-1), last.shape[-1])
        return np.array(tables[agent])[kind]

    return policy


@pytest.mark.parametrize(
    ("name", "delay", "num_cues"), [("recall", 2, 2), ("recall", 1, 3), ("relay", 1, 2), ("relay", 3, 2)]
)
def test_every_memoryless_policy_is_at_chance(name, delay, num_cues):
    """All deterministic ones; success is linear in the probabilities of each observation's action, so of others too."""
    config = {"delay": delay, "num_cues": num_cues}
    agents = 1 if name == "recall" else 2
    one = list(itertools.product(range(num_cues), repeat=num_cues + 2))
    # What the speaker does on "now", which it never sees, does not matter: one action stands for all.
    speakers = [table for table in one if table[num_cues] == 0]
    teams = itertools.product(one) if agents == 1 else itertools.product(speakers, one)
    env, first = with_all_cues(name, config)
    begin = env.get_state()
    count = 0
    for tables in teams:
        env.set_state(begin)
        _, rewards, _ = play(env, first, memoryless(tables))
        assert rewards.sum(axis=0).mean(axis=-1) == pytest.approx(1 / num_cues), tables
        count += 1
    assert count == num_cues ** (num_cues + 2) * (num_cues ** (num_cues + 1) if agents == 2 else 1)
    env.set_state(begin)
    _, rewards, _ = play(env, first, act_on_first)
    assert (rewards.sum(axis=0) == 1).all()  # with memory


@pytest.mark.parametrize("name", ["recall", "relay"])
def test_cues_are_drawn_alike_and_again_in_each_episode(name):
    env = make_vector_env(name, {"delay": 1, "num_cues": 4}, 2000)
    cues = [env.reset_joint(range(2000))[0]]
    for _ in range(2 * env.episode_length):
        result = env.step_joint(np.zeros((env.num_agents, 2000), dtype=int))
        if result.final_observations is not None:
            cues.append(result.observations[0])
    cues = np.stack(cues).argmax(axis=-1)
    frequencies = np.array([np.bincount(drawn, minlength=4) for drawn in cues]) / 2000
    assert frequencies.shape == (3, 4) and np.abs(frequencies - 0.25).max() < 0.04  # four standard errors
    together = np.bincount(4 * cues[0] + cues[1], minlength=16) / 2000
    assert np.abs(together - 1 / 16).max() < 0.022  # one episode's cue says nothing about the next one's


@given(
    name=st.sampled_from(["recall", "relay"]),
    delay=st.integers(1, 6),
    num_cues=st.integers(2, 5),
    seeds=st.lists(st.integers(0, 2**31), min_size=1, max_size=4),
)
def test_an_environment_does_not_see_its_neighbours(name, delay, num_cues, seeds):
    config = {"delay": delay, "num_cues": num_cues}
    together = play_vector(make_vector_env(name, config, len(seeds)), seeds, steps=20)
    for e, seed in enumerate(seeds):
        assert_same(row(together, e, True), row(play_vector(make_vector_env(name, config, 1), [seed], 20), 0, True))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"delay": 0}, "delay is 0; needed: at least 1"),
        ({"num_cues": 1}, "num_cues is 1; needed: at least 2"),
        ({"cues": 3}, "unknown setting 'cues'.*num_cues"),
    ],
)
@pytest.mark.parametrize("name", ["recall", "relay"])
def test_bad_settings(name, config, says):
    with pytest.raises(ValueError, match=says):
        make_vector_env(name, config, 1)
    assert name in list_envs()


def test_cartpole_without_velocities():
    env, whole = make_joint_env(STATELESS), gym.make("CartPole-v1")
    seen, (full, _) = env.reset_joint(3)["agent_0"], whole.reset(seed=3)
    assert env.observation_spaces["agent_0"].shape == (2,)
    for _ in range(500):
        np.testing.assert_array_equal(seen, full[[0, 2]])
        assert env.observation_spaces["agent_0"].contains(seen)
        action = int(full[2] + 0.3 * full[3] + 0.05 * full[0] + 0.1 * full[1] > 0)  # a hand-made controller
        result, (full, reward, terminated, truncated, _) = env.step_joint({"agent_0": action}), whole.step(action)
        assert result.rewards == {"agent_0": reward}
        assert (result.terminated, result.truncated) == (terminated, truncated)
        seen = result.observations["agent_0"]
    assert truncated and not terminated
    assert make_vector_env(STATELESS, {"max_episode_steps": 7}, 2).num_envs == 2


def test_rllibs_own_is_the_same_without_a_limit():
    ours, theirs = make_vector_env(STATELESS, {}, 3), make_vector_env(RLLIB_STATELESS, {}, 3)
    logs = [play_vector(env, [1, 2, 3], 100) for env in (ours, theirs)]
    for e in range(3):
        assert_same(*(row(log, e, True) for log in logs))
