"""Three updates of the learner on fixed rollouts equal an independent float64 loop."""

from __future__ import annotations

import dataclasses

import gymnasium as gym
import numpy as np
import pytest
import torch

from tests.core.reference_loop import AgentKind, FixedRollout, LoopSettings, ReferenceLoop, fixed_rollout
from tests.reference import ReferenceModule, ReferenceSettings, ReferenceTrainer
from tests.support import box, declared_config, default_origin, hand_batch, make_learner, parameters, scramble, update
from thrust_rllib import RedundancyPenalty
from thrust_rllib.joint_batch import ModuleStreams

TOLERANCE = 1e-5
NAMES = {
    "trunk.0.weight": "trunk_0.weight",
    "trunk.0.bias": "trunk_0.bias",
    "trunk.2.weight": "trunk_1.weight",
    "trunk.2.bias": "trunk_1.bias",
    "policy_head.weight": "policy.weight",
    "policy_head.bias": "policy.bias",
    "value_head.weight": "value.weight",
    "value_head.bias": "value.bias",
    "log_std": "log_std",
}
PLAIN = {"a0": AgentKind(3), "a1": AgentKind(4, sizes=(2,)), "a2": AgentKind(5)}
COUPLED = {"cross_agent_losses": {"redundancy": RedundancyPenalty()}, "cross_agent_coeffs": {"redundancy": 0.5}}
LR = 2e-3  # large enough for clipped ratios and clipped values within an update


@dataclasses.dataclass
class Case:
    """Options of the package and what they are in the reference's words."""

    kinds: dict = dataclasses.field(default_factory=lambda: dict(PLAIN))
    agents: dict | None = None  # {agent: module}
    config: dict = dataclasses.field(default_factory=dict)
    loop: dict = dataclasses.field(default_factory=dict)
    step: dict = dataclasses.field(default_factory=dict)
    per_module: dict = dataclasses.field(default_factory=dict)  # {module: fields of ReferenceSettings}
    data: dict = dataclasses.field(default_factory=dict)
    shapes: tuple = ((12, 3),)  # (T, E) of each batch of an update


