"""Who acts when, and batches in which agents are absent."""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import torch

from tests.core.reference_loop import AgentKind
from tests.support import hand_batch, hand_streams
from thrust_rllib import FeatureSimilarity, JensenShannon, RedundancyPenalty

AGENTS = ("a0", "a1", "a2")
STEPS, ENVS = 10, 3
KINDS = {"a0": AgentKind(3), "a1": AgentKind(4), "a2": AgentKind(5)}
PATTERNS = {  # (step of T, environment, update) to whether the agent acts
    "always": lambda t, e, k, T: True,
    "dies early": lambda t, e, k, T: t < T // 3 + e,
    "joins late": lambda t, e, k, T: t >= T // 2 - e,
    "even steps": lambda t, e, k, T: (t + e) % 2 == 0,
    "odd steps": lambda t, e, k, T: (t + e) % 2 == 1,
    "two rows": lambda t, e, k, T: e == 0 and t in (2, 3),
    "one row": lambda t, e, k, T: e == 1 and t == 2,
    "not in the second update": lambda t, e, k, T: k != 1 and t % 3 > 0,
    "never": lambda t, e, k, T: False,
}


def pairs(agents, of_pair):
    """Mean of a scalar over pairs of agents."""
    values = [of_pair(i, j) for i, j in itertools.combinations(agents, 2)]
    return sum(values) / len(values)


def reference_similarity(features, policies, present):
    """Linear CKA over the rows that both have, by the centred kernel matrices of the rows."""

    def of_pair(i, j):
        both = present[i] & present[j]
        n = int(both.sum())
        if n < 2:
            return torch.zeros((), dtype=torch.float64)
        centring = torch.eye(n, dtype=torch.float64) - 1.0 / n
        k, other = (centring @ features[a][both] @ features[a][both].T @ centring for a in (i, j))
        return (k * other).sum() / ((k * k).sum() * (other * other).sum()).sqrt()

    return pairs(features, of_pair)


def reference_divergence(features, policies, present):
    """Minus the Jensen-Shannon divergence over the rows that both have."""

    def of_pair(i, j):
        both = present[i] & present[j]
        if not both.any():
            return torch.zeros((), dtype=torch.float64)
        p, q = (torch.softmax(policies[a][both], dim=1) for a in (i, j))
        middle = (p + q) / 2
        return ((p * (p / middle).log()).sum(1) / 2 + (q * (q / middle).log()).sum(1) / 2).mean()

    return -pairs(policies, of_pair)


COUPLINGS = {  # (the package's, the reference's)
    "redundancy": (RedundancyPenalty(), None),
    "similarity": (FeatureSimilarity(), reference_similarity),
    "apart": (JensenShannon("raise"), reference_divergence),
}


SCHEDULES = {"a0": "dies early", "a1": "two rows", "a2": "odd steps"}


def ragged_batch(agents=AGENTS, schedules=SCHEDULES, seed=0, garbage=0.0, cut=False):
    """Each agent's data depends on its own name alone.

    Args:
        agents: who is in the batch.
        schedules: {agent: pattern}.
        seed: of the data.
        garbage: what stands at absent rows.
        cut: without the absent rows, one stream per agent and environment behind each other (one agent only).
    """
    modules, bootstrap = {}, np.arange(STEPS * ENVS)
    for agent in agents:
        rng = np.random.default_rng(seed + sum(map(ord, agent)))
        acts = functools.partial(PATTERNS[schedules[agent]], k=0, T=STEPS)
        present = np.array([[acts(t, e) for e in range(ENVS)] for t in range(STEPS)])
        obs, following = rng.normal(size=(2, STEPS, ENVS, 3))
        actions, logp = rng.integers(3, size=present.shape), -1.1 + 0.2 * rng.normal(size=present.shape)
        rewards = rng.normal(size=present.shape)
        terminated = np.zeros(present.shape, bool)
        if cut:
            order = [(t, e) for e in range(ENVS) for t in range(STEPS) if present[t, e]]
            ends = np.array([k + 1 == len(order) or order[k + 1][1] != e for k, (_, e) in enumerate(order)])
            obs, following, actions, logp, rewards, present, terminated = (
                np.array([x[at] for at in order])[:, None]
                for x in (obs, following, actions, logp, rewards, present, terminated)
            )
            flags = {"truncated": ends[:, None, None]}
            bootstrap = np.arange(len(order))
        else:
            obs[~present], logp[~present], rewards[~present] = np.nan_to_num(garbage, posinf=1e6), garbage, garbage
            flags = {}
        shape = present.shape
        modules[agent] = hand_streams(
            [agent],
            obs[:, None],
            actions=actions[:, None],
            rewards=rewards[:, None],
            logp=logp[:, None],
            present=present[:, None],
            terminated=terminated[:, None],
            bootstrap_obs=following.reshape(1, math.prod(shape), 3),
            **flags,
        )
    return hand_batch(modules, bootstrap)
