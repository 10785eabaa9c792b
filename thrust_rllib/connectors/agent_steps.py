"""The steps of a module's agents out of RLlib's episodes: gathered piece by piece, encoded and checked all at once."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from ray.rllib.core.columns import Columns
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.spaces.space_utils import BatchedNdArray

from thrust_rllib.connectors.team_actions import ACTED_AT, HEAD_LOGP, MEMORY_IN, MODULE_INPUT
from thrust_rllib.connectors.team_codec import ModuleCodec
from thrust_rllib.envs.action_masks import without_choice
from thrust_rllib.joint_batch import AgentID, ModuleID
from thrust_rllib.joint_episode import JointEpisode


@dataclass(frozen=True)
class AgentSteps:
    """R steps of one agent in one episode or fragment.

    | field        | shape       | meaning                                                                |
    |--------------|-------------|------------------------------------------------------------------------|
    | episode      |             | where they come from                                                   |
    | agent, index |             | who, and its place among the module's agents                           |
    | times        | [R]         | environment steps that they began at                                   |
    | observations | [R + 1, …]  | stacked as `ModuleCodec.stack` does; the last one is what follows      |
    | inputs       | [R + 1, …]  | what the module saw, where that is not the encoded observation; or None |
    | actions      | [R, …]      |                                                                        |
    | logp         | [R]         | of the actions, or None where nobody has told it                       |
    | rewards      | [R]         |                                                                        |
    | terminated   |             | nothing follows                                                        |
    | truncated    |             | the environment cut the agent's stream after the last step             |
    | acted_at     | [R]         | `times` as told by each action, for the audit; or None                 |
    | memory       | [R, S]      | the state in which a recurrent module entered each step; or None       |
    | head_logp    | [R, H]      | `logp` head by head; or None                                           |
    """

    episode: MultiAgentEpisode
    agent: AgentID
    index: int
    times: np.ndarray
    observations: Any
    inputs: np.ndarray | None
    actions: np.ndarray
    logp: np.ndarray | None
    rewards: np.ndarray
    terminated: bool
    truncated: bool
    acted_at: np.ndarray | None = None
    memory: np.ndarray | None = None
    head_logp: np.ndarray | None = None

    def origin(self) -> np.ndarray:
        """[R, 2]: a number of the episode, and the environment step, which the action itself has told if it could."""
        digest = hashlib.blake2b(self.episode.id_.encode(), digest_size=7).digest()
        times = self.times if self.acted_at is None else self.acted_at
        return np.stack([np.full(len(times), int.from_bytes(digest, "big")), times], axis=1)

    def got(self) -> str:
        """The beginning of a message."""
        episode = self.episode
        if not isinstance(episode, JointEpisode):
            return f"episode {episode.id_}: agent {self.agent!r} got"
        place = f"environment {episode.env_name!r}, environment index {episode.env_index}"
        return f"{place} (runner {episode.runner_index}): agent {self.agent!r} got"


class ModuleSteps:
    """All pieces of one module.

    Args:
        codec: of the module.
        module_id: its id.
        extra: number of steps at the end of each agent's episode that are not the environment's.
        check_bounds: compare observations with the bounds of their space, not only look for NaN and infinity.
    """

    def __init__(self, codec: ModuleCodec, module_id: ModuleID, extra: int = 0, check_bounds: bool = True) -> None:
        self.codec = codec
        self.pieces: list[AgentSteps] = []
        self._module_id = module_id
        self._extra = extra
        self._check_bounds = check_bounds

    def add(self, episode: MultiAgentEpisode, index: int, agent: AgentID, written: Any = None) -> bool:
        """Takes in the steps of one agent in one episode or fragment; says whether there are any.

        Args:
            episode: the episode.
            index: of the agent among the module's.
            agent: its id.
            written: observations that another connector has written, see `EpisodesToJointBatch.joint_batch`.
        """
        single: SingleAgentEpisode | None = episode.agent_episodes.get(agent)
        steps = 0 if single is None else len(single) - self._extra
        if single is None or steps <= 0:
            return False
        times = step_times(episode, agent)[:steps]
        outputs = single.extra_model_outputs
        if written is None:
            observations = self.codec.slice(single.observations, 0, steps + 1)
        else:
            parts = written[(single.multi_agent_episode_id, agent, self._module_id)]
            observations = self.codec.join(
                [part if isinstance(part, BatchedNdArray) else self.codec.stack([part]) for part in parts]
            )
        inputs = None
        if MODULE_INPUT in outputs:
            following = getattr(episode, "bootstrap_inputs", {}).get(agent)
            inputs = _array(outputs[MODULE_INPUT], steps)
            inputs = np.concatenate([inputs, inputs[-1:] if following is None else following[None]])
        self.pieces.append(
            AgentSteps(
                episode=episode,
                agent=agent,
                index=index,
                times=np.asarray(times, np.int64),
                observations=observations,
                inputs=inputs,
                actions=_array(single.actions, steps),
                logp=_array(outputs[Columns.ACTION_LOGP], steps) if Columns.ACTION_LOGP in outputs else None,
                acted_at=_array(outputs[ACTED_AT], steps) if ACTED_AT in outputs else None,
                memory=_array(outputs[MEMORY_IN], steps) if MEMORY_IN in outputs else None,
                head_logp=_array(outputs[HEAD_LOGP], steps) if HEAD_LOGP in outputs else None,
                rewards=_array(single.rewards, steps),
                terminated=bool(single.is_terminated),
                truncated=bool(single.is_truncated),
            )
        )
        return True

    def rewards(self) -> np.ndarray:
        """[ΣR] of all pieces behind each other.

        Raises:
            ValueError: one is not finite.
        """
        rewards = np.concatenate([piece.rewards for piece in self.pieces])
        if not np.isfinite(rewards).all():
            place = int(np.flatnonzero(~np.isfinite(rewards))[0])
            piece, step = self._locate(place, following=0)
            raise ValueError(
                f"{piece.got()} the reward {rewards[place]} for what it did at step {step} of its episode; rewards "
                "must be finite numbers"
            )
        return rewards

    def encode(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Encoded observations [ΣR + pieces, …] and action masks [ΣR + pieces, A] or None: see `own` and `following`.

        Raises:
            ValueError: an observation that is not finite or not in its space, or a mask that leaves no choice.
        """
        encoded, masks = self.codec.encode_stacked(self.codec.join([piece.observations for piece in self.pieces]))
        if encoded.shape[1:] != self.codec.encoder.encoded_space.shape:
            raise ValueError(
                f"module {self._module_id!r}: the observations in its episodes have shape {encoded.shape[1:]}, what it "
                f"saw has {self.codec.encoder.encoded_space.shape}: a piece of env_to_module_connector wrote into the "
                "batch, not into the episodes. Set its counterpart with .learners(learner_connector=...), as "
                "FrameStackingLearner beside FrameStackingEnvToModule."
            )
        # What stands behind a terminated step is not read, and need not be an observation at all.
        read = self.own.copy()
        read[self.following] = [not piece.terminated for piece in self.pieces]
        found = self.codec.encoder.first_violation(encoded[read], self._check_bounds)
        if found is not None:
            (place, *_), problem = found
            self._refuse_observation(int(np.flatnonzero(read)[place]), problem)
        if masks is not None and (stuck := without_choice(masks, self.codec.action_space) & self.own).any():
            self._refuse_mask(int(np.flatnonzero(stuck)[0]), masks)
        return encoded, masks

    @property
    def following(self) -> np.ndarray:
        """[pieces] rows of `encode` that hold what follows each piece."""
        return np.cumsum([len(piece.times) + 1 for piece in self.pieces]) - 1

    @property
    def own(self) -> np.ndarray:
        """Bool [ΣR + pieces], rows of `encode` that an agent acted on."""
        own = np.ones(sum(len(piece.times) + 1 for piece in self.pieces), bool)
        own[self.following] = False
        return own

    def _refuse_observation(self, place: int, problem: str) -> NoReturn:
        piece, step = self._locate(place, following=1)
        raise ValueError(
            f"{piece.got()} an observation that is not in its observation space, at step {step} of its episode: "
            f"{problem}. Return finite observations inside the declared space, widen the space, or switch the "
            "comparison with its bounds off with .environment(disable_env_checking=True)."
        )

    def _refuse_mask(self, place: int, masks: np.ndarray) -> NoReturn:
        piece, step = self._locate(place, following=1)
        given = masks[place].astype(int).tolist()
        raise ValueError(
            f"{piece.got()} an action mask that allows no action, at step {step} of its episode: {given} for "
            f"{self.codec.action_space}; return at least one legal action (MultiDiscrete: one in every dimension), or "
            "end the episode"
        )

    def _locate(self, place: int, following: int) -> tuple[AgentSteps, int]:
        """The piece in which row `place` of the concatenation stands, and the environment step it belongs to."""
        for piece in self.pieces:
            if place < len(piece.times) + following:
                return piece, int(piece.times[place]) if place < len(piece.times) else int(piece.times[-1]) + 1
            place -= len(piece.times) + following
        raise AssertionError("unreachable: the row stands in one of the pieces")


def step_times(episode: MultiAgentEpisode, agent: AgentID) -> Sequence[int]:
    """Environment steps at which an agent's completed steps began.

    RLlib's own index holds a number for each observation, and sometimes one too many at the end: those of the
    observations that an action answered are read.
    """
    if isinstance(episode, JointEpisode):
        return episode.step_times[agent]
    index = episode.env_t_to_agent_t[agent]
    observed = [i for i, entry in enumerate(index.data) if entry != episode.SKIP_ENV_TS_TAG]
    # RLlib counts an agent that is born in this fragment from the episode's beginning, the others from the lookback on.
    shorter = len(index.data) <= index.lookback + len(episode)
    born_here = bool(observed) and (observed[0] > index.lookback or shorter)
    start = 0 if born_here else episode.env_t_started - index.lookback
    single = episode.agent_episodes[agent]
    return [start + i for i in observed[single.observations.lookback :][: len(single)]]


def _array(buffer: Any, count: int) -> np.ndarray:
    return np.asarray(buffer.data[buffer.lookback : buffer.lookback + count])
