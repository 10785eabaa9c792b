"""JointEpisode reads like RLlib's MultiAgentEpisode, and keeps what that one loses.

Where RLlib's own successor of a cut is wrong, a fragment is compared with the uncut episode instead: without a lookback
it drops the steps of agents that wait, and with any it gives those that are born later another time, see
`tests/test_rllib_contract.py`.
"""

from __future__ import annotations

import copy
import logging
import pickle

import numpy as np
import pytest
import ray.util
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.utils.error import MultiAgentEnvError

from thrust_rllib.joint_episode import ALL, JointEpisode

AGENTS = ("a0", "a1", "a2")
REFUSALS = (IndexError, KeyError, ValueError, AssertionError, TypeError, AttributeError, MultiAgentEnvError)

# --- playing ----------------------------------------------------------------------------------------------------------


def joint(agents=AGENTS, **kwargs):
    return JointEpisode(env_name="village", runner_index=2, env_index=5, agents=agents, **kwargs)


def step(observations=(), actions=(), rewards=(), ended=(), cut=(), over=None, t=0):
    """Arguments of `add_env_step`; agents' observations and actions are their own names and the step."""
    terminateds, truncateds = dict.fromkeys(ended, True), dict.fromkeys(cut, True)
    terminateds[ALL], truncateds[ALL] = over == "terminated", over == "truncated"
    return {
        "observations": {a: np.array([float(t), 0.5]) for a in observations},
        "actions": {a: 10 * t for a in actions},
        "rewards": dict(rewards),
        "infos": {a: {"t": t} for a in observations},
        "terminateds": terminateds,
        "truncateds": truncateds,
        "extra_model_outputs": {a: {"action_logp": -float(t)} for a in actions},
    }


def start(observations, agents=AGENTS):
    episode = joint(agents)
    episode.add_env_reset(observations={a: np.array([0.0, 0.5]) for a in observations})
    return episode


@st.composite
def scripts(draw, waits=True):
    """(agents, first observations, arguments of each step) that RLlib's class stores rightly.

    The first agent is there from the reset to the end, nobody is paid before its first observation, the last step shows
    everybody something if it ends the episode.
    """
    agents = AGENTS[: draw(st.integers(1, 3))]
    length = draw(st.integers(1, 7))
    end = draw(st.sampled_from(["terminated", "truncated", None]))
    seen, dead = {}, {}
    for i, agent in enumerate(agents):
        birth = draw(st.integers(0, length - 1)) if i and waits else 0
        dies = i > 0 and waits and birth + 1 < length and draw(st.booleans())
        at = draw(st.integers(birth + 1, length - 1)) if dies else None
        dead[agent] = (at, draw(st.sampled_from(["terminated", "truncated"])))
        must = {birth, at, length if end else birth}
        seen[agent] = [
            t <= (length if at is None else at) and t >= birth and (t in must or not waits or draw(st.booleans()))
            for t in range(length + 1)
        ]
    first = {a: 100 * i for i, a in enumerate(agents) if seen[a][0]}
    steps, acting, waiting = [], list(first), set()
    for t in range(1, length + 1):
        waiting |= set(acting)
        observed = [a for a in agents if seen[a][t]]
        paid = [a for a in agents if a in acting or (a in waiting and draw(st.booleans()))]
        flags = {way: {a: True for a in agents if dead[a] == (t, way)} for way in ("terminated", "truncated")}
        for way in flags:
            flags[way][ALL] = t == length and end == way
        steps.append(
            {
                "observations": {a: 100 * agents.index(a) + t for a in observed},
                "actions": {a: 10 * (t - 1) + agents.index(a) for a in acting},
                "rewards": {a: draw(st.sampled_from([0.0, 1.0, t + 0.5])) for a in paid},
                "infos": {a: {"t": t} for a in observed},
                "terminateds": flags["terminated"],
                "truncateds": flags["truncated"],
                "extra_model_outputs": {a: {"logp": -float(t - 1)} for a in acting},
            }
        )
        waiting -= set(observed)
        acting = [a for a in observed if not (flags["terminated"].get(a) or flags["truncated"].get(a))]
    return agents, first, steps


