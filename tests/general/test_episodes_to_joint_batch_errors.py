"""EpisodesToJointBatch refuses bad numbers, and says where they come from."""

from __future__ import annotations

import numpy as np
import pytest
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode

from tests.general.plans import AGENTS, BOUND, collect, finish, joint, play, see, team


def said(*parts):
    """A pattern for a message that holds all of these, in any order."""
    return "".join(rf"(?=[\s\S]*{part})" for part in parts)


WHERE = said("environment 'village'", "environment index 3", "runner 2", "agent 'a1'")


def at(bad, moment, agent=1):
    """Observations with one bad one."""
    return lambda n, t, i: np.full(3, bad, np.float32) if (t, i) == (moment, agent) else see(n, t, i)


@pytest.mark.parametrize("numpy", [False, True])
@pytest.mark.parametrize("cuts", [(), (1,), (2,)])
def test_a_reward_that_is_no_number(cuts, numpy):
    episodes = play(
        {"a0": "ooooo", "a1": "ooooo"},
        joint(AGENTS[:2], 2, 3),
        cuts=cuts,
        reward=lambda t, i: np.nan if (t, i) == (2, 1) else 0.0,
    )
    with pytest.raises(ValueError, match=WHERE + said("reward nan", r"step 2\b", "finite")):
        collect(finish(episodes) if numpy else episodes, team(AGENTS[:2]))


@pytest.mark.parametrize(("bad", "told"), [(np.nan, "nan"), (np.inf, "inf"), (BOUND + 1, "1001")])
@pytest.mark.parametrize("moment", [0, 2, 4])
def test_a_bad_observation(bad, told, moment):
    episodes = play({"a0": "ooooo", "a1": "ooooo"}, joint(AGENTS[:2], 2, 3), observe=at(bad, moment))
    with pytest.raises(
        ValueError, match=WHERE + said("observation", rf"step {moment}\b", told, "disable_env_checking")
    ):
        collect(episodes, team(AGENTS[:2]))


def test_a_bad_observation_in_a_later_fragment_names_the_step_of_the_episode():
    episodes = play({"a0": "oooooo", "a1": "oooooo"}, joint(AGENTS[:2], 2, 3), cuts=[2], observe=at(np.nan, 4))
    collect(episodes[:1], team(AGENTS[:2]))
    with pytest.raises(ValueError, match=WHERE + said(r"step 4\b")):
        collect(episodes, team(AGENTS[:2]))


def test_bounds_are_not_compared_where_that_is_off_but_nan_is_still_found():
    make = lambda bad: play({"a0": "ooo", "a1": "ooo"}, joint(AGENTS[:2], 2, 3), observe=at(bad, 1))  # noqa: E731
    batch = collect(make(BOUND + 1), team(AGENTS[:2]), check_bounds=False)
    assert batch.stream("a1").obs[1, 0, 0] == BOUND + 1
    with pytest.raises(ValueError, match=WHERE):
        collect(make(np.nan), team(AGENTS[:2]), check_bounds=False)


def test_what_stands_behind_a_termination_is_not_looked_at():
    batch = collect(play({"a0": "ooo", "a1": "ooT"}, observe=at(np.nan, 2)), team(AGENTS[:2]))
    assert batch.stream("a1").terminated[1, 0]
    assert np.isfinite(batch.stream("a1").bootstrap_obs).all()


def test_errors_name_the_episode_of_rllibs_own_class():
    episodes = play({"a0": "ooo"}, MultiAgentEpisode(id_="abc"), observe=at(np.nan, 1, agent=0))
    with pytest.raises(ValueError, match=said("episode abc", "agent 'a0'", "observation", r"step 1\b")):
        collect(episodes, team(("a0",)))


def test_a_step_without_its_log_probability():
    episode = joint(("a0",))
    episode.add_env_reset(observations={"a0": see(0, 0, 0)})
    episode.add_env_step({"a0": see(0, 1, 0)}, {"a0": 0}, {"a0": 1.0}, extra_model_outputs={"a0": {"vf_preds": 0.0}})
    with pytest.raises(ValueError, match=r"agent 'a0'.*without 'action_logp'.*must put it out"):
        collect([episode], team(("a0",)))


def test_an_agent_that_is_not_of_the_team():
    episodes = play({"a0": "ooo", "a1": "ooo"}, MultiAgentEpisode(id_="abc"))
    with pytest.raises(ValueError, match=r"episode abc has steps of \['a1'\], but the team is \['a0'\]; declare"):
        collect(episodes, team(("a0",)))
