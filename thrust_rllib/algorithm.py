"""JointPPO: the RLlib algorithm."""

from __future__ import annotations

import functools
import logging
import time
from typing import Any

import ray
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.ppo import PPO
from ray.rllib.core import ALL_MODULES
from ray.rllib.utils.annotations import override
from ray.rllib.utils.metrics import (
    ENV_RUNNER_RESULTS,
    ENV_RUNNER_SAMPLING_TIMER,
    LEARNER_RESULTS,
    LEARNER_UPDATE_TIMER,
    NUM_AGENT_STEPS_SAMPLED,
    NUM_ENV_STEPS_SAMPLED,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    NUM_MODULE_STEPS_TRAINED_LIFETIME,
    SYNCH_WORKER_WEIGHTS_TIMER,
    TIMERS,
)
from ray.rllib.utils.typing import ResultDict
from ray.tune.result import DONE, SHOULD_CHECKPOINT

from thrust_rllib.config import JointPPOConfig
from thrust_rllib.entropy_guard import STOP_REASON, stop_reason
from thrust_rllib.envs.registry import make_joint_env
from thrust_rllib.metrics import LOW_ENTROPY_UPDATES
from thrust_rllib.rollouts import RolloutsLostError
from thrust_rllib.sampling.team_runner import TeamRunner
from thrust_rllib.team_algorithm import TeamAlgorithm

logger = logging.getLogger(__name__)

MAX_EMPTY_ITERATIONS = 3
LEAVING_S = 10.0
"""How long a runner may take to answer when the algorithm is stopped."""
RESTART_PAUSE_S = 1.0
"""A new process with torch and RLlib is up after some seconds."""


