"""Agents that are absent in some joint rows: what they learn, what is reported, and that padding reaches nothing."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import reference
from tests.core.reference_loop import AgentKind
from tests.core.test_gradients import copy_scrambled, team_learner
from tests.core.test_optimizer_pass import MAKERS, Team, equal, joint_steps, own_steps
from tests.core.test_reference_update import LR, OWN, TOLERANCE, Both, Case, joint_batch
from tests.support import (
    box,
    declared_config,
    discrete,
    hand_batch,
    hand_streams,
    largest_difference,
    make_learner,
    optimizer_states,
    parameters,
    update,
)
from thrust_rllib import CrossAgentLoss, FeatureSimilarity, JensenShannon, RedundancyPenalty
from thrust_rllib.joint_losses import Coefficients, ModuleAxis, TeamOutputs, compute_joint_losses
from thrust_rllib.joint_rows import JointRows, ModuleRows

AGENTS = ("a0", "a1", "a2")
KINDS = {"a0": AgentKind(3), "a1": AgentKind(4), "a2": AgentKind(5)}

# ------------------------------------------------------------------------------- the float64 loop, with absences

PATTERNS = {  # (step of T, environment, update) to whether the agent acts
    "always": lambda t, e, k, T: True,
    "dies early": lambda t, e, k, T: t < T // 3 + e,
    "joins late": lambda t, e, k, T: t >= T // 2 - e,
    "even steps": lambda t, e, k, T: (t + e) % 2 == 0,
    "odd steps": lambda t, e, k, T: (t + e) % 2 == 1,
    "two rows": lambda t, e, k, T: e == 0 and t in (2, 3),
    "one row": lambda t, e, k, T: e == 1 and t == 2,
    "not in the second update": lambda t, e, k, T: k != 1 and t % 3 > 0,
    "never": lambda t, e, k, T: False,
}


def pairs(agents, of_pair):
    """Mean of a scalar over pairs of agents."""
    values = [of_pair(i, j) for i, j in itertools.combinations(agents, 2)]
    return sum(values) / len(values)


def reference_similarity(features, policies, present):
    """Linear CKA over the rows that both have, by the centred kernel matrices of the rows."""

    def of_pair(i, j):
        both = present[i] & present[j]
        n = int(both.sum())
        if n < 2:
            return torch.zeros((), dtype=torch.float64)
        centring = torch.eye(n, dtype=torch.float64) - 1.0 / n
        k, other = (centring @ features[a][both] @ features[a][both].T @ centring for a in (i, j))
        return (k * other).sum() / ((k * k).sum() * (other * other).sum()).sqrt()

    return pairs(features, of_pair)


def reference_divergence(features, policies, present):
    """Minus the Jensen-Shannon divergence over the rows that both have."""

    def of_pair(i, j):
        both = present[i] & present[j]
        if not both.any():
            return torch.zeros((), dtype=torch.float64)
        p, q = (torch.softmax(policies[a][both], dim=1) for a in (i, j))
        middle = (p + q) / 2
        return ((p * (p / middle).log()).sum(1) / 2 + (q * (q / middle).log()).sum(1) / 2).mean()

    return -pairs(policies, of_pair)


COUPLINGS = {  # (the package's, the reference's)
    "redundancy": (RedundancyPenalty(), None),
    "similarity": (FeatureSimilarity(), reference_similarity),
    "apart": (JensenShannon("raise"), reference_divergence),
}


@dataclasses.dataclass
class Ragged:
    """Who acts when, and the options in the package's and in the reference's words."""

    patterns: tuple[str, ...] = ("dies early", "not in the second update", "joins late")
    coupling: str | None = None
    case: Case = dataclasses.field(default_factory=lambda: Case(kinds=dict(KINDS)))

    def but(self, **fields) -> Ragged:
        return dataclasses.replace(self, case=dataclasses.replace(self.case, **fields))


class RaggedBoth(Both):
    """Learner and reference on data with absences; what stands at absent rows is nonsense."""

    def __init__(self, ragged: Ragged, **options):
        case, self.patterns, self.updates = ragged.case, ragged.patterns, 0
        if ragged.coupling is not None:
            loss, twin = COUPLINGS[ragged.coupling]
            coupled = {"cross_agent_losses": {"c": loss}, "cross_agent_coeffs": {"c": 0.5}}
            case = dataclasses.replace(
                case, config={**case.config, **coupled}, step={**case.step, "redundancy_coeff": 0.5}
            )
        super().__init__(case, **options)
        if ragged.coupling is not None and twin is not None:
            frozen = case.step.get("frozen", ())

            def detached(features, policies, present):
                features, policies = (
                    {a: x.detach() if self.agents[a] in frozen else x for a, x in of.items()}
                    for of in (features, policies)
                )
                return twin(features, policies, present)

            self.reference.trainer._coupling = detached

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
    both = RaggedBoth(dataclasses.replace(BASE, coupling=coupling))
    trainer = both.reference.trainer
    plain = trainer._coupling

    def of_all_rows(features, policies, present):
        return plain(features, policies, {agent: torch.ones_like(mask) for agent, mask in present.items()})

    trainer._coupling = of_all_rows
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


# ------------------------------------------------------------------------------- gradient isolation

STEPS, ENVS = 10, 3
SCHEDULES = {"a0": "dies early", "a1": "two rows", "a2": "odd steps"}


def ragged_batch(agents=AGENTS, schedules=SCHEDULES, seed=0, garbage=0.0, cut=False):
    """Each agent's data depends on its own name alone.

    Args:
        agents: who is in the batch.
        schedules: {agent: pattern}.
        seed: of the data.
        garbage: what stands at absent rows.
        cut: without the absent rows, one stream per agent and environment behind each other (one agent only).
    """
    modules, bootstrap = {}, np.arange(STEPS * ENVS)
    for agent in agents:
        rng = np.random.default_rng(seed + sum(map(ord, agent)))
        acts = functools.partial(PATTERNS[schedules[agent]], k=0, T=STEPS)
        present = np.array([[acts(t, e) for e in range(ENVS)] for t in range(STEPS)])
        obs, following = rng.normal(size=(2, STEPS, ENVS, 3))
        actions, logp = rng.integers(3, size=present.shape), -1.1 + 0.2 * rng.normal(size=present.shape)
        rewards = rng.normal(size=present.shape)
        terminated = np.zeros(present.shape, bool)
        if cut:
            order = [(t, e) for e in range(ENVS) for t in range(STEPS) if present[t, e]]
            ends = np.array([k + 1 == len(order) or order[k + 1][1] != e for k, (_, e) in enumerate(order)])
            obs, following, actions, logp, rewards, present, terminated = (
                np.array([x[at] for at in order])[:, None]
                for x in (obs, following, actions, logp, rewards, present, terminated)
            )
            flags = {"truncated": ends[:, None, None]}
            bootstrap = np.arange(len(order))
        else:
            obs[~present], logp[~present], rewards[~present] = np.nan_to_num(garbage, posinf=1e6), garbage, garbage
            flags = {}
        shape = present.shape
        modules[agent] = hand_streams(
            [agent],
            obs[:, None],
            actions=actions[:, None],
            rewards=rewards[:, None],
            logp=logp[:, None],
            present=present[:, None],
            terminated=terminated[:, None],
            bootstrap_obs=following.reshape(1, math.prod(shape), 3),
            **flags,
        )
    return hand_batch(modules, bootstrap)


@pytest.mark.parametrize("critic_lr", [None, 1e-3])
@pytest.mark.parametrize("standardize", ["rollout", "minibatch", False])
def test_without_a_coupling_each_module_learns_what_it_learns_alone(standardize, critic_lr):
    options = dict(num_epochs=3, iterate_all_minibatches=True, standardize_advantages=standardize, critic_lr=critic_lr)
    together, start = team_learner(**options), parameters(team_learner(**options))
    results = [update(together, ragged_batch(seed=k)) for k in range(2)]
    for agent in AGENTS:
        alone = team_learner([agent], **options)
        own = [update(alone, ragged_batch([agent], seed=k)) for k in range(2)]
        assert largest_difference(parameters(together)[agent], parameters(alone)[agent]) < 1e-7
        assert largest_difference(start[agent], parameters(alone)[agent]) > 1e-4
        for name in ("policy_loss", "vf_loss", "entropy", "approx_kl", "clip_fraction", "vf_explained_var"):
            for ours, theirs in zip(results, own, strict=True):
                assert ours[agent][name] == pytest.approx(theirs[agent][name], rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("agent", AGENTS)
def test_absent_rows_are_as_if_cut_out(agent):
    """One minibatch of all rows: the team's module equals one that was only ever given its own rows."""
    options = dict(num_epochs=4, minibatch_size=None)
    together, alone = team_learner(**options), team_learner([agent], **options)
    results = update(together, ragged_batch(garbage=np.nan))
    own = update(alone, ragged_batch([agent], cut=True))
    rows = own[agent]["num_module_steps_trained"]
    assert results[agent]["num_module_steps_trained"] == rows == own["__all_modules__"]["num_env_steps_trained"]
    assert largest_difference(parameters(together)[agent], parameters(alone)[agent]) < 1e-6
    for name in ("policy_loss", "vf_loss", "entropy", "vf_explained_var", "gradients_default_optimizer_global_norm"):
        assert results[agent][name] == pytest.approx(own[agent][name], abs=1e-5), name


