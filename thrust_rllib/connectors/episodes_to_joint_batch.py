"""From RLlib's episodes to a `JointBatch`: last piece of the general door's learner pipeline.

Letters as in `joint_batch`: T rows, E columns, n agents of a module, K bootstrap rows; R steps of one agent.

A *column* of the batch holds fragments behind each other: those of one environment of one runner, in the order in which
they were sampled, so that both doors give the same layout. Episodes of other classes than `JointEpisode` do not say
where they come from: they are laid out one after the other, as high as the longest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core.columns import Columns
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.annotations import override
from ray.rllib.utils.spaces.space_utils import BatchedNdArray

from thrust_rllib.connectors.team_actions import MODULE_INPUT
from thrust_rllib.connectors.team_codec import ModuleCodec, TeamCodec
from thrust_rllib.envs.spaces import map_space
from thrust_rllib.joint_batch import AgentID, JointBatch, ModuleID, ModuleStreams
from thrust_rllib.joint_episode import JointEpisode

JOINT_BATCH = "joint_batch"
"""Column of the pipeline's result."""


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

    def rows(self, step_times: Sequence[int]) -> np.ndarray:
        """Which rows t these environment steps are."""
        return self.first + np.searchsorted(self.times, step_times)


@dataclass(frozen=True)
class Following:
    """What follows the last steps of some agents: rows t·E + e [m], agents' indices [m], observations [m, …]."""

    rows: np.ndarray
    agents: np.ndarray
    obs: np.ndarray

    @classmethod
    def nothing(cls, shape: tuple[int, ...]) -> Following:
        """Nobody: m is 0."""
        return cls(np.empty(0, np.int64), np.empty(0, np.int64), np.empty((0, *shape), np.float32))


class EpisodesToJointBatch(ConnectorV2):
    """`batch["joint_batch"]` from episodes, whole ones and fragments.

    An agent stands in the row of the environment step it acted at. A step that was open where the last fragment was
    cut is completed in this one: its row stands in front of the others, with only the agents whose steps are closed
    there. The end of a fragment that goes on, and of a truncated agent, carries the observation to bootstrap from.

    Args:
        input_observation_space: as of every ConnectorV2; not used.
        input_action_space: not used.
        codec: the team.
        check_bounds: compare observations with the bounds of their space, not only look for NaN and infinity.
        audit: fill `ModuleStreams.origin`.
        with_extra_step: RLlib's `AddOneTsToEpisodesAndTruncate` stands in front: the last step of each agent is not
            one of the environment's.
        **kwargs: for RLlib.
    """

    def __init__(
        self,
        input_observation_space: gym.Space | None = None,
        input_action_space: gym.Space | None = None,
        *,
        codec: TeamCodec,
        check_bounds: bool = True,
        audit: bool = False,
        with_extra_step: bool = False,
        **kwargs: Any,
    ) -> None:
        self.codec = codec
        self._check_bounds = check_bounds
        self._audit = audit
        self._extra = int(with_extra_step)
        super().__init__(input_observation_space, input_action_space, **kwargs)

    @override(ConnectorV2)
    def get_ctor_args_and_kwargs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (self.input_observation_space, self.input_action_space), {
            "codec": self.codec,
            "check_bounds": self._check_bounds,
            "audit": self._audit,
            "with_extra_step": bool(self._extra),
        }

    @override(ConnectorV2)
    def __call__(
        self, *, episodes: Sequence[MultiAgentEpisode], batch: dict[str, Any], **kwargs: Any
    ) -> dict[str, JointBatch]:
        return {JOINT_BATCH: self.joint_batch(episodes, batch.get(Columns.OBS))}

    def joint_batch(
        self, episodes: Sequence[MultiAgentEpisode], observations: Mapping[Any, Sequence[Any]] | None = None
    ) -> JointBatch:
        """All episodes in one batch.

        Args:
            episodes: at least one, with at least one step.
            observations: in place of the episodes' own, as RLlib's learner pieces write them (frame stacking):
                {(episode id, agent, module): one for each step, and one for what follows}.

        Raises:
            ValueError: no step; a reward or observation that is not finite or outside its space; a step without its
                log-probability; an agent or module that the team does not have.
        """
        fragments = list(self._fragments(episodes))
        if not fragments:
            raise ValueError("the rollout is empty: no episode came with a step in it")
        envs = 1 + max(f.column for f in fragments)
        steps = max(f.first + len(f.times) for f in fragments)
        valid, episode_start = np.zeros((steps, envs), bool), np.zeros((steps, envs), bool)
        for f in fragments:
            valid[f.first : f.first + len(f.times), f.column] = True
            episode_start[f.first, f.column] = f.times[0] == 0
        last_in_column = {f.column: f for f in fragments}
        streams, following = {}, {}
        for module_id, codec in self.codec.modules.items():
            gathered = _Gathered(codec, module_id, self._extra, self._check_bounds, self._audit)
            for fragment in fragments:
                goes_on = fragment is not last_in_column[fragment.column]
                for index, agent in enumerate(codec.agents):
                    if agent in fragment.episode.agent_episodes:
                        gathered.add(fragment, index, agent, goes_on, observations)
            streams[module_id], following[module_id] = gathered.streams((steps, len(codec.agents), envs))
        rows = np.unique(np.concatenate([f.rows for f in following.values()]))
        for module_id, after in following.items():
            mine = streams[module_id]
            mine.bootstrap_obs = np.zeros((len(mine.agents), len(rows), *mine.obs.shape[3:]), np.float32)
            mine.bootstrap_obs[after.agents, np.searchsorted(rows, after.rows)] = after.obs
        return JointBatch(
            modules=streams,
            bootstrap_rows=rows,
            episode_start=episode_start,
            valid=valid,
            extras=_extras(fragments, list(self.codec.module_of), (steps, envs)),
        ).check()

    def _fragments(self, episodes: Sequence[MultiAgentEpisode]) -> Iterator[Fragment]:
        """Where each episode stands in the batch."""
        placed = [(episode, times) for episode in episodes if len(times := _row_times(episode))]
        height = max((len(times) for _, times in placed), default=0)
        places = {(e.runner_index, e.env_index) for e, _ in placed if isinstance(e, JointEpisode)}
        columns = {place: column for column, place in enumerate(sorted(places))}
        used = [0] * len(columns)
        shelf: int | None = None
        for episode, times in placed:
            if isinstance(episode, JointEpisode):
                column = columns[episode.runner_index, episode.env_index]
            elif shelf is not None and used[shelf] + len(times) <= height:
                column = shelf
            else:
                column = shelf = len(used)
            if column == len(used):
                used.append(0)
            yield Fragment(episode, times, column, used[column])
            used[column] += len(times)