OWN = {
    "a0": {"lr": 1e-3, "gamma": 0.9, "lambda_": 0.5},
    "a1": {"entropy_coeff": 0.1, "clip_param": 0.1, "vf_loss_coeff": 1.0, "grad_clip": 0.2},
}
CASES = {
    "plain": Case(),
    "redundancy": Case(config=COUPLED, step={"redundancy_coeff": 0.5}),
    "redundancy by pairs": Case(
        config={**COUPLED, "cross_agent_losses": {"redundancy": RedundancyPenalty("pairs")}},
        step={"redundancy_coeff": 0.5, "redundancy_normalization": "pairs"},
    ),
    "critic_lr": Case(config={"critic_lr": 1e-3}, step={"critic_lr": 1e-3}),
    "critic_lr and redundancy": Case(
        config={"critic_lr": 1e-3, **COUPLED}, step={"critic_lr": 1e-3, "redundancy_coeff": 0.5}
    ),
    "frozen agent": Case(config={"trained": ["a0", "a2"]}, step={"frozen": frozenset({"a1"})}),
    "frozen agent and redundancy": Case(
        config={"trained": ["a0", "a2"], **COUPLED}, step={"frozen": frozenset({"a1"}), "redundancy_coeff": 0.5}
    ),
    "raw value targets": Case(config={"value_normalization": False}, loop={"value_normalization": False}),
    "seed_defaults": Case(
        config={"seed_recipe": True},
        loop={"value_normalization": False, "bootstrap": "zero", "iterate_all": False},
    ),
    "seed_defaults, all minibatches": Case(
        config={"seed_recipe": True, "iterate_all_minibatches": True, **COUPLED},
        loop={"value_normalization": False, "bootstrap": "zero"},
        step={"redundancy_coeff": 0.5},
    ),
    "first chunks of an epoch": Case(config={"max_minibatches_per_epoch": 2}, loop={"max_minibatches": 2}),
    "standardised by minibatch": Case(
        config={"standardize_advantages": "minibatch"}, loop={"standardize": "minibatch"}, data={"present": 0.8}
    ),
    "standardised by team": Case(
        config={"standardize_advantages": "team"}, loop={"standardize": "team"}, data={"present": 0.8}
    ),
    "not standardised": Case(config={"standardize_advantages": False}, loop={"standardize": False}),
    "no value clip": Case(config={"value_clip_range": float("inf")}, step={"value_clip_range": float("inf")}),
    "clamped value error": Case(config={"vf_clip_param": 0.5}, step={"vf_clip_param": 0.5}),
    "no gradient clip": Case(config={"grad_clip": None}, step={"grad_clip": 0.0}),
    "options per module": Case(
        config={"overrides": OWN, **COUPLED},
        loop={"gamma": {"a0": 0.9, "a1": 0.99, "a2": 0.99}, "lambda_": {"a0": 0.5, "a1": 0.95, "a2": 0.95}},
        step={"redundancy_coeff": 0.5},
        per_module={
            "a0": {"lr": 1e-3},
            "a1": {"entropy_coeff": 0.1, "clip_param": 0.1, "vf_loss_coeff": 1.0, "grad_clip": 0.2},
        },
    ),
    "value limits per module": Case(
        config={"overrides": {"a0": {"value_clip_range": 0.05}, "a2": {"vf_clip_param": 0.3}}, "value_clip_range": 0.5},
        step={"value_clip_range": 0.5},
        per_module={"a0": {"value_clip_range": 0.05}, "a2": {"vf_clip_param": 0.3}},
    ),
    "shared module": Case(
        kinds={"a0": AgentKind(3), "a1": AgentKind(3), "b": AgentKind(4)},
        agents={"a0": "m0", "a1": "m0", "b": "m1"},
        config={"policies": {"m0": ["a0", "a1"], "m1": ["b"]}, **COUPLED},
        step={"redundancy_coeff": 0.5},
        data={"present": 0.8},
    ),
    "shared module, agents interleaved": Case(
        kinds={"a0": AgentKind(3), "b": AgentKind(4), "a1": AgentKind(3)},
        agents={"a0": "m1", "b": "m0", "a1": "m1"},
        config={"policies": {"m1": ["a0", "a1"], "m0": ["b"]}, **COUPLED, "standardize_advantages": "minibatch"},
        loop={"standardize": "minibatch"},
        step={"redundancy_coeff": 0.5},
    ),
    "multi-discrete and Box": Case(
        kinds={
            "a0": AgentKind(3, "multi_discrete", (3, 2)),
            "a1": AgentKind(4, "gaussian_free", (1, 1)),
            "a2": AgentKind(5),
        },
        config=COUPLED,
        step={"redundancy_coeff": 0.5},
    ),
    "runs of equal action spaces": Case(
        kinds={
            "a0": AgentKind(3),
            "a1": AgentKind(4),
            "b0": AgentKind(3, "multi_discrete", (3, 2)),
            "b1": AgentKind(5, "multi_discrete", (3, 2)),
            "c0": AgentKind(3, "gaussian_free", (1, 1)),
            "c1": AgentKind(3, "gaussian_free", (1, 1)),
            "d0": AgentKind(3, masked=True),
            "d1": AgentKind(3),
        },
        config=COUPLED,
        step={"redundancy_coeff": 0.5},
        data={"present": 0.9},
    ),
    "action masks": Case(
        kinds={
            "a0": AgentKind(3, sizes=(4,), masked=True),
            "a1": AgentKind(3, "multi_discrete", (3, 4), masked=True),
            "a2": AgentKind(3),
        },
    ),
    "absent agents": Case(config=COUPLED, step={"redundancy_coeff": 0.5}, data={"present": 0.7}),
    "many ends": Case(data={"ends": 0.35}),
    "no ends, short rows": Case(data={"ends": 0.0}, shapes=((1, 36),)),
    "two batches of different shape": Case(
        config=COUPLED, step={"redundancy_coeff": 0.5}, shapes=((7, 4), (10, 2)), data={"present": 0.9}
    ),
    "padded batches": Case(shapes=((7, 4), (10, 2)), data={"padding": True, "present": 0.9}),
}


def space_of(kind: AgentKind):
    """(observation space, action space)."""
    if kind.action == "discrete":
        action = gym.spaces.Discrete(kind.sizes[0])
    elif kind.action == "multi_discrete":
        action = gym.spaces.MultiDiscrete(kind.sizes)
    else:
        action = box(len(kind.sizes))
    observation = box(kind.obs)
    if kind.masked:
        mask = gym.spaces.Box(0, 1, (kind.num_logits,), np.int8)
        observation = gym.spaces.Dict({"observation": observation, "action_mask": mask})
    return observation, action


def joint_batch(fixed: FixedRollout, agents: dict):
    """The batch as the package takes it."""
    steps, envs = fixed.valid.shape
    rows = fixed.bootstrap_rows()
    modules = {}
    for module_id in sorted(set(agents.values())):
        mine = [agent for agent in agents if agents[agent] == module_id]
        stack = {
            f.name: np.stack([getattr(fixed.streams[agent], f.name) for agent in mine], axis=1)
            for f in dataclasses.fields(next(iter(fixed.streams.values())))
            if getattr(fixed.streams[mine[0]], f.name) is not None
        }
        following = stack.pop("following")  # [T, n, E, O]
        flat = np.moveaxis(following, 1, 0).reshape(len(mine), steps * envs, -1)
        modules[module_id] = ModuleStreams(
            agents=tuple(mine),
            action_logp=stack.pop("logp"),
            bootstrap_obs=flat[:, rows],
            origin=default_origin(steps, len(mine), envs),
            **stack,
        )
    return hand_batch(modules, rows, valid=fixed.valid)


