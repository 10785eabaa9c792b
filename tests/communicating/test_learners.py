"""Several learners of a team that exchanges messages are one learner."""

from __future__ import annotations

import numpy as np
import pytest

from tests.communicating.world import APART, DEAF, GROUPS, HEADS, NORMALIZED, ONE, team_config
from tests.learners.test_several_learners import Pair
from tests.learners.threads import for_learners
from tests.support import largest_difference, make_runner, parameters, scramble
from thrust_rllib import RedundancyPenalty

BATCH, MINIBATCH = 96, 48
COUPLED = {
    "critic_lr": 2e-3,
    "cross_agent_losses": {"redundancy": RedundancyPenalty()},
    "cross_agent_coeffs": {"redundancy": 0.5},
}
TEAM = {"critic": "mean", "credit": "difference"}
CENTRAL = {"critic": "central", "credit": "shared", "critic_config": {"fcnet_hiddens": [8]}}

CASES = {
    "groups": ("none", GROUPS, {}, 2),
    "groups, coupled": ("none", GROUPS, COUPLED, 3),
    "one module": ("none", ONE, TEAM, 2),
    "one does not speak": ("none", DEAF, {}, 3),
    "gru": ("gru", APART, {}, 2),
    "lstm, central": ("lstm", GROUPS, CENTRAL, 2),
    "message_gru": ("message_gru", GROUPS, {}, 2),
    "message_gru, one module": ("message_gru", ONE, TEAM, 3),
    "message_gru, one does not speak": ("message_gru", DEAF, COUPLED, 2),
    "message_gru, central": ("message_gru", APART, CENTRAL, 3),
    "message_gru, frozen": ("message_gru", GROUPS, {"trained": ["left"]}, 3),
}


@pytest.mark.parametrize("name", CASES)
def test_updates_are_those_of_one_learner(name):
    cell, policies, options, size = CASES[name]
    model = {"max_seq_len": 6} if cell in ("gru", "message_gru") else {}
    config = team_config(
        cell,
        policies,
        env_config={"heads": HEADS, "masked": True},
        model=model,
        num_envs=4,
        runners=NORMALIZED,
        train_batch_size_per_learner=BATCH,
        minibatch_size=MINIBATCH,
        iterate_all_minibatches=True,
        lr=1e-3,
        **options,
    )
    runner = make_runner(for_learners(config, 1))
    pair = Pair(config, size, runner.get_spaces())
    scramble(pair.one)
    pair.several.set_state(pair.one.get_state())
    before = parameters(pair.one)
    for k in range(3):
        runner.set_state({"rl_module": pair.one.module.get_state(inference_only=True)})
        batches = runner.sample(num_timesteps=BATCH)
        assert not np.all([streams.present.all() for streams in batches[0].modules.values()])
        pair.update(batches, steps=BATCH * k)
    pair.check()
    after = parameters(pair.one)
    for m, old in before.items():
        moved = largest_difference(old, after[m])
        assert moved == 0.0 if m not in options.get("trained", before) else moved > 1e-3
