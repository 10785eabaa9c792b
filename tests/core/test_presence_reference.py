"""Updates with absent agents equal a float64 loop."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import pytest
import torch

from tests import reference
from tests.core.ragged import COUPLINGS, KINDS, PATTERNS
from tests.core.reference_loop import AgentKind
from tests.core.test_reference_update import OWN, TOLERANCE, Both, Case, joint_batch
from tests.support import update


@dataclasses.dataclass
class Ragged:
    """Who acts when, and the options in the package's and in the reference's words."""

    patterns: tuple[str, ...] = ("dies early", "not in the second update", "joins late")
    coupling: str | None = None
    case: Case = dataclasses.field(default_factory=lambda: Case(kinds=dict(KINDS)))

    def but(self, **fields) -> Ragged:
        return dataclasses.replace(self, case=dataclasses.replace(self.case, **fields))


class RaggedBoth(Both):
    """Learner and reference on data with absences; what stands at absent rows is nonsense.

    Args:
        ragged: the case.
        everywhere: the reference's coupling reads all rows, as if everybody were present: a mistake.
    """

    def __init__(self, ragged: Ragged, everywhere: bool = False):
        case, self.patterns, self.updates = ragged.case, ragged.patterns, 0
        coupling = None
        if ragged.coupling is not None:
            loss, twin = COUPLINGS[ragged.coupling]
            coupled = {"cross_agent_losses": {"c": loss}, "cross_agent_coeffs": {"c": 0.5}}
            case = dataclasses.replace(
                case, config={**case.config, **coupled}, step={**case.step, "redundancy_coeff": 0.5}
            )
            frozen = case.step.get("frozen", ())

            def coupling(features, policies, present):
                features, policies = (
                    {a: x.detach() if self.agents[a] in frozen else x for a, x in of.items()}
                    for of in (features, policies)
                )
                if everywhere:
                    present = {agent: torch.ones_like(mask) for agent, mask in present.items()}
                return (twin or self.reference.trainer.redundancy)(features, policies, present)

        super().__init__(case, coupling=coupling)

    def data(self):
        batches = super().data()
        for batch in batches:
            steps, envs = batch.valid.shape
            for stream, pattern in zip(batch.streams.values(), self.patterns, strict=True):
                acts = functools.partial(PATTERNS[pattern], k=self.updates, T=steps)
                acted = np.array([[acts(t, e) for e in range(envs)] for t in range(steps)])
                stream.present = acted & batch.valid
                if pattern == "dies early":
                    last = steps - 1 - stream.present[::-1].argmax(0)
                    stream.terminated[last, np.arange(envs)] = True
                stream.obs[~stream.present], stream.actions[~stream.present] = 1e6, 10**6
                stream.logp[~stream.present], stream.rewards[~stream.present] = np.nan, np.inf
        self.updates += 1
        return batches


BASE = Ragged()
TURNS = Ragged(("even steps", "odd steps", "always"))
RARE = Ragged(("always", "two rows", "one row"))


SHARED = Case(
    kinds={"a0": AgentKind(3), "b": AgentKind(4), "a1": AgentKind(3), "c": AgentKind(5)},
    agents={"a0": "m1", "b": "m0", "a1": "m1", "c": "m2"},
    config={"policies": {"m1": ["a0", "a1"], "m0": ["b"], "m2": ["c"]}},
)


OWN_NUMBERS = {
    "config": {"overrides": OWN},
    "loop": {"gamma": {"a0": 0.9, "a1": 0.99, "a2": 0.99}, "lambda_": {"a0": 0.5, "a1": 0.95, "a2": 0.95}},
    "per_module": {
        "a0": {"lr": 1e-3},
        "a1": {"entropy_coeff": 0.1, "clip_param": 0.1, "vf_loss_coeff": 1.0, "grad_clip": 0.2},
    },
}


CRITIC = {"config": {"critic_lr": 1e-3}, "step": {"critic_lr": 1e-3}}


RAGGED = {
    "ragged": BASE,
    "turns": TURNS,
    "absent in whole minibatches": RARE,
    "absent always": Ragged(("always", "never", "dies early")),
    "only one acts": Ragged(("never", "even steps", "never"), coupling="redundancy"),
    "nobody in some rows": Ragged(("two rows", "dies early", "one row")),
    "critic_lr": BASE.but(**CRITIC),
    "critic_lr, whole minibatches": RARE.but(**CRITIC),
    "raw value targets": BASE.but(config={"value_normalization": False}, loop={"value_normalization": False}),
    **{
        f"standardised by {scope}, {name}": base.but(
            config={"standardize_advantages": scope}, loop={"standardize": scope}
        )
        for scope in ("minibatch", "team", False)
        for name, base in (("ragged", BASE), ("rare", RARE))
    },
    **{
        f"{coupling}, {name}": dataclasses.replace(base, coupling=coupling)
        for coupling in COUPLINGS
        for name, base in (("ragged", BASE), ("turns", TURNS), ("rare", RARE))
    },
    "coupling and critic_lr": dataclasses.replace(RARE, coupling="similarity").but(**CRITIC),
    "own numbers": dataclasses.replace(BASE, coupling="redundancy").but(**OWN_NUMBERS),
    **{
        f"frozen, {coupling}": dataclasses.replace(BASE, coupling=coupling).but(
            config={"trained": ["a0", "a2"]}, step={"frozen": frozenset({"a1"})}
        )
        for coupling in (None, *COUPLINGS)
    },
    "clamped value error": BASE.but(config={"vf_clip_param": 0.5}, step={"vf_clip_param": 0.5}),
    "no value clip": BASE.but(config={"value_clip_range": math.inf}, step={"value_clip_range": math.inf}),
    "one minibatch": BASE.but(config={"minibatch_size": 36}, loop={"minibatch_size": 36}),
    "seed_defaults": BASE.but(
        config={"seed_recipe": True},
        loop={"value_normalization": False, "bootstrap": "zero", "iterate_all": False},
    ),
    "two batches, padded": dataclasses.replace(BASE, coupling="redundancy").but(
        shapes=((7, 4), (10, 2)), data={"padding": True}
    ),
    "shared module": Ragged(("dies early", "even steps", "joins late", "one row"), "redundancy", SHARED),
    "shared module, absent in one update": Ragged(
        ("not in the second update", "always", "not in the second update", "odd steps"), "similarity", SHARED
    ),
    "other actions": TURNS.but(
        kinds={
            "a0": AgentKind(3, "multi_discrete", (3, 2)),
            "a1": AgentKind(4, "gaussian_free", (1, 1)),
            "a2": AgentKind(5, sizes=(4,), masked=True),
        }
    ),
}


@pytest.mark.parametrize("name", RAGGED)
def test_three_updates_with_absences_equal_the_float64_loop(name):
    both = RaggedBoth(RAGGED[name])
    log = both.run()
    assert both.difference() < TOLERANCE
    frozen = both.case.step.get("frozen", frozenset())
    trained = {m: sum(step["rows"][m] for _, steps in log for step in steps) for m in both.first}
    for module_id, rows in trained.items():
        moved = both.movement(module_id)
        assert moved > 100 * TOLERANCE if rows and module_id not in frozen else moved == 0.0
    for results, steps in log:
        check_statistics(results, steps)


def check_statistics(results, steps):
    """Each module's numbers are means over the gradient steps in which it has a row."""
    shared = results["__all_modules__"]
    assert shared["num_minibatch_steps"] == len(steps) and shared["num_non_finite_minibatches"] == 0
    for mine, theirs in ((shared["total_loss"], "total_loss"), (shared["cross_agent_loss"]["total"], "aux_loss")):
        assert mine == pytest.approx(np.mean([step[theirs] for step in steps]), rel=1e-4, abs=1e-4)
    names = {
        "policy_loss": "policy_loss",
        "vf_loss": "value_loss",
        "entropy": "entropy",
        "approx_kl": "kl",
        "clip_fraction": "clip_fraction",
        "gradients_default_optimizer_global_norm": "grad_norm",
        **({"gradients_critic_optimizer_global_norm": "critic_grad_norm"} if "critic_grad_norm" in steps[0] else {}),
    }
    for module_id in steps[0]["rows"]:
        result, own = results[module_id], [step for step in steps if step["rows"][module_id]]
        rows = [step["rows"][module_id] for step in own]
        assert result["num_module_steps_trained"] == sum(rows)
        assert result["module_train_batch_size_mean"] == pytest.approx(np.mean(rows) if rows else 0.0)
        for mine, theirs in names.items():
            if not own:
                assert np.isnan(result.get(mine, np.nan)), (module_id, mine)
                continue
            expected = np.mean([step[theirs][module_id] for step in own])
            # A ratio may lie on the edge of the clip range in one precision and not in the other.
            tolerance = 1 / min(rows) / len(rows) if mine == "clip_fraction" else 1e-4
            assert result[mine] == pytest.approx(expected, rel=1e-4, abs=tolerance), (module_id, mine)
    assert shared["num_module_steps_trained"] == sum(sum(step["rows"].values()) for step in steps)


