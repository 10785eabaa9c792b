"""Ratios of each head's own, auxiliary targets and multipliers in float64: never imports the package.

What it adds to `tests.critics.reference`. Letters: T steps, E environments, M rows of all batches, H heads, K targets.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tests.constraints import reference as multipliers
from tests.critics.data import Lives, team_rollout
from tests.critics.reference import TeamLoop, TeamRollout, TeamTrainer
from tests.recurrent.reference_data import _act


@dataclass
class CentralRollout(TeamRollout):
    """A batch with log-probabilities head by head, and with what the environment gives beside rewards.

    Attributes:
        head_logp: {agent: [T, E, H]}.
        extras: {name: [T, E] of the team, {agent: [T, E]}, or {agent: {other: [T, E]}}}.
    """

    head_logp: dict[str, np.ndarray] = field(default_factory=dict)
    extras: dict[str, object] = field(default_factory=dict)

    def number(self, name: str, agent: str) -> np.ndarray:
        """[T, E] of one agent: its own, the team's, or the sum over the others."""
        given = self.extras[name]
        if isinstance(given, dict):
            given = given[agent]
        return sum(given.values()) if isinstance(given, dict) else given


@dataclass(frozen=True)
class Limit:
    """A constraint in the reward. `numbers`: of its mechanism."""

    name: str
    limit: float
    mechanism: str
    sense: str
    numbers: dict[str, float]

    def after(self, violations: Sequence[float]) -> float:
        """λ after these."""
        numbers = dict(self.numbers)
        if self.mechanism == "penalty":
            return numbers["coefficient"]
        if not violations:
            return numbers.get("initial", 0.0)
        bounds = {"low": 0.0, "high": numbers.pop("cap", 100.0)}
        move = multipliers.lagrangian if self.mechanism == "lagrangian" else multipliers.pid
        return float(move(violations, **numbers, **bounds)[-1])