class _Gathered:
    """The steps of one module's agents, piece by piece; encoded and written into arrays all at once."""

    def __init__(self, codec: ModuleCodec, module_id: ModuleID, extra: int, check_bounds: bool, audit: bool) -> None:
        self._codec = codec
        self._module_id = module_id
        self._extra = extra
        self._check_bounds = check_bounds
        self._audit = audit
        self._pieces: list[_Piece] = []

    def add(self, fragment: Fragment, index: int, agent: AgentID, goes_on: bool, written: Any) -> None:
        """Takes in the steps of one agent in one fragment.

        Args:
            fragment: where it stands.
            index: of the agent among the module's.
            agent: its id.
            goes_on: another fragment follows in the same column, whose rows are no successors of these.
            written: observations that another connector has written, see `EpisodesToJointBatch.joint_batch`.
        """
        episode: SingleAgentEpisode = fragment.episode.agent_episodes[agent]
        steps = len(episode) - self._extra
        if steps <= 0:
            return
        times = _step_times(fragment.episode, agent)[:steps]
        outputs = episode.extra_model_outputs
        if Columns.ACTION_LOGP not in outputs:
            raise ValueError(
                f"agent {agent!r}: its steps carry {sorted(outputs)}, without {Columns.ACTION_LOGP!r}, the log-"
                "probability of what was done; the module-to-env pipeline must put it out (TeamActions does)"
            )
        if written is None:
            observations = self._codec.slice(episode.observations, 0, steps + 1)
        else:
            key = (episode.multi_agent_episode_id, agent, self._module_id)
            observations = map_space(
                self._codec.observation_space,
                lambda _, *parts: np.concatenate([x if isinstance(x, BatchedNdArray) else [x] for x in parts]),
                *written[key],
            )
        inputs = None
        if MODULE_INPUT in outputs:
            following = getattr(fragment.episode, "bootstrap_inputs", {}).get(agent)
            inputs = _array(outputs[MODULE_INPUT], steps)
            inputs = np.concatenate([inputs, inputs[-1:] if following is None else following[None]])
        terminated = bool(episode.is_terminated)
        cut_here = not terminated and (goes_on or bool(episode.is_truncated))
        self._pieces.append(
            _Piece(
                fragment=fragment,
                agent=agent,
                index=index,
                times=np.asarray(times, np.int64),
                rows=fragment.rows(times),
                observations=observations,
                inputs=inputs,
                actions=_array(episode.actions, steps),
                logp=_array(outputs[Columns.ACTION_LOGP], steps),
                rewards=_array(episode.rewards, steps),
                terminated=terminated,
                truncated=cut_here,
            )
        )

    def streams(self, shape: tuple[int, int, int]) -> tuple[ModuleStreams, Following]:
        """The arrays [T, n, E, …], and what follows each piece that does not terminate."""
        steps, n, envs = shape
        space = self._codec.action_space
        discrete = not isinstance(space, gym.spaces.Box)
        obs_shape = self._codec.encoder.encoded_space.shape
        floats = {name: np.zeros(shape, np.float32) for name in ("action_logp", "rewards")}
        flags = {name: np.zeros(shape, bool) for name in ("present", "terminated", "truncated")}
        obs = np.zeros((*shape, *obs_shape), np.float32)
        actions = np.zeros((*shape, *(space.shape or ())), np.int64 if discrete else np.float32)
        origin = np.full((*shape, 2), -1, np.int64) if self._audit else None
        masked = self._codec.num_logits
        mask = None if masked is None else np.ones((*shape, masked), bool)
        streams = ModuleStreams(
            agents=self._codec.agents, obs=obs, actions=actions, **floats, **flags, action_mask=mask, origin=origin,
            bootstrap_obs=np.zeros((n, 0, *obs_shape), np.float32),
        )  # fmt: skip
        if not self._pieces:
            return streams, Following.nothing(obs_shape)
        pieces = self._pieces
        # One row more for each piece: what follows it.
        encoded, masks = self._codec.encode_stacked(
            map_space(
                self._codec.observation_space,
                lambda _, *parts: np.concatenate(parts),
                *[p.observations for p in pieces],
            )
        )
        if encoded.shape[1:] != obs_shape:
            raise ValueError(
                f"module {self._module_id!r}: the observations in its episodes have shape {encoded.shape[1:]}, what it "
                f"saw has {obs_shape}: a piece of env_to_module_connector wrote into the batch, not into the episodes. "
                "Set its counterpart with .learners(learner_connector=...), as FrameStackingLearner beside "
                "FrameStackingEnvToModule."
            )
        self._check(encoded)
        if pieces[0].inputs is not None:
            encoded = np.concatenate([p.inputs for p in pieces])
        ends = np.cumsum([len(p.times) + 1 for p in pieces]) - 1
        own = np.ones(len(encoded), bool)
        own[ends] = False

        places = np.concatenate([(p.rows * n + p.index) * envs + p.fragment.column for p in pieces])
        _flat(obs, shape)[places] = encoded[own]
        _flat(actions, shape)[places] = np.concatenate([p.actions for p in pieces])
        _flat(floats["action_logp"], shape)[places] = np.concatenate([p.logp for p in pieces])
        _flat(floats["rewards"], shape)[places] = rewards = np.concatenate([p.rewards for p in pieces])
        _flat(flags["present"], shape)[places] = True
        if mask is not None and masks is not None:
            _flat(mask, shape)[places] = masks[own]
        if not np.isfinite(rewards).all():
            self._refuse_reward(rewards)
        if origin is not None:
            _flat(origin, shape)[places] = np.concatenate([p.origin() for p in pieces])
        last = places[np.cumsum([len(p.times) for p in pieces]) - 1]
        _flat(flags["terminated"], shape)[last] = [p.terminated for p in pieces]
        _flat(flags["truncated"], shape)[last] = [p.truncated for p in pieces]
        goes_on = np.array([not p.terminated for p in pieces])
        return streams, Following(
            rows=np.array([p.rows[-1] * envs + p.fragment.column for p in pieces])[goes_on],
            agents=np.array([p.index for p in pieces])[goes_on],
            obs=encoded[ends[goes_on]],
        )

    def _check(self, encoded: np.ndarray) -> None:
        # What stands behind a terminated step is not read, and need not be an observation at all.
        read = np.concatenate([np.append(np.ones(len(p.times), bool), not p.terminated) for p in self._pieces])
        found = self._codec.encoder.first_violation(encoded[read], self._check_bounds)
        if found is None:
            return
        (place, *_), problem = found
        piece, step = self._locate(int(np.flatnonzero(read)[place]), extra=1)
        raise ValueError(
            f"{piece.where()} an observation that is not in its observation space, at step {step} of its episode: "
            f"{problem}. Return finite observations inside the declared space, widen the space, or switch the "
            "comparison with its bounds off with .environment(disable_env_checking=True)."
        )

    def _refuse_reward(self, rewards: np.ndarray) -> None:
        place = int(np.flatnonzero(~np.isfinite(rewards))[0])
        piece, step = self._locate(place, extra=0)
        raise ValueError(
            f"{piece.where()} the reward {rewards[place]} for what it did at step {step} of its episode; rewards must "
            "be finite numbers"
        )

    def _locate(self, place: int, extra: int) -> tuple[_Piece, int]:
        """The piece in which row `place` of the concatenation stands, and the environment step it belongs to."""
        for piece in self._pieces:
            if place < len(piece.times) + extra:
                return piece, int(piece.times[place]) if place < len(piece.times) else int(piece.times[-1]) + 1
            place -= len(piece.times) + extra
        raise AssertionError("unreachable: the row stands in one of the pieces")


