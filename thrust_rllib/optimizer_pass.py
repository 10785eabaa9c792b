"""One pass of gradients: from an objective to steps of every module's own optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from thrust_rllib import functional as F
from thrust_rllib.joint_batch import ModuleID

DECOUPLED = "decoupled_weight_decay"
"""Name of the number by which torch makes AdamW of Adam."""


def make_adam(params: Sequence[Tensor], weight_decay: float = 0.0) -> torch.optim.Adam:
    """Adam with torch's fused kernel, or without where there is a parameter between whose numbers lie others.

    With a weight decay AdamW, which shrinks each parameter by lr · weight_decay of it in each step.

    The kernel is three times faster on a small network, and skips a step by a tensor instead of an `if`.
    """
    dense = all(torch.empty_like(p, device="meta").stride() == p.stride() for p in params)
    if weight_decay:
        return torch.optim.AdamW(params, fused=dense, weight_decay=weight_decay)
    return torch.optim.Adam(params, fused=dense)


def laid_out_as(x: Tensor, param: Tensor) -> Tensor:
    """`x`, or a copy of it, with the strides and the type of a parameter.

    torch's fused kernel on the CPU walks through parameter, gradient and moments number by number as they lie in
    memory, whatever their strides are.
    """
    if x.stride() == param.stride() and x.dtype == param.dtype:
        return x
    return torch.empty_like(param).copy_(x)


class OptimizerPass:
    """The gradients of one objective, clipped per module and applied by each module's own optimizers.

    Args:
        optimizers: {module: its optimizers; more than one where other networks belong to it, none where this pass does
            not move it}, in the order of the modules.
        trained: {module: bool}; nothing of a frozen module moves, optimizer state included.
        grad_clip: {module: limit, or None}.
        grad_clip_by: "global_norm", "norm" or "value", as in RLlib.
        device: of the parameters.
        joint_clip: limit of one global norm over all modules, in place of theirs.
    """

    def __init__(
        self,
        optimizers: Mapping[ModuleID, Sequence[torch.optim.Optimizer]],
        trained: Mapping[ModuleID, bool],
        grad_clip: Mapping[ModuleID, float | None],
        grad_clip_by: str,
        device: torch.device | str,
        joint_clip: float | None = None,
    ) -> None:
        self.all_params: list[Tensor] = []
        """Of all trained modules, one behind the other."""
        modules: list[int] = []
        self._slices: dict[ModuleID, slice] = {}
        for index, (module_id, own) in enumerate(optimizers.items()):
            mine = [p for optimizer in own for p in _params(optimizer)] if trained[module_id] else []
            self._slices[module_id] = slice(len(self.all_params), len(self.all_params) + len(mine))
            self.all_params += mine
            modules += [index] * len(mine)
        self._module_of = torch.tensor(modules, dtype=torch.long, device=device)
        self._clip_by = grad_clip_by
        self._limits = {m: grad_clip[m] for m in optimizers}
        norms = [
            math.inf if limit is None or grad_clip_by != "global_norm" else limit for limit in self._limits.values()
        ]
        self._max_norms = torch.tensor(norms, dtype=torch.float32, device=device)
        self._joint_clip = joint_clip
        self._steps = _steps([optimizer for m, own in optimizers.items() if trained[m] for optimizer in own])
        self.all_grads: list[Tensor | None] = []
        """Of `all_params`, since `compute_gradients`."""

    def compute_gradients(
        self, objective: Tensor, retain_graph: bool, steps: Mapping[ModuleID, bool] | None = None
    ) -> None:
        """Gradients of `objective` for all trained modules' parameters; one outside its graph has none.

        Args:
            objective: scalar.
            retain_graph: another pass follows on the same graph.
            steps: {module: whether it takes a step}, or None where all do. One that does not (it has no row in this
                minibatch, or rests) has no gradients: gradients of 0 would let Adam move it by its momentum.
        """
        params = [p for p in self.all_params if p.requires_grad]
        if params and objective.requires_grad:
            grads = torch.autograd.grad(objective, params, retain_graph=retain_graph, allow_unused=True)
            found = iter(_in_memory_of_their_own(grads, params))
            self.all_grads = [next(found) if p.requires_grad else None for p in self.all_params]
        else:
            self.all_grads = [None] * len(self.all_params)
        if steps is not None:
            for module_id, mine in self._slices.items():
                if not steps.get(module_id, True):
                    self.all_grads[mine] = [None] * (mine.stop - mine.start)

    def params(self) -> dict[ModuleID, list[Tensor]]:
        """Each module's parameters that may move; none of a frozen module."""
        return {m: [p for p in self.all_params[mine] if p.requires_grad] for m, mine in self._slices.items()}

    def gradients(self) -> dict[ModuleID, list[Tensor | None]]:
        """Of each module's parameters; none of a frozen module."""
        return {module_id: self.all_grads[mine] for module_id, mine in self._slices.items()}

    def clip(self) -> Tensor:
        """Clips each module's gradients on their own; returns their global norms before that, [m] (0 if frozen)."""
        if self._joint_clip is not None:
            norms = F.global_norms(self.all_grads, self._module_of, len(self._max_norms))
            F.clip_by_global_norm_(self.all_grads, self._joint_clip)
            return norms
        norms = F.clip_by_global_norms_(self.all_grads, self._module_of, self._max_norms)
        if self._clip_by != "global_norm":
            clip = F.clip_by_value_ if self._clip_by == "value" else F.clip_by_norm_
            for module_id, grads in self.gradients().items():
                if (limit := self._limits[module_id]) is not None:
                    clip(grads, limit)
        return norms

    def step(self, finite: Tensor) -> None:
        """Steps the optimizer of every module that has gradients, unless `finite` (a bool scalar) is false."""
        skip = (~finite).float()
        for step in self._steps:
            step(self.all_grads, skip)


