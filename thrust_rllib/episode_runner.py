"""The general door: RLlib's own sampling loop, with an episode that loses nothing."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import numpy as np
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.env import INPUT_ENV_SINGLE_SPACES, INPUT_ENV_SPACES
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
from ray.rllib.utils.annotations import override
from ray.rllib.utils.metrics import ENV_STEP_TIMER
from ray.rllib.utils.typing import ResultDict

from thrust_rllib.connectors.team_actions import TeamActions
from thrust_rllib.connectors.team_exchange import TeamExchange
from thrust_rllib.connectors.team_memory import TeamMemory
from thrust_rllib.connectors.team_observations import ACTING
from thrust_rllib.envs.multi_agent_vector import MultiAgentVector, make_multi_agent_env
from thrust_rllib.joint_episode import JointEpisode
from thrust_rllib.rl_modules.memory import RecurrentModules
from thrust_rllib.sampling.episode_checks import checked_steps, write_bootstrap_inputs
from thrust_rllib.sampling.episode_state import episode_state, inputs_state, restore_episode, restored_inputs
from thrust_rllib.sampling.team_runner import TeamRunner


class JointEpisodeRunner(TeamRunner):
    """RLlib's `MultiAgentEnvRunner` with its connectors and callbacks, for every multi-agent environment.

    The loop is RLlib's. Different are the vector of environments (`MultiAgentVector`), the episode (`JointEpisode`),
    the last piece of each connector pipeline, and the counts, which are logged once per `sample()` instead of at each
    step.

    `sample()` returns a list of `JointEpisode`s, whole ones and fragments; `EpisodesToJointBatch` makes the learner's
    batch of them.
    """

    door = "episodes"
    env: MultiAgentVector | None

    # --- construction ---------------------------------------------------------------------------------------------

    @override(MultiAgentEnvRunner)
    def __init__(self, config: Any, **kwargs: Any) -> None:
        super().__init__(config=config, **kwargs)
        self._reseed_actions()

    @override(TeamRunner)
    def _reseed_actions(self) -> None:
        if self.env is not None:
            for piece in self._module_to_env[TeamActions]:
                piece.seed(self._next_actor_seed())

    @override(TeamRunner)
    def change_team(self, change: Any) -> bool:
        changed = super().change_team(change)
        if changed:
            self._reseed_actions()
        return changed

    @override(MultiAgentEnvRunner)
    def make_env(self) -> None:
        if self.env is not None:
            self.env.close()
        spec, context = self.config.env_spec, self._env_context
        self.env = MultiAgentVector(
            lambda: make_multi_agent_env(spec, context),
            self.config.num_envs_per_env_runner,
            spec.name,
            records_state=self.config.records_state and not self.config.in_evaluation,
        )
        self._take_in_team()
        self._tried_steps = 0
        self._evaluates = False
        self._tells_ends = self.config.callbacks_on_episode_end is not None or any(
            type(callback).on_episode_end is not RLlibCallback.on_episode_end for callback in self._callbacks
        )
        self._totals: dict[str, Any] = {}  # of episodes that go on
        self.spaces = {
            INPUT_ENV_SPACES: (self.env.observation_space, self.env.action_space),
            INPUT_ENV_SINGLE_SPACES: (self.env.single_observation_space, self.env.single_action_space),
        }
        self._tell_env_created()

    @override(MultiAgentEnvRunner)
    def get_spaces(self) -> dict[str, Any]:
        if self.env is None:
            return self.spaces
        return {**self.spaces, **self.config.module_spaces()}

    @override(MultiAgentEnvRunner)
    def _new_episode(self, env_index: int, episodes: list[Any] | None = None) -> None:
        episodes = self._ongoing_episodes if episodes is None else episodes
        episodes[env_index] = self._empty_episode(env_index)
        self._make_on_episode_callback("on_episode_created", env_index, episodes)

    def _empty_episode(self, env_index: int) -> JointEpisode:
        assert self.env is not None
        return JointEpisode(
            env_name=self.env.name,
            runner_index=self.worker_index or 0,
            env_index=env_index,
            agents=self.env.possible_agents,
            observation_space=self.env.observation_spaces,
            action_space=self.env.action_spaces,
            agent_to_module_mapping_fn=self.config.policy_mapping_fn,
        )

    # --- sampling -------------------------------------------------------------------------------------------------

    @override(MultiAgentEnvRunner)
    def sample(self, *, num_episodes: int | None = None, **kwargs: Any) -> list[JointEpisode]:
        """As RLlib's; asked for a number of episodes (an evaluation), the metrics are means over all of them."""
        self._evaluates = self.config.in_evaluation or num_episodes is not None
        if self._evaluates:
            self._statistics.start_evaluation()
        return super().sample(num_episodes=num_episodes, **kwargs)

    @override(MultiAgentEnvRunner)
    def _sample(self, **kwargs: Any) -> list[JointEpisode]:
        for piece in self._env_to_module[TeamMemory]:
            piece.take_weights()
        if self._cached_to_module and not self._needs_initial_reset:
            self._see_anew()
        episodes: list[JointEpisode] = super()._sample(**kwargs)
        acted: Counter[Any] = Counter()
        for episode in episodes:
            acted.update(episode.acted)
            self._add_up(episode)
        env_steps = sum(map(len, episodes))
        self._log_counts(env_steps, sum(episode.is_done for episode in episodes), acted)
        for counter, count in (
            (self._metrics_num_try_env_step, self._tried_steps),
            (self._metrics_num_env_steps_sampled, env_steps),
        ):
            if count:
                counter.inc(count)
        self._tried_steps = 0
        if not self._tells_ends:
            self._ongoing_episodes_for_metrics.clear()  # RLlib keeps every fragment of an episode for that callback
        steps_of = checked_steps(
            self.config.team_codec(),
            episodes,
            check_bounds=not self.config.disable_env_checking,
            check_observations=self.normalizer is not None or self.config._env_to_module_connector is None,
        )
        if self.normalizer is not None:
            write_bootstrap_inputs(self.normalizer, steps_of)
            if not self._evaluates:
                for module_id, (steps, encoded) in steps_of.items():
                    if encoded is not None:
                        self._let_into_moments(module_id, encoded[steps.own])
        return episodes

    def _see_anew(self) -> None:
        """Makes what the agents see next anew: the last rollout has made it, with other moments and weights."""
        if self.normalizer is not None:
            self.normalizer(batch=self._cached_to_module, shared_data=self._shared_data)
        for piece in self._env_to_module[TeamExchange]:
            self._cached_to_module = piece(
                rl_module=self.module,
                batch=self._cached_to_module,
                episodes=self._ongoing_episodes,
                shared_data=self._shared_data,
            )

    @override(MultiAgentEnvRunner)
    def _increase_sampled_metrics(self, num_steps: int, next_obs: Any, episode: Any) -> int:
        return num_steps  # counted once per sample()

    @override(MultiAgentEnvRunner)
    def _log_env_steps(self, metric: Any, num_steps: int) -> None:
        pass  # counted once per sample()

    @override(MultiAgentEnvRunner)
    def _try_env_reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, Any]:
        assert self.env is not None
        seeds = self._next_env_seeds() if self._needs_initial_reset else None
        self._totals.clear()
        return self._reset_safely(self.env.reset, seed=seeds, options=options)

    @override(MultiAgentEnvRunner)
    def _try_env_step(self, actions: Any) -> Any:
        assert self.env is not None
        before = time.perf_counter()
        try:
            results = self.env.step(actions)
        except RuntimeError as error:  # the environment's own; what it may not return is said by `MultiAgentVector`
            raise self._failure("a step", error) from error
        self._tried_steps += 1
        self.metrics.log_value(ENV_STEP_TIMER, time.perf_counter() - before)
        return results

    # --- state ----------------------------------------------------------------------------------------------------

    @override(TeamRunner)
    def _get_lasting_state(self) -> list[Any]:
        return [piece.get_drawing_state() for piece in self._module_to_env[TeamActions]]

    @override(TeamRunner)
    def _set_lasting_state(self, state: list[Any]) -> None:
        for piece, mine in zip(self._module_to_env[TeamActions], state, strict=True):
            piece.set_drawing_state(mine)

    @override(TeamRunner)
    def _get_playing_state(self) -> dict[str, Any]:
        assert self._cached_to_module is not None and self._shared_data is not None
        going_on = {episode.id_ for episode in self._ongoing_episodes}
        return {
            "episodes": [episode_state(episode) for episode in self._ongoing_episodes],
            "inputs": inputs_state(self._shared_data[ACTING], self._cached_to_module),
            "totals": self._totals,
            "fragments": {
                id_: [episode_state(fragment) for fragment in fragments]
                for id_, fragments in self._ongoing_episodes_for_metrics.items()
                if id_ in going_on
            },
        }

    @override(TeamRunner)
    def _set_playing_state(self, state: dict[str, Any]) -> None:
        self._ongoing_episodes = [self._restored_episode(i, saved) for i, saved in enumerate(state["episodes"])]
        assert self.env is not None
        if self.env.records_state:  # perhaps nobody asked for it in the run that was saved
            for episode in self._ongoing_episodes:
                if episode.env_t not in episode.states:
                    episode.states[episode.env_t] = self.env.global_state(episode.env_index)
        env_index_of = {episode.id_: episode.env_index for episode in self._ongoing_episodes}
        self._totals = state["totals"]
        self._done_episodes_for_metrics.clear()
        self._ongoing_episodes_for_metrics.clear()
        for id_, fragments in state["fragments"].items():
            restored = [self._restored_episode(env_index_of[id_], fragment) for fragment in fragments]
            self._ongoing_episodes_for_metrics[id_] = restored
        layouts = RecurrentModules.of(self.module).layouts
        acting, self._cached_to_module = restored_inputs(state["inputs"], layouts, self._device)
        self._shared_data = {ACTING: acting}

    def _restored_episode(self, env_index: int, state: dict[str, Any]) -> JointEpisode:
        episode = self._empty_episode(env_index)
        restore_episode(episode, state)
        return episode

    # --- metrics --------------------------------------------------------------------------------------------------

    def _add_up(self, episode: JointEpisode) -> None:
        """Adds a fragment to its episode's totals: returns [N], steps [N], length, seconds."""
        singles = [episode.agent_episodes.get(agent) for agent in self.module_of]
        returns = np.array([0.0 if single is None else single.get_return() for single in singles])
        steps = np.array([episode.acted[agent] for agent in self.module_of])
        new = (returns, steps, len(episode), episode.get_duration_s())
        before = self._totals.pop(episode.id_, None)
        totals = new if before is None else tuple(x + y for x, y in zip(before, new, strict=True))
        if episode.is_done:
            self._statistics.add_finished(*totals)
        else:
            self._totals[episode.id_] = totals

    @override(MultiAgentEnvRunner)
    def get_metrics(self) -> ResultDict:
        for episode in self._done_episodes_for_metrics:  # RLlib keeps them for its callbacks
            self._ongoing_episodes_for_metrics.pop(episode.id_, None)
        self._done_episodes_for_metrics.clear()
        return super().get_metrics()