# ------------------------------------------------------------------------------- no row, no step


@pytest.mark.parametrize("critic_lr", [None, 1e-3])
@pytest.mark.parametrize("coupling", [None, *COUPLINGS])
def test_a_module_without_a_row_does_not_move_by_one_bit(coupling, critic_lr):
    coupled = {} if coupling is None else {"cross_agent_losses": {"c": COUPLINGS[coupling][0]}}
    learner = team_learner(critic_lr=critic_lr, iterate_all_minibatches=True, **coupled)
    update(learner, ragged_batch(schedules=dict.fromkeys(AGENTS, "always")))  # moments that would move it
    before, moments = parameters(learner), optimizer_states(learner)
    results = update(learner, ragged_batch(schedules={"a0": "always", "a1": "never", "a2": "odd steps"}))
    assert results["__all_modules__"]["num_minibatch_steps"] == 4
    assert largest_difference(before["a1"], parameters(learner)["a1"]) == 0.0
    for name, state in optimizer_states(learner).items():
        difference = largest_difference(moments[name], state)
        assert difference == 0.0 if name.startswith("a1") else difference > 0.0
    for agent in ("a0", "a2"):
        assert largest_difference(before[agent], parameters(learner)[agent]) > 1e-4


def test_a_coupling_that_reads_absent_rows_moves_no_absent_module():
    class Careless(CrossAgentLoss):
        def __call__(self, features, logits, actions, present):
            return (
                sum(x.square().mean() for x in features.values()) / torch.stack([p.sum() for p in present.values()])[1]
            )

    learner = team_learner(cross_agent_losses={"careless": Careless()}, num_epochs=1, minibatch_size=None)
    before = parameters(learner)
    results = update(learner, ragged_batch(schedules={"a0": "always", "a1": "odd steps", "a2": "never"}))
    assert results["__all_modules__"]["cross_agent_loss"]["total"] > 0.0
    assert largest_difference(before["a2"], parameters(learner)["a2"]) == 0.0
    assert largest_difference(before["a1"], parameters(learner)["a1"]) > 1e-4


