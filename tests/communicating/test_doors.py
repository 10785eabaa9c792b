"""Agents that exchange messages, through both doors: the same batches, and after updates the same weights."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.communicating.test_ratio import TEAMS, Played
from tests.communicating.world import APART, CELLS, DEAF, GROUPS, HEADS, NORMALIZED, ONE, Meadow, Swarm
from tests.general.doors import assert_same_batches, column
from tests.support import largest_difference, parameters, update
from thrust_rllib.connectors.episodes_to_joint_batch import EpisodesToJointBatch

ATOL = 2e-6
"""Of normalised observations: both doors take the same numbers into their moments, in another order."""


class Pair:
    """The same team in both doors, with the same weights and environments."""

    def __init__(self, cell, policies, **options):
        self.fast, self.general = (Played(door, cell, policies, **options) for door in ("arrays", "episodes"))

    def sample(self, steps):
        """What both play greedily: a batch, and episodes."""
        played = (self.fast, self.general)
        fast, episodes = (p.runner.sample(num_timesteps=steps * p.runner.num_envs, explore=False) for p in played)
        return fast[0], episodes

    def update(self, batch, episodes):
        """Both learn, and their runners go on with the new weights."""
        for played, rollouts in ((self.fast, [batch]), (self.general, episodes)):
            update(played.learner, rollouts)
            played.runner.set_state({"rl_module": played.learner.module.get_state(inference_only=True)})

    def apart(self):
        """The largest difference between the parameters of the learners."""
        return largest_difference(parameters(self.fast.learner), parameters(self.general.learner))


def without_states(batch):
    """A batch whose rows are in no sequences: what `column` takes."""
    modules = {m: dataclasses.replace(streams, state_in=None) for m, streams in batch.modules.items()}
    return dataclasses.replace(batch, modules=modules, sequence_rows=None)


def codec_batch(played, episodes):
    return EpisodesToJointBatch(codec=played.config.team_codec(), audit=True).joint_batch(episodes)


CASES = [
    ("one module", "none", Meadow, NORMALIZED),
    *(("groups", cell, Meadow, {}) for cell in ("none", "message_gru")),
    *(("one does not speak", cell, Meadow, NORMALIZED) for cell in CELLS),
    *(("groups", cell, Swarm, NORMALIZED) for cell in ("none", "message_gru")),
    ("apart", "message_gru", Meadow, NORMALIZED),
]


@pytest.mark.parametrize("team, cell, env, runners", CASES)
def test_both_doors_play_and_learn_alike(team, cell, env, runners):
    told = {"heads": HEADS, "masked": True, **({"tells": True} if env is Swarm else {})}
    minibatch_size = None if cell == "lstm" else 9  # whose sequences are whole rollouts
    options = {"minibatch_size": minibatch_size, "lr": 1e-2, "iterate_all_minibatches": True}
    pair = Pair(cell, TEAMS[team], env=env, env_config=told, num_envs=1, runners=runners, **options)
    before, missed = parameters(pair.fast.learner), 0
    for _ in range(3):
        batch, episodes = pair.sample(23)
        assert_same_batches(batch, codec_batch(pair.general, episodes), atol=ATOL)
        missed += sum(int((~streams.present).sum()) for streams in batch.modules.values())
        pair.update(batch, episodes)
        assert pair.apart() < 1e-5
    assert missed > 15
    after = parameters(pair.fast.learner)
    assert all(largest_difference(before[m], after[m]) > 1e-3 for m in before)


@pytest.mark.parametrize("cell", ["gru", "message_gru"])
def test_several_environments_play_alike(cell):
    pair = Pair(cell, GROUPS, num_envs=3)
    for rollout in range(2):
        batch, episodes = pair.sample(17)
        for env in range(3):
            mine = [episode for episode in episodes if episode.env_index == env]
            assert_same_batches(column(without_states(batch), env), codec_batch(pair.general, mine), atol=ATOL)
        for played in (pair.fast, pair.general):
            played.set_weights(rollout + 1)


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize("cell", ["none", "message_gru"])
def test_an_environment_in_arrays_plays_as_one_with_dicts(cell, tells):
    """Where it does not say who acts next, its links alone decide who is heard."""
    one = Played("arrays", cell, APART)
    other = Played("arrays", cell, APART, env=Swarm, env_config={"heads": HEADS, "masked": True, "tells": tells})
    for rollout in range(3):
        left, right = (p.runner.sample(num_timesteps=51, explore=False)[0] for p in (one, other))
        np.testing.assert_array_equal(left.valid, right.valid)
        for m, mine in left.modules.items():
            theirs = right.modules[m]
            for name in ("present", "terminated", "truncated", "rewards", "actions"):
                np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name))
            np.testing.assert_allclose(mine.action_logp, theirs.action_logp, rtol=0, atol=1e-6)
        # Links at absent agents are 0 in the other one; to the updates that makes no difference.
        update(one.learner, left)
        update(other.learner, right)
        assert largest_difference(parameters(one.learner), parameters(other.learner)) < 1e-5
        one.set_weights(rollout + 1), other.set_weights(rollout + 1)


@pytest.mark.parametrize("policies", [ONE, DEAF])
def test_absent_agents_reach_nobody(policies):
    """What an agent that does not act would say changes neither actions nor weights."""
    played = Played("arrays", "message_gru", policies)
    batch = played.sample()[0]
    before = parameters(played.learner)
    state = played.learner.get_state()
    update(played.learner, batch)
    once = parameters(played.learner)
    played.learner.set_state(state)
    assert largest_difference(parameters(played.learner), before) == 0.0
    for streams in batch.modules.values():
        assert not streams.present.all()
        streams.obs[~streams.present] = 7.0
    update(played.learner, batch)
    assert largest_difference(parameters(played.learner), once) == 0.0


@pytest.mark.parametrize("door, cell", [("arrays", "none"), ("episodes", "none"), ("arrays", "message_gru")])
def test_forked_groups_act_as_the_module_they_come_from(door, cell):
    """Copies of one module that play half of the agents each speak to each other as its own agents do."""
    whole, forked = (Played(door, cell, policies, runners={}) for policies in (ONE, GROUPS))
    weights = whole.learner.module["shared"].get_state()
    forked.learner.module.set_state({"left": weights, "right": weights})
    forked.runner.set_state({"rl_module": forked.learner.module.get_state(inference_only=True)})
    batches = [p.learner._batches(p.runner.sample(num_timesteps=39, explore=False))[0] for p in (whole, forked)]
    for agent in batches[0].agents:
        left, right = (batch.stream(agent) for batch in batches)
        for name in ("present", "actions", "rewards"):
            np.testing.assert_array_equal(getattr(left, name), getattr(right, name))
        np.testing.assert_allclose(left.action_logp, right.action_logp, rtol=0, atol=1e-5)


@pytest.mark.parametrize("cell", CELLS)
def test_a_learner_writes_into_no_rollout(cell):
    """Arrays of Ray's object store are read-only."""
    played = Played("arrays", cell, GROUPS)
    batch = played.sample()[0]
    for owner in (batch, *batch.modules.values()):
        for array in vars(owner).values():
            if isinstance(array, np.ndarray):
                array.flags.writeable = False
    before = parameters(played.learner)
    update(played.learner, batch)
    assert largest_difference(parameters(played.learner), before) > 0.0