def play(episode, script, cuts=(), lookback=0):
    """Plays the script; a fragment begins before each step whose number is in `cuts`."""
    _, first, steps = script
    episode.add_env_reset(observations=first, infos={a: {"t": 0} for a in first})
    fragments = [episode]
    for t, arguments in enumerate(steps):
        if t in cuts:
            fragments.append(fragments[-1].cut(len_lookback_buffer=lookback))
        fragments[-1].add_env_step(**copy.deepcopy(arguments))
    return fragments


# --- reading ----------------------------------------------------------------------------------------------------------

WHAT = ("observations", "infos", "actions", "rewards", "extra_model_outputs")
OPTIONS = (
    {},
    {"env_steps": False},
    {"return_list": True},
    {"fill": -7},
    {"neg_index_as_lookback": True},
    {"fill": -7, "neg_index_as_lookback": True},
    {"fill": -7, "env_steps": False},
)


def indices(length):
    return (None, slice(0, 2), slice(-2, None), slice(1, -1), [-1, 0], [0, length - 1], 0, 1, -1, -2, length)


def read(episode, what, index, **options):
    """What the reading method returns, or the class of its refusal."""
    if what == "extra_model_outputs":
        options["key"] = "logp"
    try:
        return getattr(episode, f"get_{what}")(indices=index, **options)
    except REFUSALS as error:
        return type(error)


def differences(left, right):
    """Queries that two episodes answer differently."""
    found = []
    for what in WHAT:
        for options in OPTIONS:
            for index in indices(len(right)):
                if (what == "infos" and "fill" in options) or ("return_list" in options and isinstance(index, int)):
                    continue  # not for infos; not for a single step
                x, y = read(left, what, index, **options), read(right, what, index, **options)
                try:
                    np.testing.assert_equal(x, y)
                except AssertionError:
                    found.append((what, index, options, x, y))
    for name in (
        "get_return", "agent_steps", "env_steps", "get_agents_to_act", "get_agents_that_stepped", "get_terminateds",
        "get_truncateds", "__len__",
    ):  # fmt: skip
        x, y = getattr(left, name)(), getattr(right, name)()
        if x != y:
            found.append((name, x, y))
    x, y = left.get_return(include_hanging_rewards=True), right.get_return(include_hanging_rewards=True)
    if x != y or (left.is_done, left.is_terminated) != (right.is_done, right.is_terminated):
        found.append(("the end", x, y, left.is_done, right.is_done))
    return found


def one_step(episode, what, t, agents):
    """{agent: value} at one environment step, as RLlib's list form reads it (its other form loses values, see
    `test_rllib_contract`)."""
    found = read(episode, what, [t], neg_index_as_lookback=True, return_list=True)
    return {a: v for a, v in found[0].items() if a in agents} if isinstance(found, list) and found else {}


def index_of(episode):
    return {agent: (list(index.data), index.lookback) for agent, index in episode.env_t_to_agent_t.items()}


many = settings(max_examples=40, deadline=None, derandomize=True)


@many
@given(scripts())
def test_an_uncut_episode_reads_as_rllibs(script):
    (ours,), (theirs,) = play(joint(script[0]), script), play(MultiAgentEpisode(), script)
    assert differences(ours, theirs) == []
    assert index_of(ours) == index_of(theirs)


@many
@given(scripts())
def test_a_numpyized_episode_reads_as_rllibs(script):
    episodes = [play(joint(script[0]), script)[0], play(MultiAgentEpisode(), script)[0]]
    index = index_of(episodes[0])
    for episode in episodes:
        MultiAgentEnvRunner._prune_zero_len_sa_episodes(episode)  # as the runner does before
        episode.to_numpy()
        assert not episode.agent_episodes or episode.is_numpy
    assert differences(*episodes) == []
    assert index_of(episodes[0]) == index


