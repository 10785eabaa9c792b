"""The learner: one backward pass for every agent's losses and the couplings, on the same rows.

`update` runs its steps in the order in which they are written. RLlib's `Learner.update` differs in that its minibatches
keep one permutation per module (`MiniBatchCyclicIterator`), so that row k of two modules is not the same time step, and
in that it takes frozen modules out of the batch, where a coupling could no longer read them.

The file is longer than others so that an update is read from top to bottom in one place. What a learner keeps from
update to update stands in `team_learner`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from ray.rllib.core import ALL_MODULES
from ray.rllib.core.learner.learner import Learner
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.utils.annotations import override
from ray.rllib.utils.metrics import NUM_ENV_STEPS_SAMPLED_LIFETIME
from ray.rllib.utils.typing import ModuleID, ResultDict
from torch import Tensor

from thrust_rllib import metrics
from thrust_rllib.audit import Audit
from thrust_rllib.connectors.episodes_to_joint_batch import JOINT_BATCH
from thrust_rllib.coupling_gradients import CouplingGradients, coupling_gradients
from thrust_rllib.diversity_probe import probe_diversity
from thrust_rllib.envs.difference import DIFFERENCE_REWARD
from thrust_rllib.functional import has_head
from thrust_rllib.gradient_sum import sum_gradients
from thrust_rllib.joint_batch import JointBatch
from thrust_rllib.joint_losses import AuxiliarySettings, JointLosses, statistics_of
from thrust_rllib.joint_rows import JointRows, joint_rows
from thrust_rllib.learner_checks import check_team
from thrust_rllib.learners_alike import check_same_update, finish_alike
from thrust_rllib.minibatch_losses import possibly_compiled_losses
from thrust_rllib.minibatches import joint_epochs
from thrust_rllib.module_axis import Coefficients, ModuleAxis
from thrust_rllib.module_forward import module_values
from thrust_rllib.optimizer_pass import OptimizerPass
from thrust_rllib.rl_modules.learner_modules import TEAM_CRITIC
from thrust_rllib.rl_modules.memory import RecurrentModules
from thrust_rllib.rollouts import fetch_parts, rollouts_of
from thrust_rllib.sequences import ModuleSequences
from thrust_rllib.shared_minibatch import MinibatchShares
from thrust_rllib.target_kl import KLStops
from thrust_rllib.team_learner import ACTOR_OPTIMIZER, CRITIC_OPTIMIZER, TeamLearner

DIFFERENCE_SIGNALS = (DIFFERENCE_REWARD,)
DIVERSITY = "diversity"
"""Name of the metrics."""


class JointPPOLearner(TeamLearner):
    """Trains all modules of a team together.

    Replaces `PPOTorchLearner`: advantages with per-module γ and λ (RLlib's connector takes the global ones), joint
    minibatches, couplings, one gradient clip and one optimizer per module (two with `critic_lr`), and a minibatch
    with a non-finite loss or gradient moves nobody.
    """

    @override(TeamLearner)
    def build(self) -> None:
        super().build()
        self._losses = possibly_compiled_losses(self.config)

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
            RolloutsLostError: no rollout could be fetched; their runners are gone.
            ValueError: no rollout, or values that are not finite.
        """
        self._check_is_built()
        timesteps = timesteps or {}
        parts = fetch_parts(training_data or TrainingData(episodes=episodes, episodes_refs=episodes_refs))
        step = int(timesteps.get(NUM_ENV_STEPS_SAMPLED_LIFETIME, 0))
        check_same_update([self._weights_seq_no, step, len(parts), num_epochs, minibatch_size or 0], self.ranks)
        rollouts = rollouts_of(parts, self.ranks)
        sampled = sum(len(rollout) for rollout in rollouts)
        batches = self._batches(rollouts)
        check_team(batches, self._module_ids(), self.config.policy_mapping_fn)
        costs = self._multipliers.measure(batches)
        batches = self._multipliers.penalise(batches, DIFFERENCE_SIGNALS if self._plan.credit == "difference" else ())
        self.before_gradient_based_update(timesteps=timesteps)
        self._set_schedules(step - sampled)
        self._weights_seq_no += 1

        if minibatch_size is not None:
            minibatch_size *= self.ranks.size
        rows = self._joint_rows(batches)
        units = rows.units()
        self._notices.minibatches(
            units, minibatch_size, self.config.iterate_all_minibatches, self.config.max_minibatches_per_epoch
        )
        sizes = {m: len(module.agents) for m, module in rows.modules.items()}
        critics = self._plan.streams(sizes)
        axis = ModuleAxis(list(sizes.values()), self._device)
        critic_axis = axis if critics == sizes else ModuleAxis(list(critics.values()), self._device)
        trained = {m: self.should_module_be_updated(m, None) for m in rows.modules}
        coefficients = Coefficients.of(
            axis,
            [self.config.get_config_for_module(m) for m in rows.modules],
            [float(self._entropy_schedules[m].get_current_value()) for m in rows.modules],
            critic_axis,
            [self.config.get_config_for_module(m) for m in critics],
        )
        participants = {**trained, **{critic: True for critic in critics if critic not in trained}}
        scheduled = {name: s.get_current_value() for name, s in self._coupling_schedules.items()}
        coupling_coeffs = self._multipliers.coupling_coeffs(scheduled)
        couplings = {name: self.config.cross_agent_losses[name] for name in coupling_coeffs}
        frozen = torch.tensor([not t for t in participants.values()], device=self._device)
        passes = self._passes(participants)
        shares = MinibatchShares(rows, self.ranks)
        all_present = bool(rows.present.all())
        # [p, M] on the host: which modules have a row in a minibatch is asked without waiting for the device.
        has_rows = None
        if not all_present:
            anybody = rows.present.any(0).expand(len(participants) - len(trained), -1)
            has_rows = torch.cat([axis.any(rows.present), anybody]).cpu()
        names = {m: self.head_names[m] for m in sizes} if self.head_names else {}
        heads = has_head([len(own) for own in names.values()], list(sizes.values()), self._device) if names else None
        targets = self._auxiliary_settings()
        totals = metrics.UpdateTotals(
            statistics_of(names or list(rows.modules), critics, targets.names),
            list(self.module.keys()),
            list(self._coupling_schedules),
            self._device,
            num_passes=len(passes),
        )
        stops = KLStops(
            {m: self.config.get_config_for_module(m).target_kl if m in trained else None for m in participants},
            {m: trained.get(m, False) for m in participants},
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
                    critic=self._plan.critic,
                    axis=axis,
                    critic_axis=critic_axis,
                    coefficients=coefficients,
                    standardize_advantages=self.config.standardize_advantages,
                    all_present=all_present,
                    cross_agent_losses=couplings,
                    cross_agent_coeffs=coupling_coeffs,
                    heads=heads,
                    auxiliary=targets,
                )
                objectives = _objectives(losses, len(passes))
                if look_at_couplings and totals.num_minibatches == 0:
                    policies = {m: own for m, own in passes[0].params().items() if m in trained}
                    pulls = coupling_gradients(objectives[0], losses.weighted, policies, self.ranks)
                objectives[0] = objectives[0] + losses.coupling
                steps = stops.stepping(None if has_rows is None else has_rows[:, indices].any(1).tolist())
                for optimizer_pass, objective in zip(passes, objectives, strict=True):
                    optimizer_pass.compute_gradients(objective, optimizer_pass is not passes[-1], steps)
                found = sum_gradients(passes, losses.decisive(), self.ranks)
                norms = torch.stack([optimizer_pass.clip() for optimizer_pass in passes])
                finite = metrics.finite_parts(found, norms, frozen | stops.stopped)
                everything_finite = finite.all()
                for optimizer_pass in passes:
                    optimizer_pass.step(everything_finite)
                totals.add(losses, objectives[0], norms, finite, everything_finite, len(indices), stops.stopped)
                stops.observe(found.approx_kl, losses.counts, everything_finite)

        finish_alike(self._all_modules(), self.ranks, self.config.audit)
        if pulls is not None:
            self._coupling_gradients = pulls.by_name(list(couplings), list(rows.modules))
        interval = self.config.diversity_interval
        if interval > 0 and (self._weights_seq_no - 1) % interval == 0:
            policies = {m: self.module[m].unwrapped() for m in rows.modules}
            self._diversity = probe_diversity(policies, rows.modules, rows.present)
        self._log_update(totals, coupling_coeffs, trained, stops.num_stops, costs)
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
            memories={m: layout for m, layout in self.memories.items() if m in (*configs, TEAM_CRITIC)},
            normalizers=self._value_normalizers,
            gamma={m: config.gamma for m, config in configs.items()},
            lambda_={m: config.lambda_ for m, config in configs.items()},
            bootstrap=self.config.gae_bootstrap == "value",
            standardize_rollout=self.config.standardize_advantages == "rollout",
            device=self._device,
            ranks=self.ranks,
            plan=self._plan,
            auxiliary=tuple(self._auxiliary_schedules),
            per_head=bool(self.head_names),
        )

    @torch.no_grad()
    def _values(self, module_id: ModuleID, obs: Tensor, sequences: ModuleSequences | None) -> Tensor:
        """Values [R] of observations [R, …], or [R, N] where the team's critic has one for each agent."""
        values = module_values(self.module[module_id].unwrapped(), obs.to(self._device), sequences)
        return values.squeeze(-1) if module_id == TEAM_CRITIC and self._plan.of_team else values

    def _passes(self, trained: Mapping[ModuleID, bool]) -> list[OptimizerPass]:
        """The optimizers that step in each minibatch: one pass, or actors then their critics with `critic_lr`."""
        passes = []
        for name in (ACTOR_OPTIMIZER, CRITIC_OPTIMIZER):
            registered = {m: self.optimizers_of(m, name) for m in trained}
            if any(registered.values()):
                passes.append(
                    OptimizerPass(
                        optimizers=registered,
                        trained=trained,
                        grad_clip={m: self.config.get_config_for_module(m).grad_clip for m in registered},
                        grad_clip_by=self.config.grad_clip_by,
                        device=self._device,
                        joint_clip=self.config.grad_clip if self.config.clip_jointly else None,
                    )
                )
        return passes

    def _auxiliary_settings(self) -> AuxiliarySettings:
        weights = [float(schedule.get_current_value()) for schedule in self._auxiliary_schedules.values()]
        return AuxiliarySettings(
            tuple(self._auxiliary_schedules),
            tuple(target.loss for target in self.config.auxiliary_targets),
            torch.tensor(weights, device=self._device),
        )

    # --- what is reported -----------------------------------------------------------------------------------------

    def _log_update(
        self,
        totals: metrics.UpdateTotals,
        coupling_coeffs: Mapping[str, Any],
        trained: Mapping[ModuleID, bool],
        num_kl_stops: Mapping[ModuleID, int],
        costs: Mapping[str, float],
    ) -> None:
        summary = totals.summary()
        stepped = summary.num_minibatches > summary.num_non_finite
        self._multipliers.update({**costs, **(summary.couplings if stepped else {})})
        self._entropy_guard.count({m: summary.modules[m].get("entropy") for m in trained}, trained)
        self._notices.non_finite(summary)
        self._log_trainable_parameters()  # RLlib logs them once; from the second iteration on they would be NaN
        shared = {**self._multipliers.metrics(), **({DIVERSITY: self._diversity} if self._diversity else {})}
        if shared:
            self.metrics.log_dict(shared, key=ALL_MODULES, window=1)
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


def _objectives(losses: JointLosses, num_passes: int) -> list[Tensor]:
    """What each pass minimises beside the couplings: everything, or with two passes the actors, then the critics.

    The couplings belong to the first pass.
    """
    actor, critic = losses.actor.sum(), losses.critic.sum()
    return [actor + critic] if num_passes == 1 else [actor, critic]
