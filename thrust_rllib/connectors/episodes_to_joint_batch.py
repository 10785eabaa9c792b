"""From RLlib's episodes to a `JointBatch`: last piece of the general door's learner pipeline.

Letters as in `joint_batch`: T rows, E columns, n agents of a module, K bootstrap rows; R steps of one agent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModule
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.utils.annotations import override

from thrust_rllib.connectors.agent_steps import AgentSteps, ModuleSteps
from thrust_rllib.connectors.fragments import Fragment, fragments_of
from thrust_rllib.connectors.sequence_states import entering_states, sequence_rows
from thrust_rllib.connectors.team_actions import HEAD_LOGP
from thrust_rllib.connectors.team_codec import TeamCodec
from thrust_rllib.connectors.told_by_environment import extras_of, global_states
from thrust_rllib.joint_batch import AlignmentError, JointBatch, ModuleStreams
from thrust_rllib.rl_modules.heads import num_heads
from thrust_rllib.rl_modules.memory import RecurrentModules

JOINT_BATCH = "joint_batch"
"""Column of the pipeline's result."""


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
    Where a module is recurrent, training sequences begin as `sequence_rows` says, with the states of the steps there.

    Args:
        input_observation_space: as of every ConnectorV2; not used.
        input_action_space: not used.
        codec: the team.
        check_bounds: compare observations with the bounds of their space, not only look for NaN and infinity.
        audit: fill `ModuleStreams.origin`.
        with_extra_step: RLlib's `AddOneTsToEpisodesAndTruncate` stands in front: the last step of each agent is not
            one of the environment's.
        whole_episodes: episodes are not cut (RLlib's `batch_mode="complete_episodes"`): no training sequence of a
            recurrent module goes over the end of one.
        per_head: fill `ModuleStreams.head_logp`.
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
        whole_episodes: bool = False,
        per_head: bool = False,
        **kwargs: Any,
    ) -> None:
        self.codec = codec
        self._check_bounds = check_bounds
        self._audit = audit
        self._extra = int(with_extra_step)
        self._whole_episodes = whole_episodes
        self._per_head = per_head
        self._recurrent: RecurrentModules | None = None
        super().__init__(input_observation_space, input_action_space, **kwargs)

    @override(ConnectorV2)
    def get_ctor_args_and_kwargs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (self.input_observation_space, self.input_action_space), {
            "codec": self.codec,
            "check_bounds": self._check_bounds,
            "audit": self._audit,
            "with_extra_step": bool(self._extra),
            "whole_episodes": self._whole_episodes,
            "per_head": self._per_head,
        }

    @override(ConnectorV2)
    def __call__(
        self,
        *,
        episodes: Sequence[MultiAgentEpisode],
        batch: dict[str, Any],
        rl_module: MultiRLModule | None = None,
        **kwargs: Any,
    ) -> dict[str, JointBatch]:
        if self._recurrent is None and rl_module is not None:
            self._recurrent = RecurrentModules.of(rl_module)
        return {JOINT_BATCH: self.joint_batch(episodes, batch.get(Columns.OBS), self._recurrent)}

    def joint_batch(
        self,
        episodes: Sequence[MultiAgentEpisode],
        observations: Mapping[Any, Sequence[Any]] | None = None,
        recurrent: RecurrentModules | None = None,
    ) -> JointBatch:
        """All episodes in one batch.

        Args:
            episodes: at least one, with at least one step.
            observations: in place of the episodes' own, as RLlib's learner pieces write them (frame stacking):
                {(episode id, agent, module): one for each step, and one for what follows}.
            recurrent: the team's recurrent modules; None: there is none.

        Raises:
            ValueError: no step; a reward or observation that is not finite or outside its space; a step without its
                log-probability, or of a recurrent module without its state; an agent that the team does not have.
        """
        fragments = list(fragments_of(episodes))
        if not fragments:
            raise ValueError("the rollout is empty: no episode came with a step in it")
        for fragment in fragments:
            if unknown := [agent for agent in fragment.episode.agent_episodes if agent not in self.codec.module_of]:
                raise ValueError(
                    f"episode {fragment.episode.id_} has steps of {unknown}, but the team is "
                    f"{list(self.codec.module_of)}; declare every agent that may ever appear in possible_agents"
                )
        envs = 1 + max(f.column for f in fragments)
        steps = max(f.first + len(f.times) for f in fragments)
        valid, episode_start = np.zeros((steps, envs), bool), np.zeros((steps, envs), bool)
        for f in fragments:
            valid[f.first : f.first + len(f.times), f.column] = True
            episode_start[f.first, f.column] = f.begins_episode
        last_in_column = {f.column: f for f in fragments}
        begins = None
        if recurrent is not None and any(m in recurrent.layouts for m in self.codec.modules):
            begins = sequence_rows(fragments, envs, recurrent.sequence_length, self._whole_episodes)
        streams, following = {}, {}
        for module_id, codec in self.codec.modules.items():
            gathered = ModuleSteps(codec, module_id, self._extra, self._check_bounds)
            homes = [
                fragment
                for fragment in fragments
                for index, agent in enumerate(codec.agents)
                if gathered.add(fragment.episode, index, agent, observations)
            ]
            goes_on = [fragment is not last_in_column[fragment.column] for fragment in homes]
            shape = steps, len(codec.agents), envs
            streams[module_id], following[module_id] = _streams(gathered, homes, goes_on, shape, self._audit)
            if self._per_head:
                streams[module_id].head_logp = _head_logp(gathered, homes, shape)
            if begins is not None and recurrent is not None and module_id in recurrent.layouts:
                size = recurrent.layouts[module_id].size
                streams[module_id].state_in = entering_states(gathered, homes, begins, envs, size)
        cuts = _last_rows(fragments, streams)
        rows = np.unique(np.concatenate([cuts, *(f.rows for f in following.values())]))
        for module_id, after in following.items():
            mine = streams[module_id]
            mine.bootstrap_obs = np.zeros((len(mine.agents), len(rows), *mine.obs.shape[3:]), np.float32)
            mine.bootstrap_obs[after.agents, np.searchsorted(rows, after.rows)] = after.obs
        states, bootstrap_states = global_states(fragments, rows, (steps, envs))
        return JointBatch(
            modules=streams,
            bootstrap_rows=rows,
            episode_start=episode_start,
            valid=valid,
            global_state=states,
            bootstrap_state=bootstrap_states,
            extras=extras_of(fragments, [agent for mine in streams.values() for agent in mine.agents], (steps, envs)),
            sequence_rows=begins,
        ).check()