@many
@given(scripts(waits=False), st.data(), st.sampled_from([0, 1, 3]))
def test_fragments_of_agents_that_all_act_read_as_rllibs(script, data, lookback):
    length = len(script[2])
    cuts = data.draw(st.sets(st.integers(min(lookback, length - 1), length - 1), max_size=2))
    ours = play(joint(script[0]), script, cuts, lookback)
    theirs = play(MultiAgentEpisode(), script, cuts, lookback)
    for mine, other in zip(ours, theirs, strict=True):
        if mine is ours[0] or lookback <= mine.env_t_started:
            assert differences(mine, other) == []
            assert index_of(mine) == index_of(other)


@many
@given(scripts(), st.data(), st.sampled_from([0, 1, 3]))
def test_a_fragment_reads_as_the_uncut_episode(script, data, lookback):
    """Where agents wait, are born or have died, RLlib's successor is wrong."""
    agents, _, steps = script
    cuts = data.draw(st.sets(st.integers(0, len(steps) - 1), max_size=3))
    (truth,) = play(joint(agents), script)
    for fragment in play(joint(agents), script, cuts, lookback):
        first, last = fragment.env_t_started, fragment.env_t
        assert (first in cuts or first == 0) and fragment.id_ is not None
        # To the left as far as was asked; to the right, only what was known when the fragment ended.
        at_last = play(joint(agents), (agents, script[1], steps[:last]))[0] if last < truth.env_t else truth
        living = set(fragment.agent_episodes)
        for what in WHAT:
            for t in range(max(first - lookback, 0), last + 1):
                assert one_step(fragment, what, t - first, living) == one_step(at_last, what, t, living), (what, t)
        assert fragment.get_agents_to_act() == at_last.get_agents_to_act()
        assert fragment.get_agents_that_stepped() == at_last.get_agents_that_stepped()
        assert fragment.is_done == at_last.is_done


@many
@given(scripts(), st.data(), st.sampled_from([0, 1, 3]))
def test_cutting_loses_and_doubles_no_step(script, data, lookback):
    agents, _, steps = script
    cuts = data.draw(st.sets(st.integers(0, len(steps) - 1)))
    (truth,) = play(joint(agents), script)
    fragments = play(joint(agents), script, cuts, lookback)
    for agent in agents:
        mine = [f.agent_episodes[agent] for f in fragments if agent in f.agent_episodes]
        whole = truth.agent_episodes.get(agent)
        if whole is None:
            assert mine == []
            continue
        assert [t for f in fragments for t in f.step_times[agent]] == truth.step_times[agent]
        assert np.concatenate([e.get_actions() for e in mine]).tolist() == list(whole.get_actions())
        assert np.concatenate([e.get_rewards() for e in mine]).tolist() == list(whole.get_rewards())
        assert sum(f.acted[agent] for f in fragments) == truth.acted[agent]
        assert sum(len(f.step_times[agent]) for f in fragments) == len(whole)


# --- what RLlib's class loses -----------------------------------------------------------------------------------------


def test_n1_an_agent_that_terminates_unobserved_has_one_entry_per_moment():
    episode = start(["a0", "a1"])
    episode.add_env_step(**step(["a0", "a1"], ["a0", "a1"], {"a0": 1.0, "a1": 1.0}, t=1))
    episode.add_env_step(**step(["a1"], ["a0", "a1"], {"a0": 2.0, "a1": 1.0}, ended=["a0"], t=2))
    for t in range(3, 7):
        episode.add_env_step(**step(["a1"], ["a1"], {"a1": 1.0}, t=t, over="terminated" if t == 6 else None))
    assert episode.env_t_to_agent_t["a0"].data == [0, 1, 2, "S", "S", "S", "S"]
    assert episode.env_t_to_agent_t["a1"].data == list(range(7))
    assert episode.step_times == {"a0": [0, 1], "a1": list(range(6))}
    assert episode.agent_episodes["a0"].is_terminated and episode.is_terminated


