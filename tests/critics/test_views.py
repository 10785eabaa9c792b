"""What the team's critic sees, where the team's stream ends, what the team is paid: against loops."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.critics import reference
from tests.critics.data import EVERYTHING, RAGGED, SIMPLE, Lives, team_rollout
from tests.critics.support import INTERLEAVED, KINDS, TEAMS, VIEWS, package_batch
from tests.support import hand_batch, hand_streams
from thrust_rllib.team_lives import TeamEnds, who_follows
from thrust_rllib.team_rewards import team_rewards
from thrust_rllib.team_view import TEAM, TeamView, team_batch

LIVES = {"simple": SIMPLE, "ragged": RAGGED, "everything": EVERYTHING}


def reference_view(view: TeamView) -> reference.View:
    return reference.View(view.agents, bool(view.widths), view.state)


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("lives", LIVES)
@pytest.mark.parametrize("team", TEAMS)
def test_views_are_those_of_a_loop(team, lives, name):
    view, seen = VIEWS[name], 0
    for seed in range(5):
        fixed = team_rollout(np.random.default_rng(seed), KINDS, LIVES[lives])
        batch = package_batch(fixed, TEAMS[team])
        rows, following = view.of_rows(batch), view.of_following(batch)
        assert rows.dtype == following.dtype == np.float32 and rows.shape[-1] == view.width
        for t, e in np.argwhere(batch.valid):
            np.testing.assert_array_equal(rows[t, e], reference_view(view).of(fixed, t, e))
        for k, row in enumerate(batch.bootstrap_rows):
            t, e = divmod(row, batch.num_envs)
            np.testing.assert_array_equal(following[k], reference_view(view).of(fixed, t, e, following=True))
        seen += len(following)
    assert seen > 10


def test_a_view_does_not_depend_on_who_plays_whom():
    fixed = team_rollout(np.random.default_rng(0), KINDS, RAGGED)
    for view in VIEWS.values():
        apart, interleaved = (package_batch(fixed, agents) for agents in TEAMS.values())
        assert apart.agents != interleaved.agents
        np.testing.assert_array_equal(view.of_rows(apart), view.of_rows(interleaved))
        np.testing.assert_array_equal(view.of_following(apart), view.of_following(interleaved))


def test_what_stands_at_absent_agents_is_not_seen():
    fixed = team_rollout(np.random.default_rng(0), KINDS, EVERYTHING)
    batch, poisoned = package_batch(fixed), package_batch(fixed)
    for streams in poisoned.modules.values():
        streams.obs[~streams.present] = np.nan
    view = VIEWS["observations"]
    np.testing.assert_array_equal(view.of_rows(batch), view.of_rows(poisoned))
    assert np.isfinite(view.of_rows(poisoned)).all()


@pytest.mark.parametrize("name", VIEWS)
def test_nothing_follows_where_every_episode_is_over(name):
    ends = np.zeros((2, 1, 1), bool)
    ends[-1] = True
    modules = {
        f"m{k}": hand_streams(
            [agent], np.ones((2, 1, 1, kind.obs)), terminated=ends, bootstrap_obs=np.ones((1, 0, kind.obs))
        )
        for k, (agent, kind) in enumerate(KINDS.items())
    }
    state = {"global_state": np.ones((2, 1, 4), np.float32), "bootstrap_state": np.ones((0, 4), np.float32)}
    batch = hand_batch(modules, **state)
    assert VIEWS[name].of_following(batch).shape == (0, VIEWS[name].width)
    found = team_batch(batch, VIEWS[name], team_rewards(batch), None).check()
    assert found.modules["team_critic"].terminated.ravel().tolist() == [False, True]


def test_observations_of_any_shape_and_type_are_seen():
    obs = np.arange(24, dtype=np.uint8).reshape(2, 1, 3, 2, 2, 1)
    streams = dataclasses.replace(
        hand_streams(["a"], np.zeros((2, 1, 3, 2, 2, 1))), obs=obs, bootstrap_obs=np.zeros((1, 0, 2, 2, 1), np.uint8)
    )
    seen = TeamView(("a",), (4,)).of_rows(hand_batch({"m": streams}))
    np.testing.assert_array_equal(seen[..., :4], obs[:, 0].reshape(2, 3, 4))
    assert (seen[..., 4] == 1).all()


def test_an_agent_that_the_critic_does_not_know_is_an_error():
    batch = package_batch(team_rollout(np.random.default_rng(0), KINDS, SIMPLE))
    with pytest.raises(ValueError, match=r"built for agents \['a0', 'b'\]; the rollout has \['a1'\]"):
        TeamView(("a0", "b"), (3, 2)).of_rows(batch)


# --- ends -------------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    seed=st.integers(0, 999),
    steps=st.sampled_from([1, 9]),
    gaps=st.sampled_from([0.0, 0.3]),
    deaths=st.sampled_from([0.0, 0.2]),
    empty=st.sampled_from([0.0, 0.2]),
    cuts=st.sampled_from([(), (4,), (2, 6)]),
    padding=st.booleans(),
    team=st.sampled_from(list(TEAMS)),
)
def test_the_team_ends_where_its_episodes_and_fragments_do(seed, steps, gaps, deaths, empty, cuts, padding, team):
    lives = Lives(steps, 3, (1, 5), gaps, deaths, cuts, empty, padding and steps > 3)
    fixed = team_rollout(np.random.default_rng(seed), KINDS, lives)
    ends = TeamEnds.of(package_batch(fixed, TEAMS[team]))
    envs = fixed.valid.shape[1]
    assert ends.present.tolist() == [[fixed.acts(t, e) for e in range(envs)] for t in range(steps)]
    assert ends.terminated.tolist() == (fixed.ends == "terminated").tolist()
    assert ends.truncated.tolist() == (fixed.ends == "truncated").tolist()


def one_column(present, terminated=(), truncated=(), starts=(0,), rows=()):
    """Ends of a column of two agents: present as rows of 0 and 1; (row, agent) that end."""
    present = np.array(present, bool)[:, :, None]
    flags = np.zeros((2, *present.shape), bool)
    for kind, marks in enumerate((terminated, truncated)):
        for t, agent in marks:
            flags[kind, t, agent] = True
    start = np.zeros((len(present), 1), bool)
    start[list(starts)] = True
    streams = hand_streams(
        ["a", "b"],
        np.zeros((*present.shape, 1)),
        present=present,
        terminated=flags[0],
        truncated=flags[1],
        bootstrap_obs=np.zeros((2, len(rows), 1)),
    )
    found = TeamEnds.of(hand_batch({"m": streams}, rows, episode_start=start))
    kinds = {(False, False): ".", (True, False): "t", (False, True): "c"}
    return "".join(kinds[bool(t), bool(c)] for t, c in zip(found.terminated[:, 0], found.truncated[:, 0], strict=True))


BOTH = [[1, 1]]


def test_ends_by_hand():
    assert one_column(BOTH * 3, rows=[2]) == "..c"  # goes on behind the batch
    assert one_column(BOTH * 3, [(2, 0), (2, 1)]) == "..t"
    assert one_column(BOTH * 3, [(2, 0)], [(2, 1)], rows=[2]) == "..c"  # one dies, one is cut off: the episode is cut
    assert one_column(BOTH * 3, [(0, 0), (0, 1)], starts=(0, 1), rows=[2]) == "t.c"
    one_dies = [[1, 1], [0, 1], [0, 1]]
    assert one_column(one_dies, [(0, 0)], rows=[2]) == "..c"
    assert one_column(one_dies, [(0, 0), (2, 1)]) == "..t"
    assert one_column(one_dies, [], [(0, 0)], rows=[0, 2]) == "..c"  # one is cut off alone: the team goes on
    turns = [[1, 0], [0, 1], [1, 0], [0, 1]]
    assert one_column(turns, rows=[2, 3]) == "...c"
    assert one_column(turns, [], [(2, 0)], rows=[2, 3]) == "...c"  # alone in its row, the other one's life goes on
    assert one_column([[1, 0], [0, 1], [0, 0]], rows=[0, 1]) == ".c."  # nobody has acted to the end: a step is open
    assert one_column(BOTH * 4, [], [(1, 0), (1, 1)], rows=[1, 3]) == ".c.c"  # a fragment's end
    assert one_column([[1, 1], [0, 1], [1, 1]], [], [(0, 0), (1, 1)], rows=[0, 1, 2]) == ".cc"  # and in turns


def test_one_that_is_cut_off_before_others_act_is_no_fragments_end():
    ends = [[1, 0], [0, 1], [0, 1]]
    assert one_column(ends, [(2, 1)], [(0, 0)], rows=[0]) == "..t"  # b comes later
    assert one_column(ends, [], [(0, 0)], rows=[0, 2]) == "..c"
    assert one_column([[1, 1], [0, 0], [1, 1]], [], [(0, 0), (0, 1)], rows=[0, 2]) == "c.c"  # but both act again


def test_who_is_there_behind_a_row():
    """a dies in the last row while b waits: what b saw last follows. Where a goes on, b is not seen."""
    present = np.array([[1, 1], [1, 1], [1, 0]], bool)[:, :, None]
    for dies in (True, False):
        terminated = np.zeros((3, 2, 1), bool)
        terminated[2, 0] = dies
        obs = np.array([[[1], [2]], [[3], [4]]])  # [n, K, 1]
        streams = hand_streams(
            ["a", "b"], np.zeros((3, 2, 1, 1)), present=present, terminated=terminated, bootstrap_obs=obs
        )
        batch = hand_batch({"m": streams}, [1, 2])
        assert who_follows(batch).tolist() == ([[1, -1], [1, 1]] if dies else [[1, 2], [1, -1]])
        seen = TeamView(("a", "b"), (1, 1)).of_following(batch)
        assert seen.tolist() == [[1, 3, 1, 1], [0, 3, 0, 1] if dies else [2, 0, 1, 0]]


@pytest.mark.parametrize("name", ["state", "observations and scalars"])
def test_a_rollout_without_the_state_that_a_critic_reads_is_an_error(name):
    batch = package_batch(team_rollout(np.random.default_rng(0), KINDS, SIMPLE), with_state=False)
    for read in (VIEWS[name].of_rows, VIEWS[name].of_following):
        with pytest.raises(ValueError, match="reads the environment's state, and the rollout has none"):
            read(batch)


def test_a_team_that_acts_in_no_row_does_not_end():
    assert one_column([[0, 0]] * 3) == "..."


# --- rewards ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lives", LIVES)
def test_the_team_is_paid_the_mean_over_all_agents(lives):
    fixed = team_rollout(np.random.default_rng(3), KINDS, LIVES[lives])
    for agents in TEAMS.values():
        batch = package_batch(fixed, agents)
        for streams in batch.modules.values():
            streams.rewards[~streams.present] = 1e3
        found = team_rewards(batch)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, reference.team_rewards(fixed), rtol=0, atol=1e-6)


def test_an_absent_agent_is_paid_nothing_but_counts():
    streams = hand_streams(["a", "b"], np.zeros((1, 2, 1, 1)), rewards=[[[4.0], [2.0]]], present=[[[True], [False]]])
    assert team_rewards(hand_batch({"m": streams})).tolist() == [[2.0]]


def test_the_team_is_one_agent_in_a_batch_that_is_whole():
    batch = package_batch(team_rollout(np.random.default_rng(1), KINDS, EVERYTHING), INTERLEAVED)
    found = team_batch(batch, VIEWS["observations"], team_rewards(batch), 4).check()
    assert found.agents == (TEAM,)
    rows = found.sequence_rows
    steps, envs = batch.valid.shape
    expected = {t * envs + e for t in range(0, steps, 4) for e in range(envs)}
    expected |= {(cut + 1) * envs + e for cut in EVERYTHING.cuts for e in range(envs)}
    starts = {row for row in expected if batch.episode_start.ravel()[row]}
    # A fragment that begins with an episode's start may begin a sequence or not: memories begin anew there anyway.
    assert {row for row in expected if batch.valid.ravel()[row]} - starts <= set(rows.tolist()) <= expected