def test_the_comparison_sees_a_step_by_momentum_alone():
    # Adam with zero gradients: what happens if a module without rows is stepped all the same.
    both = RaggedBoth(RARE)
    trainer = both.reference.trainer
    plain = trainer._clip_and_step
    trainer._clip_and_step = lambda grads, optimizers, rows: plain(grads, optimizers, dict.fromkeys(rows, 1))
    both.run()
    assert both.difference() > 30 * TOLERANCE


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_the_comparison_sees_a_coupling_over_absent_rows(coupling):
    both = RaggedBoth(dataclasses.replace(BASE, coupling=coupling), everywhere=True)
    both.run(1)
    assert both.difference() > 3 * TOLERANCE


def test_explained_variance_counts_present_rows():
    both = RaggedBoth(BASE.but(config={"minibatch_size": 36, "num_epochs": 1, "value_normalization": False}))
    both.reference.settings.value_normalization = False
    data = both.data()
    rollouts = both.reference.rollouts(data)
    results = update(both.learner, [joint_batch(fixed, both.agents) for fixed in data])
    for agent, rollout in rollouts.items():
        expected = reference.explained_variance(rollout.values_old, rollout.value_targets, rollout.present)
        assert results[agent]["vf_explained_var"] == pytest.approx(expected, rel=1e-4)
        everywhere = reference.explained_variance(rollout.values_old, rollout.value_targets)
        assert rollout.present.all() or abs(expected - everywhere) > 1e-3


def test_moments_of_value_targets_take_in_present_rows_only():
    both = RaggedBoth(BASE)
    both.run()
    for agent, moments in both.learner._value_normalizers.items():
        count, mean, var = both.reference.moments[agent].merged()
        assert moments.count == pytest.approx(count) and 0 < count < 3 * 36
        assert [moments.mean, moments.var] == pytest.approx([mean, var], rel=1e-4)
