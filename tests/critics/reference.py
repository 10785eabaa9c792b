"""Critics and credits of a team in float64, one row after the other: never imports the package.

Letters: T steps, E environments, N agents, V values of a row, M rows of all batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tests import reference
from tests.core.reference_loop import VALUE_DECAY
from tests.recurrent.reference import (
    FixedSequences,
    RecurrentLoop,
    RecurrentRollout,
    RecurrentSettings,
    RecurrentTrainer,
    _remember,
    is_recurrent,
    state_size,
)
from tests.reference import ReferenceAdam, ReferenceSettings, clip_factor, global_norm

CRITIC = "team_critic"


@dataclass
class TeamRollout(FixedSequences):
    """A batch in which episodes are the team's.

    Attributes:
        state, state_after: [T, E, S] before each row, and after it.
        difference: {agent: [T, E]}.
        ends: [T, E] "" or how the team's stream ends there: "terminated", "truncated".
    """

    state: np.ndarray
    state_after: np.ndarray
    difference: dict[str, np.ndarray]
    ends: np.ndarray

    def acts(self, t: int, e: int) -> bool:
        """Whether anybody does."""
        return any(stream.present[t, e] for stream in self.streams.values())


@dataclass(frozen=True)
class View:
    """What the critic sees: the agents' observations and flags, or not; columns of the state."""

    agents: tuple[str, ...]
    observations: bool = True
    columns: tuple[int, ...] = ()

    def of(self, batch: TeamRollout, t: int, e: int, following: bool = False) -> np.ndarray:
        """Of a row, or of what follows it."""
        found: list[float] = []
        flags: list[float] = []
        for agent in self.agents if self.observations else ():
            stream = batch.streams[agent]
            seen = (stream.following if following else stream.obs)[t, e]
            there = bool(stream.present[t, e]) and not (following and stream.terminated[t, e])
            found += [float(x) if there else 0.0 for x in seen]
            flags.append(float(there))
        state = (batch.state_after if following else batch.state)[t, e]
        return np.array([*found, *flags, *(float(state[k]) for k in self.columns)])


def team_rewards(batch: TeamRollout) -> np.ndarray:
    """[T, E]."""
    total = np.zeros(batch.valid.shape)
    for stream in batch.streams.values():
        for at in np.ndindex(*total.shape):
            if stream.present[at]:
                total[at] += float(stream.rewards[at])
    return total / len(batch.streams)


def shared_rewards(batch: TeamRollout, agent: str) -> np.ndarray:
    """[T, E]: the team's reward in the agent's rows, with that of the rows in which it waits behind them."""
    team, stream = team_rewards(batch), batch.streams[agent]
    found = np.zeros_like(team)
    steps, envs = team.shape
    for e in range(envs):
        last = None
        for t in range(steps):
            if batch.episode_start[t, e]:
                last = None
            if stream.present[t, e]:
                last = t
            elif last is None or not batch.valid[t, e]:
                continue
            elif stream.terminated[last, e] or stream.truncated[last, e]:
                later = [u for u in range(t + 1, steps) if stream.present[u, e] or batch.episode_start[u, e]]
                if not later or batch.episode_start[later[0], e]:
                    continue  # it has ended, and not only a fragment
            found[last, e] += team[t, e]
    return found


def along_team(batch: TeamRollout, rewards, values, after, gamma: float, lambda_: float):
    """Advantages and targets [T, E] along the rows in which anybody acts; `after` [T, E] is read at truncated ends."""
    advantages, targets = np.zeros(batch.valid.shape), np.zeros(batch.valid.shape)
    steps, envs = batch.valid.shape
    for e in range(envs):
        next_value = next_advantage = math.nan
        for t in reversed(range(steps)):
            if not batch.acts(t, e):
                continue
            if batch.ends[t, e]:
                next_advantage = 0.0
                next_value = after[t, e] if batch.ends[t, e] == "truncated" else 0.0
            delta = rewards[t, e] + gamma * next_value - values[t, e]
            next_advantage = delta + gamma * lambda_ * next_advantage
            next_value = values[t, e]
            advantages[t, e], targets[t, e] = next_advantage, next_advantage + next_value
    return advantages, targets


