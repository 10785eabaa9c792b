"""Memory through the general door: it lies in the episode, and enters each training sequence as it entered its step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner

from tests.general.counting import Counting, general_config
from tests.general.plans import play, team
from tests.general.random_envs import Episode, Kind, Life, Script, ScriptedMultiAgentEnv, scripts
from tests.general.runs import Lives, episode_runner, episodes_config
from tests.general.script import encode, origin
from tests.general.test_generated_envs import Door, check_steps, envs, lengths
from tests.recurrent.replay import gru_with_two_memories, lstm, replay, rllibs_lstm, sequences_of
from thrust_rllib.connectors.episodes_to_joint_batch import JOINT_BATCH, EpisodesToJointBatch
from thrust_rllib.connectors.team_actions import MEMORY_IN
from thrust_rllib.joint_episode import ALL, JointEpisode
from thrust_rllib.rl_modules.distributions import mask_logits
from thrust_rllib.rl_modules.memory import RecurrentModules
from thrust_rllib.rl_modules.mlp import MLPModule

few = settings(max_examples=6, deadline=None, derandomize=True)


def door_of(script, env=ScriptedMultiAgentEnv, **options):
    """A door whose modules have random weights: without biases, an observation of zeros would leave no memory."""
    door = Door(script, env, **options)
    generator = torch.Generator().manual_seed(0)
    for module_id in sorted(door.runner.module.keys()):
        for parameter in door.runner.module[module_id].parameters():
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return door


# --- against a replay of each agent's own steps -----------------------------------------------------------------------


def check_memories(door, batch):
    """State entering every sequence, and log-probability of every step, as a replay from its episode's start has them.

    Returns:
        How many entering states were compared that are not the initial one.
    """
    expected, remembered = {}, 0
    for episode in door.journal.episodes:
        for agent, stream in episode.streams.items():
            if stream.steps:
                seen = [encode(door.kind(agent), step.observation) for step in stream.steps]
                module = door.runner.module[door.runner.module_of[agent]]
                for step, *found in zip(stream.steps, *replay(module, seen), strict=True):
                    expected[episode.number, step.t, agent] = found
    places = sequences_of(batch)
    for module_id, streams in batch.modules.items():
        for j, agent in enumerate(streams.agents):
            kind = door.kind(agent)
            for number, e, rows in places:
                own = [t for t in rows if streams.present[t, j, e]]
                state = np.zeros(streams.state_in.shape[2])
                if own:
                    state, _ = expected[(*origin(kind, streams.obs[own[0], j, e]), agent)]
                    remembered += bool(state.any())
                np.testing.assert_allclose(streams.state_in[j, number], state, rtol=0, atol=1e-5)
                for t in own:
                    _, logits = expected[(*origin(kind, streams.obs[t, j, e]), agent)]
                    logits = torch.from_numpy(logits[None])
                    if streams.action_mask is not None:
                        logits = mask_logits(logits, torch.from_numpy(streams.action_mask[t, j, e][None]))
                    distribution = door.runner.module[module_id].get_exploration_action_dist_cls().from_logits(logits)
                    logp = distribution.logp(torch.from_numpy(streams.actions[t, j, e][None]))
                    np.testing.assert_allclose(streams.action_logp[t, j, e], float(logp[0]), rtol=0, atol=1e-4)
    return remembered


@pytest.mark.parametrize("spec", [lstm, gru_with_two_memories])
@few
@given(scripts(), envs, lengths, st.integers(1, 2), st.booleans(), st.sampled_from([None, 1, 3]))
def test_fragments_cut_anywhere(spec, script, env, lengths, num_envs, shared, length):
    door = door_of(script, env, num_envs=num_envs, shared=shared, rl_module_spec=spec(length))
    for steps in lengths:
        sampled = door.sample({"num_timesteps": steps * num_envs})
        check_steps(door, sampled)
        check_memories(door, sampled.batch)


@few
@given(scripts(), lengths, st.integers(1, 2), st.sampled_from([None, 2]))
def test_several_samples_in_one_batch(script, lengths, num_envs, length):
    door = door_of(script, num_envs=num_envs, rl_module_spec=lstm(length))
    check_memories(door, door.sample(*({"num_timesteps": steps * num_envs} for steps in lengths)).batch)


@few
@given(scripts(), st.integers(1, 4))
def test_whole_episodes(script, num_episodes):
    door = door_of(script, rl_module_spec=lstm())
    door.to_batch = EpisodesToJointBatch(codec=door.to_batch.codec, whole_episodes=True)
    for _ in range(2):
        sampled = door.sample({"num_episodes": num_episodes})
        check_memories(door, sampled.batch)
    starts = np.flatnonzero(np.isin(sampled.batch.sequence_rows, np.flatnonzero(sampled.batch.episode_start)))
    assert len(starts) == len(sampled.batch.sequence_rows) == num_episodes
    for streams in sampled.batch.modules.values():
        assert not streams.state_in[:, starts].any()


# --- by hand ----------------------------------------------------------------------------------------------------------

TURNS = Script(
    kinds=(Kind(), Kind("discrete")),
    episodes=(Episode((Life("A.A.A"), Life("+A+AA", "truncated")), over="terminated"),),
)
LATE = Script(
    (Kind(), Kind()),
    (
        Episode(
            (Life("AA", "terminated"), Life("..AAAAA")),
        ),
    ),
)


def test_a_step_open_at_a_cut_begins_the_next_sequence_with_its_own_memory():
    door = door_of(TURNS, rl_module_spec=lstm())
    first = door.sample({"num_timesteps": 3})  # north acts in steps 0 and 2, the second one stays open; east in step 1
    second = door.sample({"num_timesteps": 2})
    assert check_memories(door, first.batch) == 0
    # The open step is a sequence of its own; east acts in rows 1 and 2, north in the latter.
    assert first.batch.sequence_rows.tolist() == [0] and second.batch.sequence_rows.tolist() == [0, 1]
    assert second.batch.episode_start.sum() == 0 and second.batch.stream("north").present[:, 0].tolist() == [1, 0, 1]
    assert check_memories(door, second.batch) == 3
    # A memory that a cut lost is found.
    second.batch.modules["north"].state_in[:] = 0.0
    with pytest.raises(AssertionError):
        check_memories(door, second.batch)


def test_sequences_of_a_given_length_go_on_over_the_starts_of_episodes():
    three = replace(TURNS, episodes=(Episode((Life("AAA"), Life("AAA"))),))
    door = door_of(three, num_envs=2, rl_module_spec=lstm(4))
    sampled = door.sample({"num_timesteps": 20}, {"num_timesteps": 8})  # rows 0 to 9, cut behind 9, and 10 to 13
    check_memories(door, sampled.batch)
    assert np.flatnonzero(sampled.batch.episode_start[:, 1]).tolist() == [0, 3, 6, 9, 12]
    # The fragment that goes on in row 10 begins anew.
    assert (sampled.batch.sequence_rows[::2] // 2).tolist() == [0, 4, 8, 10]
    whole = door_of(three, rl_module_spec=lstm())
    batch = whole.sample({"num_timesteps": 10}, {"num_timesteps": 4}).batch
    check_memories(whole, batch)
    assert batch.sequence_rows.tolist() == [0, 10]


def test_a_fragment_that_is_cut_shares_what_its_agents_remember():
    door = door_of(TURNS, rl_module_spec=lstm())
    episodes = door.runner.sample(num_timesteps=3)
    (going_on,) = door.runner._ongoing_episodes
    assert going_on is not episodes[0] and set(going_on.memory) == {"north", "east"}
    for agent, memory in going_on.memory.items():
        np.testing.assert_array_equal(episodes[0].memory[agent], memory)
        assert memory.shape == (8,) and memory.dtype == np.float32 and memory.any()
    before = {agent: memory.copy() for agent, memory in episodes[0].memory.items()}
    door.runner.sample(num_timesteps=1)  # east acts in step 3; north waits
    (later,) = door.runner._ongoing_episodes
    np.testing.assert_array_equal(later.memory["north"], before["north"])
    assert (later.memory["east"] != before["east"]).any()
    np.testing.assert_array_equal(episodes[0].memory["east"], before["east"])


def test_agents_that_come_late_or_leave():
    door = door_of(LATE, rl_module_spec=lstm(2))
    assert set(door.runner.sample(num_timesteps=2)[0].memory) == set()  # north has ended, east is still to come
    door = door_of(LATE, rl_module_spec=lstm(2))
    batch = door.sample({"num_timesteps": 7}).batch
    assert batch.sequence_rows.tolist() == [0, 2, 4, 6]
    assert check_memories(door, batch) == 2  # east in rows 4 and 6; its first step is in row 2
    north, east = (batch.modules[m].state_in[0] for m in ("north", "east"))
    assert not north.any() and east.any(axis=1).tolist() == [False, False, True, True]


@pytest.mark.parametrize("script", [TURNS, LATE])
def test_rllibs_own_lstm_module(script):
    door = door_of(script, num_envs=2, rl_module_spec=rllibs_lstm(2))
    for steps in (1, 4, 3, 6):
        sampled = door.sample({"num_timesteps": 2 * steps})
        check_steps(door, sampled)
        remembered = check_memories(door, sampled.batch)
    assert remembered


def test_every_episode_begins_with_the_initial_state():
    door = door_of(replace(TURNS, episodes=(Episode((Life("AAA"), Life("AAA"))),)), rl_module_spec=rllibs_lstm(1))
    batch = door.sample({"num_timesteps": 9}).batch
    assert batch.episode_start[:, 0].tolist() == [True, False, False] * 3
    for streams in batch.modules.values():
        assert streams.state_in[0].any(axis=1).tolist() == [False, True, True] * 3
    assert check_memories(door, batch) == 12


def test_only_recurrent_modules_of_a_team_have_states():
    specs = MultiRLModuleSpec(rl_module_specs={"whole": lstm(), "late": RLModuleSpec(MLPModule), "early": lstm()})
    config = episodes_config(Lives).rl_module(rl_module_spec=specs)
    runner = episode_runner(config)
    batch = batch_of(config, runner.sample(num_timesteps=12), runner)
    assert {m: None if s.state_in is None else s.state_in.shape for m, s in batch.modules.items()} == {
        "early": (1, 2, 8), "late": None, "whole": (1, 2, 8)
    }  # fmt: skip
    config = episodes_config(Lives)
    runner = episode_runner(config)
    batch = batch_of(config, runner.sample(num_timesteps=12), runner)
    assert batch.sequence_rows is None and all(s.state_in is None for s in batch.modules.values())


def batch_of(config, episodes, runner):
    """As the learner's pipeline makes it."""
    spaces = runner.spaces["__env_single__"]
    pipeline = config.build_learner_connector(*spaces)
    return pipeline(rl_module=runner.module, batch={}, episodes=episodes, shared_data={})[JOINT_BATCH]


