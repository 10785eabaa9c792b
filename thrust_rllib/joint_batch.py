"""The data type that both doors fill and the learner reads: one rollout, all agents, the same time steps.

Letters: T steps, E environments, N agents, n agents of one module, M valid joint rows, K bootstrap rows, C training
sequences, A categories of all H heads of an action, S numbers of a recurrent module's state. A *joint row* is one step
t of one environment e with all agents' data of that step; joint rows are numbered t·E + e inside a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from thrust_rllib.envs.joint_env import AgentID as AgentID  # named here, too, for all who read a batch

ModuleID = str


class AlignmentError(RuntimeError):
    """The audit's: agents of one joint row disagree on where it comes from, or a row is read too often."""


@dataclass
class ModuleStreams:
    """The agents that one module plays, their streams side by side.

    Arrays are time first, so that a step is written to, and read from, one contiguous block.

    | field          | shape           | meaning                                                            |
    |----------------|-----------------|--------------------------------------------------------------------|
    | agents         | n               | who: the agent axis of every array below, in this order            |
    | obs            | [T, n, E, …]    | what the module saw (encoded, and normalised if that is on)        |
    | actions        | [T, n, E, …]    | categories from 0, or the unscaled value of a Box action           |
    | action_logp    | [T, n, E]       | log-probability under the policy that sampled                      |
    | rewards        | [T, n, E]       | reward of this step                                                |
    | present        | [T, n, E] bool  | the agent acted at this step                                       |
    | terminated     | [T, n, E] bool  | the agent's stream ends here, nothing follows                      |
    | truncated      | [T, n, E] bool  | the agent's stream is cut here, its value goes on                  |
    | bootstrap_obs  | [n, K, …]       | the observation that follows each row of `JointBatch.bootstrap_rows` |
    |                |                 | (any observation where the agent is terminated or absent: not read) |
    | action_mask    | [T, n, E, A]    | allowed categories at sampling time, or None                       |
    | origin         | [T, n, E, 2]    | int64: a number of the episode, and the step of it that the agent  |
    |                |                 | acted at, as its own stream says; or None. Read by the audit       |
    | state_in       | [n, C, S]       | the agent's state entering its first step at or behind each row of |
    |                |                 | `JointBatch.sequence_rows` (`MemoryLayout` says what the numbers   |
    |                |                 | are); None for a module without a state                            |
    | head_logp      | [T, n, E, H]    | `action_logp` head by head, filled with ratio="per_head"; or None  |
    """

    agents: tuple[AgentID, ...]
    obs: np.ndarray
    actions: np.ndarray
    action_logp: np.ndarray
    rewards: np.ndarray
    present: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    bootstrap_obs: np.ndarray
    action_mask: np.ndarray | None = None
    origin: np.ndarray | None = None
    state_in: np.ndarray | None = None
    head_logp: np.ndarray | None = None


@dataclass(frozen=True)
class AgentStream:
    """One agent's own stream: views of `ModuleStreams` without the agent axis ([T, E, …]; bootstrap [K, …])."""

    agent_id: AgentID
    module_id: ModuleID
    obs: np.ndarray
    actions: np.ndarray
    action_logp: np.ndarray
    rewards: np.ndarray
    present: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    bootstrap_obs: np.ndarray
    action_mask: np.ndarray | None
    head_logp: np.ndarray | None = None


