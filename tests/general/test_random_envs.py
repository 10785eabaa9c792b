"""The scripted environments and the reference, held against numbers written by hand; nothing is learned or sampled."""

from __future__ import annotations

import dataclasses

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.general.random_envs import Journal, OwnStep, ScriptedJointEnv, ScriptedMultiAgentEnv, Stream, scripts
from tests.general.reference import advantages_and_targets
from tests.general.script import MAX_STEPS, Episode, Kind, Life, Script, encode, origin
from thrust_rllib.connectors.observation_encoding import ObservationEncoder

examples = settings(max_examples=100, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)

HAND = Script(
    kinds=(Kind(), Kind("masked", "shifted"), Kind("discrete", "multi")),
    episodes=(
        Episode((Life("A.+A"), Life("+.AA", "truncated"), Life("A", "terminated", last=False)), over="terminated"),
        Episode((Life("A"), Life(""), Life(".", last=False)), over="truncated"),
    ),
)
ON = {"__all__": False}


def legal_action(space, observation, rng):
    """A random action that the mask, if there is one, allows."""
    mask = observation["action_mask"] if isinstance(observation, dict) else None
    if isinstance(space, gym.spaces.Box):
        return rng.uniform(space.low, space.high).astype(np.float32)
    if isinstance(space, gym.spaces.MultiDiscrete):
        last = np.arange(space.nvec[1]) if mask is None else np.flatnonzero(mask[space.nvec[0] :])
        return np.array([rng.integers(space.nvec[0]), rng.choice(last)])
    return space.start + rng.choice(np.arange(space.n) if mask is None else np.flatnonzero(mask))


def test_a_script_by_hand():
    journal = Journal()
    env = ScriptedMultiAgentEnv({"script": HAND, "journal": journal})
    assert env.possible_agents == ["north", "east", "south"]

    seen, _ = env.reset()
    assert list(seen) == ["north", "south"]
    np.testing.assert_array_equal(seen["north"], [0, 0, 0])  # episode, step, agent
    assert seen["south"] == 0

    seen, paid, terminated, truncated, _ = env.step({"north": np.int64(1), "south": np.array([1, 2])})
    assert (seen, terminated, truncated) == ({}, {"south": True, **ON}, ON)
    assert paid == {"north": -2.0, "east": 1.5, "south": -0.5}

    seen, paid, terminated, truncated, _ = env.step({})  # nobody acts
    assert (list(seen), paid, terminated, truncated) == (["east"], {}, ON, ON)
    np.testing.assert_array_equal(seen["east"]["observations"], [0, 2, 1])
    np.testing.assert_array_equal(seen["east"]["action_mask"], [0, 1])

    seen, paid, terminated, truncated, _ = env.step({"east": np.int64(2)})
    assert (list(seen), terminated, truncated) == (["north", "east"], ON, ON)
    assert paid == {"north": 3.0, "east": 1.0}

    seen, paid, terminated, truncated, _ = env.step({"north": np.int64(0), "east": np.int64(1)})
    assert (list(seen), terminated, truncated) == (["north", "east"], {"__all__": True}, {"east": True, **ON})
    np.testing.assert_array_equal(seen["north"], [0, 4, 0])
    assert paid == {"north": 0.0, "east": -2.0}

    north, east, south = journal.episodes[0].streams.values()
    assert [(s.t, s.action, s.reward) for s in north.steps] == [(0, 1, -2.0 + 3.0), (3, 0, 0.0)]
    assert [(s.t, s.action, s.reward) for s in east.steps] == [(2, 2, 1.0), (3, 1, -2.0)]
    assert [(s.t, s.action.tolist(), s.reward) for s in south.steps] == [(0, [1, 2], -0.5)]
    np.testing.assert_array_equal(north.steps[1].observation, [0, 3, 0])
    assert (north.end, east.end, south.end) == ("terminated", "truncated", "terminated")
    assert (north.early_reward, east.early_reward, south.early_reward) == (0.0, 1.5, 0.0)
    np.testing.assert_array_equal(east.following["observations"], [0, 4, 1])
    assert south.following is None

    seen, _ = env.reset()  # the second episode of the script
    assert list(seen) == ["north"]
    seen, paid, terminated, truncated, _ = env.step({"north": np.int64(0)})
    assert (list(seen), paid, terminated, truncated) == (["north"], {"north": -0.5}, ON, {"__all__": True})
    assert {agent: len(stream.steps) for agent, stream in journal.episodes[1].streams.items()} == {
        "north": 1, "east": 0, "south": 0,
    }  # fmt: skip
    assert journal.episodes[1].streams["north"].end == "truncated"

    seen, _ = env.reset()  # the first again, with a number of its own
    np.testing.assert_array_equal(seen["north"], [2, 0, 0])
    assert seen["south"] == 2 * (MAX_STEPS + 1)


