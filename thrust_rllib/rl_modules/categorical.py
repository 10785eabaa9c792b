"""Action distributions of Discrete and MultiDiscrete spaces: categorical heads over a batch of logits.

They differ from RLlib's classes in two ways: several heads are one padded tensor instead of a list of
`torch.distributions.Categorical` objects, each of which costs about 0.1 ms to build, and masked logits give entropy
and divergence without a NaN. Formulas, with p = softmax(logits) per head:

logp = Σ_heads log p(a_head),  entropy = −Σ_heads Σ_k p_k log p_k,  kl(p‖q) = Σ_heads Σ_k p_k (log p_k − log q_k).

Source: the factorised policy of MultiDiscrete action spaces, as in RLlib's `TorchMultiCategorical`.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import gymnasium as gym
import torch
from ray.rllib.core.distribution.distribution import Distribution
from ray.rllib.core.distribution.torch.torch_distribution import TorchDeterministic

from thrust_rllib.rl_modules.head_layout import HeadLayout, on_device

TINY = torch.finfo(torch.float32).tiny


def gumbel_noise(out: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Fills `out` with Gumbel noise −log e, e ~ Exp(1): logit + noise is largest at category k with probability p_k."""
    # An e of exactly 0, which float32 draws once in 2^24, would choose its category however improbable that is.
    return out.exponential_(generator=generator).clamp_(min=TINY).log_().neg_()


class FactorizedCategorical(Distribution):
    """Independent categorical heads; one head is a plain categorical. `distribution_class` makes one for a space.

    Args:
        logits: […, A].

    Raises:
        ValueError: the logits do not fit the heads.
    """

    layout: ClassVar[HeadLayout]
    scalar: ClassVar[bool]  # actions are numbers […] (Discrete) instead of vectors […, H] (MultiDiscrete)

    def __init__(self, logits: torch.Tensor) -> None:
        if logits.shape[-1] != self.layout.total:
            raise ValueError(
                f"logits have {logits.shape[-1]} columns, the action space has {self.layout.total} categories in heads "
                f"of {self.layout.sizes}; let the module's policy head have {self.layout.total} outputs"
            )
        self.logits = self.layout.pad(logits)  # […, K, width], K blocks: one for each of the H heads

    @functools.cached_property
    def log_probs(self) -> torch.Tensor:
        """[width, …, K]: the few categories first, so that a softmax over them runs along whole rows of memory."""
        return torch.log_softmax(self.logits.movedim(-1, 0).contiguous(), dim=0)

    @classmethod
    def from_logits(cls, logits: torch.Tensor, **kwargs: Any) -> FactorizedCategorical:
        """The distribution of `logits` […, A]."""
        return cls(logits)

    def head_logp(self, value: torch.Tensor) -> torch.Tensor:
        """Log-probability […, H] of each head's part of actions […] or […, H]."""
        index = self._categories(value)
        return self._given(index).gather(0, index.unsqueeze(0)).squeeze(0)

    def logp(self, value: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Joint log-probability […] of actions […] or […, H]: the sum over heads."""
        return self.head_logp(value).sum(-1)

    def head_entropy(self, value: torch.Tensor) -> torch.Tensor:
        """Entropy […, H] of each head, in nats; that of a conditional head given its parent's category in `value`."""
        log_probs = self._given(self._categories(value))
        return -(log_probs.exp() * log_probs).sum(0)

    def entropy(self) -> torch.Tensor:
        """Joint entropy […]: the sum over heads, in nats."""
        return -(self.log_probs.exp() * self.log_probs).sum((0, -1))

    def kl(self, other: FactorizedCategorical) -> torch.Tensor:
        """KL(self ‖ other) […], summed over heads."""
        return (self.log_probs.exp() * (self.log_probs - other.log_probs)).sum((0, -1))

    def sample(self, generator: torch.Generator | None = None, **kwargs: Any) -> torch.Tensor:
        """One action per row, int64, drawn from `generator` (None: torch's own)."""
        return self._actions((self.logits + gumbel_noise(torch.empty_like(self.logits), generator)).argmax(-1))

    def rsample(self, **kwargs: Any) -> torch.Tensor:
        """Not defined: a categorical sample has no gradient."""
        raise ValueError("a categorical distribution cannot be sampled with a gradient; use sample()")

    def to_deterministic(self) -> TorchDeterministic:
        """The most probable category of each head, of a conditional one given its parent's."""
        return TorchDeterministic(loc=self._actions(self.logits.argmax(-1)))

    def _categories(self, value: torch.Tensor) -> torch.Tensor:
        """Actions as int64 […, H]."""
        return value.long().unsqueeze(-1) if self.scalar else value.long()

    def _actions(self, categories: torch.Tensor) -> torch.Tensor:
        """Actions out of a category for each block […, K]."""
        return categories.squeeze(-1) if self.scalar else categories

    def _given(self, categories: torch.Tensor) -> torch.Tensor:
        """`log_probs` [width, …, H] of the blocks that count where the heads took `categories` […, H]."""
        return self.log_probs

    @classmethod
    def required_input_dim(cls, space: gym.Space, **kwargs: Any) -> int:
        """A, the number of logits."""
        return cls.layout.total


class ConditionalCategorical(FactorizedCategorical):
    """Categorical heads of which some depend on the category of another, their parent (a skill picks the goal).

    With a parent i and its child j: p(a) = p_i(a_i) p_j(a_j | a_i). A head's log-probability and entropy are those
    given the parent's category in the action; joint entropy and divergence are exact:
    entropy = H_i + Σ_c p_i(c) H_j|c,  kl(p‖q) = KL_i + Σ_c p_i(c) KL_j|c.

    Source: the skill selector of the seed's centralized trainer; chain rule of entropy.
    """

    def entropy(self) -> torch.Tensor:
        """Joint entropy […], in nats."""
        return -((self.log_probs.exp() * self.log_probs).sum(0) * self._weights()).sum(-1)

    def kl(self, other: FactorizedCategorical) -> torch.Tensor:
        """KL(self ‖ other) […] of the joint actions."""
        return ((self.log_probs.exp() * (self.log_probs - other.log_probs)).sum(0) * self._weights()).sum(-1)

    def _actions(self, categories: torch.Tensor) -> torch.Tensor:
        return self.layout.pick(categories)

    def _given(self, categories: torch.Tensor) -> torch.Tensor:
        blocks = self.layout.counting(categories)
        return self.log_probs.gather(-1, blocks.expand(self.layout.width, *blocks.shape))

    def _weights(self) -> torch.Tensor:
        """[…, K] the probability that a block counts."""
        flat = self.log_probs.movedim(0, -1).flatten(-2)
        given = flat.index_select(-1, on_device(self.layout.block_given, flat.device))
        return given.where(on_device(self.layout.block_depends, flat.device) > 0, 0.0).exp()
