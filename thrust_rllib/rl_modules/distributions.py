"""Action distributions over a batch of logits, for the three kinds of action space: `categorical`, and normals here.

They are RLlib `Distribution`s, so that RLlib's code and any user's can take them for its own. Beside RLlib's methods
they have `head_logp` and `head_entropy`, log-probability and entropy head by head, for ratios of each head's own. Box
actions are one head.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import torch
from ray.rllib.core.distribution.distribution import Distribution
from ray.rllib.core.distribution.torch.torch_distribution import TorchDeterministic

from thrust_rllib.rl_modules.categorical import ConditionalCategorical, FactorizedCategorical
from thrust_rllib.rl_modules.head_layout import MASKED_LOGIT, HeadLayout, on_device


def mask_logits(logits: torch.Tensor, mask: torch.Tensor | None, distribution: Any = None) -> torch.Tensor:
    """Logits with a large negative number in place of what is not allowed.

    Args:
        logits: […, A].
        mask: bool, true = allowed, the categories of all heads side by side; or None. That is […, A] if no head depends
            on another; what is allowed to a conditional head is allowed to it whatever its parent chose.
        distribution: the distribution class that the logits are for; may be left out if no head depends on another.
    """
    if mask is None:
        return logits
    layout = getattr(distribution, "layout", None)
    if layout is not None and layout.conditional:
        mask = mask.index_select(-1, on_device(layout.mask_columns, mask.device))
    return logits.masked_fill(~mask, MASKED_LOGIT)


class DiagonalGaussian(Distribution):
    """Independent normals; the inputs are mean and log standard deviation side by side, […, 2k].

    logp(a) = Σ_j −½((a_j − μ_j)/σ_j)² − log σ_j − ½ log 2π,  entropy = Σ_j log σ_j + ½ log 2πe.
    """

    def __init__(self, loc: torch.Tensor, log_std: torch.Tensor) -> None:
        self.loc = loc
        self.log_std = log_std

    @classmethod
    def from_logits(cls, logits: torch.Tensor, **kwargs: Any) -> DiagonalGaussian:
        """The distribution of `logits` […, 2k]."""
        loc, log_std = logits.chunk(2, dim=-1)
        return cls(loc, log_std)

    def logp(self, value: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Log-density […] of actions […, k]."""
        z = (value - self.loc) * torch.exp(-self.log_std)
        return -(0.5 * z.square() + self.log_std).sum(-1) - 0.5 * self.loc.shape[-1] * math.log(2 * math.pi)

    def head_logp(self, value: torch.Tensor) -> torch.Tensor:
        """[…, 1]: all dimensions are one head."""
        return self.logp(value).unsqueeze(-1)

    def head_entropy(self, value: torch.Tensor) -> torch.Tensor:
        """[…, 1], see `head_logp`."""
        return self.entropy().unsqueeze(-1)

    def entropy(self) -> torch.Tensor:
        """Differential entropy […], in nats."""
        return self.log_std.sum(-1) + 0.5 * self.loc.shape[-1] * (1.0 + math.log(2 * math.pi))

    def kl(self, other: DiagonalGaussian) -> torch.Tensor:
        """KL(self ‖ other) […]."""
        ratio = torch.exp(2.0 * (self.log_std - other.log_std))
        shift = ((self.loc - other.loc) * torch.exp(-other.log_std)).square()
        return 0.5 * (ratio + shift - 1.0 - ratio.log()).sum(-1)

    def sample(self, generator: torch.Generator | None = None, **kwargs: Any) -> torch.Tensor:
        """One action per row, drawn from `generator` (None: torch's own), without a gradient."""
        with torch.no_grad():
            return self.rsample(generator)

    def rsample(self, generator: torch.Generator | None = None, **kwargs: Any) -> torch.Tensor:
        """μ + σ·ε, with a gradient."""
        noise = torch.empty_like(self.loc).normal_(generator=generator)
        return self.loc + self.log_std.exp() * noise

    def to_deterministic(self) -> TorchDeterministic:
        """The mean."""
        return TorchDeterministic(loc=self.loc)

    @staticmethod
    def required_input_dim(space: gym.Space, **kwargs: Any) -> int:
        """2k: a mean and a log standard deviation for each dimension."""
        return logits_width(space)


def logits_width(space: gym.Space) -> int:
    """Number of inputs that the distribution over `space` needs.

    Raises:
        ValueError: the space is none of Discrete, MultiDiscrete (one axis) and Box (one axis).
    """
    if isinstance(space, gym.spaces.Discrete):
        return int(space.n)
    if isinstance(space, gym.spaces.MultiDiscrete) and len(space.shape) == 1:
        return int(space.nvec.sum())
    if isinstance(space, gym.spaces.Box) and len(space.shape) == 1:
        return 2 * int(space.shape[0])
    raise ValueError(
        f"action space {space} has no policy distribution here; needed: Discrete, MultiDiscrete (one axis) or Box "
        "(one axis). Wrap the environment so that the agent acts in one of these."
    )


def distribution_class(space: gym.Space, parents: Sequence[int | None] | None = None) -> Any:
    """The distribution over `space`, with `from_logits(logits)` as RLlib's distribution classes have it.

    Args:
        space: of the actions.
        parents: of a MultiDiscrete with conditional heads: what each depends on, as of `HeadLayout`.

    Raises:
        ValueError: as `logits_width`.
    """
    logits_width(space)
    if isinstance(space, gym.spaces.Discrete):
        return _categorical_class((int(space.n),), scalar=True)
    if isinstance(space, gym.spaces.MultiDiscrete):
        sizes = tuple(space.nvec.tolist())
        return _categorical_class(sizes, scalar=False, parents=None if parents is None else tuple(parents))
    return DiagonalGaussian


@functools.cache
def _categorical_class(
    sizes: tuple[int, ...], scalar: bool, parents: tuple[int | None, ...] | None = None
) -> type[FactorizedCategorical]:
    """One class per kind of action, so that `runs_alike` sees which modules act in the same one."""
    base = FactorizedCategorical if parents is None else ConditionalCategorical
    return type(base.__name__, (base,), {"layout": HeadLayout(sizes, parents), "scalar": scalar})


def runs_alike(classes: Sequence[Any], logits: Sequence[torch.Tensor]) -> list[slice]:
    """Neighbouring modules whose distributions can be evaluated as one batch: same class, same number of logits.

    Over a few hundred rows a distribution costs what its operations' calls cost, so that one for all modules is faster
    than one for each.

    Args:
        classes: the distribution class of each module.
        logits: [R, A] of each module; R may differ.
    """
    kinds = [(cls, x.shape[-1]) for cls, x in zip(classes, logits, strict=True)]
    runs, start = [], 0
    for _, run in itertools.groupby(kinds):
        size = len(list(run))
        runs.append(slice(start, start + size))
        start += size
    return runs
