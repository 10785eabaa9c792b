"""JointPPO: the RLlib algorithm."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.ppo import PPO
from ray.rllib.core import (
    ALL_MODULES,
    COMPONENT_ENV_TO_MODULE_CONNECTOR,
    COMPONENT_LEARNER,
    COMPONENT_LEARNER_GROUP,
    COMPONENT_RL_MODULE,
)
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
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

from thrust_rllib import team_changes
from thrust_rllib.config import JointPPOConfig
from thrust_rllib.connectors.carry_over import carry_over
from thrust_rllib.connectors.observation_normalizer import ObservationNormalizer
from thrust_rllib.entropy_guard import STOP_REASON, stop_reason
from thrust_rllib.envs.names import nearest
from thrust_rllib.envs.registry import make_joint_env
from thrust_rllib.joint_batch import ModuleID
from thrust_rllib.metrics import LOW_ENTROPY_UPDATES
from thrust_rllib.team_changes import TeamChange

logger = logging.getLogger(__name__)

MAX_EMPTY_ITERATIONS = 3
RESTART_PAUSE_S = 1.0
"""A new process with torch and RLlib is up after some seconds."""


class JointPPO(PPO):
    """Synchronized joint multi-agent PPO; see `JointPPOConfig` and `docs/architecture.md`.

    `training_step` replaces PPO's in two ways: rollouts go from remote runners to the learner as object references,
    not through this process, and weights are synced by the list of trained modules instead of the keys of the
    learner's result (a module without a metric would miss its weights).
    """

    config: Any
    evaluation_config: Any
    spaces: Any
    env_to_module_connector: Any
    module_to_env_connector: Any
    _empty_iterations = 0
    _stop_reason: str | None = None
    _team_change: TeamChange | None = None

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
        if self._stop_reason is not None:
            results |= {DONE: True, SHOULD_CHECKPOINT: True, STOP_REASON: self._stop_reason}
        return results

    @override(PPO)
    def training_step(self) -> None:
        with self.metrics.log_time((TIMERS, ENV_RUNNER_SAMPLING_TIMER)):
            rollouts = self._sample()
        self._empty_iterations = 0 if rollouts else self._empty_iterations + 1
        if not rollouts:
            self._tell_nothing_came()
            return  # RLlib restores failed runners before the next step

        with self.metrics.log_time((TIMERS, LEARNER_UPDATE_TIMER)):
            results = self.learner_group.update_from_rollouts(
                rollouts,
                timesteps={
                    NUM_ENV_STEPS_SAMPLED_LIFETIME: self.metrics.peek(
                        (ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME)
                    ),
                    NUM_MODULE_STEPS_TRAINED_LIFETIME: self.metrics.peek(
                        (LEARNER_RESULTS, ALL_MODULES, NUM_MODULE_STEPS_TRAINED_LIFETIME), default=0
                    ),
                },
                num_epochs=self.config.num_epochs,
                minibatch_size=self.config.minibatch_size,
                shuffle_batch_per_epoch=self.config.shuffle_batch_per_epoch,
            )
            self.metrics.aggregate(results, key=LEARNER_RESULTS)
            self._ask_entropy_guard()

        with self.metrics.log_time((TIMERS, SYNCH_WORKER_WEIGHTS_TIMER)):
            self.env_runner_group.sync_weights(
                from_worker_or_learner_group=self.learner_group,
                policies=sorted(self.config.policies),
                inference_only=True,
            )

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

    def _tell_nothing_came(self) -> None:
        """Warns when no runner answered, and ends the run when that happens again and again."""
        group = self.env_runner_group
        if group.num_remote_workers() > 0 and group.num_healthy_remote_workers() == 0:
            self._wait_for_restarts(group.num_remote_workers())
            return
        message = (
            f"no runner answered within sample_timeout_s={self.config.sample_timeout_s} seconds "
            f"({self._empty_iterations} iterations running). If environment or network are slow, raise "
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

    def _sample(self) -> list[Any]:
        """Rollouts of at least `total_train_batch_size` steps: lists of batches, or references to them."""
        count_agent_steps = self.config.count_steps_by == "agent_steps"
        rollouts: list[Any] = []
        all_metrics: list[Any] = []
        steps = 0
        while steps < self.config.total_train_batch_size:
            if self.env_runner_group.num_remote_workers() == 0:
                runner = self.env_runner_group.local_env_runner
                sampled = [(runner.sample(), runner.get_metrics())]
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
                if None in sampled:
                    self._bring_up_to_date(self.env_runner_group)
                    sampled = [result for result in sampled if result is not None]
            for rollout, metrics in sampled:
                rollouts.append(rollout)
                all_metrics.append(metrics)
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

    def _connector_state(self) -> dict[str, Any]:
        """What the env-to-module pieces have gathered, of all runners together, as a runner's state."""
        name = COMPONENT_ENV_TO_MODULE_CONNECTOR
        if self.env_runner is not None:
            return {name: self.env_runner.get_state(components=name)[name]}
        return {name: self.env_to_module_connector.get_state()}

    @override(Algorithm)
    def _evaluate_on_local_env_runner(self, env_runner: Any) -> Any:
        """Resets the environments first where the configuration says so; RLlib asks that of remote runners only."""
        if env_runner.config.in_evaluation and self.config.evaluation_force_reset_envs_before_iteration:
            env_runner._needs_initial_reset = True
        return super()._evaluate_on_local_env_runner(env_runner)

    @override(Algorithm)
    def restore_from_path(self, path: Any, *args: Any, **kwargs: Any) -> None:
        """Restores, and hands the weights to every runner.

        RLlib's runners take weights only if their sequence number is newer, so that after going *back* they would go
        on with those they had.

        Raises:
            ValueError: the checkpoint has modules that this algorithm has not; nothing is restored then.
        """
        modules = Path(path) / COMPONENT_LEARNER_GROUP / COMPONENT_LEARNER / COMPONENT_RL_MODULE
        saved = {folder.name for folder in modules.iterdir() if folder.is_dir()} if modules.is_dir() else set()
        if unknown := sorted(saved - set(self.config.policies)):
            raise ValueError(
                f"the checkpoint {path} has modules {unknown}, which this algorithm has not: its modules are "
                f"{sorted(self.config.policies)}. Take JointPPO.from_checkpoint(path), or first add them: "
                "algo.add_module(...)."
            )
        super().restore_from_path(path, *args, **kwargs)
        self._stop_reason = None
        self._hand_out_weights()

    @override(Algorithm)
    def set_state(self, state: Any) -> None:
        """As RLlib's; weights in it reach every runner, as with `restore_from_path`."""
        super().set_state(state)
        if COMPONENT_LEARNER_GROUP in state:
            self._hand_out_weights()

    def _hand_out_weights(self) -> None:
        """The learner's weights to every runner, whatever sequence number they have."""
        groups = [group for group in (self.env_runner_group, self.eval_env_runner_group) if group is not None]
        for group in groups:
            group.foreach_env_runner(_forget_sequence_number)
            group.sync_weights(from_worker_or_learner_group=self.learner_group, inference_only=True)

    def copy_module(self, source: ModuleID, target: ModuleID) -> None:
        """Lets module `target` act as `source` does now: a frozen opponent becomes the learner's latest self.

        Copies weights, the moments of values and the entropy guard's count in the learner, weights and the moments of
        observations in every runner. The optimizers of both stay as they are.

        Args:
            source: a module.
            target: a module with the same network.

        Raises:
            ValueError: an unknown module, the same one twice, or networks of different shapes.
        """
        for module_id in (source, target):
            if module_id not in self.config.policies:
                raise ValueError(
                    f"copy_module got {module_id!r}; the modules are {sorted(self.config.policies)}"
                    f"{nearest(str(module_id), self.config.policies)}"
                )
        if source == target:
            raise ValueError(f"copy_module got {source!r} twice; name two modules")
        answers = self.learner_group.foreach_learner(_copied_in, source=source, target=target)
        for refusal in self.learner_group._get_results(answers):
            if refusal is not None:
                raise refusal
        self._hand_out_weights()
        if not self.config.normalize_observations:
            return
        for group in (self.env_runner_group, self.eval_env_runner_group):
            if group is not None:
                group.foreach_env_runner(lambda runner: runner.normalizer.copy_moments(source, target))
        if self.env_runner is None:
            self.env_to_module_connector[ObservationNormalizer][0].copy_moments(source, target)

    @override(Algorithm)
    def add_module(
        self,
        module_id: ModuleID,
        module_spec: RLModuleSpec | None = None,
        *,
        config_overrides: dict[str, Any] | None = None,
        new_agent_to_module_mapping_fn: Callable[..., ModuleID] | None = None,
        new_should_module_be_updated: Any = None,
        **where: bool,
    ) -> MultiRLModuleSpec:
        """Adds a module to learners and runners.

        All runners reset their environments and drop the episodes in progress. A module that plays no agent waits: it
        is in no batch and takes no step, until `copy_module` fills it, or another call gives it agents. Moments of
        observations (`normalize_observations`) are kept; the new module begins without.

        Args:
            module_id: its name.
            module_spec: what it leaves out is filled as for the others: spaces, class, `model_config`.
            config_overrides: its own of the options that a module may have.
            new_agent_to_module_mapping_fn: who plays whom from now on; asked once for every agent.
            new_should_module_be_updated: the modules to train from now on, or a function of a module's name.
            **where: RLlib's add_to_learners, add_to_env_runners, add_to_eval_env_runners: all have the same modules.

        Returns:
            The spec of all modules.

        Raises:
            ValueError: a name that is taken or no file name, an agent mapped to an unknown module, spaces that do not
                fit the agents, a network that cannot be built or trained, an option that no module may have, nothing
                left to train, or False for one of the places. Nothing has changed then.
        """
        _check_everywhere(where, ("add_to_learners", "add_to_env_runners", "add_to_eval_env_runners"))
        change, spec = team_changes.with_module(
            self.config,
            self.learner_group.ask_first(team_changes.specs_in),
            module_id,
            module_spec,
            config_overrides,
            new_agent_to_module_mapping_fn,
            new_should_module_be_updated,
        )
        self._ask_whether_it_can_train(change, module_id=module_id, spec=spec)
        specs = self.learner_group.add_module(
            module_id=module_id,
            module_spec=spec,
            config_overrides=change.overrides.get(module_id),
            new_should_module_be_updated=change.policies_to_train,
        )
        self.learner_group.set_agent_to_module(change.mapping)
        self._take_in_team(dataclasses.replace(change, rl_module_spec=specs))
        return specs

    @override(Algorithm)
    def remove_module(
        self,
        module_id: ModuleID,
        *,
        new_agent_to_module_mapping_fn: Callable[..., ModuleID] | None = None,
        new_should_module_be_updated: Any = None,
        **where: bool,
    ) -> MultiRLModuleSpec:
        """Removes a module from learners and runners; what happens to the runners is as with `add_module`.

        Args:
            module_id: which.
            new_agent_to_module_mapping_fn: needed where it plays an agent.
            new_should_module_be_updated: as in `add_module`; None leaves only this module out.
            **where: RLlib's remove_from_learners, remove_from_env_runners, remove_from_eval_env_runners.

        Returns:
            The spec of all modules that are left.

        Raises:
            ValueError: an unknown module, one that would still play an agent, another one that does not fit the agents
                it would get, nothing left to train, or False for one of the places. Nothing has changed then.
        """
        _check_everywhere(where, ("remove_from_learners", "remove_from_env_runners", "remove_from_eval_env_runners"))
        change = team_changes.without_module(
            self.config,
            self.learner_group.ask_first(team_changes.specs_in),
            module_id,
            new_agent_to_module_mapping_fn,
            new_should_module_be_updated,
        )
        self._ask_whether_it_can_train(change)
        self.learner_group.set_agent_to_module(change.mapping)
        specs = self.learner_group.remove_module(module_id, new_should_module_be_updated=change.policies_to_train)
        self._take_in_team(dataclasses.replace(change, rl_module_spec=specs))
        for key in team_changes.metrics_of(module_id):
            self.metrics.delete(*key, key_error=False)
        return specs

    def _ask_whether_it_can_train(self, change: TeamChange, **added: Any) -> None:
        refusal = self.learner_group.ask_first(team_changes.refusal_of, change=change, **added)
        if refusal is not None:
            raise refusal

    def _take_in_team(self, change: TeamChange) -> None:
        """Takes a change, which the learners have, into this process and all runners."""
        self._team_change = change = dataclasses.replace(change, number=self._team_number + 1)
        self.config = change.applied_to(self.config)
        self.evaluation_config = change.applied_to(self.evaluation_config)
        for group in (self.env_runner_group, self.eval_env_runner_group):
            if group is not None:
                group.foreach_env_runner(lambda runner: runner.change_team(change))
        if self.env_runner is None:
            self.spaces = {**self.spaces, **change.spaces}
            pieces = self.env_to_module_connector, self.module_to_env_connector
            self.env_to_module_connector = self.config.build_env_to_module_connector(spaces=self.spaces)
            self.module_to_env_connector = self.config.build_module_to_env_connector(spaces=self.spaces)
            for old, new in zip(pieces, (self.env_to_module_connector, self.module_to_env_connector), strict=True):
                carry_over(old, new)
        self._hand_out_weights()

    @property
    def _team_number(self) -> int:
        return 0 if self._team_change is None else self._team_change.number

    def _bring_up_to_date(self, group: Any) -> None:
        """Tells of the changed team whom Ray has started again, as it was at the start.

        Between two calls that goes unnoticed.
        """
        change = self._team_change
        if change is None or group.num_healthy_remote_workers() == 0:
            return
        state = self._connector_state()
        if any(group.foreach_env_runner(lambda r: _told(r, change, state), local_env_runner=False)):
            self._hand_out_weights()

    @override(Algorithm)
    def restore_env_runners(self, env_runner_group: Any) -> list[int]:
        """As RLlib's; a runner that Ray has started again, as it was at the start, learns of the changed team."""
        restored = super().restore_env_runners(env_runner_group)
        if restored:
            self._bring_up_to_date(env_runner_group)
        return restored

    @staticmethod
    @override(Algorithm)
    def _get_env_id_and_creator(env_specifier: Any, config: JointPPOConfig) -> tuple[Any, Any]:
        """Any environment that `JointPPOConfig.environment` takes; RLlib's takes classes and registered names."""
        return env_specifier, lambda context: make_joint_env(env_specifier, dict(context))