@dataclass
class JointBatch:
    """A rollout of E environments over T steps, every agent on the same rows.

    | field          | shape       | meaning                                                                   |
    |----------------|-------------|---------------------------------------------------------------------------|
    | modules        |             | {module id: `ModuleStreams`}, ids sorted                                  |
    | bootstrap_rows | [K] int64   | rows t·E + e whose successor is not a row of this batch: a truncated step, |
    |                |             | or the last row of an environment whose episode goes on. Sorted           |
    | sequence_rows  | [C] int64   | rows at which a training sequence of their column begins: the column's     |
    |                |             | first and every `max_seq_len` rows behind it. A sequence may hold starts   |
    |                |             | of episodes. Sorted; None without recurrent modules                        |
    | episode_start  | [T, E] bool | first step of an episode                                                  |
    | valid          | [T, E] bool | false on padding                                                          |
    | global_state   | [T, E, S]   | float32, the environment's state before each step, for a central critic;  |
    |                |             | 0 on padding. None where nobody asks for it                               |
    | bootstrap_state | [K, S]     | the state that follows each of `bootstrap_rows` (before the automatic     |
    |                |             | reset where the episode is over); None without `global_state`             |
    | extras         |             | {name: array} from the environment: of the team [T, E, …], of agents      |
    |                |             | [T, N, E, …], of pairs of agents [T, N, N, E]; agents in the order of     |
    |                |             | `agents` (module by module), 0 for those that are absent                  |

    Batches of different T or E are never padded to a common rectangle: the learner takes a list of them.
    Raises `ValueError` from `check` where shapes disagree.
    """

    modules: dict[ModuleID, ModuleStreams]
    bootstrap_rows: np.ndarray
    episode_start: np.ndarray
    valid: np.ndarray
    global_state: np.ndarray | None = None
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)
    sequence_rows: np.ndarray | None = None
    bootstrap_state: np.ndarray | None = None

    @property
    def num_steps(self) -> int:
        """T, the number of time steps."""
        return int(self.valid.shape[0])

    @property
    def num_envs(self) -> int:
        """E, the number of environments."""
        return int(self.valid.shape[1])

    @property
    def agents(self) -> tuple[AgentID, ...]:
        """All N agents, module by module: the order of the learner's agent axis."""
        return tuple(agent for streams in self.modules.values() for agent in streams.agents)

    def env_steps(self) -> int:
        """M, the number of valid joint rows (RLlib counts sampled steps by this)."""
        return int(self.valid.sum())

    def agent_steps(self) -> int:
        """Number of steps in which an agent acted, over all agents."""
        return int(sum((s.present & self.valid[:, None]).sum() for s in self.modules.values()))

    def __len__(self) -> int:
        return self.env_steps()

    def stream(self, agent_id: AgentID) -> AgentStream:
        """The agent's own stream, as views of shape [T, E, …]."""
        for module_id, streams in self.modules.items():
            if agent_id in streams.agents:
                j = streams.agents.index(agent_id)
                mask, head_logp = streams.action_mask, streams.head_logp
                return AgentStream(
                    agent_id=agent_id,
                    module_id=module_id,
                    bootstrap_obs=streams.bootstrap_obs[j],
                    action_mask=None if mask is None else mask[:, j],
                    head_logp=None if head_logp is None else head_logp[:, j],
                    **{name: getattr(streams, name)[:, j] for name in _STEP_FIELDS},
                )
        raise KeyError(f"no agent {agent_id!r} in this batch; it holds {list(self.agents)}")

    def streams(self) -> Iterator[AgentStream]:
        """All agents' streams, in the order of `agents`."""
        return (self.stream(agent_id) for agent_id in self.agents)

    def check(self) -> JointBatch:
        """Return self; raise `ValueError` where a shape contradicts the tables above."""
        if self.valid.ndim != 2 or self.valid.size == 0:
            raise ValueError(f"the rollout is empty: valid has shape {self.valid.shape}, needed [T, E] with T, E > 0")
        steps, envs = self.valid.shape
        _need("episode_start", self.episode_start.shape, (steps, envs))
        _check_row_numbers("bootstrap_rows", self.bootstrap_rows, steps * envs)
        self._check_states()
        num_sequences = 0
        if self.sequence_rows is not None:
            _check_row_numbers("sequence_rows", self.sequence_rows, steps * envs)
            num_sequences = len(self.sequence_rows)
            if padding := self.sequence_rows[~self.valid.ravel()[self.sequence_rows]].tolist():
                raise ValueError(f"sequence_rows has {padding}, which are padding; a sequence begins at a valid row")
            first = self.valid.argmax(axis=0) * envs + np.arange(envs)
            if missing := np.setdiff1d(first[self.valid.any(axis=0)], self.sequence_rows).tolist():
                raise ValueError(f"sequence_rows lacks {missing}, the first rows of their columns")
        if not self.modules:
            raise ValueError("a JointBatch needs at least one module with one agent; got none")
        for module_id, streams in self.modules.items():
            n = len(streams.agents)
            for name in _STEP_FIELDS:
                array = getattr(streams, name)
                exact = array.ndim if name in ("obs", "actions") else 3
                _need(f"{name} of module {module_id!r}", array.shape[:exact][:3], (steps, n, envs))
                if array.ndim < exact or (name not in ("obs", "actions") and array.ndim != 3):
                    raise ValueError(
                        f"{name} of module {module_id!r} has shape {array.shape}, needed [T, n, E] = {(steps, n, envs)}"
                    )
            if streams.action_mask is not None:
                _need(f"action_mask of module {module_id!r}", streams.action_mask.shape[:-1], (steps, n, envs))
            if streams.head_logp is not None:
                _need(f"head_logp of module {module_id!r}", streams.head_logp.shape[:-1], (steps, n, envs))
            if streams.origin is not None:
                _need(f"origin of module {module_id!r}", streams.origin.shape, (steps, n, envs, 2))
            if streams.state_in is not None:
                if self.sequence_rows is None:
                    raise ValueError(f"module {module_id!r} has state_in, but sequence_rows is None; fill both or none")
                _need(f"state_in of module {module_id!r}", streams.state_in.shape[:2], (n, num_sequences))
                self._check_ends(module_id, streams)
            _need(
                f"bootstrap_obs of module {module_id!r}",
                streams.bootstrap_obs.shape[:2],
                (n, len(self.bootstrap_rows)),
            )
        if len(set(self.agents)) != len(self.agents):
            raise ValueError(f"an agent stands in two modules: {list(self.agents)}")
        return self

    def _check_states(self) -> None:
        given = self.global_state, self.bootstrap_state
        if given[0] is None and given[1] is None:
            return
        if given[0] is None or given[1] is None:
            raise ValueError("one of global_state and bootstrap_state is None; fill both or none")
        _need("global_state", given[0].shape, (self.num_steps, self.num_envs, *given[0].shape[-1:]))
        _need("bootstrap_state", given[1].shape, (len(self.bootstrap_rows), *given[0].shape[-1:]))

    def _check_ends(self, module_id: ModuleID, streams: ModuleStreams) -> None:
        """Raises where an agent with a memory goes on behind its own end without a new episode or sequence."""
        begins = self.episode_start.copy()
        begins.reshape(-1)[self.sequence_rows] = True
        ends = streams.present & (streams.terminated | streams.truncated)
        before = np.cumsum(ends, axis=0) - ends  # [T, n, E], ends in earlier rows of the column
        since = np.maximum.accumulate(np.where(begins, np.arange(len(begins))[:, None], 0), axis=0)
        wrong = streams.present & (before > np.take_along_axis(before, since[:, None], axis=0))
        if wrong.any():
            t, agent, e = (int(i) for i in np.argwhere(wrong)[0])
            raise ValueError(
                f"agent {streams.agents[agent]!r} of module {module_id!r} acts in row (t, e) = {(t, e)}, behind its "
                "own end: a memory must begin anew there. Mark the row in episode_start or in sequence_rows"
            )


_STEP_FIELDS = ("obs", "actions", "action_logp", "rewards", "present", "terminated", "truncated")


def _check_row_numbers(name: str, numbers: np.ndarray, limit: int) -> None:
    rows = np.asarray(numbers)
    if rows.ndim != 1 or (np.diff(rows) <= 0).any() or (rows.size and not 0 <= rows[0] <= rows[-1] < limit):
        raise ValueError(
            f"{name} is {rows.tolist()}; needed: rows t·E + e of this batch, all below {limit}, sorted, each once"
        )


def _need(name: str, given: tuple[int, ...], needed: tuple[int, ...]) -> None:
    if tuple(given) != tuple(needed):
        raise ValueError(f"{name} has leading shape {tuple(given)}, needed {tuple(needed)}")
