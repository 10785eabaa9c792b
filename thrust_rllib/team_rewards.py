"""What agents and their team are paid, as the credits take it. Letters as in `joint_batch`."""

from __future__ import annotations

import dataclasses

import numpy as np

from thrust_rllib.envs.difference import DIFFERENCE_REWARD
from thrust_rllib.joint_batch import JointBatch
from thrust_rllib.team_lives import Lives, all_agents


def team_rewards(batch: JointBatch) -> np.ndarray:
    """[T, E]: the sum of the agents' rewards divided by N; who is absent gets 0."""
    total = sum((s.rewards * s.present).sum(1, dtype=np.float32) for s in batch.modules.values())
    return np.asarray(total / np.float32(len(batch.agents)), np.float32)


def with_rewards(batch: JointBatch, credit: str) -> JointBatch:
    """The batch with the rewards that a credit takes; the batch itself with "own"."""
    if credit == "own":
        return batch
    rewards = difference_rewards(batch) if credit == "difference" else _shared_rewards(batch)
    modules, start = {}, 0
    for module_id, streams in batch.modules.items():
        stop = start + len(streams.agents)
        modules[module_id] = dataclasses.replace(streams, rewards=rewards[:, start:stop])
        start = stop
    return dataclasses.replace(batch, modules=modules)


def _shared_rewards(batch: JointBatch) -> np.ndarray:
    """[T, N, E]: the team's reward, for each agent's own stream.

    What the team is paid while an agent waits belongs to the step with which it began to wait, as its own rewards do.
    """
    team = np.broadcast_to(team_rewards(batch)[:, None], (batch.num_steps, len(batch.agents), batch.num_envs))
    if (present := all_agents(batch, "present")).all():
        return team
    lives = Lives.of(batch)
    waits = batch.valid[:, None] & ~present & (lives.latest >= 0) & (~lives.ended | lives.returns)
    _, agents, envs = np.nonzero(waits)
    found = np.where(present, team, np.float32(0.0))
    np.add.at(found, (lives.latest[waits], agents, envs), team[waits])
    return found


def difference_rewards(batch: JointBatch) -> np.ndarray:
    """[T, N, E], finite where an agent acted."""
    shape = (batch.num_steps, len(batch.agents), batch.num_envs)
    rewards = batch.extras.get(DIFFERENCE_REWARD)
    if rewards is None:
        raise ValueError(
            f"credit='difference' needs the extra {DIFFERENCE_REWARD!r}; the environment gives "
            f"{sorted(batch.extras) or 'none'}. Return it from step_joint: JointStepResult(…, extras="
            f"{{{DIFFERENCE_REWARD!r}: {{agent: number}}}}), or wrap an environment that can be copied in "
            "thrust_rllib.envs.WithDifferenceRewards"
        )
    if rewards.shape != shape:
        raise ValueError(
            f"the extra {DIFFERENCE_REWARD!r} has shape {rewards.shape}; needed: a number of each agent, {shape}"
        )
    with np.errstate(over="ignore"):  # what is too large for float32 is told as not finite
        rewards = rewards.astype(np.float32, copy=False)
    wrong = all_agents(batch, "present") & ~np.isfinite(rewards)
    if wrong.any():
        agent = batch.agents[int(wrong.any((0, 2)).argmax())]
        raise ValueError(
            f"the extra {DIFFERENCE_REWARD!r} of agent {agent!r}, who acted, is not a finite number; let the "
            "environment give one in every step"
        )
    return rewards