@pytest.mark.parametrize("name", ["fused", "decay", "AdamW", "SGD", "amsgrad"])
def test_a_pass_leaves_out_the_modules_without_rows(name):
    team, own = Team(MAKERS[name]), Team(MAKERS[name])
    joint_steps(team, 2)
    own_steps(own, 2)
    joint = team.joint_pass()
    joint.compute_gradients(team.objective(2), retain_graph=False, acts={"a": True, "b": False, "c": True})
    norms = joint.clip()
    joint.step(torch.tensor(True))
    own_steps(own, 1, first=2, trained=("a", "c"))
    assert equal(team.everything(), own.everything()) and norms[1] == 0.0 < norms[0]
    joint_steps(team, 1, first=3)
    own_steps(own, 1, first=3)
    assert equal(team.everything(), own.everything())


def test_a_state_with_a_module_that_never_acted_is_restored():
    schedules = {"a0": "always", "a1": "never", "a2": "odd steps"}
    straight = team_learner()
    update(straight, ragged_batch(schedules=schedules))
    resumed = team_learner()
    resumed.set_state(straight.get_state())
    for learner in (straight, resumed):
        update(learner, ragged_batch(seed=1))
    assert largest_difference(parameters(straight), parameters(resumed)) == 0.0


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.05, 0.3, 0.9]))
def test_whoever_acts_in_a_random_rollout_moves_and_nobody_else(seed, share):
    rng = np.random.default_rng(seed)
    acted = rng.random((STEPS, 3, ENVS)) < share
    batch = ragged_batch(schedules=dict.fromkeys(AGENTS, "always"), seed=seed % 1000)
    for k, agent in enumerate(AGENTS):
        batch.modules[agent].present = acted[:, k : k + 1]
    learner = cached_team_learner()
    copy_scrambled(learner)
    before = parameters(learner)
    results = update(learner, batch)
    assert results["__all_modules__"]["num_non_finite_minibatches"] == 0
    for k, agent in enumerate(AGENTS):
        assert results[agent]["num_module_steps_trained"] == 2 * acted[:, k].sum()
        assert (largest_difference(before[agent], parameters(learner)[agent]) > 0.0) == acted[:, k].any()


