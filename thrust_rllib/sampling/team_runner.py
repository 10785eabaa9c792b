"""What the runners of both doors have in common: seeds, modules, metrics, messages."""

from __future__ import annotations

import functools
import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from ray.rllib.callbacks.utils import make_callback
from ray.rllib.env.env_context import EnvContext
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
from ray.rllib.utils.annotations import override
from ray.rllib.utils.metrics import (
    EPISODE_MODULE_RETURN_MEAN,
    NUM_AGENT_STEPS_SAMPLED,
    NUM_AGENT_STEPS_SAMPLED_LIFETIME,
    NUM_ENV_STEPS_SAMPLED,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    NUM_EPISODES,
    NUM_EPISODES_LIFETIME,
    NUM_MODULE_STEPS_SAMPLED,
    NUM_MODULE_STEPS_SAMPLED_LIFETIME,
)
from ray.rllib.utils.typing import ResultDict

from thrust_rllib.connectors.carry_over import rebuilt
from thrust_rllib.connectors.observation_normalizer import ObservationNormalizer
from thrust_rllib.joint_batch import AgentID, ModuleID
from thrust_rllib.rl_modules.heads import asks_per_head, module_head_names
from thrust_rllib.sampling.env_restarts import EnvironmentFailed, EnvRestarts
from thrust_rllib.sampling.episode_statistics import EpisodeStatistics
from thrust_rllib.sampling.runner_state import sampling_state, seed_generators, set_sampling_state

logger = logging.getLogger(__name__)

NUM_ENV_RESTARTS = "num_env_restarts"
COMPONENT_SAMPLING = "sampling"
"""Component of a runner's state that is there when it is asked for by name: what it is in the middle of."""
PER_MODULE_METRICS = EPISODE_MODULE_RETURN_MEAN, NUM_MODULE_STEPS_SAMPLED, NUM_MODULE_STEPS_SAMPLED_LIFETIME
"""What runners report of each module: {name: {module: value}}."""


