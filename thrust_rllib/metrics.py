"""What an update reports: sums on the device while it runs, one transfer and one log call at its end."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from ray.rllib.core import ALL_MODULES
from ray.rllib.utils.metrics import (
    MODULE_TRAIN_BATCH_SIZE_MEAN,
    NUM_ENV_STEPS_TRAINED,
    NUM_ENV_STEPS_TRAINED_LIFETIME,
    NUM_MODULE_STEPS_TRAINED,
    NUM_MODULE_STEPS_TRAINED_LIFETIME,
    WEIGHTS_SEQ_NO,
)
from torch import Tensor

from thrust_rllib.functional import RunningMoments
from thrust_rllib.joint_batch import ModuleID
from thrust_rllib.joint_losses import Decisive, JointLosses
from thrust_rllib.ranks import Traffic

TOTAL_LOSS = "total_loss"
NUM_MINIBATCH_STEPS = "num_minibatch_steps"
NUM_NON_FINITE_MINIBATCHES = "num_non_finite_minibatches"
CROSS_AGENT_LOSS = "cross_agent_loss"
CROSS_AGENT_COEFF = "cross_agent_coeff"
GRADIENT_NORMS = ("gradients_default_optimizer_global_norm", "gradients_critic_optimizer_global_norm")
COUPLING_GRADIENT = "coupling_gradient"
NUM_KL_STOPS = "num_kl_stops"
LOW_ENTROPY_UPDATES = "low_entropy_updates"
NUM_COLLECTIVES = "num_collectives"
COLLECTIVE_BYTES = "collective_bytes"
COLLECTIVE_SECONDS = "collective_seconds"


def finite_parts(found: Decisive, norms: Tensor, frozen: Tensor) -> Tensor:
    """What was finite in a minibatch, bool [p + 1]: each module and the team's critic, and last the couplings.

    A number that is not finite spreads through a coupling to everybody's gradients. Only the source is marked: modules
    whose own loss is not finite; else the couplings; else modules whose gradient is not.

    Args:
        found: of the minibatch.
        norms: [passes, p] global gradient norms.
        frozen: bool [p]; the loss of a module that takes no step stops nobody, unless it reaches a coupling.
    """
    coupling = ~torch.isfinite(found.coupling)
    loss = ~torch.isfinite(found.total) & (~frozen | coupling)
    gradient = ~torch.isfinite(norms).all(0)
    coupling = coupling & ~loss.any()
    gradient = gradient & ~loss.any() & ~coupling
    return ~torch.cat([loss | gradient, coupling.view(1)])


@dataclass(frozen=True)
class UpdateSummary:
    """One update in numbers: per module, and what all share.

    modules: {module: {statistic: mean}} over the gradient steps taken in which the module had a row and was not stopped
    by its `target_kl`; no entries where there was none. module_steps: how many these are.
    """

    modules: dict[ModuleID, dict[str, float]]
    couplings: dict[str, float]
    coupling_total: float
    total_loss: float
    num_minibatches: int
    num_non_finite: int
    non_finite: dict[str, int]
    rows_trained: int
    module_rows_trained: dict[ModuleID, int]
    module_steps: dict[ModuleID, int]


class UpdateTotals:
    """Adds up the statistics of an update on the device.

    Args:
        names: {module, or the team's critic: the statistics that it has}.
        networks: those of them that are a module, and have gradients.
        couplings: names in the order of the couplings.
        device: of the losses.
        num_passes: 1, or 2 with a critic optimizer.
    """

    def __init__(
        self,
        names: Mapping[ModuleID, Sequence[str | None]],
        networks: Collection[ModuleID],
        couplings: list[str],
        device: torch.device | str,
        num_passes: int,
    ) -> None:
        norms = GRADIENT_NORMS[:num_passes]
        self._names = {
            m: [*own, TOTAL_LOSS, *(norms if m in networks else [None] * num_passes)] for m, own in names.items()
        }
        num_statistics = len(next(iter(self._names.values())))
        self._module_ids = list(names)
        self._couplings = couplings
        m = len(names)
        self._statistics = torch.zeros(num_statistics + 2, m, device=device)  # and rows, and steps
        self._one = torch.ones(1, m, device=device)
        self._shared = torch.zeros(len(couplings) + 3, device=device)
        self._non_finite = torch.zeros(m + 1, device=device)
        self.num_minibatches = 0
        self._rows = 0

    @torch.no_grad()
    def add(
        self,
        losses: JointLosses,
        objective: Tensor,
        norms: Tensor,
        finite: Tensor,
        everything_finite: Tensor,
        num_rows: int,
        stopped: Tensor,
    ) -> None:
        """Takes in one minibatch, of each module that has a row in it and is not stopped.

        One that was skipped is only counted.
        """
        total = losses.total
        statistics = torch.cat([losses.statistics, total[None], norms, losses.counts[None], self._one])
        one = torch.ones((), device=statistics.device)
        shared = torch.cat([losses.couplings, torch.stack([losses.coupling, objective, one])])
        self._statistics += statistics.where(everything_finite & (losses.counts > 0) & ~stopped, 0.0)
        self._shared += shared.where(everything_finite, 0.0)
        self._non_finite += ~finite
        self.num_minibatches += 1
        self._rows += num_rows

    def summary(self) -> UpdateSummary:
        """Means over the gradient steps taken; the update's only wait for the device."""
        shared = self._shared.tolist()
        taken = int(shared[-1])
        sums = dict(zip(self._module_ids, self._statistics.T.tolist(), strict=True))
        rows, steps = ({m: int(values[k]) for m, values in sums.items()} for k in (-2, -1))
        sources = [*(f"module {m!r}" for m in self._module_ids), f"cross-agent losses {self._couplings}"]
        nowhere = [int(n) for n in self._non_finite.tolist()]
        return UpdateSummary(
            modules={
                m: {
                    name: value / steps[m]
                    for name, value in zip(self._names[m], values, strict=False)
                    if steps[m] and name is not None
                }
                for m, values in sums.items()
            },
            couplings={name: value / max(taken, 1) for name, value in zip(self._couplings, shared, strict=False)},
            coupling_total=shared[-3] / max(taken, 1),
            total_loss=shared[-2] / max(taken, 1),
            num_minibatches=self.num_minibatches,
            num_non_finite=self.num_minibatches - taken,
            non_finite={name: n for name, n in zip(sources, nowhere, strict=True) if n},
            rows_trained=self._rows,
            module_rows_trained=rows,
            module_steps=steps,
        )


def log_update(
    logger: Any,
    summary: UpdateSummary,
    *,
    weights_seq_no: int,
    entropy_coeffs: Mapping[ModuleID, float],
    coupling_coeffs: Mapping[str, float],
    value_normalizers: Mapping[ModuleID, RunningMoments],
    coupling_gradients: Mapping[str, Mapping[ModuleID, Mapping[str, float]]],
    num_kl_stops: Mapping[ModuleID, int],
    low_entropy_updates: Mapping[ModuleID, int],
    traffic: Traffic | None,
) -> None:
    """Writes an update into RLlib's `MetricsLogger`, under RLlib's names where it has one.

    Per module: the statistics, `total_loss`, the gradient norms before clipping, counts, and for each coupling
    `coupling_gradient/<name>` as `coupling_gradients` has it. Under `ALL_MODULES`:
    `total_loss` (with `critic_lr`: the actors' sum plus the couplings), `num_minibatch_steps`,
    `cross_agent_loss/<name>` before its coefficient, `cross_agent_loss/total` after it, `cross_agent_coeff/<name>`;
    with several learners `num_collectives`, `collective_bytes`, `collective_seconds`, as the first of them counts.
    """
    taken = summary.num_minibatches - summary.num_non_finite
    for module_id, values in summary.modules.items():
        rows = summary.module_rows_trained[module_id]
        for name, value in values.items():
            logger.log_value((module_id, *name.split("/")), value, window=1)
        numbers = {
            WEIGHTS_SEQ_NO: weights_seq_no,
            MODULE_TRAIN_BATCH_SIZE_MEAN: rows / max(summary.module_steps[module_id], 1),
        }
        if module_id in entropy_coeffs:
            numbers["curr_entropy_coeff"] = entropy_coeffs[module_id]
        logger.log_dict(numbers, key=module_id, window=1)
        if module_id in value_normalizers:
            moments = value_normalizers[module_id]
            logger.log_dict(
                {"value_target_mean": float(moments.mean), "value_target_std": float(moments.std)},
                key=module_id,
                window=1,
            )
        for name, modules in coupling_gradients.items():
            if module_id in modules:  # one that was added since has no numbers yet
                logger.log_dict(dict(modules[module_id]), key=(module_id, COUPLING_GRADIENT, name), window=1)
        if module_id in low_entropy_updates:
            logger.log_value((module_id, NUM_KL_STOPS), num_kl_stops[module_id], reduce="sum")
            logger.log_value((module_id, LOW_ENTROPY_UPDATES), low_entropy_updates[module_id], reduce="max", window=1)
        logger.log_value((module_id, NUM_MODULE_STEPS_TRAINED), rows, reduce="sum")
        logger.log_value((module_id, NUM_MODULE_STEPS_TRAINED_LIFETIME), rows, reduce="lifetime_sum")
    shared: dict[str, Any] = {NUM_MINIBATCH_STEPS: taken}
    if taken:
        shared[TOTAL_LOSS] = summary.total_loss
        shared[CROSS_AGENT_LOSS] = {**summary.couplings, "total": summary.coupling_total}
    if traffic is not None:
        shared |= {
            NUM_COLLECTIVES: traffic.calls,
            COLLECTIVE_BYTES: traffic.bytes,
            COLLECTIVE_SECONDS: traffic.seconds,
        }
    if coupling_coeffs:
        shared[CROSS_AGENT_COEFF] = dict(coupling_coeffs)
    logger.log_dict(shared, key=ALL_MODULES, window=1)
    logger.log_value((ALL_MODULES, NUM_NON_FINITE_MINIBATCHES), summary.num_non_finite, reduce="lifetime_sum")
    module_steps = sum(rows for m, rows in summary.module_rows_trained.items() if m in entropy_coeffs)
    for name, count in ((NUM_ENV_STEPS_TRAINED, summary.rows_trained), (NUM_MODULE_STEPS_TRAINED, module_steps)):
        logger.log_value((ALL_MODULES, name), count, reduce="sum")
    for name, count in (
        (NUM_ENV_STEPS_TRAINED_LIFETIME, summary.rows_trained),
        (NUM_MODULE_STEPS_TRAINED_LIFETIME, module_steps),
    ):
        logger.log_value((ALL_MODULES, name), count, reduce="lifetime_sum", with_throughput=True)
