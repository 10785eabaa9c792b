"""The learner: one backward pass for every agent's losses and the couplings, on the same rows.

`update` runs its steps in the order in which they are written. RLlib's `Learner.update` differs in that its minibatches
keep one permutation per module (`MiniBatchCyclicIterator`), so that row k of two modules is not the same time step, and
in that it takes frozen modules out of the batch, where a coupling could no longer read them.

The file is longer than others so that an update is read from top to bottom in one place.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core.learner.learner import Learner
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.core.rl_module.apis import ValueFunctionAPI
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.utils.annotations import override
from ray.rllib.utils.metrics import NUM_ENV_STEPS_SAMPLED_LIFETIME
from ray.rllib.utils.schedules.scheduler import Scheduler
from ray.rllib.utils.typing import ModuleID, ResultDict, StateDict
from torch import Tensor

from thrust_rllib import functional as F
from thrust_rllib import metrics
from thrust_rllib.audit import Audit
from thrust_rllib.connectors.carry_over import carry_over
from thrust_rllib.connectors.episodes_to_joint_batch import JOINT_BATCH
from thrust_rllib.coupling_gradients import CouplingGradients, coupling_gradients
from thrust_rllib.entropy_guard import EntropyGuard
from thrust_rllib.gradient_sum import sum_gradients
from thrust_rllib.joint_batch import JointBatch
from thrust_rllib.joint_losses import Coefficients, Decisive, JointLosses, ModuleAxis
from thrust_rllib.joint_rows import JointRows, joint_rows
from thrust_rllib.joint_values import VALUE_ROWS
from thrust_rllib.learner_checks import check_modules, check_sequences, check_team, prepare_couplings, rollouts_of
from thrust_rllib.learners_alike import check_same_update, finish_alike, start_alike
from thrust_rllib.minibatch_losses import possibly_compiled_losses
from thrust_rllib.minibatches import joint_epochs
from thrust_rllib.module_forward import module_values
from thrust_rllib.notices import Notices
from thrust_rllib.optimizer_pass import OptimizerPass
from thrust_rllib.ranks import Ranks
from thrust_rllib.rl_modules.memory import RecurrentModules
from thrust_rllib.sequences import ModuleSequences
from thrust_rllib.shared_minibatch import MinibatchShares
from thrust_rllib.target_kl import KLStops
from thrust_rllib.teams import AgentToModule

ACTOR_OPTIMIZER = "default_optimizer"
CRITIC_OPTIMIZER = "critic_optimizer"


class JointPPOLearner(TorchLearner):
    """Trains all modules of a team together.

    Replaces `PPOTorchLearner`: advantages with per-module γ and λ (RLlib's connector takes the global ones), joint
    minibatches, couplings, one gradient clip and one optimizer per module (two with `critic_lr`), and a minibatch
    with a non-finite loss or gradient moves nobody.
    """

    _weights_seq_no: int
    _learner_connector: Any

    # --- construction ---------------------------------------------------------------------------------------------

    @override(TorchLearner)
    def build(self) -> None:
        super().build()
        config = self.config
        self.ranks = self.make_ranks()
        self._coupling_schedules = {
            name: self._schedule(config.cross_agent_coeffs.get(name, 1.0)) for name in sorted(config.cross_agent_losses)
        }
        # The only source of randomness of an update: the order of the joint rows.
        self._generator = torch.Generator()
        if config.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(config.seed)
        self._notices = Notices(quiet=self.ranks.rank > 0)
        self._losses = possibly_compiled_losses(config)
        # {coupling: {module: {norm, norm_ratio, cosine}}} of the last update that looked at them.
        self._coupling_gradients: dict[str, dict[ModuleID, dict[str, float]]] = {}
        self._entropy_schedules: dict[ModuleID, Scheduler] = {}
        self._value_normalizers: dict[ModuleID, F.RunningMoments] = {}
        self._entropy_guard = EntropyGuard({}, config.min_entropy_updates)
        self._take_in_modules()

    def make_ranks(self) -> Ranks:
        """The learners that train together."""
        return Ranks.of(self.config, self._device)

    def _take_in_modules(self) -> None:
        """Gives every module what the learner keeps for it, and all learners the same modules to begin with."""
        config, ids = self.config, self._module_ids()
        modules = {m: self.module[m].unwrapped() for m in ids}
        check_modules(modules, config.cross_agent_losses, self._device)
        recurrent = RecurrentModules.of(modules)
        check_sequences(recurrent, config)
        self.memories = recurrent.layouts
        prepare_couplings(config.cross_agent_losses, modules, config.policy_mapping_fn)
        own = {m: config.get_config_for_module(m) for m in ids}
        self._entropy_schedules = {
            m: self._entropy_schedules.get(m) or self._schedule(own[m].entropy_coeff) for m in ids
        }
        self._value_normalizers = {
            m: self._value_normalizers.get(m) or F.RunningMoments(decay=VALUE_MOMENTS_DECAY)
            for m in ids
            if own[m].value_normalization
        }
        self._entropy_guard = self._entropy_guard.for_modules({m: own[m].min_entropy for m in ids})
        start_alike(modules, self._generator, self.ranks)
        self.ranks.take_traffic()  # what is counted is an update's

    def _module_ids(self) -> list[ModuleID]:
        return sorted(self.module.keys())

    def _schedule(self, value: Any) -> Scheduler:
        return Scheduler(fixed_value_or_schedule=value, framework=self.framework, device=self._device)

    def _set_schedules(self, timestep: int) -> None:
        """Sets every scheduled number to its value at the step count with which this rollout began.

        RLlib moves its schedules after an update only, so that the first update after a restore runs with the numbers
        of the construction, or with the learning rate that lies in the restored optimizer.
        """
        timestep = max(int(timestep), 0)
        for optimizer, schedule in self._optimizer_lr_schedules.items():
            self._set_optimizer_lr(optimizer, lr=schedule.update(timestep=timestep))
        for schedule in [*self._entropy_schedules.values(), *self._coupling_schedules.values()]:
            schedule.update(timestep=timestep)

    @override(TorchLearner)
    def rl_module_is_compatible(self, module: Any) -> bool:
        return super().rl_module_is_compatible(module) and isinstance(module.unwrapped(), ValueFunctionAPI)

    @override(TorchLearner)
    def configure_optimizers_for_module(self, module_id: ModuleID, config: AlgorithmConfig | None = None) -> None:
        """One Adam over the whole module; with `critic_lr` a second one with its own moments and rate."""
        assert config is not None
        params = list(self.get_parameters(self.module[module_id]))
        rates = {ACTOR_OPTIMIZER: config.lr}
        if config.critic_lr is not None:
            rates[CRITIC_OPTIMIZER] = config.critic_lr
        for name, rate in rates.items():
            self.register_optimizer(
                module_id=module_id,
                optimizer_name=name,
                # The fused kernel is three times faster on a small network and skips a step by a tensor, not an `if`.
                optimizer=torch.optim.Adam(params, fused=True),
                params=params,
                lr_or_lr_schedule=rate,
            )

    @override(TorchLearner)
    def _make_modules_ddp_if_necessary(self) -> None:
        """Nothing: torch's wrapper reduces each module's gradients alone, in the order in which a graph gives them."""

    @property
    @override(TorchLearner)
    def distributed(self) -> bool:
        """False: RLlib would wrap a module added later, too."""
        return False

    @override(TorchLearner)
    def add_module(self, **kwargs: Any) -> MultiRLModuleSpec:
        """Adds a module, as RLlib does; with several learners all start with the first one's parameters.

        Raises:
            ValueError: the module cannot be trained here; it is not there then.
        """
        trained = self.config.policies_to_train
        spec = super().add_module(**kwargs)
        try:
            self._take_in_modules()
        except ValueError:
            self.config.policies_to_train = trained
            self.remove_module(kwargs["module_id"])
            raise
        return spec

    @override(TorchLearner)
    def remove_module(self, module_id: ModuleID, **kwargs: Any) -> MultiRLModuleSpec:
        """Removes a module with everything that the learner keeps for it, as RLlib does."""
        spec = super().remove_module(module_id, **kwargs)
        self.config._per_module_overrides.pop(module_id, None)  # where RLlib would find them for another of that name
        self._take_in_modules()
        return spec

    def set_agent_to_module(self, mapping: AgentToModule) -> None:
        """Takes over who plays whom: the next rollouts have these agents and modules."""
        self.config.policy_mapping_fn = mapping
        pieces = self._learner_connector
        self._learner_connector = self.config.build_learner_connector(None, None, self._device)
        carry_over(pieces, self._learner_connector)
        self._take_in_modules()

    # --- the update -----------------------------------------------------------------------------------------------

    @override(Learner)
    def update(
        self,
        batch: Any = None,
        batches: Any = None,
        batch_refs: Any = None,
        episodes: Sequence[JointBatch] | Sequence[MultiAgentEpisode] | None = None,
        episodes_refs: Any = None,
        data_iterators: Any = None,
        training_data: TrainingData | None = None,
        *,
        timesteps: dict[str, Any] | None = None,
        num_epochs: int = 1,
        minibatch_size: int | None = None,
        shuffle_batch_per_epoch: bool = True,
        **kwargs: Any,
    ) -> ResultDict:
        """Trains on rollouts: `num_epochs` passes over their joint minibatches, one gradient step each.

        Args:
            batch: not used, as batches, batch_refs and data_iterators: RLlib's other forms of data.
            batches: not used.
            batch_refs: not used.
            episodes: rollouts: batches of the fast door, or episodes of the general one.
            episodes_refs: Ray references to lists of rollouts.
            data_iterators: not used.
            training_data: rollouts or references to them, as RLlib's `LearnerGroup` hands them over.
            timesteps: holds the lifetime count of sampled steps, which drives the schedules.
            num_epochs: passes over the batch.
            minibatch_size: joint rows per gradient step, for each of the learners; None takes all.
            shuffle_batch_per_epoch: a new order in each epoch.
            **kwargs: for RLlib's other callers.

        Returns:
            RLlib's result: statistics per module and under `ALL_MODULES`, means over the gradient steps.

        Raises:
            ValueError: no rollout, or values that are not finite.
        """
        self._check_is_built()
        timesteps = timesteps or {}
        rollouts = rollouts_of(training_data or TrainingData(episodes=episodes, episodes_refs=episodes_refs))
        sampled = sum(len(rollout) for rollout in rollouts)
        batches = self._batches(rollouts)
        check_team(batches, self._module_ids(), self.config.policy_mapping_fn)
        check_same_update([self._weights_seq_no, sampled, num_epochs, minibatch_size or 0], self.ranks)
        self.before_gradient_based_update(timesteps=timesteps)
        self._set_schedules(timesteps.get(NUM_ENV_STEPS_SAMPLED_LIFETIME, 0) - sampled)
        self._weights_seq_no += 1

        if minibatch_size is not None:
            minibatch_size *= self.ranks.size
        rows = self._joint_rows(batches)
        units = rows.units()
        self._notices.minibatches(
            units, minibatch_size, self.config.iterate_all_minibatches, self.config.max_minibatches_per_epoch
        )
        axis = ModuleAxis([len(m.agents) for m in rows.modules.values()], self._device)
        trained = {m: self.should_module_be_updated(m, None) for m in rows.modules}
        coefficients = Coefficients.of(
            axis,
            [self.config.get_config_for_module(m) for m in rows.modules],
            [float(self._entropy_schedules[m].get_current_value()) for m in rows.modules],
        )
        coupling_coeffs = {name: s.get_current_value() for name, s in self._coupling_schedules.items()}
        couplings = {name: self.config.cross_agent_losses[name] for name in coupling_coeffs}
        frozen = torch.tensor([not t for t in trained.values()], device=self._device)
        passes = self._passes(trained)
        shares = MinibatchShares(rows, self.ranks)
        all_present = bool(rows.present.all())
        # [m, M] on the host: which modules have a row in a minibatch is asked without waiting for the device.
        has_rows = None if all_present else axis.any(rows.present).cpu()
        totals = metrics.UpdateTotals(
            list(rows.modules), list(self._coupling_schedules), self._device, num_passes=len(passes)
        )
        stops = KLStops(
            {m: self.config.get_config_for_module(m).target_kl for m in rows.modules},
            trained,
            self.config.target_kl_scope,
            self._device,
        )
        interval = self.config.coupling_gradient_interval
        look_at_couplings = bool(couplings) and interval > 0 and (self._weights_seq_no - 1) % interval == 0
        pulls: CouplingGradients | None = None
        audit = Audit(rows, num_epochs) if self.config.audit else None

        for epoch in joint_epochs(
            units,
            minibatch_size=minibatch_size,
            num_epochs=num_epochs,
            iterate_all_minibatches=self.config.iterate_all_minibatches,
            max_minibatches_per_epoch=self.config.max_minibatches_per_epoch,
            shuffle=shuffle_batch_per_epoch,
            generator=self._generator,
        ):
            stops.begin_epoch()
            for indices in epoch:
                if stops.all_stopped:
                    break
                minibatch = shares.select(indices)
                if audit is not None:
                    audit.check(minibatch.whole, indices)
                losses = self._losses(
                    self.module,
                    minibatch,
                    trained,
                    ranks=self.ranks,
                    axis=axis,
                    coefficients=coefficients,
                    standardize_advantages=self.config.standardize_advantages,
                    all_present=all_present,
                    cross_agent_losses=couplings,
                    cross_agent_coeffs=coupling_coeffs,
                )
                objectives = self._objectives(losses)
                if look_at_couplings and totals.num_minibatches == 0:
                    pulls = coupling_gradients(objectives[0], losses.weighted, passes[0].params(), self.ranks)
                objectives[0] = objectives[0] + losses.coupling
                steps = stops.stepping(None if has_rows is None else has_rows[:, indices].any(1).tolist())
                for optimizer_pass, objective in zip(passes, objectives, strict=True):
                    optimizer_pass.compute_gradients(objective, optimizer_pass is not passes[-1], steps)
                found = Decisive.of_flat(sum_gradients(passes, losses.decisive().flat(), self.ranks))
                norms = torch.stack([optimizer_pass.clip() for optimizer_pass in passes])
                finite = metrics.finite_parts(found, norms, frozen | stops.stopped)
                everything_finite = finite.all()
                for optimizer_pass in passes:
                    optimizer_pass.step(everything_finite)
                totals.add(losses, objectives[0], norms, finite, everything_finite, len(indices), stops.stopped)
                stops.observe(found.approx_kl, losses.counts, everything_finite)

        finish_alike({m: self.module[m].unwrapped() for m in self._module_ids()}, self.ranks, self.config.audit)
        if pulls is not None:
            self._coupling_gradients = pulls.by_name(list(couplings), list(rows.modules))
        self._log_update(totals, coupling_coeffs, trained, stops.num_stops)
        self.after_gradient_based_update(timesteps=timesteps)
        return self.metrics.reduce()

    @override(Learner)
    def compute_loss_for_module(self, **kwargs: Any) -> Any:
        """Not used: the losses of all modules are computed together.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "JointPPOLearner computes the losses of all modules together (thrust_rllib.joint_losses); write a "
            "CrossAgentLoss to add a term"
        )

    def _batches(self, rollouts: Sequence[Any]) -> list[JointBatch]:
        """Episodes through the learner pipeline (`JointPPOConfig.build_learner_connector`); batches as they are."""
        if isinstance(rollouts[0], JointBatch):
            return list(rollouts)
        shared_data: dict[str, Any] = {}
        columns = self._learner_connector(
            rl_module=self.module, batch={}, episodes=list(rollouts), shared_data=shared_data, metrics=self.metrics
        )
        return [columns[JOINT_BATCH]]

    def _joint_rows(self, batches: Sequence[JointBatch]) -> JointRows:
        self.memories = RecurrentModules.of(self.module).layouts  # initial states may have come with other weights
        configs = {m: self.config.get_config_for_module(m) for m in batches[0].modules}
        return joint_rows(
            batches,
            values_of=self._values,
            memories={m: layout for m, layout in self.memories.items() if m in configs},
            normalizers=self._value_normalizers,
            gamma={m: config.gamma for m, config in configs.items()},
            lambda_={m: config.lambda_ for m, config in configs.items()},
            bootstrap=self.config.gae_bootstrap == "value",
            standardize_rollout=self.config.standardize_advantages == "rollout",
            device=self._device,
            ranks=self.ranks,
        )

    @torch.no_grad()
    def _values(self, module_id: ModuleID, obs: Tensor, sequences: ModuleSequences | None) -> Tensor:
        """Values [R] of observations [R, …], some thousand rows at a time to bound the memory."""
        module = self.module[module_id].unwrapped()
        if sequences is not None:
            return module_values(module, obs.to(self._device), sequences)
        return torch.cat([module_values(module, o.to(self._device), None) for o in obs.split(VALUE_ROWS)])

    def _passes(self, trained: Mapping[ModuleID, bool]) -> list[OptimizerPass]:
        """The optimizers that step in each minibatch: one pass, or actor then critic with `critic_lr`."""
        passes = []
        for name in (ACTOR_OPTIMIZER, CRITIC_OPTIMIZER):
            registered = {
                m: self._named_optimizers[f"{m}_{name}"] for m in trained if f"{m}_{name}" in self._named_optimizers
            }
            if registered:
                passes.append(
                    OptimizerPass(
                        optimizers=registered,
                        trained=trained,
                        grad_clip={m: self.config.get_config_for_module(m).grad_clip for m in registered},
                        grad_clip_by=self.config.grad_clip_by,
                        device=self._device,
                    )
                )
        return passes

    def _objectives(self, losses: JointLosses) -> list[Tensor]:
        """What each pass minimises beside the couplings: everything, or with `critic_lr` the actors, then the critics.

        The couplings belong to the first pass.
        """
        actor, critic = losses.actor.sum(), losses.critic.sum()
        return [actor + critic] if self.config.critic_lr is None else [actor, critic]

    # --- what is reported -----------------------------------------------------------------------------------------

    def _log_update(
        self,
        totals: metrics.UpdateTotals,
        coupling_coeffs: Mapping[str, Any],
        trained: Mapping[ModuleID, bool],
        num_kl_stops: Mapping[ModuleID, int],
    ) -> None:
        summary = totals.summary()
        self._entropy_guard.count({m: values.get("entropy") for m, values in summary.modules.items()}, trained)
        self._notices.non_finite(summary)
        self._log_trainable_parameters()  # RLlib logs them once; from the second iteration on they would be NaN
        metrics.log_update(
            self.metrics,
            summary,
            weights_seq_no=self._weights_seq_no,
            entropy_coeffs={m: float(s.get_current_value()) for m, s in self._entropy_schedules.items()},
            coupling_coeffs={name: float(value) for name, value in coupling_coeffs.items()},
            value_normalizers=self._value_normalizers,
            coupling_gradients=self._coupling_gradients,
            num_kl_stops=num_kl_stops,
            low_entropy_updates=self._entropy_guard.low_updates,
            traffic=self.ranks.take_traffic(),
        )

    def copy_module(self, source: ModuleID, target: ModuleID) -> None:
        """Gives module `target` the weights, the moments of values and the entropy guard's count of `source`.

        Raises:
            ValueError: the networks have different shapes.
        """
        given, needed = (self.module[m].unwrapped().state_dict() for m in (source, target))
        shapes = [{name: tuple(x.shape) for name, x in state.items()} for state in (given, needed)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"modules {source!r} and {target!r} have different networks: {shapes[0]} and {shapes[1]}")
        self.module[target].unwrapped().load_state_dict(given)
        if source in self._value_normalizers and target in self._value_normalizers:
            self._value_normalizers[target].set_state(self._value_normalizers[source].get_state())
        self._entropy_guard.low_updates[target] = self._entropy_guard.low_updates[source]

    # --- state ----------------------------------------------------------------------------------------------------

    @override(TorchLearner)
    def _set_optimizer_state(self, state: StateDict) -> None:
        # Arrays out of Ray's object store would stay there, for all learners of a machine to step in the same memory.
        super()._set_optimizer_state(copy.deepcopy(state))

    @override(Learner)
    def get_state(
        self, components: Any = None, *, not_components: Any = None, inference_only: bool = False, **kwargs: Any
    ) -> StateDict:
        # A critic with a memory of its own is run while sampling, though RLlib's LSTM module counts it as not needed.
        inference_only = inference_only and not self.memories
        state = super().get_state(components, not_components=not_components, inference_only=inference_only, **kwargs)
        if self._check_component(JOINT_STATE, components, not_components):
            state[JOINT_STATE] = {
                "generator": self._generator.get_state().numpy(),
                "value_normalizers": {m: moments.get_state() for m, moments in self._value_normalizers.items()},
                "coupling_gradients": self._coupling_gradients,
                "low_entropy_updates": dict(self._entropy_guard.low_updates),
            }
        return state

    @override(Learner)
    def set_state(self, state: StateDict) -> None:
        # RLlib would bring back the `policies_to_train` of the checkpoint over those of this configuration.
        # RLlib takes newer weights only: going back would leave the newer ones, with the older optimizers.
        number = self._weights_seq_no
        self._weights_seq_no = -1
        super().set_state({key: value for key, value in state.items() if key != "should_module_be_updated"})
        self._weights_seq_no = number if self._weights_seq_no < 0 else self._weights_seq_no
        if (joint := state.get(JOINT_STATE)) is not None:
            self._generator.set_state(torch.from_numpy(joint["generator"].copy()))
            self._coupling_gradients = joint.get("coupling_gradients", {})
            self._entropy_guard.restore(joint.get("low_entropy_updates", {}))
            for module_id, moments in joint["value_normalizers"].items():
                if module_id in self._value_normalizers:
                    self._value_normalizers[module_id].set_state(moments)


JOINT_STATE = "joint"
"""Name of this learner's own part of its state."""

VALUE_MOMENTS_DECAY = 0.95
"""Weight that one update leaves to the older value targets: about 20 updates are remembered."""