@pytest.mark.parametrize("piece", [None, lambda *spaces: Passes()], ids=["without pieces", "behind RLlib's extra step"])
def test_normalised_observations_keep_their_time_axis_over_rollouts(piece):
    """Those at the end of a rollout are normalised again where the next one begins."""
    config = episodes_config(Counting, {"length": 7}, num_envs=2, runners={"normalize_observations": True})
    config.learners(**({"learner_connector": piece} if piece else {})).rl_module(rl_module_spec=lstm(1))
    runner = episode_runner(config)
    batches = [batch_of(config, runner.sample(num_timesteps=12), runner) for _ in range(3)]
    for agent in ("left", "right"):
        streams = [batch.stream(agent) for batch in batches]
        states = [batch.modules[agent].state_in[0] for batch in batches]
        for e in range(2):
            obs = np.concatenate([s.obs[:, e] for s in streams])
            assert np.abs(obs[6:]).max() <= 10.0  # behind the first rollout
            found = np.concatenate([s[batch.sequence_rows % 2 == e] for s, batch in zip(states, batches, strict=True)])
            for start in range(0, 18, 7):
                expected, _ = replay(runner.module[agent], obs[start : start + 7])
                np.testing.assert_allclose(found[start : start + 7], expected, rtol=0, atol=1e-5)
                assert expected[1:].any()