def test_n2_a_truncated_agent_is_not_terminated_by_the_others():
    episode = start(["a0", "a1"])
    episode.add_env_step(**step(["a0", "a1"], ["a0", "a1"], {"a0": 1, "a1": 1}, ended=["a0"], cut=["a1"], t=1))
    a0, a1 = (episode.agent_episodes[a] for a in ("a0", "a1"))
    assert (a0.is_terminated, a0.is_truncated) == (True, False)
    assert (a1.is_terminated, a1.is_truncated) == (False, True)
    assert not episode.is_done  # the environment says when it is over: `MultiAgentVector` does


@pytest.mark.parametrize("over", ["terminated", "truncated"])
def test_agents_without_a_flag_of_their_own_end_with_the_episode(over):
    episode = start(["a0", "a1", "a2"])
    everybody = ["a0", "a1", "a2"]
    episode.add_env_step(
        **step(everybody, everybody, dict.fromkeys(everybody, 0.0), ended=["a0"], cut=["a1"], over=over, t=1)
    )
    terminated = [episode.agent_episodes[a].is_terminated for a in everybody]
    assert terminated == [True, False, over == "terminated"]
    assert [episode.agent_episodes[a].is_truncated for a in everybody] == [False, True, over == "truncated"]
    assert (episode.is_terminated, episode.is_truncated) == (over == "terminated", over == "truncated")
    assert episode.get_agents_to_act() == set()


def gap(cuts=(), lookback=0):
    """a0 lives t = 0 .. 2; nobody acts at t = 3 and 4; a1 lives t = 5 .. 9."""
    episode = start(["a0"])
    fragments = [episode]
    for t in range(1, 11):
        if t - 1 in cuts:
            fragments.append(fragments[-1].cut(len_lookback_buffer=lookback))
            assert fragments[-1].is_reset  # or RLlib's loop takes the next step for a reset
        acts = ["a0"] if t <= 3 else ["a1"] if t >= 6 else []
        observed = ["a0"] if t < 3 else ["a1"] if t >= 5 else []
        fragments[-1].add_env_step(
            **step(
                observed, acts, dict.fromkeys(acts, 1.0), ended=["a0"] if t == 3 else (), t=t,
                over="terminated" if t == 10 else None,
            )
        )  # fmt: skip
    return fragments


def test_n3_an_episode_goes_on_when_all_seen_so_far_have_ended():
    (episode,) = gap()
    assert len(episode) == 10 and episode.is_terminated
    assert episode.step_times == {"a0": [0, 1, 2], "a1": [5, 6, 7, 8, 9]}
    assert episode.env_t_to_agent_t["a1"].data == ["S"] * 5 + [0, 1, 2, 3, 4, 5]
    assert episode.get_return() == 8.0


@pytest.mark.parametrize("lookback", [0, 1, 3])
@pytest.mark.parametrize("cut", range(10))
def test_a_fragment_can_begin_anywhere_in_a_gap(cut, lookback):
    fragments = gap([cut], lookback)
    assert [t for f in fragments for t in f.step_times["a0"]] == [0, 1, 2]
    assert [t for f in fragments for t in f.step_times["a1"]] == [5, 6, 7, 8, 9]
    index = fragments[-1].env_t_to_agent_t["a1"]
    assert index.data[index.lookback :] == (["S"] * 5 + [0, 1, 2, 3, 4, 5])[cut:]


def test_n4_what_is_paid_before_the_first_observation_belongs_to_the_first_step():
    episode = start(["a0"])
    episode.add_env_step(**step(["a0"], ["a0"], {"a0": 1.0, "a1": 5.0}, t=1))
    episode = episode.cut()
    episode.add_env_step(**step(["a0"], ["a0"], {"a0": 1.0, "a1": 5.0}, t=2))
    episode.add_env_step(**step(["a0", "a1"], ["a0"], {"a0": 1.0}, t=3))
    assert episode.get_return() == 2.0 and episode.get_return(include_hanging_rewards=True) == 12.0
    episode.add_env_step(**step(["a0", "a1"], ["a0", "a1"], {"a0": 1.0, "a1": 0.25}, over="truncated", t=4))
    assert episode.agent_episodes["a1"].get_rewards() == [10.25]
    assert episode.get_return(include_hanging_rewards=True) == 3.0 + 10.25


