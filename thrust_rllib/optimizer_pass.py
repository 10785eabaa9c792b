"""One pass of gradients: from an objective to steps of every module's own optimizer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from thrust_rllib import functional as F
from thrust_rllib.joint_batch import ModuleID


class OptimizerPass:
    """The gradients of one objective, clipped per module and applied by one optimizer per module.

    Args:
        optimizers: {module: its optimizer}, in the order of the modules.
        trained: {module: bool}; nothing of a frozen module moves, optimizer state included.
        grad_clip: {module: limit, or None}.
        grad_clip_by: "global_norm", "norm" or "value", as in RLlib.
        device: of the parameters.
    """

    def __init__(
        self,
        optimizers: Mapping[ModuleID, torch.optim.Optimizer],
        trained: Mapping[ModuleID, bool],
        grad_clip: Mapping[ModuleID, float | None],
        grad_clip_by: str,
        device: torch.device | str,
    ) -> None:
        self._optimizers = optimizers
        self._grad_clip = grad_clip
        self._grad_clip_by = grad_clip_by
        self._zero = torch.zeros((), device=device)
        self._params = {
            m: [p for group in optimizer.param_groups for p in group["params"]] if trained[m] else []
            for m, optimizer in optimizers.items()
        }
        self._all_params = [p for params in self._params.values() for p in params]
        self._grads: dict[ModuleID, list[Tensor | None]] = {}

    def compute_gradients(self, objective: Tensor, retain_graph: bool) -> None:
        """Gradients of `objective` for all trained modules' parameters; one outside its graph has none."""
        flat: tuple[Tensor | None, ...]
        if self._all_params and objective.requires_grad:
            flat = torch.autograd.grad(objective, self._all_params, retain_graph=retain_graph, allow_unused=True)
        else:
            flat = (None,) * len(self._all_params)
        self._grads, start = {}, 0
        for module_id, params in self._params.items():
            self._grads[module_id] = list(flat[start : start + len(params)])
            start += len(params)

    def clip(self) -> Tensor:
        """Clips each module's gradients on their own; returns their global norms before that, [m] (0 if frozen)."""
        norms = []
        for module_id, grads in self._grads.items():
            limit = self._grad_clip[module_id]
            present = [g for g in grads if g is not None]
            if not present:
                norms.append(self._zero)
            elif limit is not None and self._grad_clip_by == "global_norm":
                norms.append(F.clip_by_global_norm_(present, limit))
            else:
                norms.append(F.global_norm(present))
                if limit is not None:
                    clip = F.clip_by_value_ if self._grad_clip_by == "value" else F.clip_by_norm_
                    clip(present, limit)
        return torch.stack(norms)

    def step(self, finite: Tensor) -> None:
        """Steps every trained module's optimizer, unless `finite` (a bool scalar) is false: then nobody moves."""
        skip = (~finite).float()
        for module_id, params in self._params.items():
            if not params:
                continue
            optimizer = self._optimizers[module_id]
            for param, grad in zip(params, self._grads[module_id], strict=True):
                param.grad = grad
            if optimizer.defaults.get("fused"):
                # torch's own switch (its gradient scaler uses it): the kernel reads the flag, the host never waits.
                optimizer.found_inf = skip  # type: ignore[attr-defined]
                optimizer.step()
            elif bool(finite):
                optimizer.step()
            for param in params:
                param.grad = None
