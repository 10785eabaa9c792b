"""JointEpisode keeps what RLlib's MultiAgentEpisode loses, and is whole after a cut and on the way to a learner."""

from __future__ import annotations

import logging
import pickle

import numpy as np
import pytest
import ray.util
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner

from tests.general.joint_episodes import AGENTS, index_of, joint, one_step, start, step
from thrust_rllib.joint_episode import JointEpisode

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
