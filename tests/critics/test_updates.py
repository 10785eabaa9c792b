"""Whole updates with any critic and credit equal an independent float64 loop, parameter by parameter."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from tests.critics.both import LR, TOLERANCE, Both, Case
from tests.critics.data import EVERYTHING, RAGGED, STATE, Lives
from tests.critics.reference import CRITIC, Pooled
from tests.critics.support import INTERLEAVED, WIDTHS

STATE_VIEW = {"with_state": True, "observations": False, "columns": tuple(range(STATE))}
GRU = {"cell": "gru", "cell_size": 6}
MEMORY = {"model": {"cell": "gru", "cell_size": 6, "fcnet_hiddens": [7], "max_seq_len": 4}}
DISCOUNTS = {"m0": {"gamma": 0.8, "lambda_": 0.5}, "m1": {"gamma": 0.95}, "m2": {"gamma": 0.9, "lambda_": 0.7}}
OWN_DISCOUNTS = {
    "gamma": {m: x["gamma"] for m, x in DISCOUNTS.items()},
    "lambda_": {m: x.get("lambda_", 0.95) for m, x in DISCOUNTS.items()},
}

CASES = {
    "central, shared": Case(lives=(RAGGED,)),
    "central, own": Case(credit="own", lives=(RAGGED,)),
    "central, own, interleaved": Case(credit="own", agents=INTERLEAVED, lives=(RAGGED,)),
    "central, own, discounts per module": Case(credit="own", config={"overrides": DISCOUNTS}, loop=OWN_DISCOUNTS),
    "central, agent, interleaved": Case(credit="agent", agents=INTERLEAVED, lives=(EVERYTHING,)),
    "central, difference": Case(credit="difference", lives=(RAGGED,)),
    "central, state": Case(**STATE_VIEW, lives=(RAGGED,)),
    "central, state, own": Case(credit="own", **STATE_VIEW, net={"input": "state"}),
    "central, observations though there is a state": Case(with_state=True, net={"input": "observations"}),
    "central, two ragged batches": Case(lives=(EVERYTHING, Lives(6, 2, gaps=0.3))),
    "central, no hidden layers": Case(net={"fcnet_hiddens": []}),
    "set, agent": Case("set", "agent", lives=(RAGGED,)),
    "set, own, interleaved": Case("set", "own", INTERLEAVED, lives=(RAGGED,)),
    "set, shared, max, scalars": Case(
        "set", net={"pooling": "max", "scalars": ("rest",)}, with_state=True, columns=(1, 2, 3), lives=(RAGGED,)
    ),
    "set, own, sum, whole state": Case(
        "set", "own", net={"pooling": "sum", "scalars": "state", "encoder_hiddens": [5, 6]}, with_state=True,
        columns=tuple(range(STATE)), lives=(EVERYTHING,),
    ),
    "set, difference": Case("set", "difference"),
    "mean, shared": Case("mean", lives=(RAGGED,)),
    "mean, agent": Case("mean", "agent", lives=(EVERYTHING,)),
    "mean, difference, interleaved": Case("mean", "difference", INTERLEAVED),
    "mean, shared, memory": Case(
        "mean", config=MEMORY, lives=(dataclasses.replace(EVERYTHING, max_seq_len=4),), seed=1
    ),
    "independent, shared": Case("independent", lives=(RAGGED,)),
    "independent, shared, interleaved": Case("independent", agents=INTERLEAVED, lives=(EVERYTHING,)),
    "independent, difference": Case("independent", "difference", lives=(RAGGED,)),
    "independent, own": Case("independent", "own", lives=(EVERYTHING,)),
    "central, critic_lr": Case(config={"critic_lr": 5e-3}, step={"critic_lr": 5e-3}, lives=(RAGGED,)),
    "mean, critic_lr": Case("mean", config={"critic_lr": 5e-3}, step={"critic_lr": 5e-3}, lives=(RAGGED,)),
    "central, clip_jointly": Case(config={"clip_jointly": True}, loop={"clip_jointly": True}, lives=(RAGGED,)),
    "central, clip_jointly, critic_lr": Case(
        config={"clip_jointly": True, "critic_lr": 5e-3}, loop={"clip_jointly": True}, step={"critic_lr": 5e-3}
    ),
    "mean, clip_jointly": Case("mean", config={"clip_jointly": True}, loop={"clip_jointly": True}),
    "independent, clip_jointly": Case(
        "independent", "own", config={"clip_jointly": True}, loop={"clip_jointly": True}, lives=(RAGGED,)
    ),
    "central, weight_decay": Case(config={"weight_decay": 0.5}, loop={"weight_decay": 0.5}),
    "mean, weight_decay, critic_lr": Case(
        "mean", config={"weight_decay": 0.5, "critic_lr": 5e-3}, loop={"weight_decay": 0.5}, step={"critic_lr": 5e-3}
    ),
    "central, as the tactical seed": Case(
        credit="agent",
        config={
            "clip_jointly": True, "weight_decay": 1e-1, "value_normalization": False, "value_clip_range": math.inf,
            "standardize_advantages": "minibatch",
        },
        loop={"clip_jointly": True, "weight_decay": 1e-1, "value_normalization": False, "standardize": "minibatch"},
        step={"value_clip_range": math.inf},
        lives=(RAGGED,),
    ),
    "mean, raw targets": Case("mean", config={"value_normalization": False}, loop={"value_normalization": False}),
    "central, own, raw targets": Case(
        credit="own", config={"value_normalization": False}, loop={"value_normalization": False}
    ),
    "central, standardised by team": Case(
        credit="agent", config={"standardize_advantages": "team"}, loop={"standardize": "team"}, lives=(RAGGED,)
    ),
    "central, no bootstrap": Case(config={"gae_bootstrap": "zero"}, loop={"bootstrap": "zero"}),
    "central, gru": Case(net=GRU, lives=(RAGGED,)),
    "central, gru, sequences of 4": Case(net={**GRU, "max_seq_len": 4}, lives=(EVERYTHING,)),
    "central, own, lstm": Case(credit="own", net={**GRU, "cell": "lstm"}, agents=INTERLEAVED, lives=(RAGGED,)),
    "set, own, lstm": Case("set", "own", net={**GRU, "cell": "lstm", "max_seq_len": 5}, lives=(RAGGED,)),
    "set, shared, gru": Case("set", net=GRU, lives=(RAGGED,)),
    "central, policies with memory": Case(config=MEMORY, lives=(dataclasses.replace(EVERYTHING, max_seq_len=4),)),
    "set, own, policies with memory": Case(
        "set", "own", INTERLEAVED, config=MEMORY, lives=(dataclasses.replace(RAGGED, max_seq_len=4),)
    ),
    "central, memory everywhere": Case(
        net={**GRU, "max_seq_len": 4}, config=MEMORY, lives=(dataclasses.replace(EVERYTHING, max_seq_len=4),)
    ),
    "central, frozen policy": Case(config={"trained": ["m0", "m2"]}, step={"frozen": frozenset({"m1"})}),
    "mean, frozen policy": Case("mean", config={"trained": ["m0", "m2"]}, step={"frozen": frozenset({"m1"})}),
    "central, nobody acts in some minibatches": Case(
        config={"minibatch_size": 2}, loop={"minibatch_size": 2}, lives=(Lives(9, 2, gaps=0.3, empty=0.6),)
    ),
    "central, whole batch": Case(config={"minibatch_size": None}, loop={"minibatch_size": 1000}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_updates_equal_the_float64_loop(name):
    case = CASES[name]
    both = Both(case)
    log = both.run()
    assert max(both.differences().values()) < TOLERANCE, both.differences()
    for m in both.first:
        moved = both.movement(m)
        assert moved == 0.0 if m in case.step.get("frozen", ()) else moved > 100 * TOLERANCE
    for results, steps in log:
        critics = [CRITIC] if case.critic != "independent" else sorted(set(case.agents.values()))
        assert results["__all_modules__"]["num_non_finite_minibatches"] == 0
        if "nobody" in name or case.critic == "independent":
            continue
        expected = np.mean([s["value_loss"] for s in steps], axis=0)
        found = [results[m]["vf_loss"] for m in critics]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


MISTAKES = {
    "another credit": (CASES["central, shared"], {"credit": "agent"}),
    "own credit of a shared one": (CASES["independent, shared"], {"credit": "own"}),
    "another critic": (CASES["mean, shared"], {"critic": "independent"}),
    "critic_lr": (CASES["central, critic_lr"], {"critic_lr": LR}),
    "clip per module": (CASES["central, clip_jointly"], {"clip_jointly": False}),
    "no decay": (CASES["central, weight_decay"], {"weight_decay": 0.0}),
    "pooling": (CASES["set, agent"], {"network": Pooled(WIDTHS, "sum", False)}),
    "value_normalization": (CASES["mean, raw targets"], {"value_normalization": True}),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_comparison_sees_another_setting(name):
    case, mistake = MISTAKES[name]
    both = Both(case, **mistake)
    both.run(1)
    assert max(both.differences().values()) > 3 * TOLERANCE


def test_the_comparison_sees_a_memory_that_does_not_begin_anew():
    both = Both(CASES["central, gru, sequences of 4"])
    rollouts = both.reference.rollouts

    def without_restarts(batches):
        found = rollouts(batches)
        both.reference.trainer.data.restarts[:] = False
        return found

    both.reference.rollouts = without_restarts
    both.run(1)
    differences = both.differences()
    assert differences[CRITIC] > 3 * TOLERANCE
    assert max(x for m, x in differences.items() if m != CRITIC) < TOLERANCE
