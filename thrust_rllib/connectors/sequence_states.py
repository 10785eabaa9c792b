"""Where the training sequences of a batch of episodes begin, and the states that enter them.

Letters as in `joint_batch`: E columns, n agents of a module, C sequences, S numbers of a state.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from thrust_rllib.connectors.agent_steps import AgentSteps, ModuleSteps
from thrust_rllib.connectors.fragments import Fragment
from thrust_rllib.connectors.team_actions import MEMORY_IN


def sequence_rows(
    fragments: Sequence[Fragment], num_envs: int, length: int | None, whole_episodes: bool = False
) -> np.ndarray:
    """Rows t·E + e [C] at which sequences begin, sorted: the first of each column, and every `length` rows behind it.

    The count begins anew with a fragment in which an episode goes on. Steps that were open at the last cut were chosen
    with older weights: they are sequences of their own, so that the steps behind them begin with the very state that
    sampling had.

    Args:
        fragments: of the batch.
        num_envs: E.
        length: rows of a sequence; None: all of a column.
        whole_episodes: the count begins anew with every episode, too.
    """
    starts = []
    counted_from: dict[int, int] = {}  # by column
    step = length or 1 + max(fragment.first + len(fragment.times) for fragment in fragments)
    for fragment in fragments:
        first, stop, column = fragment.first, fragment.first + len(fragment.times), fragment.column
        if fragment.begins_episode and column in counted_from and not whole_episodes:
            begin = first + (counted_from[column] - first) % step
        else:
            begin = first + int(np.searchsorted(fragment.times, fragment.episode.env_t_started))
            counted_from[column] = begin
            starts.append(np.arange(first, begin, step) * num_envs + column)
        starts.append(np.arange(begin, stop, step) * num_envs + column)
    return np.sort(np.concatenate(starts))


def entering_states(
    steps: ModuleSteps, fragments: Sequence[Fragment], begins: np.ndarray, num_envs: int, size: int
) -> np.ndarray:
    """State of each agent entering its first step in each sequence, float32 [n, C, S]; zeros where it has no step.

    Args:
        steps: of a recurrent module's agents.
        fragments: where each piece of them stands.
        begins: of `sequence_rows`.
        num_envs: E.
        size: S.

    Raises:
        ValueError: steps without a state, or with one of another size than the module's.
    """
    states = np.zeros((len(steps.codec.agents), len(begins), size), np.float32)
    homes = list(zip(fragments, steps.pieces, strict=True))
    for fragment, piece in reversed(homes):  # of two pieces in one sequence the earlier one has the last word
        memory = _memory(piece, size)
        mine = np.flatnonzero(begins % num_envs == fragment.column)
        sequence = np.searchsorted(begins[mine] // num_envs, fragment.rows(piece.times), side="right") - 1
        first = np.flatnonzero(np.diff(sequence, prepend=-1))
        states[piece.index, mine[sequence[first]]] = memory[first]
    return states


def _memory(piece: AgentSteps, size: int) -> np.ndarray:
    if piece.memory is None or len(piece.memory) != len(piece.times):
        raise ValueError(
            f"agent {piece.agent!r}: its steps came without {MEMORY_IN!r}, the state in which its recurrent module "
            "entered each of them. A JointEpisodeRunner's own pipelines store it; episodes from elsewhere, or of "
            "random actions, cannot train a recurrent module."
        )
    if piece.memory.shape[1:] != (size,):
        raise ValueError(
            f"agent {piece.agent!r}: the states of its steps have shape {piece.memory.shape[1:]}, those of its "
            f"recurrent module {(size,)}: another module sampled them"
        )
    return piece.memory