@functools.cache
def cached_team_learner():
    coupled = {name: loss for name, (loss, _) in COUPLINGS.items()}
    return team_learner(iterate_all_minibatches=True, cross_agent_losses=coupled)


# ------------------------------------------------------------------------------- padding

SPACES = {
    "a0": (box(), box(2)),
    "a1": (
        gym.spaces.Dict({"observation": box(), "action_mask": gym.spaces.Box(0, 1, (4,), np.int8)}),
        discrete(4),
    ),
    "a2": (box(), gym.spaces.MultiDiscrete([2, 3])),
}


def padded_batch(garbage):
    """A team of a Box, a masked Discrete and a MultiDiscrete agent; `garbage` in every field at absent rows."""
    rng = np.random.default_rng(0)
    shape, modules = (STEPS, 1, ENVS), {}
    for k, agent in enumerate(AGENTS):
        present = rng.random(shape) < 0.6
        actions = (
            rng.normal(size=(*shape, 2)).astype(np.float32),
            rng.integers(2, 4, size=shape),
            rng.integers(2, size=(*shape, 2)),
        )[k]
        mask = None
        if k == 1:
            mask = rng.random((*shape, 4)) < 0.5
            mask[..., 2:] = True
            mask[~present] = garbage is None
        obs, logp, rewards = rng.normal(size=(*shape, 3)), rng.normal(size=shape) - 1.0, rng.normal(size=shape)
        obs[~present], logp[~present], rewards[~present], actions[~present] = 0.0, 0.0, 0.0, 0
        terminated, truncated = (rng.random(shape) < 0.1 for _ in range(2))
        if garbage is not None:
            finite = np.clip(np.nan_to_num(garbage), -1e6, 1e6)
            obs[~present], logp[~present], rewards[~present] = finite or 1e6, garbage, garbage
            actions[~present] = garbage if k == 0 else 10**6
            terminated[~present] = truncated[~present] = True
        modules[agent] = hand_streams(
            [agent],
            obs,
            actions=actions,
            rewards=rewards,
            logp=logp,
            present=present,
            terminated=terminated,
            truncated=truncated,
            action_mask=mask,
            bootstrap_obs=rng.normal(size=(1, STEPS * ENVS, 3)),
        )
    return hand_batch(modules, np.arange(STEPS * ENVS))