class Both:
    """The package's learner and the reference loop, from the same parameters, and their data."""

    def __init__(self, case: Case, seed: int = 0, loop: dict | None = None, step: dict | None = None, coupling=None):
        self.case, self.agents = case, case.agents or {agent: agent for agent in case.kinds}
        observation_spaces, action_spaces = zip(*map(space_of, case.kinds.values()), strict=True)
        options = {"iterate_all_minibatches": not case.config.get("seed_recipe", False), "lr": LR, **case.config}
        config = declared_config(observation_spaces, action_spaces, list(case.kinds), **options)
        self.learner = make_learner(config)
        scramble(self.learner, seed)
        modules, start = {}, parameters(self.learner)
        for agent, module_id in self.agents.items():
            kind = case.kinds[agent]
            named = {NAMES[name]: p.astype(np.float64) for name, p in start[module_id].items()}
            modules[module_id] = ReferenceModule(
                named, kind.action, kind.sizes if kind.action == "multi_discrete" else ()
            )
        base = ReferenceSettings(**{"lr": LR, **case.step, **(step or {})})
        scope = {**case.loop, **(loop or {})}
        if scope.get("standardize") in ("minibatch", "team"):
            base = dataclasses.replace(base, standardize=scope["standardize"])
        discounts = {"gamma": dict.fromkeys(modules, 0.99), "lambda_": dict.fromkeys(modules, 0.95)}
        settings = LoopSettings(
            **{**discounts, **scope},
            step=base,
            per_module={m: dataclasses.replace(base, **fields) for m, fields in case.per_module.items()},
        )
        self.reference = ReferenceLoop(modules, self.agents, settings, coupling)
        self.first = start
        self.rng = np.random.default_rng(seed + 100)

    def data(self) -> list[FixedRollout]:
        """One update's batches, sampled near the current policy of the reference."""
        trainer: ReferenceTrainer = self.reference.trainer

        def logp_of(agent, obs, actions, mask):
            module_id = self.agents[agent]
            p = {name: torch.tensor(x) for name, x in trainer.parameters[module_id].items()}
            outputs = trainer._forward(p, torch.tensor(obs, dtype=torch.float64))[1]
            if mask is not None:
                outputs = torch.where(torch.tensor(mask), outputs, torch.full_like(outputs, -1e30))
            return trainer._distribution(module_id, outputs, actions)[0].numpy()

        return [
            fixed_rollout(self.rng, self.case.kinds, steps, envs, logp_of, **self.case.data)
            for steps, envs in self.case.shapes
        ]

    def run(self, updates: int = 3, permute: np.random.Generator | None = None):
        """Trains both; (results of the package, statistics of the reference) of each update."""
        log = []
        for _ in range(updates):
            data = self.data()
            results = update(self.learner, [joint_batch(fixed, self.agents) for fixed in data])
            log.append((results, self.reference.update(data, permute)))
        return log

    def difference(self) -> float:
        """The largest difference of any parameter."""
        mine, theirs = parameters(self.learner), self.reference.trainer.parameters
        return max(
            float(np.abs(p - theirs[m][NAMES[name]]).max()) for m, named in mine.items() for name, p in named.items()
        )

    def movement(self, module_id: str) -> float:
        """How far the module's parameters moved."""
        now = parameters(self.learner)[module_id]
        return max(float(np.abs(now[name] - self.first[module_id][name]).max()) for name in now)


@pytest.mark.parametrize("name", CASES)
def test_three_updates_equal_the_float64_loop(name):
    both = Both(CASES[name])
    log = both.run()
    assert both.difference() < TOLERANCE
    frozen = both.case.step.get("frozen", frozenset())
    for module_id in both.first:
        moved = both.movement(module_id)
        assert moved == 0.0 if module_id in frozen else moved > 100 * TOLERANCE
    for results, steps in log:
        check_statistics(results, steps, frozen)