ValuesOf = Callable[[TeamRollout], tuple[np.ndarray, np.ndarray]]
"""A batch to the network's values [T, E, V] of its rows, and of what follows them."""


@dataclass(frozen=True)
class Credits:
    """Whose value and whose reward; see `estimates`.

    Attributes:
        agents: {agent: module}, in the order of the critic's values.
        gamma, lambda_: {module: number}.
    """

    agents: Mapping[str, str]
    critic: str
    credit: str
    gamma: Mapping[str, float]
    lambda_: Mapping[str, float]
    bootstrap: str = "value"

    @property
    def of_team(self) -> bool:
        """One value of the team."""
        return self.critic == "mean" or (self.critic in ("central", "set") and self.credit != "own")

    def rewards(self, batch: TeamRollout, agent: str) -> np.ndarray:
        """[T, E], 0 where it is absent."""
        if self.credit == "shared":
            return shared_rewards(batch, agent)
        given = batch.difference[agent] if self.credit == "difference" else batch.streams[agent].rewards
        return np.where(batch.streams[agent].present, given, 0.0).astype(np.float64)

    def of_one(self, batch: TeamRollout, agent: str, values: np.ndarray, after: np.ndarray):
        """Advantages and targets along an agent's own rows, from its own values [T, E]."""
        stream, module_id = batch.streams[agent], self.agents[agent]
        return reference.generalized_advantages(
            self.rewards(batch, agent),
            values,
            stream.terminated,
            stream.truncated,
            after if self.bootstrap == "value" else np.zeros_like(after),
            self.gamma[module_id],
            self.lambda_[module_id],
            stream.present,
        )

    def estimates(self, batch: TeamRollout, values: np.ndarray, after: np.ndarray):
        """From values [T, E, V] in the units of rewards: {agent: advantages [T, E]}, and targets [T, E, V]."""
        if not self.of_team:
            found = [self.of_one(batch, a, values[..., i], after[..., i]) for i, a in enumerate(self.agents)]
            return dict(zip(self.agents, (x for x, _ in found), strict=True)), np.stack([x for _, x in found], -1)
        value, following = values[..., 0], after[..., 0]
        if self.bootstrap != "value":
            following = np.zeros_like(following)
        gamma, lambda_ = next(iter(self.gamma.values())), next(iter(self.lambda_.values()))
        advantages, targets = along_team(batch, team_rewards(batch), value, following, gamma, lambda_)
        own = dict.fromkeys(self.agents, advantages)
        if self.credit != "shared":
            own = {
                agent: along_team(batch, self.rewards(batch, agent), value, following, gamma, lambda_)[0]
                for agent in self.agents
            }
        return own, targets[..., None]

    def counts(self, batch: TeamRollout) -> np.ndarray:
        """Bool [T, E, V]: the value is trained on."""
        steps, envs = batch.valid.shape
        if self.of_team:
            return np.array([[[batch.acts(t, e)] for e in range(envs)] for t in range(steps)])
        return np.stack([batch.streams[agent].present for agent in self.agents], -1)


# ------------------------------------------------------------------------------------------------ networks


def layers(p: Mapping[str, Tensor], prefix: str, x: Tensor) -> Tensor:
    """Tanh layers named `prefix`0, `prefix`1, …"""
    k = 0
    while f"{prefix}{k}.weight" in p:
        x = torch.tanh(p[f"{prefix}{k}.weight"] @ x + p[f"{prefix}{k}.bias"])
        k += 1
    return x


def head(p: Mapping[str, Tensor], x: Tensor) -> Tensor:
    return p["value.weight"] @ x + p["value.bias"]