def _in_memory_of_their_own(grads: Sequence[Tensor | None], params: Sequence[Tensor]) -> list[Tensor | None]:
    """Gradients that can be clipped in place and stepped by the fused kernel.

    autograd gives the same tensor for two parameters that are added to each other, and strides as the operation left
    them.
    """
    found: list[Tensor | None] = []
    seen: set[int] = set()
    for grad, param in zip(grads, params, strict=True):
        if grad is not None:
            grad = laid_out_as(grad, param)
            if (memory := grad.data_ptr()) in seen:
                grad = grad.clone()
            seen.add(memory)
        found.append(grad)
    return found


class _AdamStep:
    """One call of torch's fused Adam kernel for all modules whose optimizers have the same numbers.

    Each optimizer keeps its own state and rate, and saves and restores them; what this spares is the work around the
    kernel, which for a small network takes longer than the kernel.
    """

    def __init__(self, numbers: Mapping[str, Any]) -> None:
        self._numbers = numbers
        self._optimizers: list[torch.optim.Optimizer] = []
        self._where: list[int] = []
        self._params: list[Tensor] = []

    def take(self, optimizer: torch.optim.Optimizer, params: Sequence[Tensor], start: int) -> None:
        """Adds a module, whose parameters begin at `start` in the list of all."""
        self._optimizers += [optimizer] * len(params)
        self._where += range(start, start + len(params))
        self._params += params

    def __call__(self, grads: Sequence[Tensor | None], skip: Tensor) -> None:
        present, taken = [], []
        for i, where in enumerate(self._where):
            if (grad := grads[where]) is not None:
                present.append(i)
                taken.append(grad)
        if not present:
            return
        states = [self._state(i) for i in present]
        adam(
            [self._params[i] for i in present],
            taken,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            # The kernel reads the flag, the host never waits (torch's gradient scaler skips steps by it).
            found_inf=skip,
            **self._numbers,
        )

    def _state(self, i: int) -> dict[str, Tensor]:
        param = self._params[i]
        state = self._optimizers[i].state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return state


class _OwnStep:
    """The step of an optimizer of another kind, by its own method."""

    def __init__(self, optimizer: torch.optim.Optimizer, params: Sequence[Tensor], start: int) -> None:
        self._optimizer = optimizer
        self._params = list(params)
        self._mine = slice(start, start + len(self._params))

    def __call__(self, grads: Sequence[Tensor | None], skip: Tensor) -> None:
        if all(grad is None for grad in grads[self._mine]):
            return
        for param, grad in zip(self._params, grads[self._mine], strict=True):
            param.grad = grad
        if not bool(skip):
            self._optimizer.step()
        for param in self._params:
            param.grad = None


def _params(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _steps(optimizers: Sequence[torch.optim.Optimizer]) -> list[Any]:
    """What steps the parameters of all optimizers, one behind the other."""
    together: dict[tuple[Any, ...], _AdamStep] = {}
    alone = []
    start = 0
    for optimizer in optimizers:
        if not _is_plain_adam(optimizer):
            params = _params(optimizer)
            alone.append(_OwnStep(optimizer, params, start))
            start += len(params)
            continue
        for group in optimizer.param_groups:
            numbers = {name: group[name] for name in ("lr", "eps", "weight_decay", "amsgrad", "maximize")}
            numbers["beta1"], numbers["beta2"] = group["betas"]
            if group.get(DECOUPLED):
                numbers[DECOUPLED] = True
            step = together.setdefault(tuple(numbers.values()), _AdamStep(numbers))
            step.take(optimizer, group["params"], start)
            start += len(group["params"])
    return [*together.values(), *alone]


def _is_adam_with_decay(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is an AdamW that is Adam's kernel with another number, as since torch 2.7."""
    return type(optimizer) is torch.optim.AdamW and all(group.get(DECOUPLED) for group in optimizer.param_groups)


def _is_plain_adam(optimizer: torch.optim.Optimizer) -> bool:
    return (
        (type(optimizer) is torch.optim.Adam or _is_adam_with_decay(optimizer))
        and all(group["fused"] and not group["amsgrad"] for group in optimizer.param_groups)
        and not any(isinstance(group["lr"], Tensor) for group in optimizer.param_groups)
        and "step" not in vars(optimizer)
        and not optimizer._optimizer_step_pre_hooks
        and not optimizer._optimizer_step_post_hooks
    )
