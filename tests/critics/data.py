"""Random batches of teams whose episodes, lives and fragments fit together: never imports the package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tests.core.reference_loop import AgentKind, fixed_rollout
from tests.critics.reference import TeamRollout
from tests.recurrent.reference_data import _act

STATE = 4


@dataclass(frozen=True)
class Lives:
    """What happens in the columns of a batch. In the first row of an episode, or fragment of one, everybody acts.

    Attributes:
        steps, envs: T and E; the columns of odd environments begin inside an episode.
        episodes: the least and largest length of an episode.
        gaps: probability that a living agent does not act in a row.
        deaths: probability that an agent's life ends in a row, terminated or truncated, while the others go on.
        cuts: rows behind which another fragment begins, in the middle of an episode.
        empty: probability that nobody acts in a row.
        padding: column e lacks its last e rows.
        max_seq_len: rows of a training sequence of the policies; None where they have no memory.
    """

    steps: int = 11
    envs: int = 3
    episodes: tuple[int, int] = (3, 6)
    gaps: float = 0.0
    deaths: float = 0.0
    cuts: tuple[int, ...] = ()
    empty: float = 0.0
    padding: bool = False
    max_seq_len: int | None = None


SIMPLE = Lives()
RAGGED = Lives(gaps=0.2, deaths=0.15, padding=True)
EVERYTHING = Lives(steps=14, gaps=0.2, deaths=0.12, cuts=(4, 9), empty=0.1, padding=True)


def team_rollout(
    rng: np.random.Generator, kinds: Mapping[str, AgentKind], lives: Lives, trainer=None, noise: float = 0.25
) -> TeamRollout:
    """A batch; with a trainer (see `TeamLoop`) its log-probabilities are near those of the policies."""
    steps, envs = lives.steps, lives.envs
    drawn = fixed_rollout(rng, kinds, steps, envs, lambda agent, obs, *_: np.zeros(len(obs)), noise=noise)
    valid = np.ones((steps, envs), bool)
    if lives.padding:
        for e in range(envs):
            valid[steps - e :, e] = False
    start, ends = np.zeros((steps, envs), bool), np.full((steps, envs), "", object)
    for stream in drawn.streams.values():
        stream.present, stream.terminated, stream.truncated = np.zeros((3, steps, envs), bool)
    for e in range(envs):
        _column(rng, drawn.streams, lives, int(valid[:, e].sum()), e, start, ends)
    rows = np.zeros(0, np.int64)
    if lives.max_seq_len is not None:
        begins = [t for t in range(steps) if t % lives.max_seq_len == 0 or t - 1 in lives.cuts]
        rows = np.array([t * envs + e for t in begins for e in range(envs) if valid[t, e]])
    state, state_after = rng.normal(size=(2, steps, envs, STATE)).astype(np.float32)
    difference = {agent: rng.normal(size=(steps, envs)).astype(np.float32) for agent in kinds}
    batch = TeamRollout(drawn.streams, valid, start, rows, {}, state, state_after, difference, ends)
    for agent in kinds if trainer is not None else ():
        _act(rng, agent, trainer, batch)
    return batch


def _column(rng, streams, lives: Lives, height: int, e: int, start, ends) -> None:
    """Plays one column: lives begin together, and end one by one or with the episode."""
    alive: list[str] = []
    last: dict[str, int] = {}  # where each one that is alive acted last
    left = 0
    for t in range(height):
        begins = left == 0
        if begins:
            left = int(rng.integers(*lives.episodes, endpoint=True))
            alive, last = list(streams), {}
            start[t, e] = t > 0 or e % 2 == 0
        left -= 1
        cut = t in lives.cuts or t == height - 1
        over = left == 0
        acting = [agent for agent in alive if rng.random() >= lives.gaps or not last]
        if rng.random() < lives.empty and last:
            acting = []
        if (over or cut) and not acting:  # there is something to end with
            acting = alive[:1]
        for agent in acting:
            streams[agent].present[t, e] = True
        last |= dict.fromkeys(acting, t)
        for agent in [a for a in acting if rng.random() < lives.deaths and len(alive) > 1 and not (over or cut)]:
            if len(alive) > 1:
                _end(streams[agent], t, e, rng.random() < 0.5)
                alive.remove(agent)
                last.pop(agent)
        if over:
            how = rng.choice(["terminated", "truncated", "mixed"])
            for k, (agent, row) in enumerate(last.items()):
                _end(streams[agent], row, e, how == "terminated" or (how == "mixed" and k % 2 == 0))
            goes_on = any(streams[agent].truncated[t, e] for agent in acting)
            ends[t, e] = "truncated" if goes_on else "terminated"
        elif cut:
            ends[t, e] = "truncated"
            if t < height - 1:
                for agent, row in last.items():
                    _end(streams[agent], row, e, False)
                # Another fragment, in the middle of an episode.
                alive, last, left = list(streams), {}, int(rng.integers(*lives.episodes, endpoint=True))


def _end(stream, t: int, e: int, terminated: bool) -> None:
    (stream.terminated if terminated else stream.truncated)[t, e] = True