@pytest.mark.parametrize("lookback", [0, 1, 3])
def test_open_steps_go_over_several_cuts(lookback):
    """Two players take turns, with a cut before every step; each step is completed once, with all it was paid."""
    episode = start(["a0", "a1"], agents=("a0", "a1"))
    fragments = [episode]
    for t in range(1, 9):
        fragments.append(fragments[-1].cut(len_lookback_buffer=lookback))
        # Each acts every fourth step, a1 two steps after a0; both are paid 1 in every step.
        acts = ["a0", "a1"] if t == 1 else ["a0"] if t % 4 == 1 else ["a1"] if t % 4 == 3 else []
        sees = ["a0"] if t % 4 == 0 else ["a1"] if t % 4 == 2 else []
        sees = ["a0", "a1"] if t == 8 else sees
        fragments[-1].add_env_step(
            **step(sees, acts, {"a0": 1.0, "a1": 1.0}, over="truncated" if t == 8 else None, t=t)
        )
    times = {a: [(i, t) for i, f in enumerate(fragments) for t in f.step_times[a]] for a in ("a0", "a1")}
    assert times == {"a0": [(4, 0), (8, 4)], "a1": [(2, 0), (6, 2), (8, 6)]}
    rewards = {a: [float(r) for f in fragments for r in f.agent_episodes[a].get_rewards()] for a in times}
    assert rewards == {"a0": [4.0, 4.0], "a1": [2.0, 4.0, 2.0]}
    outputs = [f.agent_episodes["a1"].get_extra_model_outputs("action_logp") for f in fragments if f.step_times["a1"]]
    assert np.concatenate(outputs).tolist() == [-1.0, -3.0, -7.0]  # of the actions, not of the observations
    assert [f.acted["a0"] for f in fragments] == [0, 1, 0, 0, 0, 1, 0, 0, 0]
    assert all(f.agent_episodes["a1"].is_truncated == (f is fragments[-1]) for f in fragments)


def test_an_open_step_is_closed_by_a_termination_without_an_observation():
    episode = start(["a0", "a1"])
    episode.add_env_step(**step(["a1"], ["a0", "a1"], {"a0": 1.0, "a1": 0.0}, t=1))
    episode = episode.cut()
    episode.add_env_step(**step(["a1"], ["a1"], {"a0": 2.0, "a1": 0.0}, ended=["a0"], t=2))
    a0 = episode.agent_episodes["a0"]
    assert (a0.is_terminated, a0.get_rewards()) == (True, [3.0])
    assert episode.step_times["a0"] == [0] and episode.env_t_started == 1
    np.testing.assert_array_equal(a0.get_observations(-1), [0.0, 0.5])  # its last one stands in


@pytest.fixture
def warnings_told(monkeypatch):
    """RLlib's `log_once` as in a fresh process."""
    monkeypatch.setattr(ray.util.debug, "_logged", set())


def test_what_an_agent_is_paid_that_never_acts_is_told_once(warnings_told, caplog):
    with caplog.at_level(logging.WARNING, logger="thrust_rllib"):
        for _ in range(2):
            episode = start(["a0"])
            episode.add_env_step(**step(["a0"], ["a0"], {"a0": 1.0, "a1": 5.0, "a2": 0.0}, t=1))
            episode = episode.cut()
            episode.add_env_step(**step(["a0"], ["a0"], {"a0": 1.0, "a1": -1.5}, over="terminated", t=2))
            # Nor one that is shown the end only.
            assert set(episode.agent_episodes) == {"a0"}
            assert episode.get_return(include_hanging_rewards=True) == 1.0
    (message,) = [record.getMessage() for record in caplog.records]
    assert "environment 'village', environment index 5, step 2 of its episode: agent 'a1'" in message
    assert "paid 3.5 but never acted" in message and "told once" in message


