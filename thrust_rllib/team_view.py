"""What a team's critic sees, and the team as one agent that sees it: a `JointBatch` with a single stream.

Letters as in `joint_batch`; O numbers of a view.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from thrust_rllib.joint_batch import AgentID, JointBatch, ModuleStreams
from thrust_rllib.rl_modules.learner_modules import TEAM_CRITIC
from thrust_rllib.team_lives import TeamEnds, all_agents, who_follows

TEAM: AgentID = "team"


@dataclass(frozen=True)
class TeamView:
    """One vector of O numbers for each joint row.

    The observations of all agents as their modules see them, behind each other in the order of `agents`, 0 for those
    that are absent; a flag for each that is present; then columns of the environment's state. Or the state alone.

    Args:
        agents: all of the team, in an order that changes of its modules leave as it is.
        widths: numbers of each one's observation; () where observations are not part of it.
        state: columns of the environment's state that are.
    """

    agents: tuple[AgentID, ...]
    widths: tuple[int, ...] = ()
    state: tuple[int, ...] = ()

    @property
    def width(self) -> int:
        """O."""
        return sum(self.widths) + (len(self.agents) if self.widths else 0) + len(self.state)

    def value_of(self, agent: AgentID) -> int:
        """Which of the critic's values is this agent's, where it has one of each."""
        return self.agents.index(agent)

    def of_rows(self, batch: JointBatch) -> np.ndarray:
        """The views of a batch's rows, float32 [T, E, O]."""
        state = self._columns(batch.global_state)
        if not self.widths:
            return state
        found = np.zeros((*batch.valid.shape, self.width), np.float32)
        at = self._places(batch)
        for streams in batch.modules.values():
            for j, agent in enumerate(streams.agents):
                columns, flag = at[agent]
                present = streams.present[:, j]
                obs = streams.obs[:, j].reshape(*present.shape, columns.stop - columns.start)
                np.copyto(found[..., columns], obs, where=present[..., None])
                found[..., flag] = present
        found[..., self.width - len(self.state) :] = state
        return found

    def of_following(self, batch: JointBatch) -> np.ndarray:
        """The views of what follows the bootstrap rows, float32 [K, O]; who is there: see `who_follows`."""
        state = self._columns(batch.bootstrap_state)
        if not self.widths:
            return state
        rows = batch.bootstrap_rows
        found = np.zeros((len(rows), self.width), np.float32)
        seen_behind = dict(zip(batch.agents, who_follows(batch), strict=True))
        at = self._places(batch)
        for streams in batch.modules.values():
            for j, agent in enumerate(streams.agents):
                columns, flag = at[agent]
                there = seen_behind[agent] >= 0
                obs = streams.bootstrap_obs[j, np.searchsorted(rows, seen_behind[agent][there])]
                found[there, columns] = obs.reshape(len(obs), columns.stop - columns.start)
                found[:, flag] = there
        found[:, self.width - len(self.state) :] = state
        return found

    def _columns(self, state: np.ndarray | None) -> np.ndarray:
        """The columns of a state [..., S] that are part of the view."""
        if not self.state:
            return np.zeros((0,), np.float32)
        if state is None:
            raise ValueError(
                "the team's critic reads the environment's state, and the rollout has none (JointBatch.global_state "
                "and bootstrap_state); sample it with the same critic and critic_config, for which runners record it"
            )
        return state[..., list(self.state)]

    def _places(self, batch: JointBatch) -> dict[AgentID, tuple[slice, int]]:
        """{agent: (columns of its observation, column of its flag)}."""
        if unknown := [agent for agent in batch.agents if agent not in self.agents]:
            raise ValueError(f"the team's critic was built for agents {list(self.agents)}; the rollout has {unknown}")
        starts = np.cumsum([0, *self.widths])
        return {
            agent: (slice(int(start), int(start) + width), int(starts[-1]) + i)
            for i, (agent, start, width) in enumerate(zip(self.agents, starts, self.widths, strict=False))
        }