class CentralTrainer(TeamTrainer):
    """`TeamTrainer` with heads, masks and auxiliary targets.

    A policy's auxiliary head is part of its parameters: "aux.weight" [K, D], "aux.bias" [K].

    Attributes:
        per_head: each head has its own ratio.
        parents: {module: for each head the one it depends on, or None}.
        head_names: {module: names}.
        targets: [(name, "mse" or "huber")], and their weights now.
        columns: {agent: head_logp [M, H], action_mask [M, A] or None, targets [K, M]}.
        told: {module: {metric: number}} of the last step, for modules with a row in it.
    """

    per_head = False

    def __init__(self, modules, settings, agents):
        super().__init__(modules, settings, agents)
        self.parents: dict[str, tuple[int | None, ...]] = {}
        self.head_names: dict[str, tuple[str, ...]] = {}
        self.targets: list[tuple[str, str]] = []
        self.weights: list[float] = []
        self.columns: dict[str, dict[str, np.ndarray | None]] = {}
        self.seen = np.zeros((0, 0))
        self._parts: dict[str, dict[str, list[np.ndarray]]] = {}

    def _blocks(self, module_id: str) -> list[tuple[int, int, int | None]]:
        """Of each head: where its logits begin, how many categories it has, and its parent."""
        sizes = self.modules[module_id].nvec
        found, start = [], 0
        for size, parent in zip(sizes, self.parents.get(module_id) or [None] * len(sizes), strict=True):
            found.append((start, size, parent))
            start += size * (1 if parent is None else sizes[parent])
        return found

    def allowed(self, module_id: str, mask: np.ndarray | None) -> np.ndarray | None:
        """Masks [..., sum of categories] to masks of the logits."""
        if mask is None or self.modules[module_id].action != "multi_discrete":
            return mask
        sizes = self.modules[module_id].nvec
        parts = np.split(mask, np.cumsum(sizes)[:-1], axis=-1)
        blocks = self._blocks(module_id)
        return np.concatenate(
            [x for x, (_, _, p) in zip(parts, blocks, strict=True) for _ in range(1 if p is None else sizes[p])], -1
        )

    def heads(self, module_id: str, outputs: Tensor, actions: np.ndarray) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of each head, [B, H]; of a conditional one given its parent's category."""
        if self.modules[module_id].action != "multi_discrete":
            logp, entropy = super()._distribution(module_id, outputs, actions)
            return logp[:, None], entropy[:, None]
        blocks = self._blocks(module_id)
        logp, entropy = torch.zeros(2, len(outputs), len(blocks), dtype=torch.float64).unbind()
        rows = []
        for row, action in zip(outputs, np.asarray(actions, np.int64), strict=True):
            of_row = []
            for h, (start, size, parent) in enumerate(blocks):
                at = start + (0 if parent is None else size * action[parent])
                log_p = torch.log_softmax(row[at : at + size], 0)
                of_row.append(torch.stack([log_p[action[h]], -(log_p.exp() * log_p).sum()]))
            rows.append(torch.stack(of_row))
        return torch.stack(rows).unbind(-1) if rows else (logp, entropy)

    def _distribution(self, module_id: str, outputs: Tensor, actions: np.ndarray) -> tuple[Tensor, Tensor]:
        """Of the whole action; the entropy by the chain rule over all categories of the parents."""
        logp, entropy = self.heads(module_id, outputs, actions)
        self.seen = logp.detach().numpy()
        if any(parent is not None for parent in self.parents.get(module_id, ())):
            entropy = torch.stack([self._chain(module_id, row) for row in outputs])[:, None]
        return logp.sum(1), entropy.sum(1)

    def _chain(self, module_id: str, row: Tensor) -> Tensor:
        blocks, total = self._blocks(module_id), torch.zeros((), dtype=torch.float64)

        def log_p(start, size):
            return torch.log_softmax(row[start : start + size], 0)

        for start, size, parent in blocks:
            if parent is None:
                x = log_p(start, size)
                total = total - (x.exp() * x).sum()
                continue
            weights = log_p(*blocks[parent][:2]).exp()
            for c, weight in enumerate(weights):
                x = log_p(start + c * size, size)
                total = total - weight * (x.exp() * x).sum()
        return total

    def policy_terms(self, agent, outputs, r, kept, a):
        module_id, columns = self.agents[agent], self.columns[agent]
        if (mask := self.allowed(module_id, columns["action_mask"])) is not None:
            outputs = torch.where(torch.tensor(mask[kept]), outputs, torch.full_like(outputs, -1e30))
        if not self.per_head:
            return super().policy_terms(agent, outputs, r, kept, a)
        eps = self.settings.clip_param
        logp, entropy = self.heads(module_id, outputs, r.actions[kept])
        ratio = torch.exp(logp - torch.tensor(np.asarray(columns["head_logp"], np.float64)[kept]))
        both = a[:, None] * ratio, a[:, None] * torch.clamp(ratio, 1 - eps, 1 + eps)
        for h, name in enumerate(self.head_names[module_id]):
            self._tell(module_id, f"heads/{name}/entropy", entropy[:, h])
            self._tell(module_id, f"heads/{name}/approx_kl", -torch.log(ratio[:, h]))
            self._tell(module_id, f"heads/{name}/clip_fraction", ((ratio[:, h] - 1).abs() > eps).double())
        return -torch.minimum(*both).sum(1), entropy.sum(1)

    def more(self, leaves, features, rollouts, rows):
        total = torch.zeros((), dtype=torch.float64)
        for k, (name, kind) in enumerate(self.targets):
            for module_id in self.modules:
                mine = [agent for agent, m in self.agents.items() if m == module_id]
                p, y = [], []
                for agent in mine:
                    kept = rows[rollouts[agent].present[rows]]
                    p.append(features[agent] @ leaves[module_id]["aux.weight"][k] + leaves[module_id]["aux.bias"][k])
                    y.append(torch.tensor(self.columns[agent]["targets"][k][kept]))
                p, y = torch.cat(p), torch.cat(y)
                distance = (p - y).abs()
                error = distance**2
                if kind == "huber":
                    error = torch.where(distance <= 1, distance**2 / 2, distance - 0.5)
                total = total + self.weights[k] * self._mean(error)
                self._tell(module_id, f"auxiliary_loss/{name}", error)
                if len(p):
                    large = y.abs() > 1e-3
                    relative = np.median((distance / y.abs())[large].detach().numpy()) if large.any() else 1.0
                    accuracy = np.array([min(max(1 - relative, 0.0), 1.0)])
                    self._parts.setdefault(module_id, {})[f"auxiliary_accuracy/{name}"] = [accuracy]
        return total

    def _tell(self, module_id: str, name: str, values: Tensor) -> None:
        self._parts.setdefault(module_id, {}).setdefault(name, []).append(values.detach().numpy())

    def step(self, rollouts, rows):
        self._parts = {}
        result = super().step(rollouts, rows)
        joined = {m: {name: np.concatenate(x) for name, x in own.items()} for m, own in self._parts.items()}
        told = {m: {name: float(x.mean()) for name, x in own.items() if len(x)} for m, own in joined.items()}
        return {**result, "told": told}


