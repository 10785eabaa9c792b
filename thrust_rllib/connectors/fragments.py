"""Where episodes, whole ones and fragments, stand in a `JointBatch`.

A *column* of the batch holds fragments behind each other: those of one environment of one runner, in the order in which
they were sampled, so that both doors give the same layout. Episodes of other classes than `JointEpisode` do not say
where they come from: they are laid out one after the other, as high as the longest; one that begins in the middle of an
episode opens a column, for it would be taken for what follows the one in front of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode

from thrust_rllib.connectors.agent_steps import step_times
from thrust_rllib.joint_episode import JointEpisode


@dataclass(frozen=True)
class Fragment:
    """An episode, or a part of it, in the batch.

    | field  | meaning                                                                                     |
    |--------|---------------------------------------------------------------------------------------------|
    | times  | [R] environment steps of its rows: those that its agents' steps began at, and all it played  |
    | column | e                                                                                           |
    | first  | t of its first row                                                                          |
    """

    episode: MultiAgentEpisode
    times: np.ndarray
    column: int
    first: int

    @property
    def begins_episode(self) -> bool:
        """Whether its first row is that of its episode: one that completes a step of that row only does not."""
        return int(self.times[0]) == 0 and self.episode.env_t_started == 0

    def rows(self, times: Sequence[int] | np.ndarray) -> np.ndarray:
        """Which rows t these environment steps are."""
        return self.first + np.searchsorted(self.times, times)


def fragments_of(episodes: Sequence[MultiAgentEpisode]) -> Iterator[Fragment]:
    """The episodes that have rows, each at its place."""
    placed = [(episode, times) for episode in episodes if len(times := _row_times(episode))]
    height = max((len(times) for _, times in placed), default=0)
    places = {(e.runner_index, e.env_index) for e, _ in placed if isinstance(e, JointEpisode)}
    columns = {place: column for column, place in enumerate(sorted(places))}
    used = [0] * len(columns)
    shelf: int | None = None
    for episode, times in placed:
        if isinstance(episode, JointEpisode):
            column = columns[episode.runner_index, episode.env_index]
        elif shelf is not None and times[0] == 0 and used[shelf] + len(times) <= height:
            column = shelf
        else:
            column = shelf = len(used)
        if column == len(used):
            used.append(0)
        yield Fragment(episode, times, column, used[column])
        used[column] += len(times)


def _row_times(episode: MultiAgentEpisode) -> np.ndarray:
    """Environment steps of an episode's rows, ascending: open steps that were completed here, then its own."""
    start = episode.env_t_started
    earlier = {
        times[0] for agent in episode.agent_episodes if (times := step_times(episode, agent)) and times[0] < start
    }
    return np.array([*sorted(earlier), *range(start, episode.env_t)], np.int64)
