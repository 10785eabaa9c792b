"""JointEpisode reads like RLlib's MultiAgentEpisode.

Where RLlib's own successor of a cut is wrong, a fragment is compared with the uncut episode instead: without a lookback
it drops the steps of agents that wait, and with any it gives those that are born later another time, see
`tests/test_rllib_contract.py`.
"""

from __future__ import annotations

import copy

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode

from tests.general.joint_episodes import AGENTS, index_of, joint, one_step, read
from thrust_rllib.joint_episode import ALL

# --- playing ----------------------------------------------------------------------------------------------------------


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
