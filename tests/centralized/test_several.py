"""L learners with ratios of heads, auxiliary targets, constraints and the diversity probe are one learner."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.centralized.both import PARTS, Case, batch_of, config_of
from tests.centralized.reference import CentralRollout
from tests.centralized.test_auxiliary_updates import EXTRAS, KINDS, TWO
from tests.centralized.test_constraint_updates import EXTRAS as COSTS
from tests.centralized.test_constraint_updates import LAGRANGIAN, PENALTY, PID
from tests.centralized.test_head_updates import MASKED, SKILLED
from tests.critics.data import Lives, team_rollout
from tests.learners.test_several_learners import Pair
from tests.learners.threads import for_learners
from tests.support import largest_difference, make_runner, parameters, scramble
from thrust_rllib import Constraint, RedundancyPenalty

LIVES = Lives(steps=16, envs=3, gaps=0.2, deaths=0.15)
DRIVEN = Constraint("redundancy", 0.02, "pid", kp=2.0, ki=1.0, of="coupling", sense="equal")
GRU = {"model": {"cell": "gru", "cell_size": 6, "fcnet_hiddens": [7], "max_seq_len": 4}}
CASES = {
    "per_head": Case(ratio="per_head", lives=LIVES),
    "per_head, everybody acts": Case(ratio="per_head", lives=Lives(steps=16, envs=3)),
    "per_head, conditional, masks": Case(ratio="per_head", heads=SKILLED, kinds=MASKED, lives=LIVES),
    "per_head, central": Case(ratio="per_head", critic="central", credit="agent", lives=LIVES),
    "auxiliary": Case(kinds=KINDS, targets=TWO, extras=EXTRAS, lives=LIVES),
    "auxiliary, critic_lr, frozen": Case(
        kinds=KINDS, targets=TWO, extras=EXTRAS, lives=LIVES, config={"critic_lr": 3e-3, "trained": ["a0", "a1"]}
    ),
    "auxiliary, gru": Case(
        kinds=KINDS, targets=TWO, extras=EXTRAS, lives=dataclasses.replace(LIVES, max_seq_len=4), **GRU
    ),
    "constraints": Case(kinds=KINDS, limits=(PENALTY, LAGRANGIAN, PID), extras=COSTS, lives=LIVES, credit="difference"),
    "a driven coupling": Case(
        kinds=KINDS, limits=(DRIVEN,), lives=LIVES, config={"cross_agent_losses": {"redundancy": RedundancyPenalty()}}
    ),
    "everything": Case(
        ratio="per_head", targets=TWO, limits=(LAGRANGIAN, DRIVEN), extras=EXTRAS | COSTS, critic="central",
        credit="difference", lives=LIVES,
        config={"cross_agent_losses": {"redundancy": RedundancyPenalty()}, "clip_jointly": True, "weight_decay": 0.1},
    ),
}  # fmt: skip


def rollout(case: Case, rng: np.random.Generator):
    """Random numbers of every kind; no policy is asked."""
    batch = CentralRollout(**vars(team_rollout(rng, case.kinds, case.lives)))
    for agent, kind in case.kinds.items():
        shape = (*batch.valid.shape, len(kind.sizes) if kind.action == "multi_discrete" else 1)
        batch.head_logp[agent] = (-1.2 + 0.2 * rng.normal(size=shape)).astype(np.float32)
        batch.streams[agent].logp = batch.head_logp[agent].sum(-1)
        if "cell" in case.model:
            states = len(batch.sequence_rows), case.model["cell_size"]
            batch.state_in[agent] = rng.normal(size=states).astype(np.float32)

    def numbers():
        return rng.normal(size=batch.valid.shape).astype(np.float32)

    for name, kind in case.extras.items():
        batch.extras[name] = numbers() if kind == "team" else {agent: numbers() for agent in case.kinds}
        if kind == "pair":
            batch.extras[name] = {a: {b: numbers() for b in case.kinds if b != a} for a in case.kinds}
    return batch_of(batch, case.module_of(), case.ratio == "per_head")


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_updates_are_those_of_one_learner(name, size):
    case = CASES[name]
    config = config_of(case).training(minibatch_size=18 if size == 3 else 16, diversity_interval=1)
    pair = Pair(config, size, make_runner(for_learners(config, 1)).get_spaces())
    scramble(pair.one)
    pair.several.set_state(pair.one.get_state())
    before, rng = parameters(pair.one), np.random.default_rng(3)
    for k in range(3):
        told = pair.update([rollout(case, rng)], steps=48 * k)
    pair.check()
    for learner in pair.several.learners:
        assert learner._multipliers.coefficients() == pytest.approx(pair.one._multipliers.coefficients(), rel=1e-4)
    after = parameters(pair.one)
    frozen = {"b"} if "trained" in case.config else set()
    assert all(largest_difference(before[m], after[m]) > 1e-3 for m in set(before) - frozen)
    words = {"per_head": "/heads/", "auxiliary": "/auxiliary_accuracy/", "constraints": "/constraints/"}
    for word in [text for start, text in words.items() if name.startswith(start)]:
        assert any(word in path for path in told)
    if case.kinds is KINDS:
        assert any("/diversity/a0_and_1_more/total_variation" in path for path in told)


def test_random_rollouts_have_every_number_that_is_asked_for():
    batch = rollout(CASES["everything"], np.random.default_rng(0))
    assert batch.modules["b"].head_logp.shape[-1] == len(PARTS["b"].sizes) and {"between", "own"} <= set(batch.extras)