class TeamRunner(MultiAgentEnvRunner):
    """Base of the runners; a subclass makes the environments and samples.

    A subclass calls `_take_in_team` in its `make_env`, then `_tell_env_created`.
    """

    door: ClassVar[str]
    """What `sampling` in the configuration says for this class."""

    config: Any
    spaces: dict[str, Any]
    module_of: dict[AgentID, ModuleID]
    team_number: int | None = None
    """Of the last change of the team that was taken over; None until the algorithm has seen this process."""
    _env_to_module: Any
    _module_to_env: Any
    _ongoing_episodes: list[Any]
    _cached_to_module: dict[str, Any] | None

    def _take_in_team(self) -> None:
        """Takes over the agents of the environments; those that are made anew go on with other seeds."""
        assert self.env is not None
        agents = list(self.env.possible_agents)
        self.num_envs = num_envs = self.env.num_envs
        self.module_of = {agent: self.config.module_for_agent(agent) for agent in agents}
        self._statistics = EpisodeStatistics(agents, self.module_of, num_envs, self._metrics_window())
        if not hasattr(self, "_env_seeds"):
            self._env_seeds, self._actor_seeds = seed_generators(self)
        self._told_raw: set[ModuleID] = set()  # modules about whose observations was warned
        self._needs_initial_reset = True

    def _next_env_seeds(self) -> list[int]:
        """One seed per environment; never the same again."""
        return [int(seed) for seed in self._env_seeds.integers(2**31, size=self.num_envs)]

    def _next_actor_seed(self) -> int:
        return int(self._actor_seeds.integers(2**31))

    @property
    def _env_context(self) -> EnvContext:
        return EnvContext(
            self.config.env_config, worker_index=self.worker_index or 0, num_workers=self.config.num_env_runners
        )

    def _tell_env_created(self) -> None:
        make_callback(
            "on_environment_created",
            callbacks_objects=self._callbacks,
            callbacks_functions=self.config.callbacks_on_environment_created,
            kwargs={
                "env_runner": self,
                "metrics_logger": self.metrics,
                "env": self.env,
                "env_context": self._env_context,
            },
        )

    @override(MultiAgentEnvRunner)
    def make_module(self) -> None:
        spec = self.config.get_multi_rl_module_spec(spaces=self.get_spaces(), inference_only=True)
        for module_spec in spec.rl_module_specs.values():
            module_spec.inference_only = True  # RLlib leaves specs that are given module by module as they are
        self.module = spec.build()
        self.module.foreach_module(
            lambda _, module: module.to(self._device) if isinstance(module, torch.nn.Module) else module
        )
        if asks_per_head(self.config):
            self.module.foreach_module(lambda module_id, module: module_head_names(module_id, module))

    def change_team(self, change: Any) -> bool:
        """Takes over a changed team, if it has not yet; its weights have to be handed out then.

        Environments are reset, episodes in progress are dropped, memories begin anew. What connector pieces have
        gathered is kept, moments of observations for the modules that stay.

        Args:
            change: a `thrust_rllib.team_changes.TeamChange`.

        Returns:
            Whether anything has changed.
        """
        if self.team_number == change.number:
            return False
        self.team_number = change.number
        before, self.config = self.config, change.applied_to(self.config)
        if self.env is None:
            self.spaces = {**self.spaces, **change.spaces}
        elif self.config.policy_mapping_fn.table != before.policy_mapping_fn.table:
            self._take_in_team()
        self._env_to_module, self._module_to_env = rebuilt(
            self._env_to_module, self._module_to_env, self.config, self.spaces, self.env, self._device
        )
        self.make_module()
        self._cached_to_module = None
        self._ongoing_episodes = [None] * self.num_envs
        self._ongoing_episodes_for_metrics.clear()
        self._needs_initial_reset = True
        for module_id in sorted(set(before.policies) - set(self.config.policies)):
            for name in PER_MODULE_METRICS:
                self.metrics.delete(name, module_id, key_error=False)
        return True

    @property
    def normalizer(self) -> ObservationNormalizer | None:
        """What normalises encoded observations, with its current moments."""
        found = self._env_to_module[ObservationNormalizer]
        return found[0] if found else None

    @property
    def _env_name(self) -> str:
        return self.config.env_spec.name if self.config.env_spec else str(self.config.env)

    def _failure(self, moment: str, error: Exception) -> EnvironmentFailed:
        return EnvironmentFailed(
            f"environment {self._env_name!r} failed in {moment} (runner {self.worker_index or 0}): "
            f"{type(error).__name__}: {error}"
        )

    def _let_into_moments(self, module_id: ModuleID, obs: np.ndarray, present: np.ndarray | None = None) -> None:
        """Lets encoded observations of a finished rollout into the moments; what a frozen module sees must not change.

        Args:
            module_id: whose.
            obs: […, *shape].
            present: bool […], rows that count; None for all.
        """
        normalizer = self.normalizer
        assert normalizer is not None
        if self.config.is_trained(module_id):
            normalizer.update(module_id, obs, present)
        elif not normalizer.moments[module_id].count and module_id not in self._told_raw:
            self._told_raw.add(module_id)
            logger.warning(
                "module %r is not trained and has no moments of observations: with normalize_observations it sees them "
                "as they are. Restore it together with its moments (a checkpoint has both).",
                module_id,
            )

    def _reset_safely(self, reset: Callable[..., Any], **arguments: Any) -> Any:
        """Resets the environments; what goes wrong in them is named."""
        try:
            return reset(**arguments)
        except (TypeError, ValueError):
            raise  # what the environment showed contradicts what it declares: said by `thrust_rllib.envs`
        except Exception as error:
            raise self._failure("its reset", error) from error

    @override(MultiAgentEnvRunner)
    def sample(self, **kwargs: Any) -> Any:
        """As RLlib's; after an error or an interrupt the next call begins with a reset.

        With `restart_failed_env_runners` environments that fail are made anew, and what was sampled in this call is
        lost.

        Raises:
            EnvironmentFailed: they fail again and again, see `EnvRestarts`.
        """
        while True:
            try:
                sampled = super().sample(**kwargs)
            except BaseException as error:
                self._needs_initial_reset = True  # what was left in the middle of a step cannot go on
                if not isinstance(error, EnvironmentFailed):
                    raise
                self.env_restarts.failed(error)
                self._make_env_anew()
            else:
                self.env_restarts.succeeded()
                return sampled

    @functools.cached_property
    def env_restarts(self) -> EnvRestarts:
        """How often environments have failed."""
        return EnvRestarts(self.config.restart_failed_env_runners)

    def _make_env_anew(self) -> None:
        finished = self._statistics.get_finished()
        try:
            self.make_env()
        except Exception as error:
            raise self._failure("being made anew", error) from error
        self._statistics.set_finished(finished)
        self.metrics.log_value(NUM_ENV_RESTARTS, 1, reduce="lifetime_sum")

    # --- state ----------------------------------------------------------------------------------------------------

    def get_sampling_state(self) -> dict[str, Any] | None:
        """What the runner is in the middle of, to be taken between two calls to `sample`.

        A runner with the same weights and connector state that is given it samples what this one would have sampled,
        to the bit, if the environments have `get_state` and `set_state`; otherwise if both begin with a reset.

        Returns:
            A plain dict, see `thrust_rllib.sampling.runner_state`; None for a runner without environments.
        """
        return None if self.env is None else sampling_state(self)

    def set_sampling_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from `get_sampling_state`; to be called behind weights and connector state.

        Of another team, number of environments or door it takes the random generators only: the next rollout begins
        with a reset then. Without environments it does nothing.

        Raises:
            ValueError: no such state.
        """
        if self.env is not None:
            set_sampling_state(self, state)

    def reseed(self, *numbers: int) -> None:
        """Begins anew, with a reset and random numbers other than at the start, for a runner that has no saved state.

        Args:
            *numbers: whole numbers ≥ 0 that choose them, beside the configuration's seed (without one they are drawn
                from the system) and the runner's index.
        """
        if self.env is None:
            return
        self._env_seeds, self._actor_seeds = seed_generators(self, numbers)
        self._reseed_actions()
        self._statistics.forget_finished()
        self._needs_initial_reset = True

    @override(MultiAgentEnvRunner)
    def get_state(
        self,
        components: str | Collection[str] | None = None,
        *,
        not_components: str | Collection[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """As RLlib's; with `COMPONENT_SAMPLING` among `components` also `get_sampling_state`."""
        state: dict[str, Any] = super().get_state(components, not_components=not_components, **kwargs)
        if COMPONENT_SAMPLING in ([components] if isinstance(components, str) else components or ()):
            state[COMPONENT_SAMPLING] = self.get_sampling_state()
        return state

    @override(MultiAgentEnvRunner)
    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        if (sampling := state.get(COMPONENT_SAMPLING)) is not None:
            self.set_sampling_state(sampling)

    @abstractmethod
    def _reseed_actions(self) -> None:
        """Begins the random numbers of actions anew, from `_actor_seeds`."""

    @abstractmethod
    def _get_lasting_state(self) -> Any:
        """What goes on over resets, above all where the random numbers of actions are."""

    @abstractmethod
    def _set_lasting_state(self, state: Any) -> None:
        """Goes on with it."""

    @abstractmethod
    def _get_playing_state(self) -> dict[str, Any]:
        """Everything in the middle of an episode beside the environments' own state; may share arrays with it."""

    @abstractmethod
    def _set_playing_state(self, state: dict[str, Any]) -> None:
        """Goes on with it; the environments do already. May keep the arrays."""

    # --- metrics --------------------------------------------------------------------------------------------------

    @override(MultiAgentEnvRunner)
    def get_metrics(self) -> ResultDict:
        if self.env is not None:
            self._statistics.log(self.metrics)
            self._statistics.end_evaluation()
        return self.metrics.reduce()

    def _log_counts(self, env_steps: int, num_episodes: int, agent_steps: Mapping[AgentID, int]) -> None:
        """Logs how much was sampled, once per `sample()`."""
        self.metrics.log_value(NUM_ENV_STEPS_SAMPLED, env_steps, reduce="sum")
        self.metrics.log_value(NUM_ENV_STEPS_SAMPLED_LIFETIME, env_steps, reduce="lifetime_sum", with_throughput=True)
        self.metrics.log_value(NUM_EPISODES, num_episodes, reduce="sum")
        self.metrics.log_value(NUM_EPISODES_LIFETIME, num_episodes, reduce="lifetime_sum")
        for agent, module_id in self.module_of.items():
            steps = agent_steps[agent]
            self.metrics.log_value((NUM_AGENT_STEPS_SAMPLED, str(agent)), steps, reduce="sum")
            self.metrics.log_value((NUM_AGENT_STEPS_SAMPLED_LIFETIME, str(agent)), steps, reduce="lifetime_sum")
            self.metrics.log_value((NUM_MODULE_STEPS_SAMPLED, module_id), steps, reduce="sum")
            self.metrics.log_value((NUM_MODULE_STEPS_SAMPLED_LIFETIME, module_id), steps, reduce="lifetime_sum")

    def _metrics_window(self) -> int:
        """Episodes per runner so that all runners' windows together are `metrics_num_episodes_for_smoothing` long."""
        return max(1, math.ceil(self.config.metrics_num_episodes_for_smoothing / (self.config.num_env_runners or 1)))
