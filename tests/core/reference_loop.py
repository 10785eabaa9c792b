"""Fixed rollouts, and the independent float64 loop that trains on them: never imports the package.

`FixedRollout` holds one batch as plain arrays by agent. `ReferenceLoop.update` goes from such batches to new
parameters: values, advantages, value normalisation, standardisation, order of the rows, minibatches, and
`ReferenceTrainer` for the gradient steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tests import reference
from tests.reference import Coupling, ReferenceModule, ReferenceRollout, ReferenceSettings, ReferenceTrainer

VALUE_DECAY = 0.95
"""The weight that one update leaves to older value targets."""


@dataclass(frozen=True)
class AgentKind:
    """An agent: O observed numbers, kind of action (see `ReferenceModule`) with its sizes, masked or not."""

    obs: int = 3
    action: str = "discrete"
    sizes: tuple[int, ...] = (3,)  # choices of each dimension; for a Gaussian its length counts
    masked: bool = False

    @property
    def num_logits(self) -> int:
        return len(self.sizes) if self.action == "gaussian_free" else sum(self.sizes)


@dataclass
class FixedStream:
    """One agent's data of a batch, [T, E, …]; `following` is what would be seen after each step."""

    obs: np.ndarray
    following: np.ndarray
    actions: np.ndarray
    logp: np.ndarray
    rewards: np.ndarray
    present: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    action_mask: np.ndarray | None


@dataclass
class FixedRollout:
    """A batch: {agent: FixedStream} and which rows are no padding, [T, E]."""

    streams: dict[str, FixedStream]
    valid: np.ndarray

    def bootstrap_rows(self) -> np.ndarray:
        """Rows t·E + e at which some agent's return goes on with something that is not a row of the batch."""
        steps, envs = self.valid.shape
        rows = set()
        for stream in self.streams.values():
            for e in range(envs):
                last = max((t for t in range(steps) if stream.present[t, e]), default=None)
                for t in range(steps):
                    if not stream.present[t, e] or stream.terminated[t, e]:
                        continue
                    if stream.truncated[t, e] or t == last:
                        rows.add(t * envs + e)
        return np.array(sorted(rows), np.int64)


def fixed_rollout(
    rng: np.random.Generator,
    kinds: Mapping[str, AgentKind],
    steps: int,
    envs: int,
    logp_of,
    *,
    present: float = 1.0,
    ends: float = 0.1,
    padding: bool = False,
    noise: float = 0.25,
) -> FixedRollout:
    """Random data.

    Args:
        rng: source of all numbers.
        kinds: {agent: its kind}.
        steps: T.
        envs: E.
        logp_of: (agent, obs [R, O], actions [R, …], mask) to log-probabilities [R]; noise is added.
        present: probability that an agent acts in a row.
        ends: probability of a termination, and of a truncation, in a row.
        padding: environment 0 lacks its last two rows.
        noise: how far the sampling policy was from `logp_of`.
    """
    valid = np.ones((steps, envs), bool)
    if padding:
        valid[-2:, 0] = False
    streams = {}
    for agent, kind in kinds.items():
        shape = (steps, envs)
        obs, following = rng.normal(size=(2, *shape, kind.obs)).astype(np.float32)
        mask = None
        if kind.masked:
            mask = rng.random((*shape, kind.num_logits)) < 0.6
            start = 0
            for size in kind.sizes:  # at least one choice is allowed in every dimension
                allowed = start + rng.integers(size, size=shape)
                np.put_along_axis(mask, allowed[..., None], True, axis=-1)
                start += size
        if kind.action == "gaussian_free":
            actions = rng.normal(size=(*shape, len(kind.sizes))).astype(np.float32)
        else:
            parts, start = [], 0
            for size in kind.sizes:
                score = rng.random((*shape, size))
                if mask is not None:
                    score = score * mask[..., start : start + size]
                parts.append(score.argmax(-1))
                start += size
            actions = parts[0] if kind.action == "discrete" else np.stack(parts, -1)
        flat = [x.reshape(steps * envs, *x.shape[2:]) for x in (obs, actions)]
        logp = logp_of(agent, *flat, None if mask is None else mask.reshape(steps * envs, -1))
        logp = logp.reshape(shape) + noise * rng.normal(size=shape)
        streams[agent] = FixedStream(
            obs=obs,
            following=following,
            actions=actions,
            logp=logp.astype(np.float32),
            rewards=(3.0 + 2.0 * rng.normal(size=shape)).astype(np.float32),
            present=valid & (rng.random(shape) < present),
            terminated=rng.random(shape) < ends,
            truncated=rng.random(shape) < ends,
            action_mask=mask,
        )
    return FixedRollout(streams, valid)


@dataclass
class LoopSettings:
    """What surrounds the gradient steps; see `thrust-rllib`'s options of the same names."""

    gamma: Mapping[str, float]
    lambda_: Mapping[str, float]
    bootstrap: str = "value"
    value_normalization: bool = True
    standardize: str | bool = "rollout"
    minibatch_size: int = 16
    num_epochs: int = 2
    iterate_all: bool = True
    max_minibatches: int | None = None
    seed: int = 3
    step: ReferenceSettings = field(default_factory=ReferenceSettings)
    per_module: Mapping[str, ReferenceSettings] = field(default_factory=dict)