class Passes(ConnectorV2):
    def __call__(self, *, batch, **kwargs):
        return batch


def test_an_evaluation_remembers_too():
    """Greedy actions, whole episodes, agents that wait."""
    door = door_of(TURNS, rl_module_spec=gru_with_two_memories(1))
    sampled = door.sample({"num_episodes": 2, "explore": False})
    assert check_memories(door, sampled.batch) > 0


# --- users' pieces ----------------------------------------------------------------------------------------------------


class Watches(ConnectorV2):
    """Notes the shapes of all columns, and adds one of its own."""

    shapes: list

    def __call__(self, *, batch, **kwargs):
        for outputs in batch.values():
            self.shapes.append({name: np.shape(x) for name, x in outputs.items()})
            outputs["note"] = outputs[Columns.ACTION_DIST_INPUTS] + 1.0
        return batch


class Chooses(ConnectorV2):
    """Action 2 for all, with or without the time axis."""

    time_axis: bool

    def __call__(self, *, batch, **kwargs):
        for outputs in batch.values():
            rows = len(outputs[Columns.ACTION_DIST_INPUTS])
            outputs[Columns.ACTIONS] = torch.full((rows, 1) if self.time_axis else (rows,), 2)
        return batch


def test_pieces_see_rllibs_time_axis_and_episodes_do_not():
    piece = Watches()
    piece.shapes = []
    config = general_config(to_env=lambda env, spaces: piece).rl_module(rl_module_spec=lstm())
    runner = episode_runner(config)
    (episode, *_) = runner.sample(num_timesteps=4)
    assert piece.shapes[0] == {Columns.ACTION_DIST_INPUTS: (2, 1, 3), Columns.STATE_OUT: ()}
    outputs = episode.agent_episodes["left"].extra_model_outputs
    assert outputs["note"].data[0].shape == outputs[Columns.ACTION_DIST_INPUTS].data[0].shape == (3,)
    np.testing.assert_array_equal(outputs["note"].data[0], outputs[Columns.ACTION_DIST_INPUTS].data[0] + 1.0)
    assert outputs[MEMORY_IN].data[0].shape == (8,) and Columns.STATE_OUT not in outputs
    assert np.shape(episode.agent_episodes["left"].actions.data[0]) == ()


