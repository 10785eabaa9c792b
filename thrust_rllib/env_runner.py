"""The fast door: environments to a `JointBatch`, without an episode object and without per-agent Python in a step.

Longer than others: what RLlib's runner does in one class (construction, sampling, evaluation, metrics) is overridden in
one class. Its parts are in `thrust_rllib.sampling`.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from ray.rllib.env import INPUT_ENV_SINGLE_SPACES, INPUT_ENV_SPACES
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
from ray.rllib.utils.annotations import override
from ray.rllib.utils.metrics import ENV_STEP_TIMER

from thrust_rllib.envs.joint_env import JointStepResult, VectorJointEnv, episode_over, per_agent_flags
from thrust_rllib.envs.registry import make_vector_env
from thrust_rllib.joint_batch import AgentID, JointBatch
from thrust_rllib.rl_modules.heads import asks_per_head
from thrust_rllib.rl_modules.memory import RecurrentModules
from thrust_rllib.sampling.acting import TeamActor
from thrust_rllib.sampling.agent_groups import agent_groups, by_agent, by_group, env_actions
from thrust_rllib.sampling.episode_clock import EpisodeClock, origins
from thrust_rllib.sampling.episode_shares import episodes_per_environment
from thrust_rllib.sampling.rollout import RolloutRecorder
from thrust_rllib.sampling.rollout_checks import RolloutChecks
from thrust_rllib.sampling.state_reader import StateReader
from thrust_rllib.sampling.team_runner import TeamRunner

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SampledSteps:
    """What an evaluation returns: how much was played, in the words of RLlib's episodes."""

    num_env_steps: int
    num_agent_steps: int

    def env_steps(self) -> int:
        """Environment steps played."""
        return self.num_env_steps

    def agent_steps(self) -> int:
        """Steps in which an agent acted, over all agents."""
        return self.num_agent_steps

    def __len__(self) -> int:
        return self.num_env_steps


