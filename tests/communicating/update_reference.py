"""Whole updates of agents that exchange messages, in float64 and one joint row after the other: no package in it.

Networks are loops over agents, senders and steps. What surrounds them (advantages, moments of targets, losses,
clipping, Adam, minibatches) is `tests.critics.reference`. Parameters have the names of their state dicts.

Letters: N agents, T steps, E environments, D features, S numbers of a memory, A policy outputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from tests.core.reference_loop import AgentKind
from tests.critics.data import Lives, team_rollout
from tests.critics.reference import TeamLoop, TeamRollout, TeamTrainer
from tests.recurrent.reference import RecurrentLoop

Parameters = Mapping[str, Tensor]


def layer(p: Parameters, name: str, x: Tensor) -> Tensor:
    return p[f"{name}.weight"] @ x + p[f"{name}.bias"]


def chain(p: Parameters, name: str, x: Tensor, activation) -> Tensor:
    """Layers "name.0", "name.2", … with an activation behind each."""
    k = 0
    while f"{name}.{k}.weight" in p:
        x = activation(layer(p, f"{name}.{k}", x))
        k += 2
    return x


def normed(p: Parameters, name: str, x: Tensor) -> Tensor:
    x = (x - x.mean()) / torch.sqrt(((x - x.mean()) ** 2).mean() + 1e-5)
    return x * p[f"{name}.weight"] + p[f"{name}.bias"]


def gru(p: Parameters, name: str, x: Tensor, h: Tensor, suffix: str = "") -> Tensor:
    """Gates r, z, n; the reset gate behind the recurrent product."""
    inputs = p[f"{name}.weight_ih{suffix}"] @ x + p[f"{name}.bias_ih{suffix}"]
    recurrent = p[f"{name}.weight_hh{suffix}"] @ h + p[f"{name}.bias_hh{suffix}"]
    (ri, zi, ni), (rh, zh, nh) = inputs.chunk(3), recurrent.chunk(3)
    z = torch.sigmoid(zi + zh)
    return (1 - z) * torch.tanh(ni + torch.sigmoid(ri + rh) * nh) + z * h


def speaks(p: Parameters) -> bool:
    return "encoder.0.weight" in p


class Speakers:
    """One joint row: who is there speaks, hears, and acts.

    Args:
        agents: {agent: module} in the order of the links.
        rounds: of messages.
        aggregation: of those heard.
    """

    def __init__(self, agents: Mapping[str, str], rounds: int, aggregation: str) -> None:
        self.agents, self.rounds, self.aggregation = dict(agents), rounds, aggregation

    def initial(self, leaves: Mapping[str, Parameters]) -> dict[str, Tensor]:
        """{agent: memory [S]} before an episode; no numbers where there is none."""
        found = {}
        for agent, m in self.agents.items():
            sizes = [
                leaves[m][name].shape[1] for name in ("cell.weight_hh_l0", "updates.0.weight_hh") if name in leaves[m]
            ]
            found[agent] = torch.zeros(sizes[0] if sizes else 0, dtype=torch.float64)
        return found

    def row(self, leaves, obs: Mapping[str, Tensor], memory: Mapping[str, Tensor]):
        """What the agents in `obs` (who are there) make of it: {agent: (features, outputs, value)}, and memories."""
        p = {agent: leaves[self.agents[agent]] for agent in obs}
        told, after = self._exchange(p, obs, memory)
        found, after = {}, {**memory, **after}
        for agent, own in p.items():
            x = told[agent] if agent in told else chain(own, "trunk", obs[agent], torch.tanh)
            if "cell.weight_hh_l0" in own:
                x = after[agent] = gru(own, "cell", x, memory[agent], "_l0")
            found[agent] = x, layer(own, "policy_head", x), layer(own, "value_head", x)[0]
        return found, after

    def _exchange(self, p, obs, memory):
        n = len(self.agents)
        place = {agent: i for i, agent in enumerate(self.agents)}
        speaking = [agent for agent in obs if speaks(p[agent])]
        z = {a: chain(p[a], "encoder", obs[a][n:], torch.relu) for a in speaking}
        remembering = {a for a in speaking if "updates.0.weight_hh" in p[a]}
        carried = {a: memory[a] if a in remembering else z[a] for a in speaking}
        for r in range(self.rounds):
            heard = {a: self._heard(p, a, r, carried, {b: obs[a][place[b]] for b in speaking}) for a in speaking}
            carried = {
                a: gru(p[a], f"updates.{r}", torch.cat([z[a], heard[a]]), carried[a])
                if a in remembering
                else normed(
                    p[a], f"updates.{r}.2", torch.relu(layer(p[a], f"updates.{r}.0", torch.cat([carried[a], heard[a]])))
                )
                for a in speaking
            }
        told = {a: normed(p[a], "memory_norm", carried[a]) if a in remembering else carried[a] for a in speaking}
        return told, {a: carried[a] for a in remembering}

    def _heard(self, p, agent, r, carried, links):
        """The aggregate of what one agent hears in round r."""
        senders = [b for b in carried if float(links[b]) > 0]
        if not senders:
            return torch.zeros_like(carried[agent])
        messages = []
        for b in senders:
            message = layer(p[b], f"messages.{r}.say", carried[b])
            if f"messages.{r}.distance.weight" in p[agent]:
                message = message + layer(p[agent], f"messages.{r}.distance", links[b].reshape(1))
            messages.append(message)
        if self.aggregation == "max":
            return torch.stack(messages).max(0).values
        if self.aggregation == "mean":
            return sum(messages) / len(messages)
        query = layer(p[agent], f"messages.{r}.query", carried[agent])
        scores = [query @ layer(p[b], f"messages.{r}.key", carried[b]) / math.sqrt(len(query)) for b in senders]
        shares = torch.exp(torch.stack(scores) - max(scores).detach())
        return sum(share / shares.sum() * message for share, message in zip(shares, messages, strict=True))


def numbers(x) -> Tensor:
    return torch.tensor(np.asarray(x, np.float64))


class SpeakingTrainer(TeamTrainer):
    """Gradient steps; agents of a row are run together, once per step."""

    loop: SpeakingLoop

    def step(self, rollouts, rows):
        self.rollouts, self.found = rollouts, None
        return super().step(rollouts, rows)

    def _run(self, p, rollout, rows, present):
        if self.found is None:
            self.found = self._run_all(rows)
        agent = next(a for a, own in self.rollouts.items() if own is rollout)
        return self.found[agent]

    @staticmethod
    def _gradients(loss, leaves):
        """What nobody hears in a minibatch has the gradient 0, and goes on by its momentum; heads are left out."""
        found = TeamTrainer._gradients(loss, leaves)
        for module_id, named in found.items():
            for name, gradient in named.items():
                if gradient is None and "_head" not in name and speaks(leaves[module_id]):
                    named[name] = np.zeros(leaves[module_id][name].shape)
        return found

    def _run_all(self, rows):
        """{agent: features [B, D], outputs [B, A], values [B]}, 0 where it is absent."""
        speakers, first = self.loop.speakers, next(iter(self.rollouts.values()))
        memory, steps = speakers.initial(self.leaves), []
        for row in rows:
            if first.begins[row] >= 0:
                memory = {
                    a: memory[a] if r.state_in is None else numbers(r.state_in[first.begins[row]])
                    for a, r in self.rollouts.items()
                }
            if first.restarts[row]:
                memory = speakers.initial(self.leaves)
            obs = {a: numbers(r.obs[row]) for a, r in self.rollouts.items() if r.present[row]}
            found, memory = speakers.row(self.leaves, obs, memory)
            steps.append(found)
        result = {}
        for agent, module_id in self.agents.items():
            own = self.leaves[module_id]
            width, outputs = own["policy_head.weight"].shape[1], len(own["policy_head.bias"])
            absent = numbers(np.zeros(width)), numbers(np.zeros(outputs)), numbers(0.0)
            result[agent] = tuple(torch.stack(x) for x in zip(*(s.get(agent, absent) for s in steps), strict=True))
        return result


class SpeakingLoop(TeamLoop):
    """From batches to parameters.

    Args:
        modules, critic, agents, settings: of `TeamLoop`; the agents in the order of the links.
        rounds, aggregation: of `Speakers`.
    """

    trainer_class = SpeakingTrainer

    def __init__(self, modules, critic, agents, settings, rounds=2, aggregation="max"):
        super().__init__(modules, critic, agents, settings)
        self.speakers = Speakers(agents, rounds, aggregation)

    def leaves(self):
        return {m: {name: torch.tensor(x) for name, x in named.items()} for m, named in self.trainer.parameters.items()}

    def played(self, batch: TeamRollout):
        """{(t, e): ({agent: (features, outputs, value)}, {agent: value of what follows}, entering memories)}."""
        leaves, found = self.leaves(), {}
        last = {
            (a, e): max((t for t in range(len(batch.valid)) if x.present[t, e]), default=None)
            for a, x in batch.streams.items()
            for e in range(batch.valid.shape[1])
        }
        numbers_of = {row: c for c, row in enumerate(batch.sequence_rows)}
        envs = batch.valid.shape[1]
        for e in range(envs):
            memory = self.speakers.initial(leaves)
            for t in range(len(batch.valid)):
                if not batch.valid[t, e]:
                    continue
                if (c := numbers_of.get(t * envs + e)) is not None and batch.state_in:
                    memory = {a: numbers(batch.state_in[a][c]) for a in self.agents}
                if batch.episode_start[t, e]:
                    memory = self.speakers.initial(leaves)
                there = {a: x for a, x in batch.streams.items() if x.present[t, e]}
                own, memory = self.speakers.row(leaves, {a: numbers(x.obs[t, e]) for a, x in there.items()}, memory)
                goes_on = {
                    a: numbers(x.following[t, e])
                    for a, x in there.items()
                    if not x.terminated[t, e] and (x.truncated[t, e] or t == last[a, e])
                }
                after, _ = self.speakers.row(leaves, goes_on, memory)
                found[t, e] = own, {a: x[2] for a, x in after.items()}
        return found

    def network_values(self, batch):
        if self.settings.network is not None:
            return super().network_values(batch)
        values, after = np.zeros((2, *batch.valid.shape, len(self.agents)))
        there, goes_on = np.zeros((2, *values.shape), bool)
        for (t, e), (own, following) in self.played(batch).items():
            for i, agent in enumerate(self.agents):
                if agent in own:
                    values[t, e, i], there[t, e, i] = own[agent][2], True
                if agent in following:
                    after[t, e, i], goes_on[t, e, i] = following[agent], True
        if self.settings.critic != "mean":
            return values, after
        return tuple(
            ((x * w).sum(-1) / np.maximum(w.sum(-1), 1))[..., None] for x, w in ((values, there), (after, goes_on))
        )

    def sequences(self, batches):
        if any(batch.state_in for batch in batches):
            return RecurrentLoop.sequences(self, batches)
        return super().sequences(batches)


def spoken_rollout(rng, agents: Mapping[str, str], width: int, lives: Lives, loop: SpeakingLoop) -> TeamRollout:
    """A batch: observations with links to anybody, log-probabilities near those of the loop's policies."""
    n = len(agents)
    batch = team_rollout(rng, {agent: AgentKind(n + width) for agent in agents}, lives)
    for i, stream in enumerate(batch.streams.values()):
        for x in (stream.obs, stream.following):
            x[..., :n] = rng.uniform(0.1, 1.0, x[..., :n].shape) * (rng.random(x[..., :n].shape) < 0.6)
            x[..., i] = 0.0
    sizes = {agent: len(h) for agent, h in loop.speakers.initial(loop.leaves()).items()}
    if any(sizes.values()):
        count = len(batch.sequence_rows)
        batch.state_in = {a: (0.5 * rng.normal(size=(count, s))).astype(np.float32) for a, s in sizes.items()}
    for (t, e), (own, _) in loop.played(batch).items():
        for agent, (_, outputs, _) in own.items():
            stream = batch.streams[agent]
            logp = loop.trainer._distribution(agents[agent], outputs[None], stream.actions[t, e][None])[0]
            stream.logp[t, e] += float(logp[0])
    return batch
