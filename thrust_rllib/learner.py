"""The learner: one backward pass for every agent's losses and the couplings, on the same rows.

`update` runs its steps in the order in which they are written. RLlib's `Learner.update` differs in that its minibatches
keep one permutation per module (`MiniBatchCyclicIterator`), so that row k of two modules is not the same time step, and
in that it takes frozen modules out of the batch, where a coupling could no longer read them.

An update is read from top to bottom in one place. What a learner keeps from update to update stands in `team_learner`,
its state in `learner_state`, what it prepares for one update in `update_inputs`.
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
from thrust_rllib.coupling_gradients import CouplingGradients, coupling_gradients
from thrust_rllib.diversity_probe import DIVERSITY, probe_diversity
from thrust_rllib.envs.difference import DIFFERENCE_REWARD
from thrust_rllib.gradient_sum import sum_gradients
from thrust_rllib.joint_batch import JointBatch
from thrust_rllib.joint_losses import JointLosses
from thrust_rllib.joint_rows import JointRows
from thrust_rllib.learner_checks import check_team
from thrust_rllib.learners_alike import check_same_update, finish_alike
from thrust_rllib.loss_settings import statistics_of
from thrust_rllib.minibatch_losses import possibly_compiled_losses
from thrust_rllib.minibatches import joint_epochs
from thrust_rllib.module_axis import ModuleAxis
from thrust_rllib.rollouts import fetch_parts, rollouts_of
from thrust_rllib.shared_minibatch import MinibatchShares
from thrust_rllib.target_kl import KLStops
from thrust_rllib.update_inputs import UpdateInputs

DIFFERENCE_SIGNALS = (DIFFERENCE_REWARD,)


class JointPPOLearner(UpdateInputs):
    """Trains all modules of a team together.

    Replaces `PPOTorchLearner`: advantages with per-module γ and λ (RLlib's connector takes the global ones), joint
    minibatches, couplings, one gradient clip and one optimizer per module (two with `critic_lr`), and a minibatch
    with a non-finite loss or gradient moves nobody.
    """

    @override(UpdateInputs)
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
        trained = {m: self.should_module_be_updated(m, None) for m in rows.modules}
        sizes = {m: len(module.agents) for m, module in rows.modules.items()}
        critics = self._plan.streams(sizes)
        participants = {**trained, **{critic: True for critic in critics if critic not in trained}}
        settings = self._loss_settings(rows, critics)
        passes = self._passes(participants)
        frozen = torch.tensor([not t for t in participants.values()], device=self._device)
        has_rows = None if settings.all_present else _has_rows(rows, settings.axis, len(participants))
        shares = MinibatchShares(rows, self.ranks)
        totals = metrics.UpdateTotals(
            statistics_of({m: self.head_names.get(m, ()) for m in sizes}, critics, settings.auxiliary.names),
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
        look_at_couplings = bool(settings.cross_agent_losses) and self._is_due(self.config.coupling_gradient_interval)
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
                losses = self._losses(self.module, minibatch, trained, self.ranks, settings)
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
            self._coupling_gradients = pulls.by_name(list(settings.cross_agent_losses), list(rows.modules))
        if self._is_due(self.config.diversity_interval):
            policies = {m: self.module[m].unwrapped() for m in rows.modules}
            self._diversity = probe_diversity(policies, rows.modules, rows.present)
        self._log_update(totals, settings.cross_agent_coeffs, trained, stops.num_stops, costs)
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
        self._multipliers.update(costs, summary.couplings if stepped else {})
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


def _has_rows(rows: JointRows, axis: ModuleAxis, num_participants: int) -> Tensor:
    """[p, M] on the host: which participants have a row where; a critic of the team where anybody acted.

    So which modules have a row in a minibatch is asked without waiting for the device.
    """
    anybody = rows.present.any(0).expand(num_participants - len(axis.sizes), -1)
    return torch.cat([axis.any(rows.present), anybody]).cpu()


def _objectives(losses: JointLosses, num_passes: int) -> list[Tensor]:
    """What each pass minimises beside the couplings: everything, or with two passes the actors, then the critics.

    The couplings belong to the first pass.
    """
    actor, critic = losses.actor.sum(), losses.critic.sum()
    return [actor + critic] if num_passes == 1 else [actor, critic]
