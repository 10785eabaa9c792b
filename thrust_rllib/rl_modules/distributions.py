"""Action distributions over a batch of logits, for the three kinds of action space.

They are RLlib `Distribution`s, so that RLlib's code and any user's can take them for its own. They differ from RLlib's
classes in two ways: several categorical heads are one padded tensor instead of a list of
`torch.distributions.Categorical` objects, each of which costs about 0.1 ms to build, and masked logits give entropy
and divergence without a NaN. Formulas, with p = softmax(logits) per head:

logp = Σ_heads log p(a_head),  entropy = −Σ_heads Σ_k p_k log p_k,  kl(p‖q) = Σ_heads Σ_k p_k (log p_k − log q_k).

Source: the factorised policy of MultiDiscrete action spaces, as in RLlib's `TorchMultiCategorical`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import gymnasium as gym
import torch
from ray.rllib.core.distribution.distribution import Distribution
from ray.rllib.core.distribution.torch.torch_distribution import TorchDeterministic

MASKED_LOGIT = -1e30  # finite: 0 · MASKED_LOGIT is 0, where 0 · −inf would be NaN
TINY = torch.finfo(torch.float32).tiny


def mask_logits(logits: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Logits […, A]; where `mask` […, A] (bool, true = allowed) is false, a large negative number."""
    return logits if mask is None else logits.masked_fill(~mask, MASKED_LOGIT)


def gumbel_noise(out: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Fills `out` with Gumbel noise −log e, e ~ Exp(1): logit + noise is largest at category k with probability p_k."""
    # An e of exactly 0, which float32 draws once in 2^24, would choose its category however improbable that is.
    return out.exponential_(generator=generator).clamp_(min=TINY).log_().neg_()


class HeadLayout:
    """Where the heads of a MultiDiscrete space lie in one vector of A logits.

    Args:
        sizes: number of categories of each head; their sum is A.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(int(k) for k in sizes)
        self.width = max(self.sizes)
        self.equal = all(k == self.width for k in self.sizes)
        total = sum(self.sizes)
        columns, start = [], 0
        for k in self.sizes:
            columns += [start + i if i < k else total for i in range(self.width)]  # column A is the padding
            start += k
        self.total = total
        self.columns = tuple(columns)

    def pad(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits […, A] to [… , heads, widest head], the padding masked."""
        shape = (*logits.shape[:-1], len(self.sizes), self.width)
        if self.equal:
            return logits.reshape(shape)
        padding = logits.new_full((*logits.shape[:-1], 1), MASKED_LOGIT)
        columns = _on_device(self.columns, logits.device)
        return torch.cat([logits, padding], dim=-1).index_select(-1, columns).reshape(shape)


@functools.cache
def _on_device(numbers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """`numbers` as a tensor, copied to the device once, however often it is asked for."""
    with torch.inference_mode(False):  # a tensor made in inference mode could not be used in training
        return torch.tensor(numbers, device=device)


class FactorizedCategorical(Distribution):
    """Independent categorical heads; one head is a plain categorical. `distribution_class` makes one for a space.

    Args:
        logits: […, A].

    Raises:
        ValueError: the logits do not fit the heads.
    """

    layout: ClassVar[HeadLayout]
    scalar: ClassVar[bool]  # actions are numbers […] (Discrete) instead of vectors […, heads] (MultiDiscrete)

    def __init__(self, logits: torch.Tensor) -> None:
        if logits.shape[-1] != self.layout.total:
            raise ValueError(
                f"logits have {logits.shape[-1]} columns, the action space has {self.layout.total} categories in heads "
                f"of {self.layout.sizes}; let the module's policy head have {self.layout.total} outputs"
            )
        self.logits = self.layout.pad(logits)  # […, heads, width]

    @functools.cached_property
    def log_probs(self) -> torch.Tensor:
        """[width, …, heads]: the few categories first, so that a softmax over them runs along whole rows of memory."""
        return torch.log_softmax(self.logits.movedim(-1, 0).contiguous(), dim=0)

    @classmethod
    def from_logits(cls, logits: torch.Tensor, **kwargs: Any) -> FactorizedCategorical:
        """The distribution of `logits` […, A]."""
        return cls(logits)

    def logp(self, value: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Joint log-probability […] of actions […] or […, heads]."""
        index = value.long()
        if self.scalar:
            index = index.unsqueeze(-1)
        return self.log_probs.gather(0, index.unsqueeze(0)).squeeze(0).sum(-1)

    def entropy(self) -> torch.Tensor:
        """Joint entropy […]: the sum over heads, in nats."""
        return -(self.log_probs.exp() * self.log_probs).sum((0, -1))

    def kl(self, other: FactorizedCategorical) -> torch.Tensor:
        """KL(self ‖ other) […], summed over heads."""
        return (self.log_probs.exp() * (self.log_probs - other.log_probs)).sum((0, -1))

    def sample(self, generator: torch.Generator | None = None, **kwargs: Any) -> torch.Tensor:
        """One action per row, int64, drawn from `generator` (None: torch's own)."""
        actions = (self.logits + gumbel_noise(torch.empty_like(self.logits), generator)).argmax(-1)
        return actions.squeeze(-1) if self.scalar else actions

    def rsample(self, **kwargs: Any) -> torch.Tensor:
        """Not defined: a categorical sample has no gradient."""
        raise ValueError("a categorical distribution cannot be sampled with a gradient; use sample()")

    def to_deterministic(self) -> TorchDeterministic:
        """The most probable category of each head."""
        actions = self.logits.argmax(-1)
        return TorchDeterministic(loc=actions.squeeze(-1) if self.scalar else actions)

    @staticmethod
    def required_input_dim(space: gym.Space, **kwargs: Any) -> int:
        """A, the number of logits."""
        return logits_width(space)


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


def distribution_class(space: gym.Space) -> Any:
    """The distribution over `space`, with `from_logits(logits)` as RLlib's distribution classes have it.

    Raises:
        ValueError: as `logits_width`.
    """
    logits_width(space)
    if isinstance(space, gym.spaces.Discrete):
        return _categorical_class((int(space.n),), scalar=True)
    if isinstance(space, gym.spaces.MultiDiscrete):
        return _categorical_class(tuple(space.nvec.tolist()), scalar=False)
    return DiagonalGaussian


@functools.cache
def _categorical_class(sizes: tuple[int, ...], scalar: bool) -> type[FactorizedCategorical]:
    """One class per action space, so that `runs_alike` sees which modules act in the same one."""
    return type("FactorizedCategorical", (FactorizedCategorical,), {"layout": HeadLayout(sizes), "scalar": scalar})


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