def _streams(
    steps: ModuleSteps, fragments: Sequence[Fragment], goes_on: Sequence[bool], shape: tuple[int, int, int], audit: bool
) -> tuple[ModuleStreams, Following]:
    """One module's arrays [T, n, E, …], and what follows each piece that does not terminate.

    Args:
        steps: what was gathered.
        fragments: where each piece stands.
        goes_on: whether other rows follow it in the same column, which are no successors of its own.
        shape: T, n, E.
        audit: fill `ModuleStreams.origin`.
    """
    _, n, envs = shape
    codec, pieces = steps.codec, steps.pieces
    space, obs_shape = codec.action_space, codec.encoder.encoded_space.shape
    discrete = not isinstance(space, gym.spaces.Box)
    streams = ModuleStreams(
        agents=codec.agents,
        obs=np.zeros((*shape, *obs_shape), np.float32),
        actions=np.zeros((*shape, *(space.shape or ())), np.int64 if discrete else np.float32),
        action_logp=np.zeros(shape, np.float32),
        rewards=np.zeros(shape, np.float32),
        present=np.zeros(shape, bool),
        terminated=np.zeros(shape, bool),
        truncated=np.zeros(shape, bool),
        bootstrap_obs=np.zeros((n, 0, *obs_shape), np.float32),
        action_mask=None if codec.num_logits is None else np.ones((*shape, codec.num_logits), bool),
        origin=np.full((*shape, 2), -1, np.int64) if audit else None,
    )
    if not pieces:
        return streams, Following.nothing(obs_shape)
    encoded, masks = steps.encode()
    if pieces[0].inputs is not None:
        encoded = np.concatenate([piece.inputs for piece in pieces if piece.inputs is not None])
    rows = [fragment.rows(piece.times) for fragment, piece in zip(fragments, pieces, strict=True)]
    columns = [fragment.column for fragment in fragments]
    places = _places(steps, fragments, shape)

    def write(array: np.ndarray, values: Any, where: np.ndarray = places) -> None:
        array.reshape(int(np.prod(shape)), *array.shape[3:])[where] = values

    write(streams.obs, encoded[steps.own])
    write(streams.actions, np.concatenate([piece.actions for piece in pieces]))
    write(streams.action_logp, np.concatenate([_log_probabilities(piece) for piece in pieces]))
    write(streams.rewards, steps.rewards())
    write(streams.present, True)
    if streams.action_mask is not None and masks is not None:
        write(streams.action_mask, masks[steps.own])
    if streams.origin is not None:
        if len(np.unique(places)) < len(places):
            raise AlignmentError(f"agents {list(codec.agents)}: two steps of one agent stand in the same joint row")
        write(streams.origin, np.concatenate([piece.origin() for piece in pieces]))
    last = places[np.cumsum([len(piece.times) for piece in pieces]) - 1]
    terminated = np.array([piece.terminated for piece in pieces])
    write(streams.terminated, terminated, last)
    cut_here = np.array([piece.truncated for piece in pieces]) | np.array(goes_on)
    write(streams.truncated, cut_here & ~terminated, last)
    return streams, Following(
        rows=np.array([t[-1] * envs + e for t, e in zip(rows, columns, strict=True)])[~terminated],
        agents=np.array([piece.index for piece in pieces])[~terminated],
        obs=encoded[steps.following[~terminated]],
    )