@dataclass(frozen=True)
class _Piece:
    """R steps of one agent in one fragment; `observations` and `inputs` have R + 1, what follows is the last."""

    fragment: Fragment
    agent: AgentID
    index: int
    times: np.ndarray
    rows: np.ndarray
    observations: Any
    inputs: np.ndarray | None
    actions: np.ndarray
    logp: np.ndarray
    rewards: np.ndarray
    terminated: bool
    truncated: bool

    def origin(self) -> np.ndarray:
        """[R, 2]: a number of the episode, and the environment step."""
        digest = hashlib.blake2b(self.fragment.episode.id_.encode(), digest_size=7).digest()
        return np.stack([np.full_like(self.times, int.from_bytes(digest, "big")), self.times], axis=1)

    def where(self) -> str:
        episode = self.fragment.episode
        if not isinstance(episode, JointEpisode):
            return f"episode {episode.id_}: agent {self.agent!r} got"
        place = f"environment {episode.env_name!r}, environment index {episode.env_index}"
        return f"{place} (runner {episode.runner_index}): agent {self.agent!r} got"


def _extras(fragments: Sequence[Fragment], agents: Sequence[AgentID], shape: tuple[int, int]) -> dict[str, np.ndarray]:
    """What environments told beside rewards: {name: [T, E, …], or [T, N, E, …] in the environment's agent order}."""
    arrays: dict[str, np.ndarray] = {}
    steps, envs = shape
    for fragment in fragments:
        told: Mapping[int, Mapping[str, Any]] = getattr(fragment.episode, "extras", {})
        for row, extras in zip(fragment.rows(list(told)), told.values(), strict=True):
            for name, value in extras.items():
                by_agent = value if isinstance(value, Mapping) else None
                sample = np.asarray(value if by_agent is None else next(iter(by_agent.values())))
                if name not in arrays:
                    lead = (steps, envs) if by_agent is None else (steps, len(agents), envs)
                    arrays[name] = np.zeros((*lead, *sample.shape), sample.dtype)
                if by_agent is None:
                    arrays[name][row, fragment.column] = value
                else:
                    for agent, own in by_agent.items():
                        arrays[name][row, agents.index(agent), fragment.column] = own
    return arrays


