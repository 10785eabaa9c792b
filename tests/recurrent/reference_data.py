"""Random batches of training sequences, sampled near a float64 policy with a memory: never imports the package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from tests.core.reference_loop import AgentKind, fixed_rollout
from tests.recurrent.reference import FixedSequences, RecurrentTrainer, is_recurrent, state_size, walk

PRESENCE = {  # whether an agent acts at step k of an episode
    "always": lambda k, rng: True,
    "late": lambda k, rng: k >= 2,
    "dead": lambda k, rng: k < 3,
    "gaps": lambda k, rng: rng.random() < 0.7,
    "never": lambda k, rng: False,
}


@dataclass(frozen=True)
class Shape:
    """Where episodes, fragments, sequences and columns begin and end.

    Attributes:
        steps: T.
        envs: E; the columns of odd ones begin inside an episode.
        episodes: the least and largest length of an episode; None: no episode begins or ends.
        max_seq_len: rows of a training sequence; None for whole columns.
        ragged: column e lacks its last (2e) mod 5 rows.
        cuts: rows behind which every column's data is cut although memories and episodes go on.
        presence: {agent: name in `PRESENCE`}, "always" where it is left out.
        noise: how far log-probabilities are from the policy's.
    """

    steps: int = 9
    envs: int = 4
    episodes: tuple[int, int] | None = (2, 6)
    max_seq_len: int | None = None
    ragged: bool = False
    cuts: tuple[int, ...] = ()
    presence: Mapping[str, str] = field(default_factory=dict)
    noise: float = 0.25


def fixed_sequences(
    rng: np.random.Generator, kinds: Mapping[str, AgentKind], trainer: RecurrentTrainer, shape: Shape
) -> FixedSequences:
    """Random data in which episodes' ends, presence and memories agree with each other.

    Args:
        rng: source of all numbers.
        kinds: {agent: its kind}.
        trainer: whose current parameters act. Memories that enter a column are random; the later ones follow from them.
        shape: see `Shape`.
    """
    drawn = fixed_rollout(
        rng, kinds, shape.steps, shape.envs, lambda agent, obs, *_: np.zeros(len(obs)), noise=shape.noise
    )
    valid = np.ones((shape.steps, shape.envs), bool)
    if shape.ragged:
        for e in range(shape.envs):
            valid[shape.steps - 2 * e % 5 :, e] = False
    start, step_of = _episodes(rng, shape)
    for agent, stream in drawn.streams.items():
        pattern = shape.presence.get(agent, "always")
        acts = [[PRESENCE[pattern](k, rng) for k in row] for row in step_of]
        stream.present = valid & np.array(acts)
        stream.terminated, stream.truncated = _ends(rng, stream.present, start, valid, shape, pattern == "dead")
    rows = _sequence_rows(valid, shape)
    batch = FixedSequences(drawn.streams, valid, start & valid, rows, {})
    for agent in kinds:
        _act(rng, agent, trainer, batch)
    return batch


def _episodes(rng: np.random.Generator, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """[T, E] whether an episode starts, and the number of the step inside its episode."""
    start = np.zeros((shape.steps, shape.envs), bool)
    step_of = np.zeros(start.shape, np.int64)
    for e in range(shape.envs):
        k = 0 if shape.episodes is not None and e % 2 == 0 else 2
        left = None if shape.episodes is None else int(rng.integers(*shape.episodes, endpoint=True))
        for t in range(shape.steps):
            start[t, e], step_of[t, e] = k == 0, k
            k += 1
            if left is not None:
                left -= 1
                if left == 0:
                    k, left = 0, int(rng.integers(*shape.episodes, endpoint=True))
    return start, step_of


def _ends(rng, present, start, valid, shape, dies) -> tuple[np.ndarray, np.ndarray]:
    """[T, E] terminated and truncated: at the last row in which the agent acted before an episode, or data, is cut."""
    flags = np.zeros((2, *present.shape), bool)
    for e in range(shape.envs):
        last = None
        for t in range(shape.steps):
            if t and valid[t, e] and last is not None and (start[t, e] or t - 1 in shape.cuts):
                kind = int(not dies and rng.random() < 0.5) if start[t, e] else 1
                if not flags[:, last, e].any():
                    flags[kind, last, e] = True
                last = None
            last = t if present[t, e] else last
    return flags[0], flags[1]


def _sequence_rows(valid: np.ndarray, shape: Shape) -> np.ndarray:
    steps, envs = valid.shape
    rows = []
    for e in range(envs):
        since = 0
        for t in range(steps):
            if t - 1 in shape.cuts or (shape.max_seq_len is not None and t - since == shape.max_seq_len):
                since = t
            if since == t and valid[t, e]:
                rows.append(t * envs + e)
    return np.array(sorted(rows), np.int64)


def _act(rng: np.random.Generator, agent: str, trainer: RecurrentTrainer, batch: FixedSequences) -> None:
    """Log-probabilities (added to what stands there), and the states that enter the sequences."""
    module_id, stream = trainer.agents[agent], batch.streams[agent]
    p = {name: torch.tensor(x) for name, x in trainer.parameters[module_id].items()}
    steps, envs = batch.valid.shape
    if not is_recurrent(p):
        outputs = trainer._forward(p, torch.tensor(stream.obs.reshape(steps * envs, -1), dtype=torch.float64))[1]
    else:
        outputs = torch.zeros(steps, envs, len(p["policy.bias"]) + len(p.get("log_std", ())), dtype=torch.float64)
        entering = np.zeros((steps, envs, state_size(p)))
        for e in range(envs):
            first = {0: 0.5 * rng.normal(size=state_size(p))}
            rows = walk(p, stream.obs[:, e], stream.present[:, e], batch.episode_start[:, e], first)
            for t, (state, step) in enumerate(rows):
                entering[t, e] = state
                if step is not None:
                    outputs[t, e] = step[1]
        batch.state_in[agent] = entering.reshape(steps * envs, -1)[batch.sequence_rows].astype(np.float32)
        outputs = outputs.flatten(0, 1)
    if stream.action_mask is not None:
        allowed = torch.tensor(stream.action_mask.reshape(steps * envs, -1))
        outputs = torch.where(allowed, outputs, torch.full_like(outputs, -1e30))
    actions = stream.actions.reshape(steps * envs, *stream.actions.shape[2:])
    logp = trainer._distribution(module_id, outputs, actions)[0]
    stream.logp = (stream.logp + logp.reshape(steps, envs).numpy()).astype(np.float32)
