"""The axis of agents cut into modules, and the numbers of an update that may differ between modules.

Letters: N agents, B rows, m modules, V values of a row, v critics that give them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thrust_rllib import functional as F


class ModuleAxis:
    """The agent axis [N, …] cut into modules [m, …]: sums and statistics over each module's own rows.

    Args:
        sizes: number of agents of each module.
        device: of the tensors.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device | str) -> None:
        self.sizes = list(sizes)
        self._equal = len(set(self.sizes)) == 1
        self._index = torch.arange(len(sizes)).repeat_interleave(torch.tensor(self.sizes)).to(device)
        self._device = device
        self.num_agents = self.per_module(self.sizes)

    def per_agent(self, numbers: Sequence[float]) -> Tensor:
        """One number per module to a column [N, 1]."""
        return self.per_module(numbers)[self._index][:, None]

    def per_module(self, numbers: Sequence[float]) -> Tensor:
        """One number per module as a tensor [m]."""
        return torch.tensor(numbers, dtype=torch.float32, device=self._device)

    def sum(self, x: Tensor) -> Tensor:
        """[…, N, B] to […, m]: the sum over each module's agents and rows."""
        per_agent = x.sum(-1)
        if self._equal:
            return per_agent.view(*per_agent.shape[:-1], len(self.sizes), -1).sum(-1)
        result = per_agent.new_zeros(*per_agent.shape[:-1], len(self.sizes))
        return result.index_add(-1, self._index, per_agent)

    def any(self, x: Tensor) -> Tensor:
        """[N, B] bool to [m, B]: whether it holds for any of the module's agents."""
        return torch.stack([mine.any(0) for mine in x.split(self.sizes)])

    def explained_variance(self, values: Tensor, targets: Tensor, present: Tensor | None) -> Tensor:
        """[m] over each module's rows of [N, B] tensors."""
        if self._equal:
            rows = (len(self.sizes), -1)
            mask = None if present is None else present.reshape(rows)
            return F.explained_variance(values.reshape(rows), targets.reshape(rows), mask, dim=1)
        parts = [x.split(self.sizes) for x in (values, targets)]
        masks = [None] * len(self.sizes) if present is None else present.split(self.sizes)
        return torch.stack([F.explained_variance(v, t, m) for v, t, m in zip(*parts, masks, strict=True)])


@dataclass(frozen=True)
class Coefficients:
    """Numbers that may differ between modules, as tensors made once per update.

    Of the m policies: clip_param [N, 1], entropy_coeff [m]. Of the v critics: value_clip_range and vf_clip_param
    [V, 1], None where they are infinite for all; vf_loss_coeff [v].
    """

    clip_param: Tensor
    value_clip_range: Tensor | None
    vf_clip_param: Tensor | None
    vf_loss_coeff: Tensor
    entropy_coeff: Tensor

    @classmethod
    def of(
        cls,
        axis: ModuleAxis,
        configs: Sequence[Any],
        entropy_coeffs: Sequence[float],
        critic_axis: ModuleAxis,
        critic_configs: Sequence[Any],
    ) -> Coefficients:
        """From the configuration of each policy and its scheduled entropy coefficient, and that of each critic."""

        def limit(numbers: list[float]) -> Tensor | None:
            return critic_axis.per_agent(numbers) if min(numbers) < math.inf else None

        return cls(
            clip_param=axis.per_agent([c.clip_param for c in configs]),
            value_clip_range=limit([c.value_clip_range for c in critic_configs]),
            vf_clip_param=limit([c.vf_clip_param for c in critic_configs]),
            vf_loss_coeff=critic_axis.per_module([c.vf_loss_coeff for c in critic_configs]),
            entropy_coeff=axis.per_module(entropy_coeffs),
        )
