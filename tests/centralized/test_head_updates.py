"""Updates with a ratio of each head's own equal the float64 loop, parameter by parameter."""

from __future__ import annotations

import dataclasses

import pytest

from tests.centralized.both import HEADS, PARTS, TOLERANCE, Both, Case, batch_of, config_of
from tests.core.reference_loop import AgentKind
from tests.critics.data import EVERYTHING, Lives
from tests.support import make_learner, update
from thrust_rllib import AuxiliaryTarget

MASKED = {agent: dataclasses.replace(kind, masked=True) for agent, kind in PARTS.items()}
SKILLED = {"a0": {"1": "0"}, "b": {"0": "1", "2": "1"}}
SHARED = {
    "kinds": {"a0": PARTS["a0"], "c": AgentKind(4), "a1": PARTS["a0"], "d": AgentKind(2, "gaussian_free", (1, 1))},
    "agents": {"a0": "skilled", "c": "plain", "a1": "skilled", "d": "box"},
}
GRU = {
    "model": {"cell": "gru", "cell_size": 6, "fcnet_hiddens": [7], "max_seq_len": 4},
    "lives": dataclasses.replace(EVERYTHING, max_seq_len=4),
}
PER_HEAD = {"ratio": "per_head"}

CASES = {
    "other numbers of heads": Case(**PER_HEAD),
    "everybody acts": Case(**PER_HEAD, lives=Lives()),
    "masks": Case(**PER_HEAD, kinds=MASKED),
    "shared module": Case(**PER_HEAD, **SHARED),
    "fragments and empty rows": Case(**PER_HEAD, lives=EVERYTHING),
    "conditional heads": Case(**PER_HEAD, heads=SKILLED),
    "conditional heads, masks": Case(**PER_HEAD, heads=SKILLED, kinds=MASKED),
    "conditional heads, one ratio": Case(heads=SKILLED, kinds=MASKED),
    "conditional heads, gru": Case(**PER_HEAD, heads=SKILLED, **GRU),
    "gru": Case(**PER_HEAD, **GRU),
    "central critic, frozen, critic_lr": Case(
        critic="central", credit="agent", **PER_HEAD,
        config={"critic_lr": 5e-3, "trained": ["a0", "c"]}, step={"critic_lr": 5e-3, "frozen": frozenset({"b"})},
    ),
    "mean critic": Case(critic="mean", credit="shared", **PER_HEAD),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_updates_equal_the_float64_loop(name):
    case = CASES[name]
    both = Both(case)
    log = both.run()
    both.check(log)
    for m in both.first:
        assert both.movement(m) == 0.0 if m in case.step.get("frozen", ()) else both.movement(m) > 100 * TOLERANCE
    if case.ratio == "per_head":
        names = both.reference.trainer.head_names
        for m, own in names.items():
            for statistic in ("entropy", "approx_kl", "clip_fraction"):
                assert set(log[0][0][m]["heads"]) == set(own) and statistic in log[0][0][m]["heads"][own[0]]
        assert len({len(own) for own in names.values()}) > 1
    else:
        assert all("heads" not in log[0][0][m] for m in both.agents.values())


MISTAKES = {
    "one ratio": ("other numbers of heads", {"ratio": "joint"}),
    "ratios of heads": ("conditional heads, one ratio", {"ratio": "per_head"}),
    "clip_param": ("conditional heads", {"clip_param": 0.1}),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_comparison_sees_another_setting(name):
    case, mistake = MISTAKES[name]
    both = Both(CASES[case], **mistake)
    both.run(1)
    assert max(both.differences().values()) > 3 * TOLERANCE


def test_the_entropies_of_heads_add_up_and_names_are_those_of_the_configuration():
    kinds = {agent: PARTS["a0"] for agent in ("a0", "a1")}
    both = Both(Case(kinds=kinds, **PER_HEAD))
    config = config_of(both.case).training(head_names=("skill", "goal"))
    results = update(make_learner(config), batch_of(both.data(), both.agents, per_head=True))
    for m in kinds:
        heads = results[m]["heads"]
        assert set(heads) == {"skill", "goal"}
        assert results[m]["entropy"] == pytest.approx(sum(own["entropy"] for own in heads.values()), rel=1e-5)
        assert results[m]["approx_kl"] == pytest.approx(sum(own["approx_kl"] for own in heads.values()), rel=1e-4)


def test_a_rollout_without_numbers_of_heads_is_an_error_and_with_one_ratio_they_are_not_read():
    both = Both(Case(**PER_HEAD))
    fixed = both.data()
    with pytest.raises(ValueError, match="ratio='per_head' needs log-probabilities head by head.*none of module 'a0'"):
        update(both.learner, batch_of(fixed, both.agents))
    results = [
        update(make_learner(config_of(Case())), batch_of(fixed, both.agents, per_head=stored)) for stored in (0, 1)
    ]
    assert results[0]["a0"]["policy_loss"] == results[1]["a0"]["policy_loss"] and "heads" not in results[1]["a0"]


def test_heads_and_auxiliary_targets_together():
    case = Case(
        **PER_HEAD, heads=SKILLED, targets=(AuxiliaryTarget("own"),), extras={"own": "agent"}, critic="central",
        credit="agent",
    )  # fmt: skip
    both = Both(case)
    both.check(both.run())
    assert both.movement(HEADS) > 100 * TOLERANCE