@pytest.mark.parametrize("standardize", ["rollout", "minibatch", "team"])
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 1e6, -1e6])
def test_what_stands_at_absent_rows_changes_no_bit(garbage, standardize):
    learners, results = [], []
    for batch in (padded_batch(None), padded_batch(garbage)):
        observations, actions = zip(*SPACES.values(), strict=True)
        config = declared_config(
            observations,
            actions,
            AGENTS,
            iterate_all_minibatches=True,
            standardize_advantages=standardize,
            cross_agent_losses={"redundancy": RedundancyPenalty(), "similarity": FeatureSimilarity()},
        )
        learners.append(make_learner(config))
        copy_scrambled(learners[-1])
        results.append(update(learners[-1], batch))
    assert results[0]["__all_modules__"]["num_non_finite_minibatches"] == 0
    assert results[0] == results[1]
    assert largest_difference(*map(parameters, learners)) == 0.0
    assert largest_difference(*map(optimizer_states, learners)) == 0.0
    assert largest_difference(parameters(learners[0]), parameters(fresh(learners[0]))) > 1e-4


def fresh(learner):
    other = make_learner(learner.config)
    copy_scrambled(other)
    return other


@pytest.mark.parametrize("standardize", ["minibatch", "team", False])
@pytest.mark.parametrize("limits", [math.inf, 0.2])
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e6, -1e6])
def test_the_gradient_of_an_absent_row_is_exactly_zero(garbage, limits, standardize):
    generator = torch.Generator().manual_seed(0)
    N, B = 3, 6
    present = torch.rand(N, B, generator=generator) < 0.5
    assert present.any() and not present.all()

    def losses(fill):
        generator.manual_seed(1)
        columns = torch.randn(4, N, B, generator=generator).masked_fill(~present, fill)
        leaves = [torch.randn(N, B, generator=generator).masked_fill(~present, fill).requires_grad_() for _ in range(3)]
        numbers = SimpleNamespace(
            clip_param=0.2, value_clip_range=limits, vf_clip_param=limits, vf_loss_coeff=0.5, entropy_coeff=0.0
        )
        axis = ModuleAxis([2, 1], "cpu")
        own = ModuleRows(("x", "y"), torch.zeros(2, B, 1), torch.zeros(2, B), None)
        other = ModuleRows(("z",), torch.zeros(1, B, 1), torch.zeros(1, B), None)
        result = compute_joint_losses(
            TeamOutputs(*leaves[:2], leaves[2], {}, {}, {}),
            JointRows({"m": own, "o": other}, columns, present),
            axis=axis,
            coefficients=Coefficients.of(axis, [numbers, numbers], [0.01, 0.02]),
            standardize_advantages=standardize,
            all_present=False,
            cross_agent_losses={},
            cross_agent_coeffs={},
        )
        (result.actor.sum() + result.critic.sum()).backward()
        return result, [leaf.grad for leaf in leaves]

    clean, expected = losses(0.0)
    result, gradients = losses(garbage)
    for gradient, needed in zip(gradients, expected, strict=True):
        assert torch.equal(gradient, needed) and (gradient[~present] == 0.0).all()
    assert any((gradient[present] != 0.0).any() for gradient in gradients)
    assert torch.equal(result.statistics, clean.statistics) and torch.isfinite(result.statistics).all()
    assert result.counts.tolist() == [present[:2].sum(), present[2:].sum()]


# ------------------------------------------------------------------------------- standardisation of hardly any rows


