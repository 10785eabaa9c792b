"""The package's learner and the float64 loop side by side, with heads, auxiliary targets and constraints."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from tests.centralized.reference import CentralLoop, CentralRollout, Limit, central_rollout
from tests.core.reference_loop import AgentKind
from tests.core.test_reference_update import space_of
from tests.critics.both import critic_name
from tests.critics.data import RAGGED, Lives
from tests.critics.reference import CRITIC, Joined, TeamSettings, View
from tests.critics.support import package_batch
from tests.recurrent.test_reference_update import reference_name
from tests.reference import ReferenceModule, ReferenceSettings
from tests.support import declared_config, make_learner, parameters, scramble, update
from thrust_rllib import AuxiliaryTarget, Constraint, JointBatch, JointPPOConfig

TOLERANCE = 1e-5
LR = 2e-3
MINIBATCH = 18
HEADS = "auxiliary_heads"
PARTS = {
    "a0": AgentKind(3, "multi_discrete", (3, 4)),
    "b": AgentKind(2, "multi_discrete", (2, 2, 3)),
    "c": AgentKind(4),
}


@dataclass
class Case:
    """Options of the package, and what they are in the reference's words.

    Attributes:
        kinds, agents: {agent: kind}, {agent: module}; one module for each agent if left out.
        heads: {module: `conditional_heads`}.
        targets: of the option `auxiliary_targets`, and `weights`: {name: its weight in each update}.
        limits: of the option `constraints`.
        extras: {name: "team", "agent" or "pair"}.
        config: other options of `tiny_config`; model: of all modules.
        loop, step: fields of `TeamSettings` and `ReferenceSettings`.
    """

    kinds: Mapping[str, AgentKind] = field(default_factory=lambda: dict(PARTS))
    agents: dict[str, str] | None = None
    critic: str = "independent"
    credit: str = "own"
    ratio: str = "joint"
    heads: Mapping[str, dict[str, str]] = field(default_factory=dict)
    targets: tuple[AuxiliaryTarget, ...] = ()
    weights: Mapping[str, list[float]] = field(default_factory=dict)
    limits: tuple[Constraint, ...] = ()
    extras: Mapping[str, str] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=lambda: {"fcnet_hiddens": [9, 7]})
    config: dict[str, Any] = field(default_factory=dict)
    loop: dict[str, Any] = field(default_factory=dict)
    step: dict[str, Any] = field(default_factory=dict)
    lives: Lives = RAGGED

    def module_of(self) -> dict[str, str]:
        """{agent: module}."""
        return self.agents or {agent: agent for agent in self.kinds}


def config_of(case: Case) -> JointPPOConfig:
    """Of the package."""
    agents = case.module_of()
    observations, actions = zip(*map(space_of, case.kinds.values()), strict=True)
    options = {"minibatch_size": MINIBATCH, "lr": LR, "iterate_all_minibatches": True, **case.config}
    if case.critic == "central":
        options["critic_config"] = {"fcnet_hiddens": [9, 7]}
    config = declared_config(
        observations,
        actions,
        list(case.kinds),
        policies={m: [a for a in case.kinds if agents[a] == m] for m in sorted(set(agents.values()))},
        num_envs=case.lives.envs,
        train_batch_size_per_learner=case.lives.steps * case.lives.envs,
        model=case.model,
        critic=case.critic,
        credit=case.credit,
        ratio=case.ratio,
        auxiliary_targets=case.targets,
        constraints=case.limits,
        **options,
    )
    if case.heads:
        own = {m: RLModuleSpec(model_config={**case.model, "conditional_heads": x}) for m, x in case.heads.items()}
        config.rl_module(rl_module_spec=MultiRLModuleSpec(rl_module_specs=own))
    return config


def batch_of(fixed: CentralRollout, agents: Mapping[str, str], per_head: bool = False) -> JointBatch:
    """The batch as the package takes it."""
    batch = package_batch(fixed, agents, with_state=False)
    extras = dict(batch.extras)
    for name, given in fixed.extras.items():
        if not isinstance(given, dict):
            extras[name] = given
            continue
        nothing = np.zeros(fixed.valid.shape, np.float32)
        own = [given[agent] for agent in batch.agents]
        if isinstance(own[0], dict):
            own = [np.stack([x.get(other, nothing) for other in batch.agents], axis=1) for x in own]
        extras[name] = np.stack(own, axis=1)
    for streams in batch.modules.values() if per_head else ():
        streams.head_logp = np.stack([fixed.head_logp[agent] for agent in streams.agents], axis=1)
    return dataclasses.replace(batch, extras=extras).check()


class Both:
    """See the file.

    Args:
        case: see `Case`.
        **mistakes: fields in which the reference differs: of `TeamSettings`, `ReferenceSettings` or `Case`.
    """

    def __init__(self, case: Case, **mistakes: Any):
        self.case, self.agents = case, case.module_of()
        self.learner = make_learner(config_of(case))
        scramble(self.learner)
        self.first = parameters(self.learner)
        of_case = {k: v for k, v in mistakes.items() if k in Case.__dataclass_fields__}
        of_step = {k: v for k, v in mistakes.items() if k in ReferenceSettings.__dataclass_fields__}
        of_loop = {k: v for k, v in mistakes.items() if k not in of_step and k not in of_case}
        wrong = dataclasses.replace(case, **of_case)
        modules = {}
        for agent, m in self.agents.items():
            named = {reference_name(name): p.astype(np.float64) for name, p in self.first[m].items()}
            if HEADS in self.first:
                own = [f"heads.of_{m}.of_{target.name}" for target in case.targets]
                named |= {
                    f"aux.{x}": np.concatenate([self.first[HEADS][f"{head}.{x}"] for head in own], dtype=np.float64)
                    for x in ("weight", "bias")
                }
            kind = case.kinds[agent]
            modules[m] = ReferenceModule(named, kind.action, kind.sizes if kind.action == "multi_discrete" else ())
        modules = dict(sorted(modules.items()))
        critic = network = view = None
        if case.critic == "central":
            critic = {critic_name(name): p for name, p in self.first[CRITIC].items()}
            view, network = View(tuple(case.kinds)), Joined()
        settings = TeamSettings(
            **{
                "gamma": dict.fromkeys(modules, 0.99),
                "lambda_": dict.fromkeys(modules, 0.95),
                "minibatch_size": MINIBATCH,
                "critic": wrong.critic,
                "credit": wrong.credit,
                "view": view,
                "network": network,
                **case.loop,
                **of_loop,
            },
            step=ReferenceSettings(**{"lr": LR, **case.step, **of_step}),
        )
        self.reference = CentralLoop(modules, critic, {agent: self.agents[agent] for agent in case.kinds}, settings)
        trainer = self.reference.trainer
        trainer.per_head = wrong.ratio == "per_head"
        for agent, m in self.agents.items():
            kind = case.kinds[agent]
            names = tuple(map(str, range(len(kind.sizes) if kind.action == "multi_discrete" else 1)))
            trainer.head_names[m] = names
            depends = wrong.heads.get(m, {})
            trainer.parents[m] = tuple(names.index(depends[name]) if name in depends else None for name in names)
        trainer.targets = [(target.name, target.loss) for target in wrong.targets]
        self.reference.weights = {target.name: [target.weight] for target in wrong.targets} | dict(wrong.weights)
        self.reference.limits = [_limit(own) for own in wrong.limits]
        self.rng = np.random.default_rng(100)

    def data(self) -> CentralRollout:
        """One update's batch, near the current policy of the reference."""
        return central_rollout(self.rng, self.case.kinds, self.case.lives, self.reference.trainer, self.case.extras)

    def run(self, updates: int = 2) -> list[tuple[dict, list[dict]]]:
        """Trains both; (results of the package, statistics of the reference) of each update."""
        log = []
        for k in range(updates):
            fixed = self.data()
            batch = batch_of(fixed, self.agents, self.case.ratio == "per_head")
            results = update(self.learner, batch, steps=int(fixed.valid.sum()) * (k + 1))
            log.append((results, self.reference.update([fixed])))
        return log

    def pairs(self):
        """(module, name there, the package's array, the reference's) of every parameter."""
        mine, theirs = parameters(self.learner), self.reference.trainer.parameters
        for m, named in mine.items():
            for name, p in named.items():
                if m == HEADS:
                    _, owner, target, part = name.split(".")
                    k = [f"of_{each.name}" for each in self.case.targets].index(target)
                    yield m, name, p, theirs[owner.removeprefix("of_")][f"aux.{part}"][k : k + 1]
                else:
                    yield m, name, p, theirs[m][critic_name(name)]

    def differences(self) -> dict[str, float]:
        """{module: the largest difference of any of its parameters}."""
        found: dict[str, float] = {}
        for m, _, mine, theirs in self.pairs():
            found[m] = max(found.get(m, 0.0), float(np.abs(mine - theirs).max()))
        return found

    def movement(self, module_id: str, part: str = "") -> float:
        """How far the module's parameters whose names have `part` in them moved."""
        now, before = parameters(self.learner)[module_id], self.first[module_id]
        return max(float(np.abs(now[name] - before[name]).max()) for name in now if part in name)

    def check(self, log: list[tuple[dict, list[dict]]]) -> None:
        """Parameters and all that the reference tells are the same."""
        assert max(self.differences().values()) < TOLERANCE, self.differences()
        for results, steps in log:
            assert results["__all_modules__"]["num_non_finite_minibatches"] == 0
            assert results["__all_modules__"]["num_minibatch_steps"] == len(steps)
            for m in self.reference.trainer.modules:
                told = [s["told"][m] for s in steps if s["told"].get(m)]
                for name in told[0] if told else ():
                    found = results[m]
                    for key in name.split("/"):
                        found = found[key]
                    limit = 2e-2 if "clip_fraction" in name else 1e-4  # a ratio on the edge of the clip
                    expected = np.mean([own[name] for own in told])
                    assert found == pytest.approx(expected, rel=1e-3, abs=limit), (m, name)


def _limit(own: Constraint) -> Limit:
    names = ("coefficient", "rate", "initial", "cap", "kp", "ki", "kd")
    numbers = {name: getattr(own, name) for name in names if getattr(own, name) is not None}
    return Limit(own.name, own.limit, own.mechanism, own.sense, numbers)
