"""L learners with a critic of the team are one learner."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.critics.both import Case, config_of
from tests.critics.data import Lives, team_rollout
from tests.critics.reference import CRITIC
from tests.critics.support import INTERLEAVED, KINDS, package_batch
from tests.learners.test_several_learners import Pair
from tests.learners.threads import for_learners
from tests.support import largest_difference, make_runner, parameters, scramble

LIVES = Lives(steps=16, envs=3, gaps=0.2, deaths=0.15)
WHOLE = Lives(steps=16, envs=3)
TORN = Lives(steps=16, envs=3, gaps=0.3, deaths=0.15, empty=0.15, cuts=(5,), padding=True)
MEMORY = {"model": {"cell": "gru", "cell_size": 6, "fcnet_hiddens": [7], "max_seq_len": 4}}

CASES = {
    "central, shared": Case(lives=(WHOLE,)),
    "central, own": Case(credit="own", agents=INTERLEAVED, lives=(LIVES,)),
    "central, shared, gru": Case(net={"cell": "gru", "cell_size": 6, "max_seq_len": 4}, lives=(LIVES,)),
    "central, own, lstm": Case(credit="own", net={"cell": "lstm", "cell_size": 6, "max_seq_len": 4}, lives=(LIVES,)),
    "central, policies with memory": Case(config=MEMORY, lives=(Lives(16, 3, gaps=0.2, deaths=0.15, max_seq_len=4),)),
    "set, shared": Case("set", lives=(LIVES,)),
    "set, own": Case("set", "own", lives=(LIVES,)),
    "set, own, gru, ragged": Case(
        "set", "own", INTERLEAVED, net={"cell": "gru", "cell_size": 6, "max_seq_len": 4}, lives=(TORN,)
    ),
    "set, agent, lstm, ragged": Case(
        "set", "agent", net={"cell": "lstm", "cell_size": 6, "max_seq_len": 4, "pooling": "max"}, lives=(TORN,)
    ),
    "set, memory everywhere, ragged": Case(
        "set",
        net={"cell": "gru", "cell_size": 6, "max_seq_len": 4},
        config=MEMORY,
        lives=(dataclasses.replace(TORN, max_seq_len=4),),
    ),
    "mean, shared": Case("mean", lives=(LIVES,)),
    "mean, agent, critic_lr": Case("mean", "agent", config={"critic_lr": 3e-3}, lives=(LIVES,)),
    "independent, shared": Case("independent", lives=(LIVES,)),
    "mean, weight_decay, critic_lr": Case("mean", config={"weight_decay": 0.5, "critic_lr": 3e-3}, lives=(LIVES,)),
    "clip_jointly, weight_decay, critic_lr": Case(
        credit="agent", config={"clip_jointly": True, "weight_decay": 0.1, "critic_lr": 3e-3}, lives=(LIVES,)
    ),
    "empty rows and padding": Case(lives=(Lives(16, 3, gaps=0.3, empty=0.2, cuts=(5,), padding=True),)),
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_updates_are_those_of_one_learner(name, size):
    case = CASES[name]
    config = config_of(case).training(minibatch_size=18 if size == 3 else 16)
    pair = Pair(config, size, make_runner(for_learners(config, 1)).get_spaces())
    scramble(pair.one)
    pair.several.set_state(pair.one.get_state())
    before, rng = parameters(pair.one), np.random.default_rng(3)
    recurrent = "model" in case.config
    for k in range(3):
        fixed = team_rollout(rng, KINDS, case.lives[0])
        if recurrent:
            sequences = len(fixed.sequence_rows)
            fixed.state_in = {agent: rng.normal(size=(sequences, 6)).astype(np.float32) for agent in KINDS}
        pair.update([package_batch(fixed, case.agents, with_state=False)], steps=48 * k)
    pair.check()
    after = parameters(pair.one)
    assert all(largest_difference(before[m], after[m]) > 1e-3 for m in before)
    assert (CRITIC in after) == (case.critic in ("central", "set"))