class JointPPO(TeamAlgorithm):
    """Synchronized joint multi-agent PPO; see `JointPPOConfig` and `docs/architecture.md`.

    `training_step` replaces PPO's in two ways: rollouts go from remote runners to the learner as object references,
    not through this process, and weights are synced by the list of trained modules instead of the keys of the
    learner's result (a module without a metric would miss its weights).
    """

    _empty_iterations = 0
    _stop_reason: str | None = None
    _has_updated = False
    _told_of_late_runners = False

    @classmethod
    @override(PPO)
    def get_default_config(cls) -> JointPPOConfig:
        return JointPPOConfig()

    @override(Algorithm)
    def step(self) -> ResultDict:
        """One iteration; one after which training does not go on has `done`, and says why under `STOP_REASON`.

        Tune ends the trial then, with a checkpoint. A checkpoint does not hold the reason: an algorithm into which it
        is restored trains on.

        Raises:
            RuntimeError: the iteration before was the last one; the reason.
        """
        if self._stop_reason is not None:
            raise RuntimeError(self._stop_reason)
        results = super().step()
        self._has_updated = False
        if self._stop_reason is not None:
            results |= {DONE: True, SHOULD_CHECKPOINT: True, STOP_REASON: self._stop_reason}
        return results

    @property
    def can_be_saved(self) -> bool:
        """Whether weights and counters are those of the last whole iteration: False behind an error in an update."""
        return not self._has_updated

    @override(PPO)
    def training_step(self) -> None:
        with self.metrics.log_time((TIMERS, ENV_RUNNER_SAMPLING_TIMER)):
            rollouts = self._sample()
        if not rollouts:
            self._tell_nothing_came(
                f"no runner answered within sample_timeout_s={self.config.sample_timeout_s} seconds"
            )
            return  # RLlib restores failed runners before the next step

        self._has_updated = True
        with self.metrics.log_time((TIMERS, LEARNER_UPDATE_TIMER)):
            try:
                self._update(rollouts)
            except RolloutsLostError as error:
                self._tell_nothing_came(str(error))
                return
            self._ask_entropy_guard()
        self._empty_iterations = 0

        with self.metrics.log_time((TIMERS, SYNCH_WORKER_WEIGHTS_TIMER)):
            self.env_runner_group.sync_weights(
                from_worker_or_learner_group=self.learner_group,
                policies=sorted(self.config.policies),
                inference_only=True,
            )

    def _update(self, rollouts: list[Any]) -> None:
        results = self.learner_group.update_from_rollouts(
            rollouts,
            timesteps={
                NUM_ENV_STEPS_SAMPLED_LIFETIME: self.metrics.peek((ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME)),
                NUM_MODULE_STEPS_TRAINED_LIFETIME: self.metrics.peek(
                    (LEARNER_RESULTS, ALL_MODULES, NUM_MODULE_STEPS_TRAINED_LIFETIME), default=0
                ),
            },
            num_epochs=self.config.num_epochs,
            minibatch_size=self.config.minibatch_size,
            shuffle_batch_per_epoch=self.config.shuffle_batch_per_epoch,
        )
        self.metrics.aggregate(results, key=LEARNER_RESULTS)

    def _ask_entropy_guard(self) -> None:
        """Ends the training after this iteration where the learner has counted enough updates of low entropy."""
        # RLlib's `get_config_for_module` cannot be asked here: it changes a copy that is as frozen as the original.
        own, default = self.config.algorithm_config_overrides_per_module, self.config.min_entropy
        limits = {m: own.get(m, {}).get("min_entropy", default) for m in sorted(self.config.policies)}
        if self._stop_reason is not None or all(limit is None for limit in limits.values()):
            return
        low_updates, entropies = (
            {m: self.metrics.peek((LEARNER_RESULTS, m, name), default=0, latest_merged_only=True) for m in limits}
            for name in (LOW_ENTROPY_UPDATES, "entropy")
        )
        self._stop_reason = stop_reason(low_updates, entropies, limits, self.config.min_entropy_updates)

    def _tell_nothing_came(self, what: str) -> None:
        """Warns when there is nothing to train on, and ends the run when that happens again and again."""
        self._empty_iterations += 1
        group = self.env_runner_group
        if group.num_remote_workers() > 0 and group.num_healthy_remote_workers() == 0:
            self._wait_for_restarts(group.num_remote_workers())
            return
        message = (
            f"{what} ({self._empty_iterations} iterations running). If environment or network are slow, raise "
            ".env_runners(sample_timeout_s=...) or lower train_batch_size_per_learner; if runners died, their own "
            "messages stand in the log."
        )
        if self._empty_iterations >= MAX_EMPTY_ITERATIONS:
            raise RuntimeError(message)
        logger.warning(message)

    def _wait_for_restarts(self, num_runners: int) -> None:
        """Leaves Ray some time for new processes; RLlib looks for them before the next iteration."""
        allowed = self.config.num_consecutive_env_runner_failures_tolerance
        message = (
            f"none of the {num_runners} runners is alive ({self._empty_iterations} iterations running, "
            f"num_consecutive_env_runner_failures_tolerance={allowed}, "
            f"restart_failed_env_runners={self.config.restart_failed_env_runners}); why they died stands in the log"
        )
        if not self.config.restart_failed_env_runners or self._empty_iterations > allowed:
            raise RuntimeError(message)
        logger.warning(message)
        time.sleep(RESTART_PAUSE_S)

    def _tell_late(self, count: int) -> None:
        """Warns, once, of runners that are alive and did not answer in time: the others have to do their share."""
        if count <= 0 or self._told_of_late_runners:
            return
        self._told_of_late_runners = True
        logger.warning(
            "%d of %d runners did not answer within sample_timeout_s=%s seconds; the others go on, and wait so long "
            "each time. If the environment is slow, raise .env_runners(sample_timeout_s=...); if it hangs, stop the "
            "run and resume it.",
            count,
            self.env_runner_group.num_remote_workers(),
            self.config.sample_timeout_s,
        )

    def _sample(self) -> list[Any]:
        """Rollouts of at least `total_train_batch_size` steps: lists of batches, or references to them."""
        count_agent_steps = self.config.count_steps_by == "agent_steps"
        rollouts: list[Any] = []
        all_metrics: list[Any] = []
        steps = 0
        while steps < self.config.total_train_batch_size:
            if self.env_runner_group.num_remote_workers() == 0:
                sampled = [_sample(self.env_runner_group.local_env_runner)]
            else:
                sampled = self.env_runner_group.foreach_env_runner(
                    functools.partial(_sample_remotely, team_number=self._team_number),
                    local_env_runner=False,
                    timeout_seconds=self.config.sample_timeout_s,
                )
                if not sampled:
                    break
                for result in sampled:
                    if isinstance(result, Exception):
                        raise result
                self._tell_late(self.env_runner_group.num_healthy_remote_workers() - len(sampled))
                if None in sampled:
                    self._bring_up_to_date(self.env_runner_group)
                    sampled = [result for result in sampled if result is not None]
            for rollout, metrics, failures in sampled:
                rollouts.append(rollout)
                all_metrics.append(metrics)
                for failure in failures:
                    logger.warning(failure)
                if count_agent_steps:
                    steps += sum(int(count) for count in metrics[NUM_AGENT_STEPS_SAMPLED].values())
                else:
                    steps += int(metrics[NUM_ENV_STEPS_SAMPLED])
        if all_metrics:
            self.metrics.aggregate(all_metrics, key=ENV_RUNNER_RESULTS)
        return rollouts

    @override(Algorithm)
    def _before_evaluate(self) -> None:
        """Hands the state of the connectors, moments of observations above all, to the evaluation runners.

        RLlib's own sync leaves a local one out, and drops the message to a remote one: it comes right behind the
        weights, with the same tag, of which one request may be in flight.
        """
        group = self.eval_env_runner_group
        if group is None:
            return
        self._bring_up_to_date(group)
        if not self.config.normalize_observations and self.config._env_to_module_connector is None:
            return
        state = self._connector_state()
        group.foreach_env_runner(lambda runner: runner.set_state(state))

    @override(Algorithm)
    def _evaluate_on_local_env_runner(self, env_runner: Any) -> Any:
        """Resets the environments first where the configuration says so; RLlib asks that of remote runners only."""
        if env_runner.config.in_evaluation and self.config.evaluation_force_reset_envs_before_iteration:
            env_runner._needs_initial_reset = True
        return super()._evaluate_on_local_env_runner(env_runner)

    @override(TeamAlgorithm)
    def restore_from_path(self, path: Any, *args: Any, **kwargs: Any) -> None:
        """As `TeamAlgorithm`'s; the training goes on, whatever had ended it."""
        super().restore_from_path(path, *args, **kwargs)
        self._go_on()

    @override(TeamAlgorithm)
    def set_state(self, state: Any) -> None:
        """As `TeamAlgorithm`'s; the training goes on, whatever had ended it."""
        super().set_state(state)
        self._go_on()

    def _go_on(self) -> None:
        self._stop_reason, self._empty_iterations = None, 0

    @override(Algorithm)
    def cleanup(self) -> None:
        """As RLlib's, which would wait for ever for a runner whose environment hangs: its process is ended."""
        groups = [getattr(self, name, None) for name in ("env_runner_group", "eval_env_runner_group")]
        actors = [a for group in groups if group is not None for a in group._worker_manager.actors().values()]
        if actors and ray.is_initialized():
            asked = {actor.ping.remote(): actor for actor in actors}
            _, late = ray.wait(list(asked), num_returns=len(asked), timeout=LEAVING_S)
            for call in late:
                ray.kill(asked[call])
        super().cleanup()

    @staticmethod
    @override(Algorithm)
    def _get_env_id_and_creator(env_specifier: Any, config: JointPPOConfig) -> tuple[Any, Any]:
        """Any environment that `JointPPOConfig.environment` takes; RLlib's takes classes and registered names."""
        return env_specifier, lambda context: make_joint_env(env_specifier, dict(context))


def _sample(runner: Any) -> tuple[Any, dict[str, Any], list[str]]:
    """Runs in a runner: its rollout, its metrics, and what failed on the way."""
    rollout = runner.sample()
    told = runner.env_restarts.pop_told() if isinstance(runner, TeamRunner) else []
    return rollout, runner.get_metrics(), told


def _sample_remotely(runner: Any, team_number: int = 0) -> tuple[Any, dict[str, Any], list[str]] | Exception | None:
    """Runs in a remote runner: as `_sample`, with a reference to the rollout; or what its environment raised.

    None: it does not have the team of this number (`TeamRunner.team_number`).

    RLlib ends a runner's process when a call raises, and with it the message; an environment's mistake is no failure
    of the process.
    """
    if getattr(runner, "team_number", 0) != team_number:
        return None
    try:
        rollout, metrics, told = _sample(runner)
        return ray.put(rollout), metrics, told
    except Exception as error:
        return error