@pytest.mark.parametrize("time_axis", [True, False])
def test_a_piece_may_choose_the_actions(time_axis):
    piece = Chooses()
    piece.time_axis = time_axis
    runner = episode_runner(general_config(to_env=lambda env, spaces: piece).rl_module(rl_module_spec=lstm()))
    episodes = runner.sample(num_timesteps=8)
    for episode in episodes:
        for single in episode.agent_episodes.values():
            assert single.get_actions().tolist() == [2] * len(single)
            assert single.extra_model_outputs[Columns.ACTION_LOGP].data[0].shape == ()
    assert all(set(actions.values()) == {2} for actions in runner.env.envs[0].unwrapped.played)


def test_feed_forward_modules_get_no_time_axis():
    runner = episode_runner(episodes_config(Lives))
    shapes = []
    forward = runner.module.forward_exploration
    runner.module.forward_exploration = lambda batch, **kwargs: (
        shapes.extend(tuple(columns[Columns.OBS].shape) for columns in batch.values()),
        forward(batch, **kwargs),
    )[1]
    episodes = runner.sample(num_timesteps=4)
    assert set(shapes) == {(2, 2)} and not any(episode.memory for episode in episodes)


# --- what cannot be learned from --------------------------------------------------------------------------------------


def stateful(modules=("m_a0", "m_a1"), size=4):
    """Layouts alone, for episodes made by hand."""
    layout = type("Layout", (), {"size": size})()
    return RecurrentModules(dict.fromkeys(modules, layout), None)


