"""What environments tell beside observations and rewards, out of episodes: extras, and global states.

Letters as in `joint_batch`; both are laid out as the fast door does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from thrust_rllib.connectors.agent_steps import step_times
from thrust_rllib.connectors.fragments import Fragment
from thrust_rllib.envs.extras import ExtrasRecorder, check_shape, is_of_pairs, numbers, pair_rows
from thrust_rllib.joint_batch import AgentID


def extras_of(
    fragments: Sequence[Fragment], agents: Sequence[AgentID], shape: tuple[int, int]
) -> dict[str, np.ndarray]:
    """{name: [T, E, …] of the team, [T, N, E, …] of agents, [T, N, N, E] of pairs}.

    Args:
        fragments: all of the batch.
        agents: in the order of the batch.
        shape: T, E.

    Raises:
        TypeError: an extra that makes no array of numbers.
        ValueError: an extra that changes its shape, is left out in some steps, or can be taken for one of agents or
            pairs.
    """
    recorder = ExtrasRecorder()
    (steps, envs), place = shape, {agent: i for i, agent in enumerate(agents)}
    leads = [(steps, *(len(agents),) * axes, envs) for axes in range(3)]
    for fragment in fragments:
        told: Mapping[int, Mapping[str, Any]] = getattr(fragment.episode, "extras", {})
        e = fragment.column
        acted = {t for agent in fragment.episode.agent_episodes for t in step_times(fragment.episode, agent)}
        for time in sorted(acted):
            recorder.check_names(told.get(time, {}).keys(), f"episode {fragment.episode.id_}, step {time}")
        for time, row in zip(told, fragment.rows(list(told)), strict=True):
            where = f"episode {fragment.episode.id_}, step {time}"
            for name, value in told[time].items():
                if not isinstance(value, Mapping):
                    number = numbers(value, name, where)
                    check_shape(number.shape, 0, len(agents), envs, name, where)
                    recorder.place(name, leads[0], number, where)[row, e] = number
                elif is_of_pairs(value):
                    pairs = numbers(pair_rows(value, agents), name, where)
                    recorder.place(name, leads[2], pairs[0, 0], where)[row, :, :, e] = pairs
                else:
                    for agent, given in value.items():
                        own = numbers(given, name, where)
                        check_shape(own.shape, 1, len(agents), envs, name, where)
                        recorder.place(name, leads[1], own, where)[row, place[agent], e] = own
    return recorder.arrays


def global_states(
    fragments: Sequence[Fragment], bootstrap_rows: np.ndarray, shape: tuple[int, int]
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """The states before each row, [T, E, S], and those that follow the bootstrap rows, [K, S]; twice None without any.

    Args:
        fragments: all of the batch.
        bootstrap_rows: [K] rows t·E + e, sorted.
        shape: T, E.

    Raises:
        ValueError: a state is missing, or has another size.
    """
    told: list[Mapping[int, np.ndarray]] = [getattr(fragment.episode, "states", {}) for fragment in fragments]
    sample = next((state for states in told for state in states.values()), None)
    if sample is None:
        return None, None
    steps, envs = shape
    before = np.zeros((steps, envs, *sample.shape), np.float32)
    following = np.zeros((len(bootstrap_rows), *sample.shape), np.float32)
    for fragment, states in zip(fragments, told, strict=True):
        rows = fragment.rows(fragment.times)
        numbers = rows * envs + fragment.column
        after = np.searchsorted(bootstrap_rows, numbers)
        cut = np.isin(numbers, bootstrap_rows)
        for time, row, k, is_cut in zip(fragment.times.tolist(), rows, after, cut, strict=True):
            before[row, fragment.column] = _state(fragment, states, time, sample.shape)
            if is_cut:
                following[k] = _state(fragment, states, time + 1, sample.shape)
    return before, following


def _state(fragment: Fragment, states: Mapping[int, np.ndarray], time: int, shape: tuple[int, ...]) -> np.ndarray:
    if time not in states:
        raise ValueError(
            f"episode {fragment.episode.id_} came without the global state before its step {time}, others with theirs; "
            "all runners must record it"
        )
    if states[time].shape != shape:
        raise ValueError(
            f"episode {fragment.episode.id_}: the global state before step {time} has {len(states[time])} numbers, "
            f"in other steps {shape[0]}"
        )
    return states[time]