class CentralLoop(TeamLoop):
    """`TeamLoop` with `CentralTrainer`, and limits whose multipliers act in the reward and move behind an update."""

    trainer_class = CentralTrainer
    limits: Sequence[Limit] = ()
    weights: Mapping[str, Sequence[float]] = {}  # {auxiliary target: its weight in each update}
    updates = 0

    def __init__(self, *args):
        super().__init__(*args)
        self.violations: dict[str, list[float]] = {}

    def multipliers(self) -> dict[str, float]:
        """{constraint: λ} of now."""
        return {own.name: own.after(self.violations.get(own.name, [])) for own in self.limits}

    def rollouts(self, batches: Sequence[CentralRollout]):
        result = super().rollouts(batches)

        def column(of):
            return np.concatenate([of(batch)[batch.valid] for batch in batches])

        for agent in self.agents:
            stream = batches[0].streams[agent]
            self.trainer.columns[agent] = {
                "head_logp": column(lambda batch, agent=agent: batch.head_logp[agent]),
                "action_mask": (
                    None
                    if stream.action_mask is None
                    else column(lambda batch, agent=agent: batch.streams[agent].action_mask)
                ),
                "targets": np.array(
                    [
                        column(lambda batch, agent=agent, name=name: batch.number(name, agent)).astype(np.float64)
                        for name, _ in self.trainer.targets
                    ]
                ),
            }
        return result

    def cost(self, batches: Sequence[CentralRollout], name: str) -> float:
        """The mean of a cost: of the team over rows in which anybody acted, of others over the agents' steps."""
        found = []
        for batch in batches:
            if not isinstance(batch.extras[name], dict):
                acted = np.any([stream.present for stream in batch.streams.values()], axis=0)
                found += batch.extras[name][acted & batch.valid].tolist()
                continue
            for agent, stream in batch.streams.items():
                found += batch.number(name, agent)[stream.present & batch.valid].tolist()
        return sum(found) / len(found)

    def update(self, batches: Sequence[CentralRollout], permute=None) -> list[dict]:
        held, paid = self.multipliers(), copy.deepcopy(list(batches))
        for own in self.limits:
            sign = -1.0 if own.sense == "at_least" else 1.0
            for batch in paid:
                for agent, stream in batch.streams.items():
                    less = sign * held[own.name] * batch.number(own.name, agent)
                    stream.rewards = stream.rewards - less
                    batch.difference[agent] = batch.difference[agent] - less
        self.trainer.weights = [
            self.weights[name][min(self.updates, len(self.weights[name]) - 1)] for name, _ in self.trainer.targets
        ]
        log = super().update(paid)
        self.updates += 1
        for own in self.limits:
            found = multipliers.violation(self.cost(batches, own.name), own.limit, own.sense)
            self.violations.setdefault(own.name, []).append(found)
        return log


def central_rollout(
    rng: np.random.Generator, kinds, lives: Lives, trainer: CentralTrainer, extras: Mapping[str, str]
) -> CentralRollout:
    """Random data near the trainer's policy.

    Args:
        rng: source of all numbers.
        kinds: {agent: its kind}.
        lives: see `Lives`.
        trainer: whose parameters act.
        extras: {name: "team", "agent" or "pair"}.
    """
    batch = CentralRollout(**vars(team_rollout(rng, kinds, lives)))
    steps, envs = batch.valid.shape
    for agent, stream in batch.streams.items():
        mask = stream.action_mask
        stream.action_mask = trainer.allowed(trainer.agents[agent], mask)
        _act(rng, agent, trainer, batch)
        stream.action_mask = mask
        heads = trainer.seen.reshape(steps, envs, -1)
        moved = (heads + 0.2 * rng.normal(size=heads.shape)).astype(np.float32)
        batch.head_logp[agent], stream.logp = moved, moved.sum(-1)

    def numbers():
        return rng.normal(size=(steps, envs)).astype(np.float32)

    for name, kind in extras.items():
        if kind == "team":
            batch.extras[name] = numbers()
        elif kind == "agent":
            batch.extras[name] = {agent: numbers() for agent in kinds}
        else:
            batch.extras[name] = {agent: {other: numbers() for other in kinds if other != agent} for agent in kinds}
    return batch
