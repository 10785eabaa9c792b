"""Updates with auxiliary targets equal the float64 loop, parameter by parameter."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.centralized.both import HEADS, LR, TOLERANCE, Both, Case, batch_of
from tests.core.reference_loop import AgentKind
from tests.critics.data import EVERYTHING, Lives
from tests.critics.support import INTERLEAVED
from tests.support import largest_difference, parameters, update
from thrust_rllib import AuxiliaryTarget, RedundancyPenalty

KINDS = {"a0": AgentKind(3), "b": AgentKind(2), "a1": AgentKind(3)}
EXTRAS = {"of_team": "team", "own": "agent"}
TWO = (AuxiliaryTarget("of_team", weight=0.7), AuxiliaryTarget("own", "huber", weight=1.5))
FROZEN = {"config": {"trained": ["a0", "a1"]}, "step": {"frozen": frozenset({"b"})}}
GRU = {
    "model": {"cell": "gru", "cell_size": 6, "fcnet_hiddens": [7], "max_seq_len": 4},
    "lives": dataclasses.replace(EVERYTHING, max_seq_len=4),
}
# Of updates that begin at 0, 33 and 66 steps.
FALLING = (AuxiliaryTarget("of_team", weight=[[0, 2.0], [66, 0.0]]), AuxiliaryTarget("own", weight=0.3))


def case(targets=TWO, **options):
    return Case(**{"kinds": KINDS, "targets": targets, "extras": EXTRAS, **options})


CASES = {
    "of the team": case(TWO[:1]),
    "of each agent": case(TWO[1:]),
    "both": case(),
    "everybody acts": case(lives=Lives()),
    "fragments and empty rows": case(lives=EVERYTHING),
    "shared module": case(agents=INTERLEAVED),
    "a weight of 0": case((AuxiliaryTarget("own", weight=0.0),)),
    "a schedule": case(FALLING, weights={"of_team": [2.0, 1.0, 0.0]}, lives=Lives()),
    "frozen": case(**FROZEN),
    "critic_lr": case(config={"critic_lr": 5e-3}, step={"critic_lr": 5e-3}),
    "a tight clip": case(config={"grad_clip": 0.05}, step={"grad_clip": 0.05}),
    "clip_jointly, weight_decay": case(
        config={"clip_jointly": True, "weight_decay": 0.5}, loop={"clip_jointly": True, "weight_decay": 0.5}
    ),
    "rates of modules": case(config={"overrides": {"b": {"lr": 5e-4}}}),
    "central critic, critic_lr": case(
        critic="central", credit="agent", config={"critic_lr": 5e-3}, step={"critic_lr": 5e-3}
    ),
    "mean critic, frozen": case(critic="mean", credit="shared", **FROZEN),
    "gru": case(**GRU),
}


def run(name, updates=3, **mistakes):
    both = Both(CASES[name], **mistakes)
    if name == "rates of modules":
        both.reference.trainer.optimizers["b"].lr = 5e-4
    return both, both.run(updates)


@pytest.mark.parametrize("name", CASES)
def test_updates_equal_the_float64_loop(name):
    both, log = run(name)
    both.check(log)
    frozen = both.case.step.get("frozen", ())
    for m in both.reference.trainer.modules:
        moved = both.movement(HEADS, f"of_{m}.")
        assert moved == 0.0 if m in frozen or name == "a weight of 0" else moved > 100 * TOLERANCE, m
        for results, _ in log:
            for metric in ("auxiliary_loss", "auxiliary_accuracy"):
                assert set(results[m][metric]) == {target.name for target in both.case.targets}


MISTAKES = {
    "weight": ("both", {"weights": {"own": [1.4]}}),
    "the error": ("both", {"targets": (TWO[0], AuxiliaryTarget("own", "mse", weight=1.5))}),
    "no schedule": ("a schedule", {"weights": {"of_team": [2.0]}}),
    "no clip": ("a tight clip", {"grad_clip": 0.0}),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_comparison_sees_another_setting(name):
    case_name, mistake = MISTAKES[name]
    both, _ = run(case_name, 2, **mistake)
    assert max(both.differences().values()) > 3 * TOLERANCE


def test_a_heads_gradient_is_clipped_with_its_policys():
    """A loss of a head that is huge leaves nothing of its policy's own gradient."""
    results = []
    for weight in (0.0, 1e6):
        both = Both(case((AuxiliaryTarget("own", weight=weight),), config={"num_epochs": 1, "minibatch_size": None}))
        batch = batch_of(both.data(), both.agents)
        results.append((update(both.learner, batch), parameters(both.learner)))
    norm = "gradients_default_optimizer_global_norm"
    assert results[1][0]["b"][norm] > 1e4 * results[0][0]["b"][norm]
    moments = both.learner.get_optimizer("b", "b_default_optimizer").state_dict()["state"]
    heads = both.learner.get_optimizer(HEADS, f"{HEADS}_b").state_dict()["state"]
    length = sum(float(x["exp_avg"].square().sum()) for state in (moments, heads) for x in state.values())
    assert np.sqrt(length) == pytest.approx(0.1 * 0.5, rel=1e-3)  # (1 − β) times the clipped gradient
    assert largest_difference(results[0][1]["b"], results[1][1]["b"]) > LR / 10


def test_an_extra_that_no_environment_gives_is_an_error_with_the_names_that_there_are():
    both = Both(case(config={"value_normalization": True}))
    fixed = both.data()
    fixed.extras.pop("own")
    before, moments = parameters(both.learner), both.learner.get_state(components="joint")["joint"]["value_normalizers"]
    with pytest.raises(ValueError, match=r"auxiliary target 'own' is not among the rollout's extras \[.*'of_team'\]"):
        update(both.learner, batch_of(fixed, both.agents))
    assert largest_difference(before, parameters(both.learner)) == 0.0
    assert both.learner.get_state(components="joint")["joint"]["value_normalizers"] == moments and len(moments) == 3


def test_couplings_stand_beside_auxiliary_losses():
    options = {"cross_agent_losses": {"redundancy": RedundancyPenalty()}, "coupling_gradient_interval": 1}
    both = Both(case(config=options))
    results = update(both.learner, batch_of(both.data(), both.agents))
    for m in KINDS:
        assert results[m]["coupling_gradient"]["redundancy"]["norm"] > 0 and results[m]["auxiliary_loss"]["own"] > 0