def test_a_step_is_open_until_the_next_observation():
    journal = Journal()
    env = ScriptedMultiAgentEnv({"script": HAND, "journal": journal})
    env.reset()
    north = journal.episodes[0].streams["north"]
    complete = [north.complete()]
    for actions in ({"north": 1, "south": np.array([0, 1])}, {}, {"east": 2}, {"north": 0, "east": 1}):
        env.step({agent: np.asarray(action) for agent, action in actions.items()})
        complete.append(north.complete())
    assert complete == [0, 0, 0, 1, 2]


def test_what_nobody_may_do_is_refused():
    env = ScriptedMultiAgentEnv({"script": HAND, "journal": Journal()})
    env.reset()
    with pytest.raises(AssertionError):
        env.step({"north": np.int64(1)})  # south acts, too
    with pytest.raises(AssertionError):
        env.step({"north": np.int64(3), "south": np.array([0, 0])})  # outside the space
    env.step({"north": np.int64(1), "south": np.array([0, 0])})
    env.step({})
    with pytest.raises(AssertionError):
        env.step({"east": np.int64(1)})  # masked
    with pytest.raises(AssertionError, match="in the middle"):
        env.reset()


@examples
@given(scripts(), seeds)
def test_random_scripts_keep_rllibs_contract_and_the_log_is_complete(script, seed):
    rng, journal = np.random.default_rng(seed), Journal()
    env = ScriptedMultiAgentEnv({"script": script, "journal": journal})
    for number in range(len(script.episodes) + 1):
        seen, _ = env.reset()
        log = journal.episodes[number]
        paid, acted, ended = dict.fromkeys(script.agents, 0.0), dict.fromkeys(script.agents, 0), set()
        assert seen
        for _ in range(MAX_STEPS):
            actions = {a: legal_action(env.action_spaces[a], seen[a], rng) for a in seen if a not in ended}
            seen, rewards, terminated, truncated, _ = env.step(actions)
            assert not ended & (set(seen) | set(rewards)) and set(actions) <= set(rewards)
            for agent, reward in rewards.items():
                paid[agent] += reward
            for agent in actions:
                acted[agent] += 1
            ended |= {a for flags in (terminated, truncated) for a, flag in flags.items() if flag}
            if "__all__" in ended or ended == set(script.agents):
                break
            assert set(seen) - ended == {
                a for a, life in zip(script.agents, env.play.episode.lives, strict=True) if life.at(env.play.t) == "A"
            }
        assert env.play.t == env.play.episode.length
        for n, (agent, stream) in enumerate(log.streams.items()):
            assert stream.early_reward + sum(step.reward for step in stream.steps) == paid[agent]
            assert stream.complete() == len(stream.steps) == acted[agent]
            assert [step.t for step in stream.steps] == [
                t for t in range(MAX_STEPS) if env.play.episode.lives[n].at(t) == "A"
            ]
            encoder = ObservationEncoder(env.observation_spaces[agent])
            for step in stream.steps:
                row = encode(script.kinds[n], step.observation)
                np.testing.assert_array_equal(row, encoder.encode(step.observation))
                assert origin(script.kinds[n], row) == (number, step.t)


@examples
@given(scripts(waits=False), seeds)
def test_both_forms_play_the_same(script, seed):
    rng, journals = np.random.default_rng(seed), (Journal(), Journal())
    rllib = ScriptedMultiAgentEnv({"script": script, "journal": journals[0]})
    joint = ScriptedJointEnv(script, journals[1])
    for _ in range(len(script.episodes)):
        (seen, _), ended = rllib.reset(), set()
        assert list(joint.reset_joint()) == list(seen)
        for t in range(MAX_STEPS):
            actions = {a: legal_action(rllib.action_spaces[a], seen[a], rng) for a in seen if a not in ended}
            seen, rewards, terminated, truncated, _ = rllib.step(actions)
            result = joint.step_joint(actions)
            assert (list(result.observations), result.rewards) == (list(seen), rewards)
            assert set(actions) <= set(result.terminated) and set(actions) <= set(result.truncated)
            ended |= {a for a in result.terminated if result.terminated[a] or result.truncated[a]}
            assert result.over == (t + 1 == joint.play.episode.length)
            if result.over:
                break
            assert ended == ended | {a for flags in (terminated, truncated) for a, flag in flags.items() if flag}
    for left, right in zip(journals[0].episodes, journals[1].episodes, strict=True):
        for agent in script.agents:
            a, b = left.streams[agent], right.streams[agent]
            assert (a.end, [(s.t, s.reward) for s in a.steps]) == (b.end, [(s.t, s.reward) for s in b.steps])
            np.testing.assert_equal(a.following, b.following)


def gap(episode):
    """A step in which nobody acts, before the last action."""
    acting = ["A" in {life.at(t) for life in episode.lives} for t in range(episode.length)]
    return False in acting and any(acting[acting.index(False) :])


def between(episode):
    """Everybody seen so far has ended, another comes later."""
    return any(
        all("A" not in life.timeline[:t] or len(life.timeline) <= t for life in episode.lives)
        and any("A" in life.timeline[t:] for life in episode.lives)
        for t in range(1, episode.length)
    )