def _last_rows(fragments: Sequence[Fragment], streams: Mapping[str, ModuleStreams]) -> np.ndarray:
    """Rows t·E + e in which anybody acted last in each fragment of an episode that goes on: the team's goes on there.

    Whoever acted in it may have terminated, while others wait.
    """
    acted = np.logical_or.reduce([mine.present.any(1) for mine in streams.values()])
    found = []
    for f in fragments:
        mine = np.flatnonzero(acted[f.first : f.first + len(f.times), f.column])
        if len(mine) and not f.episode.is_done:
            found.append((f.first + mine[-1]) * acted.shape[1] + f.column)
    return np.array(found, np.int64)


def _places(steps: ModuleSteps, fragments: Sequence[Fragment], shape: tuple[int, int, int]) -> np.ndarray:
    """[ΣR] where each step stands among the T·n·E numbers of an array [T, n, E]."""
    _, n, envs = shape
    pairs = zip(fragments, steps.pieces, strict=True)
    return np.concatenate([(f.rows(piece.times) * n + piece.index) * envs + f.column for f, piece in pairs])


def _head_logp(steps: ModuleSteps, fragments: Sequence[Fragment], shape: tuple[int, int, int]) -> np.ndarray:
    """[T, n, E, H], 0 where an agent did not act."""
    parts = []
    for piece in steps.pieces:
        if piece.head_logp is None:
            raise ValueError(
                f"agent {piece.agent!r}: its steps came without {HEAD_LOGP!r}, the log-probabilities of their parts, "
                "which ratio='per_head' needs; sample them with the same configuration (TeamActions puts them out)"
            )
        parts.append(piece.head_logp)
    heads = num_heads(steps.codec.action_space)
    found = np.zeros((*shape, heads), np.float32)
    if parts:
        found.reshape(-1, heads)[_places(steps, fragments, shape)] = np.concatenate(parts)
    return found


def _log_probabilities(piece: AgentSteps) -> np.ndarray:
    if piece.logp is None:
        raise ValueError(
            f"agent {piece.agent!r}: its steps came without {Columns.ACTION_LOGP!r}, the log-probability of what was "
            "done; the module-to-env pipeline must put it out (TeamActions does)"
        )
    return piece.logp
