"""Which modules still take steps: one whose policy went further than `target_kl` rests for a while."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from thrust_rllib.joint_batch import ModuleID


class KLStops:
    """Stops each trained module on its own, after the step of a minibatch in which its approx_kl was over its target.

    approx_kl is mean(logp_old − logp) over the module's rows of the minibatch, as its loss had it before the step. A
    stopped module takes no more steps in the rest of the epoch, or of the update; its features still enter couplings.

    Args:
        targets: {module: `target_kl`, or None}, in the order of the modules.
        trained: {module: bool}; a frozen module neither stops nor keeps an epoch going.
        scope: "epoch" or "update".
        device: of the losses.

    Source: early stopping by KL, as in the seed's recurrent trainer, there for the only module.
    """

    def __init__(
        self,
        targets: Mapping[ModuleID, float | None],
        trained: Mapping[ModuleID, bool],
        scope: str,
        device: torch.device | str,
    ) -> None:
        self._module_ids = list(targets)
        self._trained = {m for m in self._module_ids if trained[m]}
        self._limits = {m: target for m, target in targets.items() if target is not None and trained[m]}
        self._limit = torch.tensor([self._limits.get(m, math.inf) for m in self._module_ids], device=device)
        self._scope = scope
        self._stopped: set[ModuleID] = set()
        self.num_stops = dict.fromkeys(self._module_ids, 0)
        """{module: epochs in which it stopped}."""
        self.stopped = torch.zeros(len(self._module_ids), dtype=torch.bool, device=device)
        """bool [m]: who rests."""

    def begin_epoch(self) -> None:
        """With the scope "epoch" everybody steps again."""
        if self._scope == "epoch" and self._stopped:
            self._stopped.clear()
            self.stopped = torch.zeros_like(self.stopped)

    @property
    def all_stopped(self) -> bool:
        """Whether no trained module steps any more."""
        return bool(self._stopped) and self._stopped == self._trained

    def stepping(self, has_rows: Sequence[bool] | None) -> dict[ModuleID, bool] | None:
        """{module: whether it takes a step}, or None where all do.

        Args:
            has_rows: of each module, whether it has a row in this minibatch; None where all have.
        """
        if has_rows is None and not self._stopped:
            return None
        if has_rows is None:
            has_rows = [True] * len(self._module_ids)
        return {m: has and m not in self._stopped for m, has in zip(self._module_ids, has_rows, strict=True)}

    def observe(self, approx_kl: Tensor, counts: Tensor, everything_finite: Tensor) -> None:
        """Stops whoever was over its target in this minibatch; one that was skipped, or without a row, stops nobody.

        Args:
            approx_kl: [m] of the minibatch.
            counts: [m] rows of each module in it.
            everything_finite: bool scalar, whether the minibatch was trained on.
        """
        if not self._limits:
            return
        over = (approx_kl > self._limit) & (counts > 0) & everything_finite
        # The update's one wait per minibatch: whether to go on is a question to the host. Without a target, none.
        now = {m for m, is_over in zip(self._module_ids, over.tolist(), strict=True) if is_over} - self._stopped
        if now:
            self._stopped |= now
            self.stopped = self.stopped | over
            for module_id in now:
                self.num_stops[module_id] += 1
