"""EpisodesToJointBatch: episodes of lists and of arrays, ours and RLlib's own, give the same batch."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.rllib.connectors.learner import AddOneTsToEpisodesAndTruncate
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode

from tests.general.plans import AGENTS, PLAIN, TRUNCATED, assert_same, collect, finish, play, steps_of, team

PLANS = [
    ({"a0": "ooooo", "a1": "ooooo"}, (), None),
    ({"a0": "ooooo", "a1": "ooooo"}, (1, 3), "truncated"),
    ({"a0": "ooooooo", "a1": "ooT....", "a2": "..ooooX"}, (), "terminated"),
    ({"a0": "o.o.ooo", "a1": ".o.o.oo", "a2": "..o..oo"}, (2, 3), "truncated"),
    ({"a0": "oo.t...", "a1": "ooooooo"}, (3, 5), "terminated"),
]


@pytest.mark.parametrize("lookback", [0, 1, 3])
@pytest.mark.parametrize(("plan", "cuts", "over"), PLANS)
def test_lists_and_arrays_give_the_same_batch(plan, cuts, over, lookback):
    codec = team(tuple(plan))
    lists = collect(play(plan, cuts=cuts, over=over, wait_pay=0.5), codec)
    arrays = collect(finish(play(plan, cuts=cuts, over=over, wait_pay=0.5, lookback=lookback)), codec)
    assert_same(lists, arrays)


STOCK = [
    ({"a0": "ooooo", "a1": "ooooo"}, "truncated"),
    ({"a0": "oooooo", "a1": "ooT...", "a2": "..oooo"}, "terminated"),
    ({"a0": "oot....", "a1": "ooooooo"}, "terminated"),  # N1: RLlib's index has one entry too many
    ({"a0": "o.o.ooo", "a1": "oo.o.oo", "a2": "..o..oo"}, None),
    ({"a0": "ooooo", "a1": "oo..."}, None),  # a1's step is open at the end
]


@pytest.mark.parametrize("numpy", [False, True])
@pytest.mark.parametrize(("plan", "over"), STOCK)
def test_rllibs_own_class_gives_the_same_batch(plan, over, numpy):
    codec = team(tuple(plan))
    ours = play(plan, over=over)
    theirs = play(plan, MultiAgentEpisode(id_="episode0"), over=over)
    if numpy:
        finish(theirs)
    assert_same(collect(ours, codec), collect(theirs, codec))


@pytest.mark.parametrize("lookback", [0, 1, 3])
def test_fragments_of_rllibs_own_class(lookback):
    plan = {"a0": "oooooo", "a1": "oooooo"}
    codec = team(tuple(plan))
    ours = play(plan, cuts=[2], over="truncated", lookback=lookback)
    theirs = play(plan, MultiAgentEpisode(id_="episode0"), cuts=[2], over="truncated", lookback=lookback)
    for mine, other in zip(ours, theirs, strict=True):
        assert_same(collect([mine], codec), collect([other], codec))


@st.composite
def plans(draw):
    """Plans of three agents that RLlib's class stores rightly but for the index: the first one always acts."""
    length = draw(st.integers(2, 7))
    over = draw(st.sampled_from(["terminated", "truncated", None]))
    plan = {"a0": "o" * (length + 1)}
    for agent in AGENTS[1:]:
        birth = draw(st.integers(0, length - 1))
        death = draw(st.none() | st.integers(birth + 1, length - 1)) if birth + 1 < length else None
        moments = ["."] * birth + ["o"] + [draw(st.sampled_from("o.o")) for _ in range(length - birth)]
        if over:
            moments[-1] = "o"
        if death is not None:
            moments[death:] = [draw(st.sampled_from("TX")), *["."] * (length - death)]
        plan[agent] = "".join(moments)
    return plan, over


@settings(max_examples=25, deadline=None, derandomize=True)
@given(plans(), st.data(), st.sampled_from([1, 3]))
def test_fragments_of_rllibs_own_class_with_agents_that_come_and_go(plan_and_end, data, lookback):
    """With a lookback, as RLlib's default is: without one its class loses the steps that are open at a cut. Without
    unobserved terminations, whose step it loses after a cut."""
    plan, over = plan_and_end
    cut = data.draw(st.integers(0, len(plan["a0"]) - 2))
    ours = play(plan, cuts=[cut], over=over, lookback=lookback)
    theirs = play(plan, MultiAgentEpisode(id_="episode0"), cuts=[cut], over=over, lookback=lookback)
    for mine, other in zip(ours, theirs, strict=True):
        if len(mine):
            assert_same(collect([mine]), collect([other]))


def test_an_agent_born_in_a_later_fragment_of_rllibs_own_class():
    """RLlib counts it from the episode's beginning, not from the fragment's: its steps stood outside the batch."""
    plan = {"a0": "ooooooo", "a1": "....ooo"}
    fragments = play(plan, MultiAgentEpisode(id_="episode0"), cuts=[2], over="truncated", lookback=1)
    batch = collect(fragments[1:], team(AGENTS[:2]))
    assert steps_of(batch, "a1") == {(2, 0): (4, 14.0, *PLAIN), (3, 0): (5, 15.0, *TRUNCATED)}


def test_rllibs_own_episodes_fill_columns_as_high_as_the_longest():
    lengths = [4, 2, 2, 3, 1]
    episodes = [
        play({"a0": "o" * n + "T"}, MultiAgentEpisode(), number=k, over="terminated")[0] for k, n in enumerate(lengths)
    ]
    batch = collect(episodes, team(("a0",)))
    assert batch.num_steps == 4 and batch.env_steps() == sum(lengths)
    rows = [(int(n), int(t)) for n, t, _ in batch.stream("a0").obs[batch.valid].tolist()]
    assert sorted(rows) == [(k, t) for k, n in enumerate(lengths) for t in range(n)]
    assert batch.episode_start.sum() == 5 and batch.stream("a0").terminated.sum() == 5
    assert batch.num_envs == 3


def test_rllibs_extra_step_is_left_out():
    """A user's learner pieces stand behind RLlib's AddOneTsToEpisodesAndTruncate."""
    plan = {"a0": "ooooo", "a1": "oo.oo"}
    codec = team(tuple(plan))
    whole, extended = (finish(play(plan, over="truncated"))[0] for _ in range(2))
    AddOneTsToEpisodesAndTruncate()(rl_module=None, batch={}, episodes=[extended], shared_data={})
    assert len(extended.agent_episodes["a0"]) == 5
    expected, got = collect([whole], codec), collect([extended], codec, with_extra_step=True)
    for batch in (expected, got):
        for s in batch.modules.values():
            s.origin = s.origin[..., 1:].repeat(2, -1)  # RLlib has changed the episode's id
    assert_same(expected, got)