CASES = {
    "all act in every step": lambda e: len(e.lives) > 1 and {life.timeline for life in e.lives} == {"A" * e.length},
    "turns": lambda e: e.length > 3 and all(sum(life.at(t) == "A" for life in e.lives) == 1 for t in range(e.length)),
    "born late": lambda e: any(life.acts and life.timeline[0] != "A" for life in e.lives),
    "paid while waiting": lambda e: any("A+A" in life.timeline for life in e.lives),
    "paid before the first action": lambda e: any(life.timeline[:1] == "+" and life.acts for life in e.lives),
    "paid and never acts": lambda e: any("+" in life.timeline and not life.acts for life in e.lives),
    "dies early, not seen again": lambda e: any(
        x.acts and x.end == "terminated" and not x.last and len(x.timeline) < e.length for x in e.lives
    ),
    "truncated while waiting": lambda e: any(
        x.acts and x.timeline[-1] in ".+" and x.end == "truncated" for x in e.lives
    ),
    "mixed end without __all__": lambda e: e.over is None and {"terminated", "truncated"} <= {x.end for x in e.lives},
    "truncated while others terminate": lambda e: (
        e.over == "terminated" and any(x.acts and x.end == "truncated" and len(x.timeline) == e.length for x in e.lives)
    ),
    "nobody acts": gap,
    "all have ended, one is to come": between,
    "one step": lambda e: e.length == 1,
    "longest": lambda e: e.length == MAX_STEPS,
}


def test_every_case_is_generated():
    missing = set(CASES)

    @settings(examples, max_examples=300)
    @given(scripts())
    def look(script):
        missing.difference_update([case for case in missing if any(map(CASES[case], script.episodes))])

    look()
    assert not missing


@examples
@given(scripts(waits=False))
def test_without_waiting_agents_act_from_birth_to_end(script):
    for life in (life for episode in script.episodes for life in episode.lives):
        assert ".A" not in life.timeline.strip(".") and "A." not in life.timeline and "+" not in life.timeline


@pytest.mark.parametrize(
    "lives, over",
    [
        ((Life("AA"), Life("A")), "terminated"),  # shorter, but without an end of its own
        ((Life("AA", "truncated", last=False),), "terminated"),
        ((Life("AA", last=False),), "truncated"),
        ((Life("AA", "terminated"), Life("..", "terminated")), None),  # nobody can tell that it is over
        ((Life(".."),), "terminated"),
        ((Life("B"),), "terminated"),
    ],
)
def test_impossible_episodes_are_refused(lives, over):
    with pytest.raises(AssertionError):
        Episode(lives, over)


# Rewards 1, 2, 3; values 4, 6, 8, and 10 for what follows; gamma 1/2.
@pytest.mark.parametrize(
    "end, first, stop, lambda_, targets",
    [
        ("terminated", 0, 3, 0.0, [1 + 3, 2 + 4, 3]),
        ("truncated", 0, 3, 0.0, [1 + 3, 2 + 4, 3 + 5]),
        (None, 0, 3, 0.0, [1 + 3, 2 + 4, 3 + 5]),
        ("terminated", 0, 3, 1.0, [1 + (2 + 3 / 2) / 2, 2 + 3 / 2, 3]),
        ("truncated", 0, 3, 1.0, [1 + (2 + 8 / 2) / 2, 2 + 8 / 2, 8]),
        ("terminated", 0, 2, 1.0, [1 + (2 + 8 / 2) / 2, 2 + 8 / 2]),  # cut: the value of the third observation
        ("terminated", 2, 3, 1.0, [3]),
    ],
)
def test_reference_by_hand(end, first, stop, lambda_, targets):
    stream = Stream([OwnStep(t, v, 0, r) for t, v, r in ((0, 4, 1), (3, 6, 2), (4, 8, 3))], following=10, end=end)
    advantages, found = advantages_and_targets(stream, first, stop, float, 0.5, lambda_)
    np.testing.assert_allclose(found, targets, rtol=0, atol=1e-12)
    np.testing.assert_allclose(advantages, np.array(targets) - [4, 6, 8][first:stop], rtol=0, atol=1e-12)


def test_reference_pays_what_came_before_the_first_step_with_it():
    steps = [OwnStep(2, 4, 0, 1.0), OwnStep(3, 6, 0, 2.0)]
    stream = Stream(steps, early_reward=5.0, end="terminated")
    assert advantages_and_targets(stream, 0, 2, float, 0.5, 0.0)[1].tolist() == [5 + 1 + 3, 2]
    assert advantages_and_targets(stream, 1, 2, float, 0.5, 0.0)[1].tolist() == [2]
    without = dataclasses.replace(stream, early_reward=0.0)
    assert advantages_and_targets(without, 0, 2, float, 0.5, 0.0)[1].tolist() == [1 + 3, 2]