def check_statistics(results, steps, frozen):
    """What is reported is the mean of what the reference computed in the gradient steps with rows of the module."""
    shared = results["__all_modules__"]
    assert shared["num_minibatch_steps"] == len(steps)
    assert shared["num_non_finite_minibatches"] == 0
    assert shared["total_loss"] == pytest.approx(np.mean([s["total_loss"] for s in steps]), rel=1e-4, abs=1e-4)
    assert shared["cross_agent_loss"]["total"] == pytest.approx(
        np.mean([s["aux_loss"] for s in steps]), rel=1e-4, abs=1e-6
    )
    pairs = {
        "policy_loss": "policy_loss",
        "vf_loss": "value_loss",
        "entropy": "entropy",
        "approx_kl": "kl",
        "gradients_default_optimizer_global_norm": "grad_norm",
    }
    for module_id in steps[0]["entropy"]:
        own = [s for s in steps if s["rows"][module_id]]
        for mine, theirs in pairs.items():
            expected = np.mean([s[theirs][module_id] for s in own])
            assert results[module_id][mine] == pytest.approx(expected, rel=1e-4, abs=1e-4), (module_id, mine)
        # A ratio may lie on the edge of the clip range in one precision and not in the other.
        expected = np.mean([s["clip_fraction"][module_id] for s in own])
        assert results[module_id]["clip_fraction"] == pytest.approx(expected, abs=5e-3)


NEGATIVE = {
    "clip_param": ({}, {"clip_param": 0.1}),
    "entropy_coeff": ({}, {"entropy_coeff": 0.02}),
    "value_clip_range": ({}, {"value_clip_range": 0.1}),
    "vf_loss_coeff": ({}, {"vf_loss_coeff": 0.45}),
    "lr": ({}, {"lr": 1.05 * LR}),
    "grad_clip": ({}, {"grad_clip": 3.0}),
    "redundancy_coeff": ({}, {"redundancy_coeff": 0.45}),
    "redundancy_normalization": ({}, {"redundancy_normalization": "pairs"}),
    "standardize": ({"standardize": False}, {}),
    "bootstrap": ({"bootstrap": "zero"}, {}),
    "value_normalization": ({"value_normalization": False}, {}),
    "gamma": ({"gamma": {"a0": 0.99, "a1": 0.98, "a2": 0.99}}, {}),
    "lambda_": ({"lambda_": {"a0": 0.95, "a1": 0.9, "a2": 0.95}}, {}),
    "minibatch_size": ({"minibatch_size": 15}, {}),
    "order of the rows": ({"seed": 4}, {}),
}


@pytest.mark.parametrize("name", NEGATIVE)
def test_the_comparison_sees_another_setting(name):
    loop, step = NEGATIVE[name]
    both = Both(CASES["redundancy"], loop=loop, step=step)
    both.run(1)
    assert both.difference() > 3 * TOLERANCE


def test_the_comparison_sees_rows_that_are_not_aligned():
    # Each agent's own losses do not depend on how its rows are paired with the others', except through the
    # minibatches; with all rows in one minibatch only the coupling can tell.
    case = dataclasses.replace(
        CASES["redundancy"], config={**COUPLED, "minibatch_size": 36}, loop={"minibatch_size": 36}
    )
    both = Both(case)
    both.run(3)
    assert both.difference() < TOLERANCE
    both = Both(case)
    both.run(3, permute=np.random.default_rng(0))
    assert both.difference() > 3 * TOLERANCE


def test_without_a_coupling_one_minibatch_of_all_rows_does_not_see_the_pairing():
    both = Both(Case(config={"minibatch_size": 36}, loop={"minibatch_size": 36}))
    both.run(3, permute=np.random.default_rng(0))
    assert both.difference() < TOLERANCE


def test_two_modules_follow_schedules_of_their_own():
    own = {
        "a0": {"lr": [[0, 2e-3], [72, 0.0]], "critic_lr": [[0, 0.0], [72, 2e-3]], "entropy_coeff": [[0, 0], [72, 0.2]]},
        "a1": {"lr": [[0, 0.0], [72, 4e-3]], "entropy_coeff": [[0, 0.1], [36, 0.0]]},
    }
    # Of the updates that begin at 0, 36 and 72 steps.
    expected = {
        "a0": {"lr": (2e-3, 1e-3, 0.0), "critic_lr": (0.0, 1e-3, 2e-3), "entropy_coeff": (0.0, 0.1, 0.2)},
        "a1": {"lr": (0.0, 2e-3, 4e-3), "critic_lr": (1e-3,) * 3, "entropy_coeff": (0.1, 0.0, 0.0)},
    }
    case = Case(config={"critic_lr": 1e-3, "overrides": own}, step={"critic_lr": 1e-3})
    for late in (0, 1):  # 1: the reference follows them one update later
        both = Both(case)
        trainer = both.reference.trainer
        for k in range(3):
            for module_id, numbers in expected.items():
                now = {name: values[max(k - late, 0)] for name, values in numbers.items()}
                trainer.optimizers[module_id].lr = now["lr"]
                trainer.critic_optimizers[module_id].lr = now["critic_lr"]
                trainer.per_module[module_id] = dataclasses.replace(trainer.per_module[module_id], **now)
            data = both.data()
            update(both.learner, [joint_batch(fixed, both.agents) for fixed in data], steps=36 * (k + 1))
            both.reference.update(data)
        assert (both.difference() < TOLERANCE) == (not late)