@dataclass(frozen=True)
class Joined:
    """A critic of a whole view; parameters "trunk_0", …, maybe "cell", "value"."""

    def step(self, p: Mapping[str, Tensor], view: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """One row: values [V], and the memory behind it."""
        if is_recurrent(p):
            features, memory = _remember(p, "", view, memory)
            return head(p, features), memory
        return head(p, layers(p, "trunk_", view)), memory


@dataclass(frozen=True)
class Pooled:
    """A set critic: encoders "encoder_<width>_0", …, then as `Joined`."""

    widths: tuple[int, ...]
    pooling: str
    per_agent: bool

    def step(self, p: Mapping[str, Tensor], view: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """One row: values [V], and the memory behind it."""
        n, start, encoded = len(self.widths), 0, []
        for width in self.widths:
            encoded.append(layers(p, f"encoder_{width}_", view[start : start + width]))
            start += width
        there = [x for x, flag in zip(encoded, view[start : start + n], strict=True) if flag]
        pooled = torch.zeros_like(encoded[0])
        if there:
            pooled = sum(there)
            if self.pooling == "mean":
                pooled = pooled / len(there)
            elif self.pooling == "max":
                pooled = torch.stack(there).max(0).values
        x = torch.cat([pooled, view[start + n :]])
        if is_recurrent(p):
            x, memory = _remember(p, "", x, memory)
        else:
            x = layers(p, "trunk_", x)
        if self.per_agent:
            return torch.cat([head(p, torch.cat([own, x])) for own in encoded]), memory
        return head(p, x), memory


# ------------------------------------------------------------------------------------------------ whole updates


@dataclass
class TeamSettings(RecurrentSettings):
    """`view`, `network`, `max_seq_len`: of a central or set critic; `weight_decay`: decoupled."""

    critic: str = "independent"
    credit: str = "own"
    view: View | None = None
    network: Joined | Pooled | None = None
    max_seq_len: int | None = None
    clip_jointly: bool = False
    weight_decay: float = 0.0


@dataclass
class Adam(ReferenceAdam):
    """With decoupled weight decay (Loshchilov and Hutter 2019)."""

    weight_decay: float = 0.0

    def step(self, parameters, grads) -> None:
        for name in grads:
            parameters[name] = parameters[name] * (1.0 - self.lr * self.weight_decay)
        super().step(parameters, grads)


@dataclass
class CriticData:
    """The critic's rows: views [M, O], targets, old values and whether they count [M, V]; where memories begin [M]."""

    views: np.ndarray
    targets: np.ndarray
    old: np.ndarray
    counts: np.ndarray
    restarts: np.ndarray


class TeamTrainer(RecurrentTrainer):
    """Gradient steps with a critic of the team. Parameters of the critic stand under `CRITIC`."""

    loop: TeamLoop
    data: CriticData
    leaves: dict[str, dict[str, Tensor]]

    def values_of_rows(self, leaves, rollouts, rows) -> Tensor:
        """[B, V] of a minibatch."""
        s: TeamSettings = self.loop.settings
        if s.critic in ("central", "set"):
            p, found = leaves[CRITIC], []
            memory = torch.zeros(state_size(p), dtype=torch.float64)
            for k, row in enumerate(rows):
                if k == 0 or self.data.restarts[row]:
                    memory = torch.zeros_like(memory)
                if not self.loop.acts[row]:
                    found.append(torch.zeros(self.data.targets.shape[1], dtype=torch.float64))
                    continue
                value, memory = s.network.step(p, torch.tensor(self.data.views[row]), memory)
                found.append(value)
            return torch.stack(found)
        columns = []
        for agent, module_id in self.agents.items():
            r = rollouts[agent]
            columns.append(self._run(leaves[module_id], r, rows, r.present[rows])[2])
        values = torch.stack(columns, -1)
        if s.critic != "mean":
            return values
        there = torch.tensor(np.stack([rollouts[agent].present[rows] for agent in self.agents], -1))
        return ((values * there).sum(-1) / there.sum(-1).clamp(min=1))[:, None]

    def policy_terms(self, agent: str, outputs: Tensor, r: RecurrentRollout, kept: np.ndarray, a: Tensor):
        """Of an agent's present rows `kept`: what is minimised, and entropy, [b] each."""
        eps = self.settings.clip_param
        logp, entropy = self._distribution(self.agents[agent], outputs, r.actions[kept])
        ratio = torch.exp(logp - torch.tensor(np.asarray(r.logp_old, np.float64)[kept]))
        return -torch.minimum(a * ratio, a * torch.clamp(ratio, 1 - eps, 1 + eps)), entropy

    def more(self, leaves, features: Mapping[str, Tensor], rollouts, rows: np.ndarray) -> Tensor:
        """What else the actors minimise; features [b, D] of each agent's present rows."""
        return torch.zeros((), dtype=torch.float64)

    def step(self, rollouts: Mapping[str, RecurrentRollout], rows: np.ndarray) -> dict[str, object]:
        s, team = self.settings, self.loop.settings
        leaves = self.leaves = {
            m: {name: torch.tensor(p, dtype=torch.float64, requires_grad=True) for name, p in params.items()}
            for m, params in self.parameters.items()
        }
        advantages = self._advantages(rollouts, rows)
        actor, features = torch.zeros((), dtype=torch.float64), {}
        rows_of = dict.fromkeys(self.parameters, 0)
        for module_id in self.modules:
            policy, entropies = [], []
            for agent in (a for a, m in self.agents.items() if m == module_id):
                r = rollouts[agent]
                there = r.present[rows]
                own, outputs, _ = self._run(leaves[module_id], r, rows, there)
                kept = rows[there]
                features[agent] = own[torch.tensor(there)]
                terms = self.policy_terms(agent, outputs[torch.tensor(there)], r, kept, torch.tensor(advantages[agent]))
                policy.append(terms[0])
                entropies.append(terms[1])
                rows_of[module_id] += len(kept)
            actor = actor + self._mean(torch.cat(policy)) - s.entropy_coeff * self._mean(torch.cat(entropies))
        actor = actor + self.more(leaves, features, rollouts, rows)
        values = self.values_of_rows(leaves, rollouts, rows)
        targets, old = (torch.tensor(x[rows]) for x in (self.data.targets, self.data.old))
        square = (values - targets) ** 2
        if math.isfinite(s.value_clip_range):
            clipped = old + torch.clamp(values - old, -s.value_clip_range, s.value_clip_range)
            square = torch.maximum(square, (clipped - targets) ** 2)
        counts = torch.tensor(self.data.counts[rows])
        if team.critic == "independent":
            owners = list(self.agents.values())
            groups = [[i for i, m in enumerate(owners) if m == module_id] for module_id in self.modules]
        else:
            groups = [list(range(square.shape[1]))]
        losses = [self._mean(square[:, group][counts[:, group]]) for group in groups]
        critic = s.vf_loss_coeff * sum(losses)
        if CRITIC in self.parameters:
            rows_of[CRITIC] = int(sum(self.loop.acts[row] for row in rows))
        split = s.critic_lr is not None and CRITIC not in self.parameters
        passes = [(actor, self.optimizers), (critic, self.critic_optimizers)]
        if not split:
            passes = [(actor + critic, self.optimizers)]
        found = [(self._gradients(loss, leaves), optimizers) for loss, optimizers in passes]
        for grads, optimizers in found:
            self._apply(grads, optimizers, rows_of)
        return {"value_loss": [float(x.detach()) for x in losses], "grads": found[0][0], "critic_grads": found[-1][0]}

    def _apply(self, grads, optimizers, rows_of) -> None:
        moving = {m: named for m, named in grads.items() if rows_of[m] and m not in self.settings.frozen}
        moving = {m: {k: g for k, g in named.items() if g is not None} for m, named in moving.items()}
        everything = [g for named in moving.values() for g in named.values()]
        for m, named in moving.items():
            norm = global_norm(everything if self.loop.settings.clip_jointly else named.values())
            factor = clip_factor(norm, self.settings.grad_clip)
            optimizers[m].step(self.parameters[m], {name: g * factor for name, g in named.items()})

    @staticmethod
    def _gradients(loss, leaves):
        """None where a parameter is outside the graph: Adam leaves it alone."""
        flat = [x for named in leaves.values() for x in named.values()]
        found = iter(torch.autograd.grad(loss, flat, retain_graph=True, allow_unused=True))
        return {
            m: {name: None if (g := next(found)) is None else g.numpy() for name in named}
            for m, named in leaves.items()
        }


class TeamLoop(RecurrentLoop):
    """From batches to parameters, with any critic and any credit.

    Args:
        modules: the policies.
        critic: {name: array} of the team's critic, or None.
        agents: {agent: module}, in the order of the critic's values.
        settings: see `TeamSettings`.
    """

    settings: TeamSettings
    trainer_class = TeamTrainer

    def __init__(self, modules, critic: Mapping[str, np.ndarray] | None, agents, settings: TeamSettings):
        super().__init__(modules, agents, settings)
        step: ReferenceSettings = settings.step
        self.trainer = self.trainer_class(modules, step, agents)
        self.trainer.loop = self
        if critic is not None:
            self.trainer.parameters[CRITIC] = {name: np.array(x, np.float64) for name, x in critic.items()}
        for owner, rate in ((self.trainer.optimizers, step.lr), (self.trainer.critic_optimizers, step.critic_lr)):
            if rate is not None:
                owner |= {m: Adam(rate, weight_decay=settings.weight_decay) for m in self.trainer.parameters}
        if critic is not None and step.critic_lr is not None:
            self.trainer.optimizers[CRITIC].lr = step.critic_lr
        self.credits = Credits(
            agents, settings.critic, settings.credit, settings.gamma, settings.lambda_, settings.bootstrap
        )
        owners = dict.fromkeys(agents.values()) if settings.critic == "independent" else [CRITIC]
        self.moments = {m: reference.RunningMoments(decay=VALUE_DECAY) for m in owners}
        self.acts = np.zeros(0, bool)

    def owners(self) -> list[str]:
        """Whose moments normalise each of the V values."""
        if self.settings.critic == "independent":
            return list(self.agents.values())
        return [CRITIC] * (1 if self.credits.of_team else len(self.agents))

    def sequence_begins(self, batch: TeamRollout) -> np.ndarray:
        """Bool [T, E]: a training sequence begins."""
        steps, envs = batch.valid.shape
        begins = np.zeros((steps, envs), bool)
        if len(batch.sequence_rows):
            for row in batch.sequence_rows:
                begins[row // envs, row % envs] = True
            return begins
        length = self.settings.max_seq_len or steps
        for t, e in np.ndindex(steps, envs):
            cut = t > 0 and batch.ends[t - 1, e] == "truncated" and not batch.episode_start[t, e]
            begins[t, e] = batch.valid[t, e] and (t % length == 0 or cut)
        return begins

    def network_values(self, batch: TeamRollout) -> tuple[np.ndarray, np.ndarray]:
        """[T, E, V] in the network's units, of rows and of what follows them."""
        s = self.settings
        if s.network is None:
            own = [super(TeamLoop, self).stream_values(agent, batch) for agent in self.agents]
            values, after = (np.stack([x[k] for x in own], -1) for k in (0, 1))
            if s.critic != "mean":
                return values, after
            there = np.stack([batch.streams[agent].present for agent in self.agents], -1)
            goes_on = there & ~np.stack([batch.streams[agent].terminated for agent in self.agents], -1)
            return tuple(
                ((x * w).sum(-1) / np.maximum(w.sum(-1), 1))[..., None] for x, w in ((values, there), (after, goes_on))
            )
        p = {name: torch.tensor(x) for name, x in self.trainer.parameters[CRITIC].items()}
        num_values = 1 if self.credits.of_team else len(self.agents)
        found = np.zeros((2, *batch.valid.shape, num_values))
        begins = self.sequence_begins(batch) | batch.episode_start
        for e in range(batch.valid.shape[1]):
            memory = torch.zeros(state_size(p), dtype=torch.float64)
            for t in range(batch.valid.shape[0]):
                if begins[t, e]:
                    memory = torch.zeros_like(memory)
                if batch.acts(t, e):
                    value, memory = s.network.step(p, torch.tensor(s.view.of(batch, t, e)), memory)
                    after, _ = s.network.step(p, torch.tensor(s.view.of(batch, t, e, following=True)), memory)
                    found[0, t, e], found[1, t, e] = value.numpy(), after.numpy()
        return found[0], found[1]

    def rollouts(self, batches: Sequence[TeamRollout]) -> dict[str, RecurrentRollout]:
        """Advantages of all agents; what the critic is trained on goes to the trainer."""
        s, owners = self.settings, self.owners()
        before = [self.units(m) for m in owners]
        mean, std = (np.array([x[k] for x in before]) for k in (0, 1))
        parts, critic = {agent: [] for agent in self.agents}, []
        number = 0
        for batch in batches:
            values, after = self.network_values(batch)
            own, targets = self.credits.estimates(batch, values * std + mean, after * std + mean)
            keep = batch.valid.ravel()
            sequences = np.full(batch.valid.size, -1)
            sequences[batch.sequence_rows] = number + np.arange(len(batch.sequence_rows))
            number += len(batch.sequence_rows)
            for agent, x in batch.streams.items():
                columns = [x.obs, x.actions, x.logp, own[agent], x.present]
                columns += [sequences.reshape(batch.valid.shape), batch.episode_start]
                parts[agent].append([c.reshape(len(keep), *c.shape[2:])[keep] for c in columns])
            views = np.zeros((len(keep), 0))
            if s.view is not None:
                places = np.ndindex(*batch.valid.shape)
                views = np.stack([s.view.of(batch, t, e) for t, e in places])
            acts = np.array([batch.acts(t, e) for t, e in np.ndindex(*batch.valid.shape)])
            restarts = (self.sequence_begins(batch) | batch.episode_start).ravel()
            rows = [views, *(x.reshape(len(keep), -1) for x in (targets, values, self.credits.counts(batch)))]
            critic.append([x[keep] for x in (*rows, restarts, acts)])
        views, targets, old, counts, restarts, self.acts = (np.concatenate(x) for x in zip(*critic, strict=True))
        for m, moments in self.moments.items():
            mine = [v for v, owner in enumerate(owners) if owner == m]
            moments.update(targets[:, mine][counts[:, mine]])
        now = [self.units(m) for m in owners]
        mean, std = (np.array([x[k] for x in now]) for k in (0, 1))
        self.trainer.data = CriticData(views, (targets - mean) / std, old, counts, restarts)
        result = {}
        for agent, mine in parts.items():
            obs, actions, logp, advantages, present, begins, starts = map(np.concatenate, zip(*mine, strict=True))
            if s.standardize == "rollout":
                advantages = reference.standardize(advantages, present)
            unused = np.zeros(len(obs))
            result[agent] = RecurrentRollout(
                obs, actions, logp, advantages, unused, unused, present, begins=begins, restarts=starts
            )
            if agent in batches[0].state_in:
                result[agent].state_in = np.concatenate([batch.state_in[agent] for batch in batches])
        return result

    def sequences(self, batches: Sequence[TeamRollout]) -> list[list[int]]:
        """Single rows where nobody has a memory; those of a critic begin where `sequence_begins` says."""
        recurrent = any(is_recurrent(p) for p in self.trainer.parameters.values())
        found, number = [], 0
        for batch in batches:
            begins = self.sequence_begins(batch)
            numbers = np.cumsum(batch.valid.ravel()).reshape(batch.valid.shape) - 1 + number
            number += int(batch.valid.sum())
            if not recurrent:
                continue
            mine: dict[tuple[int, int], list[int]] = {}
            for e in range(begins.shape[1]):
                at = (0, e)
                for t in range(begins.shape[0]):
                    at = (t, e) if begins[t, e] else at
                    if batch.valid[t, e]:
                        mine.setdefault(at, []).append(int(numbers[t, e]))
            found += [mine[at] for at in sorted(mine)]
        return found if recurrent else [[row] for row in range(number)]
