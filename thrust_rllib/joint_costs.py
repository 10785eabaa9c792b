"""Costs of a rollout: what the environments return beside rewards, as means and as rewards that are paid less.

| a cost of | the environment returns in `extras` | in the batch | an agent's cost |
|---|---|---|---|
| the team | {name: number} | [T, E] | the team's, for each agent that acted |
| each agent | {name: {agent: number}} | [T, N, E] | its own |
| each pair | {name: {agent: {other: number}}} | [T, N, N, E] | the sum of its row, over the others |

Letters as in `joint_batch`. Only rows in which somebody acted count, and of these the costs of agents that acted; in a
pair that is the first one, whoever the other is. Where agents wait for each other over the end of a rollout, the row of
an open step belongs to the rollout in which the step is completed, as its reward does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from thrust_rllib.envs.names import nearest
from thrust_rllib.joint_batch import JointBatch


def mean_cost(batches: Sequence[JointBatch], name: str) -> float | None:
    """Mean of a cost over the steps of all batches, in float64.

    A team's cost is averaged over rows in which anybody acted, the others over the steps in which an agent acted, of
    all agents.

    Args:
        batches: of one team.
        name: of the extra.

    Returns:
        The mean, or None where no row counts.

    Raises:
        ValueError: a batch has no such extra, or one of another shape; or a cost that counts is not finite.
    """
    total, count = 0.0, 0
    for batch in batches:
        costs, acted = _costs(batch, name), _acted(batch)
        counted = costs[acted.any(axis=1) if costs.ndim == 2 else acted]
        total += float(counted.sum())
        count += counted.size
    if not math.isfinite(total):
        raise ValueError(
            f"the cost {name!r} of a rollout adds up to {total}; needed: finite numbers for whoever acts. Look at what "
            "the environment returns in extras"
        )
    return total / count if count else None


def penalised(batch: JointBatch, weights: Mapping[str, float], signals: Sequence[str] = ()) -> JointBatch:
    """A batch whose rewards are r_i − Σ_k w_k c_{k,i}, computed in float64.

    The batch itself is left as it is, and all its other arrays are shared.

    Args:
        batch: a rollout.
        weights: {name of the extra: w_k}; those of weight 0 change nothing.
        signals: agent extras [T, N, E] that take the place of the reward for some credit, and are paid less as well.

    Returns:
        A new batch, or this one where no weight differs from 0.

    Raises:
        ValueError: the batch has no such extra, or one of another shape.
    """
    weights = {name: weight for name, weight in weights.items() if weight != 0}
    if not weights:
        return batch
    acted = _acted(batch)
    penalty = np.zeros(acted.shape)
    for name, weight in weights.items():
        costs = _costs(batch, name)
        penalty += weight * (costs[:, None] if costs.ndim == 2 else costs)
    penalty[~acted] = 0.0
    modules, start = {}, 0
    for module_id, streams in batch.modules.items():
        mine = slice(start, start + len(streams.agents))
        start = mine.stop
        modules[module_id] = replace(streams, rewards=_less("rewards", streams.rewards, penalty[:, mine]))
    extras = {name: _less(f"extras {name!r}", batch.extras[name], penalty) for name in signals if name in batch.extras}
    return replace(batch, modules=modules, extras={**batch.extras, **extras})


def _less(what: str, rewards: np.ndarray, penalty: np.ndarray) -> np.ndarray:
    """In the rewards' floating dtype.

    Raises:
        ValueError: the shapes differ.
    """
    if rewards.shape != penalty.shape:
        raise ValueError(f"{what} have shape {rewards.shape}; needed: one number per step and agent, {penalty.shape}")
    return (rewards - penalty).astype(np.result_type(rewards.dtype, np.float32))


def _acted(batch: JointBatch) -> np.ndarray:
    """Bool [T, N, E]: valid rows of agents that acted."""
    present = np.concatenate([streams.present for streams in batch.modules.values()], axis=1)
    return present & batch.valid[:, None]


def _costs(batch: JointBatch, name: str) -> np.ndarray:
    """float64 [T, E] of a team's cost, else [T, N, E]."""
    if name not in batch.extras:
        raise ValueError(
            f"the constraint {name!r} reads the extra {name!r}, which the environment does not return; it returns "
            f"{sorted(batch.extras) or 'none'}{nearest(name, batch.extras)} In every step return JointStepResult(…, "
            f"extras={{{name!r}: …}}): a number for the team, {{agent: number}}, or {{agent: {{other: number}}}}. For "
            "an environment of another library whose infos hold it give a function that makes its adapter, such as "
            f"thrust_rllib.envs.PettingZooJointEnv(env, extras_from_infos=[{name!r}])."
        )
    costs = np.asarray(batch.extras[name])
    steps, agents, envs = batch.num_steps, len(batch.agents), batch.num_envs
    shapes = (steps, envs), (steps, agents, envs), (steps, agents, agents, envs)
    if costs.shape not in shapes or costs.dtype.kind not in "biuf":
        raise ValueError(
            f"the cost {name!r} has shape {costs.shape} and dtype {costs.dtype} in a batch of T = {steps} steps, N = "
            f"{agents} agents and E = {envs} environments; needed: numbers [T, E] (the environment returns one number "
            "for the team), [T, N, E] ({agent: number}) or [T, N, N, E] ({agent: {other: number}})"
        )
    costs = costs.astype(np.float64)
    if costs.ndim < 4:
        return costs
    costs[:, range(agents), range(agents)] = 0.0  # nobody is a pair
    return costs.sum(axis=2)
