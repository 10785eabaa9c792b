"""The algorithm's team: modules are added, removed and copied while it trains, in learners and runners alike."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.core import ALL_MODULES, COMPONENT_ENV_TO_MODULE_CONNECTOR
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.utils.annotations import override
from ray.rllib.utils.metrics import LEARNER_RESULTS

from thrust_rllib import team_changes, warm_start
from thrust_rllib.algorithm_state import StatefulAlgorithm
from thrust_rllib.connectors.carry_over import rebuilt
from thrust_rllib.connectors.observation_normalizer import ObservationNormalizer
from thrust_rllib.diversity_probe import DIVERSITY
from thrust_rllib.envs.names import nearest
from thrust_rllib.joint_batch import ModuleID
from thrust_rllib.sampling.team_runner import TeamRunner
from thrust_rllib.team_changes import TeamChange


class TeamAlgorithm(StatefulAlgorithm):
    """Base of the algorithm: learners and all runners have the same modules with the same weights."""

    evaluation_config: Any
    spaces: Any
    _team_change: TeamChange | None = None

    @override(Algorithm)
    def setup(self, config: Any) -> None:
        if config.num_env_runners:
            team_changes.check_buildable(config)
        try:
            super().setup(config)
        except IndexError as error:  # RLlib's, where no remote runner tells its spaces
            if not config.num_env_runners or (reason := _why_no_runner_is_built(config)) is None:
                raise
            raise RuntimeError(f"none of the {config.num_env_runners} runners can be built. {reason}") from error
        for group in self._runner_groups():
            group.foreach_env_runner(_count_as_told)

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
        self._take_in_team(dataclasses.replace(change, rl_module_spec=team_changes.policies_in(specs)))
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
        self._take_in_team(dataclasses.replace(change, rl_module_spec=team_changes.policies_in(specs)))
        for key in team_changes.metrics_of(module_id):
            self.metrics.delete(*key, key_error=False)
        return specs

    def _ask_whether_it_can_train(self, change: TeamChange, **added: Any) -> None:
        self.learner_group.ask_first(team_changes.check_trainable, change=change, **added)

    def _take_in_team(self, change: TeamChange) -> None:
        """Takes a change, which the learners have, into this process and all runners."""
        for group in self._runner_groups():
            self._bring_up_to_date(group)
        self._team_change = change = dataclasses.replace(change, number=self._team_number + 1)
        if change.mapping.table != self.config.policy_mapping_fn.table:
            self.metrics.delete(LEARNER_RESULTS, ALL_MODULES, DIVERSITY, key_error=False)
        self.config = change.applied_to(self.config)
        self.evaluation_config = change.applied_to(self.evaluation_config)
        for group in self._runner_groups():
            group.foreach_env_runner(lambda runner: runner.change_team(change))
        if self.env_runner is None:
            self.spaces = {**self.spaces, **change.spaces}
            self.env_to_module_connector, self.module_to_env_connector = rebuilt(
                self.env_to_module_connector, self.module_to_env_connector, self.config, self.spaces
            )
        self._hand_out_weights()

    @property
    def _team_number(self) -> int:
        return 0 if self._team_change is None else self._team_change.number

    def _bring_up_to_date(self, group: Any) -> None:
        """Tells the state of now to runners that Ray has started again, as they were at the start.

        Between two calls that goes unnoticed, by RLlib too: such a runner answers, with the weights of its seed.
        """
        number, change = self._team_number, self._team_change
        if group.num_healthy_remote_workers() == 0:
            return
        found = group.foreach_env_runner(lambda runner: runner.team_number, local_env_runner=False)
        if all(n == number for n in found):
            return
        state, iteration = self._connector_state(), self.iteration
        group.foreach_env_runner(lambda runner: _tell(runner, number, change, state, iteration), local_env_runner=False)
        self._hand_out_weights()

    @override(Algorithm)
    def restore_env_runners(self, env_runner_group: Any) -> list[int]:
        """As RLlib's; a runner that Ray has started again, as it was at the start, learns of the changed team.

        All get the weights of now: RLlib gives them only to a runner whose own are older, and one that did not answer
        while a checkpoint was restored may have newer ones.
        """
        restored = super().restore_env_runners(env_runner_group)
        if restored:
            self._bring_up_to_date(env_runner_group)
            self._hand_out_weights()
        return restored

    @override(StatefulAlgorithm)
    def _give_states(self) -> None:
        for group in self._runner_groups():
            self._bring_up_to_date(group)
        super()._give_states()

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
        for group in self._runner_groups():
            self._bring_up_to_date(group)
        copied = self.learner_group.foreach_learner(_copy_module, source=source, target=target)
        self.learner_group._get_results(copied)
        self._hand_out_weights()
        if not self.config.normalize_observations:
            return
        for group in self._runner_groups():
            group.foreach_env_runner(lambda runner: runner.normalizer.copy_moments(source, target))
        if self.env_runner is None:
            self.env_to_module_connector[ObservationNormalizer][0].copy_moments(source, target)

    def warm_start(
        self,
        path: str | Path,
        modules: Mapping[ModuleID, ModuleID] | None = None,
        noise: float = 0.0,
        group_noise: float = 0.0,
    ) -> None:
        """Gives modules the parameters that modules of a checkpoint have; everything else stays as it is.

        Moments of observations and of values come along, optimizers, counters and settings do not: the training
        starts from other weights. Learners and all runners have them afterwards.

        Parameters of agents that exchange messages fit a team of any number of agents, and a grid of any size where
        they see a window of one size or their encoder is "conv". Moments of observations have the shape of what is
        seen beside the links.

        Args:
            path: of a checkpoint of any run.
            modules: {module here: module of the checkpoint}; several may take from the same one. None takes all
                policies that have the same name; a critic of the team is taken where it is named, {"team_critic":
                "team_critic"}.
            noise: to every number of a parameter is added a normal one, times this, times the deviation of that
                parameter's numbers, sqrt(mean (p − mean p)²); drawn from the configuration's seed and the module's
                name. Modules that start from one differ by it.
            group_noise: the same for groups forked from one module (`thrust_rllib.teams.forked_groups`): of the modules
                here that start from the same one the first by name is its exact copy, and the others get noise times
                this, times the root mean square of the parameter's numbers, sqrt(mean p²). Not together with `noise`.

        Raises:
            ValueError: no checkpoint, an unknown module, networks of different shapes, observations of different shapes
                whose moments are kept, noise below 0, or both kinds of noise. Nothing has changed then.
        """
        seed = random.getrandbits(63) if self.config.seed is None else self.config.seed
        added = warm_start.Noise.of(noise, group_noise, seed)
        parts = warm_start.read_parts(path, modules, sorted(self.config.policies), self.config.learner_modules)
        connectors = self._connector_state()
        moments = warm_start.observation_moments(parts, connectors[COMPONENT_ENV_TO_MODULE_CONNECTOR])
        self.learner_group.ask_first(warm_start.check_shapes, parts=parts)
        added.tell_if_useless(parts)
        for group in self._runner_groups():
            self._bring_up_to_date(group)
        taken = self.learner_group.foreach_learner(warm_start.take_parts, parts=parts, noise=added)
        self.learner_group._get_results(taken)
        if moments is not None:
            if self.env_runner is None:
                self.env_to_module_connector.set_state(moments)
            self._tell_runners(self._runner_groups(), _take_moments, moments)
        self._hand_out_weights()


def _take_moments(runner: Any, state: Any) -> None:
    runner.set_state({COMPONENT_ENV_TO_MODULE_CONNECTOR: ray.get(state) if isinstance(state, ray.ObjectRef) else state})


def _tell(runner: Any, number: int, change: TeamChange | None, state: dict[str, Any], iteration: int) -> None:
    """Runs in a runner: gives it the team of this number, and the state that belongs to it, if it has another one.

    It goes on with numbers of its own: those of the start were trained on.
    """
    if runner.team_number == number:
        return
    if change is not None:
        runner.change_team(change)
    runner.team_number = number
    runner.set_state(state)
    if isinstance(runner, TeamRunner):
        runner.reseed(iteration)


def _copy_module(learner: Any, source: ModuleID, target: ModuleID) -> None:
    learner.copy_module(source, target)


def _check_everywhere(where: dict[str, bool], known: Sequence[str]) -> None:
    for name, value in where.items():
        if name not in known:
            raise ValueError(f"{name!r} is no argument{nearest(name, known)}")
        if not value:
            raise ValueError(
                f"{name}={value!r}: learners and all runners have the same modules here. Leave it out; a module that "
                "is not to be trained, or plays no agent, costs nothing."
            )


def _count_as_told(runner: Any) -> None:
    runner.team_number = 0


def _why_no_runner_is_built(config: Any) -> str | None:
    """Builds one more in a process of its own, whose error can be asked for; None if that goes well."""
    kind = ray.remote(num_cpus=config.num_cpus_per_env_runner)(config.env_runner_cls)
    runner = kind.remote(config=config, worker_index=1, num_workers=config.num_env_runners)
    try:
        ray.get(runner.ping.remote())
    except RayActorError as error:
        return str(error)
    ray.kill(runner)
    return None