@pytest.mark.parametrize("standardize", ["rollout", "minibatch", "team"])
def test_one_row_or_equal_advantages_are_standardised_to_zero(standardize):
    """Episodes of one step, one row for a1; a0's advantages are all equal."""
    steps, envs = 4, 3
    shape = (steps, 1, envs)
    present = np.zeros(shape, bool)
    present[2, 0, 1] = True
    modules = {
        "a0": hand_streams(["a0"], np.ones((*shape, 3)), rewards=np.full(shape, 0.3), terminated=np.ones(shape, bool)),
        "a1": hand_streams(
            ["a1"], np.ones((*shape, 3)), rewards=np.full(shape, 5.0), terminated=np.ones(shape, bool), present=present
        ),
    }
    if standardize == "team":  # all agents' rows share a mean: the team has one row
        modules["a0"].present = np.zeros(shape, bool)
    config = declared_config(
        [box()] * 2, [discrete()] * 2, AGENTS[:2], standardize_advantages=standardize, minibatch_size=None
    )
    learner = make_learner(config)
    results = update(learner, hand_batch(modules), num_epochs=1)
    for agent in ("a0", "a1") if standardize != "team" else ("a1",):
        assert results[agent]["policy_loss"] == 0.0
        assert results[agent]["entropy"] > 0.0 and results[agent]["vf_explained_var"] == 1.0
    for values in parameters(learner).values():
        assert all(np.isfinite(p).all() for p in values.values())


# ------------------------------------------------------------------------------- what is reported


def test_a_module_without_rows_reports_no_value_and_spoils_no_other():
    schedules = dict.fromkeys(AGENTS, "always")
    learner = team_learner(cross_agent_losses={"c": RedundancyPenalty()})
    (never, first, absent, again) = (
        update(learner, ragged_batch(schedules={**schedules, "a1": pattern}))
        for pattern in ("never", "always", "never", "two rows")
    )
    assert "policy_loss" not in never["a1"] and never["a1"]["value_target_std"] == 1.0
    assert np.isnan(absent["a1"]["policy_loss"])
    for results in (never, absent):
        assert results["a1"]["num_module_steps_trained"] == results["a1"]["module_train_batch_size_mean"] == 0
        assert results["a1"]["curr_entropy_coeff"] == pytest.approx(0.01)
    for results in (never, first, absent, again):
        for module_id in ("a0", "a2", "__all_modules__"):
            assert all(np.isfinite(x) for x in numbers(results[module_id])), module_id
    assert absent["a1"]["value_target_mean"] == first["a1"]["value_target_mean"] != again["a1"]["value_target_mean"]
    assert np.isfinite(first["a1"]["policy_loss"]) and np.isfinite(again["a1"]["policy_loss"])


def numbers(result):
    for value in result.values():
        if isinstance(value, dict):
            yield from numbers(value)
        else:
            yield value


# ------------------------------------------------------------------------------- compiled


# Torch's compiler looks at .grad of intermediate tensors where it breaks a graph, and looks through caches.
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped function:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_update_with_absences_equals_the_plain_one():
    def learner(**options):
        config = declared_config(
            [box()] * 3,
            [discrete(3)] * 3,
            AGENTS,
            cross_agent_losses={"redundancy": RedundancyPenalty()},
            critic_lr=LR,
        )
        made = make_learner(config.framework(**options))
        copy_scrambled(made)
        return made

    plain = learner()
    compiled = learner(torch_compile_learner=True, torch_compile_learner_dynamo_backend="aot_eager")
    for schedules in (SCHEDULES, dict.fromkeys(AGENTS, "always"), SCHEDULES):
        results = [update(x, ragged_batch(schedules=schedules, garbage=np.nan)) for x in (plain, compiled)]
        assert results[0]["a2"]["policy_loss"] == pytest.approx(results[1]["a2"]["policy_loss"], abs=1e-5)
    assert largest_difference(parameters(plain), parameters(compiled)) < 1e-6
    assert largest_difference(parameters(plain), parameters(learner())) > 1e-4