def _told(runner: Any, change: TeamChange, state: dict[str, Any]) -> bool:
    """Runs in a runner: whether it did not have the team yet, which it has now, with the state that belongs to it."""
    changed: bool = runner.change_team(change)
    if changed:
        runner.set_state(state)
    return changed


def _sample_remotely(runner: Any, team_number: int = 0) -> tuple[ray.ObjectRef, dict[str, Any]] | Exception | None:
    """Runs in a remote runner: a reference to its rollout and its metrics, or what its environment raised.

    None: it does not have the team of this number (`TeamRunner.team_number`).

    RLlib ends a runner's process when a call raises, and with it the message; an environment's mistake is no failure
    of the process.
    """
    if getattr(runner, "team_number", 0) != team_number:
        return None
    try:
        return ray.put(runner.sample()), runner.get_metrics()
    except Exception as error:
        return error


def _copied_in(learner: Any, source: ModuleID, target: ModuleID) -> ValueError | None:
    """Copies in a learner's process; RLlib asks a learner whose call has raised for nothing more."""
    try:
        learner.copy_module(source, target)
    except ValueError as error:
        return error
    return None


def _check_everywhere(where: dict[str, bool], known: Sequence[str]) -> None:
    for name, value in where.items():
        if name not in known:
            raise ValueError(f"{name!r} is no argument{nearest(name, known)}")
        if not value:
            raise ValueError(
                f"{name}={value!r}: learners and all runners have the same modules here. Leave it out; a module that "
                "is not to be trained, or plays no agent, costs nothing."
            )


def _forget_sequence_number(runner: Any) -> None:
    runner._weights_seq_no = 0