def test_an_agent_that_is_shown_the_end_only_is_not_one_of_the_episode():
    episode = start(["a0"])
    episode.add_env_step(**step(["a0", "a1"], ["a0"], {"a0": 1.0}, over="truncated", t=1))
    assert set(episode.agent_episodes) == {"a0"} and set(episode.env_t_to_agent_t) == {"a0"}


@pytest.mark.parametrize("lookback", [0, 1, 3])
def test_who_is_born_after_a_cut_stands_in_time_with_the_others(lookback):
    episode = start(["a0"])
    for t in (1, 2):
        episode.add_env_step(**step(["a0"], ["a0"], {"a0": 1.0}, t=t))
    episode = episode.cut(len_lookback_buffer=lookback)
    episode.add_env_step(**step(["a0"], ["a0"], {"a0": 1.0}, t=3))
    episode.add_env_step(**step(["a0", "a1"], ["a0"], {"a0": 1.0}, t=4))
    episode.add_env_step(**step(["a0", "a1"], ["a0", "a1"], {"a0": 1.0, "a1": 7.0}, t=5))
    index = index_of(episode)
    kept = min(lookback, 2)
    assert index["a0"] == ([*range(2 - kept, 6)], kept)
    assert index["a1"] == (["S"] * (kept + 2) + [0, 1], kept)
    assert episode.step_times == {"a0": [2, 3, 4], "a1": [4]}
    assert one_step(episode, "rewards", 2, AGENTS) == {"a0": 1.0, "a1": 7.0}
    assert one_step(episode, "rewards", 1, AGENTS) == {"a0": 1.0}


def test_the_dead_do_not_come_along():
    episode = start(["a0", "a1"])
    episode.add_env_step(**step(["a0", "a1"], ["a0", "a1"], {"a0": 1.0, "a1": 1.0}, ended=["a1"], t=1))
    successor = episode.cut(len_lookback_buffer=1)
    assert set(successor.agent_episodes) == {"a0"}
    with pytest.raises(ValueError, match="agent 'a1' has ended"):
        successor.add_env_step(**step(["a0"], ["a0"], {"a0": 1.0, "a1": 0.0}, t=2))


def test_ids_may_be_numbers():
    episode = start([0, 1], agents=(0, 1))
    episode.add_env_step(**step([1], [0, 1], {0: 1.0, 1: 2.0}, t=1))
    episode = episode.cut()
    episode.add_env_step(**step([0, 1], [1], {0: 1.0, 1: 2.0}, cut=[0], over="terminated", t=2))
    assert episode.step_times == {0: [0], 1: [1]}
    assert episode.agent_episodes[0].is_truncated and episode.agent_episodes[1].is_terminated
    assert episode.agent_episodes[0].get_rewards() == [2.0]


def test_agents_act_in_the_environments_order():
    episode = joint(("b", "a", "c"))
    episode.add_env_reset(observations={"c": 0, "a": 0, "b": 0})
    assert episode.acting == ("b", "a", "c")
    episode.add_env_step(**step(["c", "b"], ["a", "b", "c"], {"a": 0.0, "b": 0.0, "c": 0.0}, t=1))
    assert episode.acting == ("b", "c") and episode.get_agents_to_act() == {"b", "c"}
    assert episode.cut().acting == ("b", "c")


# --- messages ---------------------------------------------------------------------------------------------------------

WHERE = r"^environment 'village', environment index 5, step {step} of its episode: agent '{agent}' "


def two_steps():
    """a0 is alive, a1 has ended in step 1, a2 was not seen yet."""
    episode = start(["a0", "a1"])
    episode.add_env_step(**step(["a0", "a1"], ["a0", "a1"], {"a0": 1.0, "a1": 1.0}, ended=["a1"], t=1))
    return episode


