"""Where the training sequences of a batch of episodes begin, and the states that enter them.

Letters as in `joint_batch`: E columns, n agents of a module, C sequences, S numbers of a state.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from thrust_rllib.connectors.agent_steps import AgentSteps, ModuleSteps
from thrust_rllib.connectors.fragments import Fragment
from thrust_rllib.connectors.team_actions import MEMORY_IN


def sequence_rows(fragments: Sequence[Fragment], num_envs: int, length: int | None) -> np.ndarray:
    """Rows t·E + e [C] at which sequences begin, sorted: a fragment's first, and every `length` rows behind it in it.

    Steps that were open at the last cut were chosen with older weights. They are sequences of their own, so that the
    steps behind them begin with the very state that sampling had.

    Args:
        fragments: of the batch.
        num_envs: E.
        length: rows of a sequence; None: the whole fragment.
    """
    starts = []
    for fragment in fragments:
        first, stop = fragment.first, fragment.first + len(fragment.times)
        own = first + int(np.searchsorted(fragment.times, fragment.episode.env_t_started))
        for begin, end in ((first, own), (own, stop)):
            starts.append(np.arange(begin, end, length or len(fragment.times)) * num_envs + fragment.column)
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
    for fragment, piece in zip(fragments, steps.pieces, strict=True):
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