def remembering(size=4):
    """Two steps of two agents whose states are the step's number + 1."""
    episode = JointEpisode(env_name="village", runner_index=0, env_index=0, agents=("a0", "a1"), id_="episode0")
    see = lambda t: {a: np.array([0, t, i], np.float32) for i, a in enumerate(("a0", "a1"))}  # noqa: E731
    episode.add_env_reset(observations=see(0))
    for t in range(2):
        outputs = {"action_logp": np.float32(0.0), MEMORY_IN: np.full(size, t + 1, np.float32)}
        episode.add_env_step(
            see(t + 1), {"a0": 0, "a1": 0}, {"a0": 1.0, "a1": 1.0}, truncateds={ALL: t == 1},
            extra_model_outputs={"a0": outputs, "a1": outputs},
        )  # fmt: skip
    return episode


def collect(episode, needed):
    return EpisodesToJointBatch(codec=team(("a0", "a1"))).joint_batch([episode], None, needed)


def test_steps_need_the_state_in_which_they_were_entered():
    batch = collect(remembering(), replace(stateful(), sequence_length=1))
    assert batch.modules["m_a1"].state_in[0].tolist() == [[1.0] * 4, [2.0] * 4]
    (elsewhere,) = play({"a0": "ooo", "a1": "ooo"})
    assert collect(elsewhere, None).sequence_rows is None
    with pytest.raises(ValueError, match=r"agent 'a0': its steps came without 'memory_in'.*JointEpisodeRunner"):
        collect(elsewhere, stateful())
    with pytest.raises(ValueError, match=r"have shape \(4,\), those of its recurrent module \(6,\)"):
        collect(remembering(), stateful(size=6))


def test_random_actions_leave_no_states():
    config = episodes_config(Counting).rl_module(rl_module_spec=lstm())
    runner = episode_runner(config)
    with pytest.raises(ValueError, match="came without"):
        batch_of(config, runner.sample(num_timesteps=8, random_actions=True), runner)
    assert batch_of(config, runner.sample(num_timesteps=8), runner).sequence_rows is not None


class PlainRunner(MultiAgentEnvRunner):
    pass


def test_another_runner_class_is_an_early_error():
    config = episodes_config(Lives, runners={"env_runner_cls": PlainRunner, "sampling": "auto"})
    config.copy().validate()
    config.rl_module(rl_module_spec=lstm())
    with pytest.raises(ValueError, match=r"env_runner_cls=PlainRunner with recurrent modules \['early', 'late', 'who"):
        config.validate()


class Forgets(MLPModule):
    """Says that it has a state, and returns none."""

    def get_initial_state(self):
        return {"h": np.zeros(2, np.float32)}

    def _forward(self, batch, **kwargs):
        outputs = super()._forward({Columns.OBS: batch[Columns.OBS].squeeze(1)})
        return {name: x.unsqueeze(1) for name, x in outputs.items()}


def test_a_recurrent_module_has_to_return_its_state():
    runner = episode_runner(episodes_config(Lives).rl_module(rl_module_spec=RLModuleSpec(Forgets, model_config={})))
    with pytest.raises(ValueError, match=r"\(Forgets\) returned \['action_dist_inputs'\]; needed: 'state_out'"):
        runner.sample(num_timesteps=2)


def test_modules_with_different_sequences_are_refused():
    specs = {"whole": lstm(2), "late": lstm(3), "early": lstm(2)}
    config = episodes_config(Lives).rl_module(rl_module_spec=MultiRLModuleSpec(rl_module_specs=specs))
    runner = episode_runner(config)
    with pytest.raises(ValueError, match="max_seq_len differs"):
        runner.sample(num_timesteps=2)
