"""What each agent of a plan (tests/envs/lives.py) lives through, and its advantages, straight from the definitions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass
class Row:
    """One step of an agent: observation, reward, what follows, and its end ("terminated", "truncated" or None)."""

    obs: np.ndarray
    reward: float
    following: np.ndarray
    end: str | None


def rows_of(lives, length, agent, start, stop):
    """The agent's rows in the environment's steps start … stop − 1; None where it does not act."""
    index, (first, last, end) = list(lives).index(agent), lives[agent]
    rows = []
    for t in range(start, stop):
        episode, step = divmod(t, length)
        if not first <= step <= last:
            rows.append(None)
            continue
        here, then = (np.array([episode, s, index], np.float64) for s in (step, step + 1))
        rows.append(Row(here, 10.0 * index + step + 1, then, end if step == last else None))
    return rows


def targets_of(rows, value, gamma, lambda_):
    """Value targets by the definition of GAE, in float64: {t: A_t + V_t}, A_t = Σ_k (γλ)^k δ_{t+k}, to its end."""
    targets = {}
    for t, row in enumerate(rows):
        if row is None:
            continue
        advantage, weight = 0.0, 1.0
        for later in rows[t:]:
            if later is None:  # the next life is another stream
                break
            following = 0.0 if later.end == "terminated" else value(later.following)
            advantage += weight * (later.reward + gamma * following - value(later.obs))
            weight *= gamma * lambda_
            if later.end is not None:
                break
        targets[t] = advantage + value(row.obs)
    return targets