class JointEnvRunner(TeamRunner):
    """Steps a `VectorJointEnv` and returns arrays: one forward per step for all agents that are alike.

    Replaces RLlib's `MultiAgentEnvRunner`, whose loop builds an episode object per environment and runs a connector
    pipeline per agent and step: that costs more than the networks. Construction, `sample`, weight sync and
    checkpointing are RLlib's; environments, the loop and the episode metrics are ours.

    `sample()` returns a list with one `JointBatch` (`num_timesteps`), or with one `SampledSteps` (`num_episodes`,
    which is how RLlib evaluates): then environment e plays its fixed share of the episodes, so that short episodes
    are not favoured.

    Actions are drawn from a generator of the runner's own; torch's global one is left as it was.
    """

    door = "arrays"
    env: VectorJointEnv | None

    # --- construction ---------------------------------------------------------------------------------------------

    @override(MultiAgentEnvRunner)
    def make_env(self) -> None:
        if self.env is not None:
            self.env.close()
        self.env = make_vector_env(
            self.config.env_spec or self.config.env, dict(self.config.env_config), self.config.num_envs_per_env_runner
        )
        self._take_in_team()
        asked = self.config.records_state and not self.config.in_evaluation
        self._states = StateReader(self.env, self._env_name) if asked else None
        if hasattr(self, "_actor"):  # environments that are made anew
            self._make_actor()
        self._tell_env_created()

    @override(TeamRunner)
    def _take_in_team(self) -> None:
        super()._take_in_team()
        assert self.env is not None
        self._groups = agent_groups(self.env, self.module_of, self.config.normalize_actions, self.config.clip_actions)
        self._checks = RolloutChecks(self._env_name, list(self.module_of), not self.config.disable_env_checking)
        self._clock = EpisodeClock(self.num_envs, self.worker_index or 0)
        # The pipelines are built from the spaces right after this, see MultiAgentEnvRunner.__init__.
        self.spaces = self.get_spaces()

    @override(MultiAgentEnvRunner)
    def get_spaces(self) -> dict[str, Any]:
        if self.env is None:
            return self.spaces
        spaces = (
            gym.spaces.Dict(_by_name(self.env.observation_spaces)),
            gym.spaces.Dict(_by_name(self.env.action_spaces)),
        )
        return {
            INPUT_ENV_SPACES: spaces,
            INPUT_ENV_SINGLE_SPACES: spaces,
            **{m: (g.encoder.encoded_space, g.action_space) for g in self._groups for m in g.module_ids},
        }

    @override(MultiAgentEnvRunner)
    def make_module(self) -> None:
        super().make_module()
        if self.env is not None:
            self._make_actor()

    def _make_actor(self) -> None:
        self._actor = TeamActor(self._groups, self.module, self.normalizer, self._device, self._next_actor_seed())
        self._groups = self._actor.groups
        self._sequence_length = RecurrentModules.of(self.module).sequence_length

    # --- sampling -------------------------------------------------------------------------------------------------

    @override(MultiAgentEnvRunner)
    def _sample(
        self,
        *,
        num_timesteps: int | None = None,
        num_episodes: int | None = None,
        explore: bool,
        random_actions: bool = False,
        force_reset: bool = False,
    ) -> list[JointBatch] | list[SampledSteps]:
        if num_episodes is not None:
            sampled: Any = self._play_episodes(num_episodes, explore, random_actions)
        else:
            if self.config.in_evaluation:
                self._statistics.start_evaluation()
            if force_reset or self._needs_initial_reset:
                self._reset()
            steps = max(1, math.ceil((num_timesteps or 0) / self.num_envs))
            sampled = self._record(steps, explore, random_actions)
        self._log_steps(sampled)
        return [sampled]

    def _record(self, num_steps: int, explore: bool, random_actions: bool) -> JointBatch:
        """Plays and records `num_steps` steps in every environment; the episodes go on in the next call."""
        recorder = RolloutRecorder(self._groups, num_steps, self.num_envs, self._sequence_length)
        self._actor.take_weights()
        began_at = self._clock.now()
        over = np.zeros((num_steps, self.num_envs), bool)
        times = np.zeros(num_steps)
        env_seconds = 0.0
        state = None if self._states is None else self._states.before(0)
        for t in range(num_steps):
            if state is not None:
                recorder.record_state(t, state)
            episode_start = self._episode_start
            acted = self._actor.act(self._encoded, self._masks, explore, random_actions, self._who_is_heard())
            recorder.record_acted(
                t,
                self._encoded if self._actor.normalizer else None,
                self._masks,
                acted,
                self._seen_at if self.config.audit else None,
            )
            actions = env_actions(self._groups, [done.actions for done in acted])
            before = time.perf_counter()
            result = self._step_env(actions, t)
            times[t] = now = time.perf_counter()
            env_seconds += now - before
            over[t] = self._advance(result)
            if self._states is not None:
                state = self._states.before(t + 1)
            present = True if result.present is None else result.present
            recorder.record_step(
                t, result.rewards, present, result.terminated, result.truncated, episode_start, result.extras
            )
            last = t == num_steps - 1
            if last or result.truncated.any():
                cut = (result.truncated & ~result.terminated & present).any(axis=0) | (last & ~over[t])
                if cut.any():
                    self._record_bootstrap(recorder, t, np.flatnonzero(cut), over[t], result, state)
        self.metrics.log_value(ENV_STEP_TIMER, env_seconds / num_steps)
        self._check(recorder, over)
        self._statistics.add(recorder.rewards, recorder.present, over, np.ones(self.num_envs, bool), times)
        arrays = [(i, recorder.array(i, "logits"), recorder.array(i, "actions")) for i in range(len(self._groups))]
        batch = recorder.finish(
            [self._actor.logp(*group) for group in arrays],
            origins(began_at, over) if self.config.audit else None,
            [self._actor.head_logp(*group) for group in arrays] if asks_per_head(self.config) else None,
        )
        if self._actor.normalizer is not None and not self.config.in_evaluation:
            for index, group in enumerate(self._groups):
                encoded = recorder.array(index, "encoded")
                for module_id, mine in group.by_module:
                    self._let_into_moments(module_id, encoded[:, mine], batch.modules[module_id].present)
        return batch

    def _check(self, recorder: RolloutRecorder, over: np.ndarray) -> None:
        """Looks at a whole rollout at once."""
        for index, group in enumerate(self._groups):
            encoded = recorder.array(index, "obs" if self._actor.normalizer is None else "encoded")
            self._checks.observations(group, encoded)
            if group.encoder.masked:
                masks, present = recorder.array(index, "action_mask"), recorder.present[:, group.positions]
                self._checks.action_masks(group, masks, present)
            if self._actor.exchanges_messages and self._who_is_heard() is None:
                self._checks.links(group, encoded, recorder.present)
        self._checks.rewards(recorder.rewards)
        if recorder.states is not None:
            self._checks.states(recorder.states)
        assert self.env is not None
        self._checks.presence(
            recorder.present, recorder.terminated, recorder.truncated, recorder.rewards, over, self.env.acts_next()
        )

    def _play_episodes(self, num_episodes: int, explore: bool, random_actions: bool) -> SampledSteps:
        """Plays exactly `num_episodes` episodes from a reset, recording only their returns and lengths."""
        self._reset()
        self._actor.take_weights()
        self._statistics.start_evaluation()
        share = episodes_per_environment(num_episodes, self.num_envs)
        env_steps = agent_steps = t = 0
        while share.any():
            playing = share > 0
            for group, encoded in zip(self._groups, self._encoded, strict=True):
                self._checks.observations(group, encoded[None], first_step=t)
            acted = self._actor.act(self._encoded, self._masks, explore, random_actions, self._who_is_heard())
            result = self._step_env(env_actions(self._groups, [done.actions for done in acted]), t)
            self._checks.rewards(result.rewards[None], first_step=t)
            for group, masks in zip(self._groups, self._masks, strict=True):
                if masks is not None:
                    acted_now = None if result.present is None else result.present[None, group.positions]
                    self._checks.action_masks(group, masks[None], acted_now, first_step=t)
            over = self._advance(result)
            present = np.ones_like(result.terminated) if result.present is None else result.present
            self._statistics.add(
                result.rewards[None], present[None], over[None], playing, np.array([time.perf_counter()])
            )
            env_steps += int(playing.sum())
            agent_steps += int(present[:, playing].sum())
            share -= over & playing
            t += 1
        # The episodes that go on beyond their share belong to the evaluation: training starts afresh.
        self._needs_initial_reset = True
        return SampledSteps(env_steps, agent_steps)

    # --- state ----------------------------------------------------------------------------------------------------

    @override(TeamRunner)
    def _reseed_actions(self) -> None:
        self._make_actor()

    @override(TeamRunner)
    def _get_lasting_state(self) -> Any:
        return {"actor": self._actor.get_drawing_state(), "clock": self._clock.get_state()}

    @override(TeamRunner)
    def _set_lasting_state(self, state: Any) -> None:
        self._actor.set_drawing_state(state["actor"])
        if len(state["clock"]) == self.num_envs:
            self._clock.set_state(state["clock"])
            self._seen_at = self._clock.now()

    @override(TeamRunner)
    def _get_playing_state(self) -> dict[str, Any]:
        return {
            "seen": by_agent(self._groups, self._encoded),
            "masks": by_agent(self._groups, self._masks),
            "memories": by_agent(self._groups, self._actor.get_memories()),
            "episode_start": self._episode_start,
            "acting": self._checks.get_state(),
            "running": self._statistics.get_running(time.perf_counter()),
        }

    @override(TeamRunner)
    def _set_playing_state(self, state: dict[str, Any]) -> None:
        self._encoded = by_group(self._groups, state["seen"])
        self._masks = by_group(self._groups, state["masks"])
        self._actor.set_memories(by_group(self._groups, state["memories"]))
        self._episode_start = state["episode_start"]
        self._checks.set_state(state["acting"])
        self._statistics.set_running(state["running"], time.perf_counter())

    # --- the environment ------------------------------------------------------------------------------------------

    def _reset(self) -> None:
        """Resets every environment; the first time, each gets a seed of its own."""
        assert self.env is not None
        seeds = None
        if self._needs_initial_reset:
            seeds = self._next_env_seeds()
        observations = self._reset_safely(self.env.reset_joint, seeds=seeds)
        self._clock.reset()
        self._actor.restart()
        self._see(observations)
        self._episode_start = np.ones(self.num_envs, bool)
        self._checks.reset()
        self._statistics.reset(time.perf_counter())
        self._needs_initial_reset = False

    def _see(self, observations: Any) -> None:
        """Encodes what the environment shows next."""
        self._encoded = [group.encode(observations) for group in self._groups]
        self._masks = [group.masks(observations) for group in self._groups]
        if self.config.audit:
            self._seen_at = self._clock.now()

    def _who_is_heard(self) -> np.ndarray | None:
        """Who acts in the next step, bool [N, E], where messages are exchanged and the environment says it."""
        assert self.env is not None
        return self.env.acts_next() if self._actor.exchanges_messages else None

    def _advance(self, result: JointStepResult) -> np.ndarray:
        """Takes over the next observations; returns which environments are over, bool [E]."""
        shape = (len(self.module_of), self.num_envs)
        result.terminated = per_agent_flags(result.terminated, *shape)
        result.truncated = per_agent_flags(result.truncated, *shape)
        over = episode_over(result.terminated, result.truncated, result.present, result.over)
        if self.config.audit:
            self._clock.advance(over)
        self._actor.advance(result.present, over)
        self._see(result.observations)
        self._episode_start = over
        return over

    def _record_bootstrap(
        self,
        recorder: RolloutRecorder,
        t: int,
        envs: np.ndarray,
        over: np.ndarray,
        result: JointStepResult,
        state: np.ndarray | None,
    ) -> None:
        """Records what follows step t in `envs`: observation and state before the reset where the episode is over.

        Nothing follows for agents that are terminated or absent, and what the environment shows them is unspecified:
        the observation they had at step t stands in for it, and its value is never read.
        """
        follows = ~result.terminated if result.present is None else ~result.terminated & result.present
        ended = over[envs]
        following = []
        for index, (group, encoded) in enumerate(zip(self._groups, self._encoded, strict=True)):
            obs = recorder.array(index, "obs" if self._actor.normalizer is None else "encoded")[t][:, envs]
            mine = follows[group.positions]
            read = mine[:, envs]
            obs[read & ~ended] = encoded[:, envs][read & ~ended]
            if (read & ended).any():
                obs[read & ended] = group.encode_some(result.final_observations, mine & over)
            self._checks.observations(group, obs[None], first_step=t + 1, envs=envs, read=read[None])
            if self._actor.normalizer is not None:
                obs = self._actor.normalizer.normalize(group.module_ids, obs)
            following.append(obs)
        if state is not None and self._states is not None:
            state = self._states.following(t, state, envs, over, result.final_state)
            self._checks.states(state[None], first_step=t + 1, envs=envs)
        recorder.record_bootstrap(t, envs, following, state)

    def _step_env(self, actions: Any, t: int) -> JointStepResult:
        assert self.env is not None
        try:
            return self.env.step_joint(actions)
        except Exception as error:
            raise self._failure(f"step {t} of this rollout", error) from error

    def _log_steps(self, sampled: JointBatch | SampledSteps) -> None:
        num_episodes, agent_steps = self._statistics.pop_counts()
        steps = dict(zip(self.module_of, agent_steps.tolist(), strict=True))
        self._log_counts(sampled.env_steps(), num_episodes, steps)


def _by_name(spaces: dict[AgentID, gym.Space]) -> dict[str, gym.Space]:
    return {str(agent): space for agent, space in spaces.items()}