def team_batch(batch: JointBatch, view: TeamView | None, rewards: np.ndarray, max_seq_len: int | None) -> JointBatch:
    """The team as one agent of the module `TEAM_CRITIC`, present in every row in which anybody acts.

    Args:
        batch: of all agents.
        view: what it sees; None where no network is asked.
        rewards: [T, E].
        max_seq_len: rows of a training sequence, where the batch does not say where they begin; None for a column.
    """
    steps, envs = batch.valid.shape
    ends = TeamEnds.of(batch)
    nothing = np.zeros((steps, 1, envs), np.float32)
    obs, following = np.zeros((steps, envs, 0), np.float32), np.zeros((len(batch.bootstrap_rows), 0), np.float32)
    if view is not None:
        obs, following = view.of_rows(batch), view.of_following(batch)
    streams = ModuleStreams(
        agents=(TEAM,),
        obs=obs[:, None],
        actions=nothing,
        action_logp=nothing,
        rewards=rewards[:, None],
        present=ends.present[:, None],
        terminated=ends.terminated[:, None],
        truncated=ends.truncated[:, None],
        bootstrap_obs=following[None],
    )
    rows = batch.sequence_rows
    return dataclasses.replace(
        batch,
        modules={TEAM_CRITIC: streams},
        sequence_rows=_sequence_rows(batch, ends, max_seq_len) if rows is None else rows,
        extras={},
        global_state=None,
        bootstrap_state=None,
    )


def with_memory(batches: Sequence[JointBatch], initial: np.ndarray) -> list[JointBatch]:
    """Batches of `team_batch` whose critic has a memory, which begins anew with each training sequence.

    Args:
        batches: of teams.
        initial: [S], the state in which it begins: nobody runs the critic while sampling.
    """
    found = []
    for batch in batches:
        assert batch.sequence_rows is not None
        states = np.broadcast_to(initial, (1, len(batch.sequence_rows), len(initial)))
        streams = dataclasses.replace(batch.modules[TEAM_CRITIC], state_in=states)
        found.append(dataclasses.replace(batch, modules={TEAM_CRITIC: streams}))
    return found


def for_each_agent(team: JointBatch, batch: JointBatch) -> JointBatch:
    """The team once for each agent, with the ends of that agent.

    A memory takes one more step behind an end, into what is seen then; that of the other agents goes on without it.

    Args:
        team: of `with_memory`.
        batch: of the agents.
    """
    acted, terminated, truncated = (all_agents(batch, name) for name in ("present", "terminated", "truncated"))
    later = np.zeros_like(acted)
    later[:-1] = np.maximum.accumulate(acted[:0:-1])[::-1]
    streams, (_, n, _) = team.modules[TEAM_CRITIC], acted.shape

    def for_each(x: np.ndarray, axis: int) -> np.ndarray:
        return np.broadcast_to(x, (*x.shape[:axis], n, *x.shape[axis + 1 :]))

    assert streams.state_in is not None
    each = dataclasses.replace(
        streams,
        agents=batch.agents,
        obs=for_each(streams.obs, 1),
        present=for_each(streams.present, 1),
        terminated=np.zeros_like(acted),
        truncated=acted & ~terminated & (truncated | ~later),
        rewards=for_each(streams.rewards, 1),
        bootstrap_obs=for_each(streams.bootstrap_obs, 0),
        state_in=for_each(streams.state_in, 0),
    )
    return dataclasses.replace(team, modules={TEAM_CRITIC: each})


def _sequence_rows(batch: JointBatch, ends: TeamEnds, length: int | None) -> np.ndarray:
    """The first valid row of each column, every `length` rows behind it, and those behind the end of a fragment."""
    steps = len(batch.valid)
    behind = np.arange(steps)[:, None] - batch.valid.argmax(axis=0)
    begins = (behind >= 0) & (behind % (length or steps) == 0)
    begins[1:] |= ends.truncated[:-1] & ~batch.episode_start[1:]
    return np.flatnonzero(begins & batch.valid)