def _row_times(episode: MultiAgentEpisode) -> np.ndarray:
    """Environment steps of an episode's rows, ascending: open steps that were completed here, then its own."""
    start = episode.env_t_started
    earlier = {
        times[0] for agent in episode.agent_episodes if (times := _step_times(episode, agent)) and times[0] < start
    }
    return np.array([*sorted(earlier), *range(start, episode.env_t)], np.int64)


def _step_times(episode: MultiAgentEpisode, agent: AgentID) -> Sequence[int]:
    """Environment steps at which an agent's completed steps began.

    RLlib's own index holds a number for each observation, and sometimes one too many at the end: those of the
    observations that an action answered are read.
    """
    if isinstance(episode, JointEpisode):
        return episode.step_times[agent]
    index = episode.env_t_to_agent_t[agent]
    start = episode.env_t_started - index.lookback
    observed = [start + i for i, entry in enumerate(index.data) if entry != episode.SKIP_ENV_TS_TAG]
    single = episode.agent_episodes[agent]
    return observed[single.observations.lookback :][: len(single)]


def _array(buffer: Any, count: int) -> np.ndarray:
    return np.asarray(buffer.data[buffer.lookback : buffer.lookback + count])


def _flat(array: np.ndarray, shape: tuple[int, int, int]) -> np.ndarray:
    """[T, n, E, …] as [T·n·E, …], the same memory."""
    return array.reshape(int(np.prod(shape)), *array.shape[3:])
