"""Slow twins in float64: loops over steps, agents, pairs and environments, and multipliers step by step."""

from __future__ import annotations

import numpy as np


def violation(cost, limit, sense="at_most", signed=True):
    difference = np.float64(cost) - np.float64(limit)
    if sense == "at_least":
        difference = -difference
    return difference if signed or difference > 0 else np.float64(0)


def lagrangian(violations, rate, initial=0.0, low=0.0, high=np.inf):
    """λ after each violation."""
    found, current = [], np.float64(initial)
    for v in violations:
        current = current + np.float64(rate) * v
        if current < low:
            current = np.float64(low)
        if current > high:
            current = np.float64(high)
        found.append(current)
    return found


def pid(violations, kp=0.0, ki=0.0, kd=0.0, low=0.0, high=np.inf, anti_windup=True):
    """λ after each violation."""
    found, total, before = [], np.float64(0), np.float64(0)
    for v in violations:
        total = total + v
        if anti_windup and ki * total > high:
            total = np.float64(high) / ki
        if anti_windup and ki * total < low:
            total = np.float64(low) / ki
        found.append(np.clip(kp * v + ki * total + kd * (v - before), low, high))
        before = v
    return found


def cost_of(batch, name, t, i, e):
    """The cost of agent i (in the order of `batch.agents`) in row (t, e)."""
    costs = batch.extras[name]
    if costs.ndim == 2:
        return float(costs[t, e])
    if costs.ndim == 3:
        return float(costs[t, i, e])
    return sum(float(costs[t, i, j, e]) for j in range(len(batch.agents)) if j != i)


def rows(batch):
    """(t, i, e) of all agents that acted in valid rows."""
    for i, stream in enumerate(batch.streams()):
        for t, e in np.ndindex(*batch.valid.shape):
            if batch.valid[t, e] and stream.present[t, e]:
                yield t, i, e


def mean_cost(batches, name):
    costs = []
    for batch in batches:
        if batch.extras[name].ndim == 2:
            costs += [cost_of(batch, name, t, 0, e) for t, e in sorted({(t, e) for t, _, e in rows(batch)})]
        else:
            costs += [cost_of(batch, name, *row) for row in rows(batch)]
    return sum(costs) / len(costs)


def penalised_rewards(batch, weights):
    """float64 [T, N, E]."""
    rewards = np.stack([stream.rewards for stream in batch.streams()], axis=1).astype(np.float64)
    for t, i, e in rows(batch):
        for name, weight in weights.items():
            rewards[t, i, e] -= weight * cost_of(batch, name, t, i, e)
    return rewards
