"""Advantages and value targets of one agent's own steps, straight from the log of an environment, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def advantages_and_targets(
    stream: Any, first: int, stop: int, value_of: Callable[[Any], float], gamma: float, lambda_: float
) -> tuple[np.ndarray, np.ndarray]:
    """Of the complete own steps first .. stop - 1 of one agent in one episode, as one fragment holds them.

    With r_i all that was paid from own step i to the next (i = 0: and what was paid before), o_i its observations:

        delta_i = r_i + gamma V(o_{i+1}) - V(o_i)
        A_i     = delta_i + gamma lambda A_{i+1}, A_stop = 0
        R_i     = A_i + V(o_i)

    What follows the last step: 0 if the agent has terminated, else the value of what it saw next, or last.

    Args:
        stream: `steps`, each with `observation` and `reward`; `early_reward`, `following`, `end`.
        first: number of the first own step.
        stop: number after the last one.
        value_of: V of an observation as the environment gave it.
        gamma: discount of one own step, however long it lasts.
        lambda_: GAE's lambda.

    Returns:
        (advantages, targets), float64 [stop - first].
    """
    steps = stream.steps[first:stop]
    rewards = [step.reward + (stream.early_reward if step is stream.steps[0] else 0.0) for step in steps]
    values = [value_of(step.observation) for step in steps]
    if stop < len(stream.steps):
        values.append(value_of(stream.steps[stop].observation))
    elif stream.end == "terminated":
        values.append(0.0)
    else:
        values.append(value_of(stream.following))
    advantages = np.zeros(len(steps) + 1)
    for i in reversed(range(len(steps))):
        delta = rewards[i] + gamma * values[i + 1] - values[i]
        advantages[i] = delta + gamma * lambda_ * advantages[i + 1]
    return advantages[:-1], advantages[:-1] + np.array(values[:-1])