class ReferenceLoop:
    """Joint PPO from rollouts to parameters, in float64.

    Args:
        modules: start networks.
        agents: {agent: module}.
        settings: see `LoopSettings`.
        coupling: see `ReferenceTrainer`.
    """

    def __init__(
        self,
        modules: Mapping[str, ReferenceModule],
        agents: Mapping[str, str],
        settings: LoopSettings,
        coupling: Coupling | None = None,
    ) -> None:
        self.agents, self.settings = dict(agents), settings
        self.trainer = ReferenceTrainer(modules, settings.step, agents, settings.per_module, coupling)
        self.moments = {m: reference.RunningMoments(decay=VALUE_DECAY) for m in modules}
        self.generator = torch.Generator().manual_seed(settings.seed)

    def values(self, module_id: str, obs: np.ndarray) -> np.ndarray:
        """Values of observations [..., O] in the network's units."""
        p = {name: torch.tensor(x) for name, x in self.trainer.parameters[module_id].items()}
        flat = torch.tensor(np.asarray(obs, np.float64).reshape(-1, obs.shape[-1]))
        return self.trainer._forward(p, flat)[2].numpy().reshape(obs.shape[:-1])

    def stream_values(self, agent: str, batch: FixedRollout) -> tuple[np.ndarray, np.ndarray]:
        """Values [T, E] of an agent's rows, and of what follows each, in the network's units."""
        module_id, stream = self.agents[agent], batch.streams[agent]
        return self.values(module_id, stream.obs), self.values(module_id, stream.following)

    def units(self, module_id: str) -> tuple[float, float]:
        """Mean and std of the value targets seen so far."""
        if not self.settings.value_normalization or not self.moments[module_id].batches:
            return 0.0, 1.0
        _, mean, var = self.moments[module_id].merged()
        return float(mean), max(math.sqrt(float(var)), 1e-6)

    def rollouts(self, batches: Sequence[FixedRollout]) -> dict[str, ReferenceRollout]:
        """Advantages, targets and rows of all agents; takes the targets into the moments."""
        s = self.settings
        result, targets_of = {}, {m: [] for m in self.moments}
        valid = np.concatenate([batch.valid.ravel() for batch in batches])
        for agent, module_id in self.agents.items():
            mean, std = self.units(module_id)
            parts = []
            for batch in batches:
                x = batch.streams[agent]
                values, after = self.stream_values(agent, batch)
                after = after * std + mean
                advantages, targets = reference.generalized_advantages(
                    x.rewards,
                    values * std + mean,
                    x.terminated,
                    x.truncated,
                    after if s.bootstrap == "value" else np.zeros_like(after),
                    s.gamma[module_id],
                    s.lambda_[module_id],
                    x.present,
                )
                mask = np.zeros((*x.present.shape, 0), bool) if x.action_mask is None else x.action_mask
                parts.append([x.obs, x.actions, x.logp, advantages, targets, values, x.present, mask])
            rows = [
                np.concatenate([a.reshape(a.shape[0] * a.shape[1], *a.shape[2:]) for a in column])[valid]
                for column in zip(*parts, strict=True)
            ]
            *arrays, present, mask = rows
            result[agent] = ReferenceRollout(*arrays, present, mask if mask.shape[1] else None)
            targets_of[module_id].append(result[agent].value_targets[present])
        for module_id, moments in self.moments.items():
            moments.update(np.concatenate(targets_of[module_id]))
        for agent, module_id in self.agents.items():
            r = result[agent]
            mean, std = self.units(module_id)
            r.value_targets = (r.value_targets - mean) / std
            if s.standardize == "rollout":
                r.advantages = reference.standardize(r.advantages, r.present)
        return result

    def minibatches(self, num_rows: int) -> list[np.ndarray]:
        """The seed's rule: one shuffle per epoch; one draw of it, or all (or the first k) of its chunks."""
        s, result = self.settings, []
        for _ in range(s.num_epochs):
            order = torch.randperm(num_rows, generator=self.generator).numpy()
            chunks = [order[k : k + s.minibatch_size] for k in range(0, num_rows, s.minibatch_size)]
            limit = 1
            if s.iterate_all:
                limit = len(chunks) if s.max_minibatches is None else max(s.max_minibatches, 1)
            result += chunks[:limit]
        return result

    def update(self, batches: Sequence[FixedRollout], permute: np.random.Generator | None = None) -> list[dict]:
        """One update; the statistics of each gradient step.

        Args:
            batches: of this update.
            permute: if given, the first agent's rows are shuffled on their own (a deliberate mistake).
        """
        rollouts = self.rollouts(batches)
        if permute is not None:
            r = rollouts[next(iter(self.agents))]
            order = permute.permutation(len(r.obs))
            for name in ("obs", "actions", "logp_old", "advantages", "value_targets", "values_old", "present"):
                setattr(r, name, getattr(r, name)[order])
        num_rows = len(next(iter(rollouts.values())).obs)
        return self.trainer.update(rollouts, self.minibatches(num_rows))
