"""When the agents of a team act, wait and end, and what that makes of the team: where its own stream goes on.

Letters as in `joint_batch`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from thrust_rllib.joint_batch import JointBatch


def all_agents(batch: JointBatch, name: str) -> np.ndarray:
    """An array [T, N, E] of the streams of all modules."""
    return np.concatenate([getattr(streams, name) for streams in batch.modules.values()], axis=1)


@dataclass(frozen=True)
class Lives:
    """What is known of each agent at each row of an episode, [T, N, E].

    | field   | meaning                                                                           |
    |---------|-----------------------------------------------------------------------------------|
    | latest  | the row in which it acted last, this one or an earlier one; −1 where there is none |
    | ended   | its stream ended there                                                            |
    | returns | it acts in a later row: an end between them is that of a fragment                 |
    """

    latest: np.ndarray
    ended: np.ndarray
    returns: np.ndarray

    @classmethod
    def of(cls, batch: JointBatch) -> Lives:
        """Of all agents, in the order of `batch.agents`."""
        steps = len(batch.valid)
        time = np.arange(steps)[:, None, None]
        acted = all_agents(batch, "present") & batch.valid[:, None]
        latest = np.maximum.accumulate(np.where(acted, time, -1))
        begins = np.maximum.accumulate(np.where(batch.episode_start, time[:, 0], 0))[:, None]
        latest = np.where(latest >= begins, latest, -1)
        ends = all_agents(batch, "terminated") | all_agents(batch, "truncated")
        ended = (latest >= 0) & np.take_along_axis(ends, latest.clip(0), 0)
        following = _next_row(acted)
        begins = np.concatenate([np.broadcast_to(begins, acted.shape), np.full((1, *acted.shape[1:]), steps)])
        return cls(latest, ended, np.take_along_axis(begins, following, 0) == begins[:-1])


def _next_row(acts: np.ndarray) -> np.ndarray:
    """[T, …] the first row behind each one in which `acts` [T, …] is true; T where there is none."""
    steps = len(acts)
    time = np.arange(steps).reshape(-1, *[1] * (acts.ndim - 1))
    from_here_on = np.minimum.accumulate(np.where(acts, time, steps)[::-1])[::-1]
    return np.concatenate([from_here_on[1:], np.full((1, *acts.shape[1:]), steps)])


def who_follows(batch: JointBatch) -> np.ndarray:
    """Who is there behind each bootstrap row: the row whose bootstrap observation an agent sees then, or −1, [N, K].

    Those that acted in the row and go on; where nobody does, those that wait, with what they saw last.
    """
    rows = batch.bootstrap_rows
    t, e = np.divmod(rows, batch.num_envs)
    latest = Lives.of(batch).latest[t, :, e].T  # [N, K]
    agents = np.arange(len(latest))[:, None]
    found = latest * batch.num_envs + e
    goes_on = (latest >= 0) & ~all_agents(batch, "terminated")[latest.clip(0), agents, e] & np.isin(found, rows)
    acted = goes_on & (latest == t)
    return np.where(np.where(acted.any(0), acted, goes_on), found, -1)


@dataclass(frozen=True)
class TeamEnds:
    """Where the team acts, and where its stream ends, bool [T, E] each: for good, or only in this batch."""

    present: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray

    @classmethod
    def of(cls, batch: JointBatch) -> TeamEnds:
        """The team acts where anybody does, and ends with an episode, a column, or a fragment of an episode.

        Such an end is truncated where it is bootstrapped from. A fragment ends where nobody's stream goes on, and
        somebody returns later.
        """
        goes_on = np.zeros(batch.valid.shape, bool)
        goes_on.reshape(-1)[batch.bootstrap_rows] = True
        lives = Lives.of(batch)
        acts = (all_agents(batch, "present") & batch.valid[:, None]).any(1)
        is_open = ((lives.latest >= 0) & ~lives.ended).any(1)
        fragment = goes_on & ~is_open & (lives.ended & lives.returns).any(1)
        episode = np.vstack([batch.episode_start.cumsum(0), np.full(batch.num_envs, -1)])
        last = np.take_along_axis(episode, _next_row(acts), 0) != episode[:-1]
        last = acts & (last | fragment)
        return cls(acts, last & ~goes_on, last & goes_on)
