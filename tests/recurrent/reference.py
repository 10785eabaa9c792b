"""Recurrent joint PPO in float64, one row after the other: never imports the package.

Cells are their formulas, time is a Python loop. What happens outside the networks (advantages, losses, coupling,
clipping, Adam, moments of the value targets) is `tests.reference` and `tests.core.reference_loop`.

Letters: T steps, E environments, M rows, C training sequences, H cell size, S numbers of a module's state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import torch
from torch import Tensor

from tests.core.reference_loop import FixedRollout, LoopSettings, ReferenceLoop
from tests.reference import Coupling, ReferenceModule, ReferenceRollout, ReferenceTrainer

# ------------------------------------------------------------------------------------------------ networks


def lstm_step(p: Mapping[str, Tensor], cell: str, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Hochreiter and Schmidhuber 1997 with forget gates: (h [H], state [2H] = cell memory c, then h)."""
    c, h = state.chunk(2)
    gates = p[f"{cell}.weight_ih"] @ x + p[f"{cell}.bias_ih"] + p[f"{cell}.weight_hh"] @ h + p[f"{cell}.bias_hh"]
    i, f, g, o = gates.chunk(4)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(c)
    return h, torch.cat([c, h])


def gru_step(p: Mapping[str, Tensor], cell: str, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Cho et al. 2014, the reset gate after the recurrent product: (h [H], state [H] = h)."""
    from_x = p[f"{cell}.weight_ih"] @ x + p[f"{cell}.bias_ih"]
    from_h = p[f"{cell}.weight_hh"] @ h + p[f"{cell}.bias_hh"]
    (xr, xz, xn), (hr, hz, hn) = from_x.chunk(3), from_h.chunk(3)
    r, z = torch.sigmoid(xr + hr), torch.sigmoid(xz + hz)
    n = torch.tanh(xn + r * hn)
    h = (1 - z) * n + z * h
    return h, h


def _is_lstm(p: Mapping[str, Tensor], cell: str) -> bool:
    rows, size = p[f"{cell}.weight_hh"].shape
    return rows == 4 * size


def is_recurrent(p: Mapping) -> bool:
    """Whether a network's parameters have a cell; see `RecurrentTrainer`."""
    return "cell.weight_ih" in p


def state_size(p: Mapping, cells: Sequence[str] = ("cell", "critic_cell")) -> int:
    """S, or of some cells."""
    mine = [cell for cell in cells if f"{cell}.weight_hh" in p]
    return sum(p[f"{cell}.weight_hh"].shape[1] * (2 if _is_lstm(p, cell) else 1) for cell in mine)


def _remember(p: Mapping[str, Tensor], prefix: str, obs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Tanh layers, as many as there are, then the cell."""
    x, k = obs, 0
    while f"{prefix}trunk_{k}.weight" in p:
        x = torch.tanh(p[f"{prefix}trunk_{k}.weight"] @ x + p[f"{prefix}trunk_{k}.bias"])
        k += 1
    step = lstm_step if _is_lstm(p, f"{prefix}cell") else gru_step
    return step(p, f"{prefix}cell", x, state)


def module_step(p: Mapping[str, Tensor], obs: Tensor, state: Tensor):
    """One step of one agent: (features [D], policy outputs [A], value, state [S] behind it)."""
    size = state_size(p, ["cell"])
    features, after = _remember(p, "", obs, state[:size])
    embedding = features
    if "critic_cell.weight_hh" in p:
        embedding, critic_after = _remember(p, "critic_", obs, state[size:])
        after = torch.cat([after, critic_after])
    outputs = p["policy.weight"] @ features + p["policy.bias"]
    if "log_std" in p:
        outputs = torch.cat([outputs, p["log_std"]])
    return features, outputs, (p["value.weight"] @ embedding + p["value.bias"])[0], after


def walk(
    p: Mapping[str, Tensor],
    obs: np.ndarray,
    present: np.ndarray,
    restarts: np.ndarray,
    entering: Mapping[int, np.ndarray],
) -> Iterator[tuple[Tensor, tuple | None]]:
    """One agent's rows in the order of time.

    Args:
        p: parameters.
        obs: [R, O].
        present: [R] bool; the memory stands still in other rows.
        restarts: [R] bool; before such a row the memory is set to 0, whether the agent is present or not.
        entering: {row: state [S]} put in before that row, and before its restart.

    Yields:
        Of each row the state that enters it, and `module_step`, or None where the agent is absent.
    """
    state = torch.zeros(state_size(p), dtype=torch.float64)
    for k in range(len(obs)):
        if k in entering:
            state = torch.tensor(np.asarray(entering[k], dtype=np.float64))
        if restarts[k]:
            state = torch.zeros_like(state)
        if not present[k]:
            yield state, None
            continue
        step = module_step(p, torch.tensor(np.asarray(obs[k], dtype=np.float64)), state)
        yield state, step
        state = step[3]


# ------------------------------------------------------------------------------------------------ gradient steps


@dataclass
class RecurrentRollout(ReferenceRollout):
    """A rollout whose rows stand in training sequences.

    Attributes:
        begins: [M] int, at a row where a training sequence begins its number c, elsewhere −1.
        restarts: [M] bool, rows that start an episode.
        state_in: [C, S] the agent's state entering each sequence; None for a network without memory.
    """

    begins: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    restarts: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    state_in: np.ndarray | None = None


class RecurrentTrainer(ReferenceTrainer):
    """`ReferenceTrainer` for networks with memory; others run as there.

    Parameters: tanh layers "trunk_0", "trunk_1", … (none is allowed), "cell.weight_ih" [G·H, I], "cell.weight_hh"
    [G·H, H], "cell.bias_ih", "cell.bias_hh" [G·H] with G = 4 gates (i, f, g, o: an LSTM) or 3 (r, z, n: a GRU),
    "policy", "value", "log_std" as there. With "critic_cell.…" (and "critic_trunk_0", …) the value head reads a memory
    of its own; the state then is the actor's followed by the critic's. Minibatches are whole sequences, each in the
    order of time.
    """

    def _run(self, p, rollout, rows, present):
        if not is_recurrent(p):
            return super()._run(p, rollout, rows, present)
        entering = {k: rollout.state_in[rollout.begins[row]] for k, row in enumerate(rows) if rollout.begins[row] >= 0}
        absent = (
            torch.zeros(p["policy.weight"].shape[1], dtype=torch.float64),
            torch.zeros(len(p["policy.bias"]) + len(p.get("log_std", ())), dtype=torch.float64),
            torch.zeros((), dtype=torch.float64),
        )
        steps = walk(p, rollout.obs[rows], present, rollout.restarts[rows], entering)
        return tuple(torch.stack(x) for x in zip(*(absent if s is None else s[:3] for _, s in steps), strict=True))


# ------------------------------------------------------------------------------------------------ whole updates


@dataclass
class FixedSequences(FixedRollout):
    """A batch of training sequences.

    Attributes:
        episode_start: [T, E] bool.
        sequence_rows: [C] sorted rows t·E + e at which a training sequence begins.
        state_in: {agent: [C, S]} the state entering the agent's first step of each sequence; none without a memory.
    """

    episode_start: np.ndarray
    sequence_rows: np.ndarray
    state_in: dict[str, np.ndarray]


@dataclass
class RecurrentSettings(LoopSettings):
    """`target_kl`: a module whose k1-KL in a minibatch was larger rests until the next epoch, or update."""

    target_kl: float | None = None
    target_kl_scope: str = "epoch"


class RecurrentLoop(ReferenceLoop):
    """`ReferenceLoop` whose minibatches are whole sequences; of `FixedSequences`."""

    settings: RecurrentSettings

    def __init__(self, modules: Mapping[str, ReferenceModule], agents, settings, coupling: Coupling | None = None):
        super().__init__(modules, agents, settings, coupling)
        self.trainer = RecurrentTrainer(modules, settings.step, agents, settings.per_module, coupling)

    def stream_values(self, agent: str, batch: FixedSequences) -> tuple[np.ndarray, np.ndarray]:
        """A column after the other; what follows a row is one more step of the memory behind that row."""
        p = {name: torch.tensor(x) for name, x in self.trainer.parameters[self.agents[agent]].items()}
        if not is_recurrent(p):
            return super().stream_values(agent, batch)
        stream = batch.streams[agent]
        values, following = np.zeros(batch.valid.shape), np.zeros(batch.valid.shape)
        steps, envs = batch.valid.shape
        for e in range(envs):
            entering = {
                row // envs: batch.state_in[agent][c] for c, row in enumerate(batch.sequence_rows) if row % envs == e
            }
            rows = walk(p, stream.obs[:, e], stream.present[:, e], batch.episode_start[:, e], entering)
            for t, (_, step) in enumerate(rows):
                if step is not None:
                    values[t, e] = step[2]
                    after = torch.tensor(np.asarray(stream.following[t, e], dtype=np.float64))
                    following[t, e] = module_step(p, after, step[3])[2]
        return values, following

    def rollouts(self, batches: Sequence[FixedSequences]) -> dict[str, RecurrentRollout]:
        """As in the parent, with sequences numbered batch after batch."""
        begins, count = [], 0
        for batch in batches:
            mine = np.full(batch.valid.size, -1)
            mine[batch.sequence_rows] = count + np.arange(len(batch.sequence_rows))
            begins.append(mine[batch.valid.ravel()])
            count += len(batch.sequence_rows)
        places = np.concatenate(begins), np.concatenate([batch.episode_start[batch.valid] for batch in batches])
        result = {}
        for agent, r in super().rollouts(batches).items():
            own = {f.name: getattr(r, f.name) for f in fields(r)}
            result[agent] = RecurrentRollout(**own, begins=places[0], restarts=places[1])
            if agent in batches[0].state_in:
                result[agent].state_in = np.concatenate([batch.state_in[agent] for batch in batches])
        return result

    def sequences(self, batches: Sequence[FixedSequences]) -> list[list[int]]:
        """Rows of each sequence, in the order in which `rollouts` numbers rows and sequences."""
        result, first = [], 0
        for batch in batches:
            steps, envs = batch.valid.shape
            numbers = np.cumsum(batch.valid.ravel()) - 1 + first
            for row in batch.sequence_rows:
                mine, t = [], row // envs
                while t < steps and batch.valid[t, row % envs]:
                    mine.append(int(numbers[t * envs + row % envs]))
                    t += 1
                    if t * envs + row % envs in batch.sequence_rows:
                        break
                result.append(mine)
            first += int(batch.valid.sum())
        return result

    def epochs(self, sequences: Sequence[Sequence[int]]) -> Iterator[list[np.ndarray]]:
        """One shuffle per epoch; a minibatch takes sequences while they fit into `minibatch_size`, at least one."""
        s = self.settings
        for _ in range(s.num_epochs):
            chunks: list[list[int]] = [[]]
            for c in torch.randperm(len(sequences), generator=self.generator).tolist():
                if chunks[-1] and len(chunks[-1]) + len(sequences[c]) > s.minibatch_size:
                    chunks.append([])
                chunks[-1] += sequences[c]
            limit = 1
            if s.iterate_all:
                limit = len(chunks) if s.max_minibatches is None else max(s.max_minibatches, 1)
            yield [np.array(chunk) for chunk in chunks[:limit]]

    def update(self, batches: Sequence[FixedSequences], permute=None) -> list[dict]:
        """One update; the statistics of each gradient step that at least one module took."""
        s, trainer, log = self.settings, self.trainer, []
        rollouts = self.rollouts(batches)
        trainer.stopped.clear()
        for epoch in self.epochs(self.sequences(batches)):
            if s.target_kl_scope == "epoch":
                trainer.stopped.clear()
            for rows in epoch:
                if trainer.stopped | s.step.frozen >= set(trainer.modules):
                    break
                log.append(trainer.step(rollouts, rows))
                if s.target_kl is not None:
                    trainer.stopped |= {m for m, kl in log[-1]["kl"].items() if kl > s.target_kl}
        return log