@pytest.mark.parametrize(
    ("agent", "told", "arguments"),
    [
        ("a1", r"has ended and still got the reward 0.0; leave an agent out", {"rewards": {"a0": 1.0, "a1": 0.0}}),
        ("a1", r"has ended and still got an observation; leave", {"observations": ["a0", "a1"]}),
        (
            "a1",
            r"has ended and still got an observation and the reward 2.0",
            {"observations": ["a0", "a1"], "rewards": {"a0": 1.0, "a1": 2.0}},
        ),
        ("a1", r"has ended and still got an action", {"actions": ["a0", "a1"], "rewards": {"a0": 1.0}}),
        ("a0", r"acted but got no reward; return a number for every agent that acted \(0.0", {"rewards": {}}),
        ("a0", r"was truncated without a last observation.*return one, or let it terminate", {
            "observations": [], "cut": ["a0"]}),
        ("a0", r"was truncated without a last observation", {"observations": [], "over": "truncated"}),
        ("a0", r"was observed again before it acted", {"actions": [], "rewards": {}}),
        ("a0", r"got the reward None; return one number", {"rewards": {"a0": None}}),
        ("a0", r"got the reward \[1, 2\]; return one number", {"rewards": {"a0": [1, 2]}}),
    ],
)  # fmt: skip
def test_what_is_refused_and_where_it_happened(agent, told, arguments):
    defaults = {"observations": ["a0"], "actions": ["a0"], "rewards": {"a0": 1.0}}
    episode = two_steps()
    # The step that is being added is counted, as environments and messages of the fast door do.
    with pytest.raises(ValueError, match=WHERE.format(step=2, agent=agent) + told):
        episode.add_env_step(**step(**{**defaults, **arguments}, t=2))


@pytest.mark.parametrize("field", ["observations", "rewards"])
def test_an_unknown_agent_is_refused(field):
    unknown = {"observations": ["a0", "zed"]} if field == "observations" else {"rewards": {"a0": 1.0, "zed": 1.0}}
    arguments = {"observations": ["a0"], "actions": ["a0"], "rewards": {"a0": 1.0}, **unknown}
    with pytest.raises(
        ValueError, match=r"'village'.*index 5, step \d.*agent 'zed' is not in possible_agents.*declare"
    ):
        two_steps().add_env_step(**step(**arguments, t=2))


def test_an_unknown_agent_is_refused_at_the_reset():
    with pytest.raises(ValueError, match=r"'village'.*index 5, step 0.*agent 'zed' is not in possible_agents"):
        start(["zed"])


def test_an_episode_that_is_over_neither_grows_nor_goes_on():
    episode = two_steps()
    episode.add_env_step(**step(["a0"], ["a0"], {"a0": 1.0}, over="terminated", t=2))
    with pytest.raises(ValueError, match=r"environment 'village', environment index 5.*over, and still a step"):
        episode.add_env_step(**step(["a0"], ["a0"], {"a0": 1.0}, t=3))
    with pytest.raises(ValueError, match=r"environment 'village', environment index 5.*cannot go on in another"):
        episode.cut()


# --- on the way -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numpy", [False, True])
def test_pickled_episodes_are_whole(numpy):
    """Ray sends them from runner to learner."""
    episode = start(["a0", "a1"])
    episode.custom_data["note"] = [1, 2]
    episode.add_env_step(**step(["a0"], ["a0", "a1"], {"a0": 1.0, "a1": 3.0}, t=1))
    episode.bootstrap_inputs["a0"] = np.ones(2)
    if numpy:
        MultiAgentEnvRunner._prune_zero_len_sa_episodes(episode)
        episode.to_numpy()
    copied = pickle.loads(pickle.dumps(episode))
    assert type(copied) is JointEpisode
    for name in ("id_", "env_name", "runner_index", "env_index", "agents", "step_times", "acting", "acted", "env_t"):
        assert getattr(copied, name) == getattr(episode, name), name
    np.testing.assert_equal(copied.bootstrap_inputs, episode.bootstrap_inputs)
    assert copied.custom_data == {"note": [1, 2]}
    assert index_of(copied) == index_of(episode)
    assert copied.is_numpy == numpy
    if not numpy:  # it grows on, too
        for one in (episode, copied):
            one.add_env_step(**step(["a0", "a1"], ["a0"], {"a0": 1.0, "a1": 1.0}, over="truncated", t=2))
        assert copied.agent_episodes["a1"].get_rewards() == episode.agent_episodes["a1"].get_rewards() == [4.0]


def test_a_successor_says_where_it_comes_from():
    episode = start(["a0", "a1"])
    episode.custom_data["note"] = [1]
    episode.add_env_step(**step(["a0"], ["a0", "a1"], {"a0": 1.0, "a1": 3.0}, t=1))
    successor = episode.cut()
    assert (successor.id_, successor.env_name, successor.runner_index, successor.env_index) == (
        episode.id_, "village", 2, 5,
    )  # fmt: skip
    assert (len(successor), successor.env_t_started, successor.env_t) == (0, 1, 1)
    for agent in ("a0", "a1"):
        after, before = successor.agent_episodes[agent], episode.agent_episodes[agent]
        assert (after.id_, after.agent_id, after.module_id) == (before.id_, agent, before.module_id)
        assert after.multi_agent_episode_id == episode.id_
    successor.custom_data["note"].append(2)
    assert episode.custom_data == {"note": [1]} and successor.custom_data == {"note": [1, 2]}
    # What goes on in the one is not seen in the other.
    successor.add_env_step(**step(["a0", "a1"], ["a0"], {"a0": 1.0, "a1": 1.0}, t=2))
    assert len(episode) == 1 and len(episode.agent_episodes["a1"]) == 0
    assert episode.get_return(include_hanging_rewards=True) == 4.0


def test_modules_are_asked_for_once():
    asked = []

    def module_for(agent, episode):
        asked.append(agent)
        return f"m_{agent}"

    episode = joint(agent_to_module_mapping_fn=module_for)
    episode.add_env_reset(observations={"a0": 0, "a1": 0})
    episode.add_env_step(**step(["a0", "a1"], ["a0", "a1"], {"a0": 1.0, "a1": 3.0}, t=1))
    successor = episode.cut()
    assert [successor.module_for(a) for a in ("a0", "a1", "a2")] == ["m_a0", "m_a1", "m_a2"]
    assert sorted(asked) == ["a0", "a1", "a2"]


def test_rllibs_pruning_of_agents_without_a_step_leaves_the_others():
    """Who waits through a whole fragment has no step in it; its continuation has."""
    episode = start(["a0", "a1"])
    episode.add_env_step(**step(["a0"], ["a0", "a1"], {"a0": 1.0, "a1": 3.0}, t=1))
    successor = episode.cut()
    MultiAgentEnvRunner._prune_zero_len_sa_episodes(episode)
    assert set(episode.agent_episodes) == {"a0"} and episode.acted == {"a0": 1, "a1": 1}
    assert episode.to_numpy() is episode and episode.agent_steps() == 1
    successor.add_env_step(**step(["a0", "a1"], ["a0"], {"a0": 1.0, "a1": 4.0}, t=2))
    assert successor.agent_episodes["a1"].get_rewards() == [7.0]


def test_what_the_environment_tells_beside_rewards_is_kept_by_step():
    episode = start(["a0"])
    fragments = [episode]
    for t in range(1, 4):
        if t == 3:
            fragments.append(fragments[-1].cut())
        arguments = step(["a0"], ["a0"], {"a0": 1.0}, t=t)
        arguments["infos"]["__common__"] = {"extras": {"cost": t}} if t != 2 else {"other": 1}
        fragments[-1].add_env_step(**arguments)
    assert [fragment.extras for fragment in fragments] == [{0: {"cost": 1}}, {2: {"cost": 3}}]
