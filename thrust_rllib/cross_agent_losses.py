"""Losses that couple agents: they read several agents' tensors of one joint minibatch and give one number.

A coupling of your own is a subclass with one method, or any callable with the same arguments:

    class SameFeatures(CrossAgentLoss):
        def __call__(self, features, logits, actions, present):
            first, *others = features.values()
            return sum((first - other).square().mean() for other in others)

    JointPPOConfig().training(
        cross_agent_losses={"same": SameFeatures()}, cross_agent_coeffs={"same": 0.1})

The learner multiplies by the coefficient, adds the term to the sum of the agents' losses and runs one backward pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Literal

from torch import Tensor

from thrust_rllib.functional import redundancy_penalty
from thrust_rllib.joint_batch import AgentID


class CrossAgentLoss(ABC):
    """A loss over several agents on the same joint minibatch of B rows.

    Row b of every tensor is the same time step of the same environment. A frozen agent's tensors are detached.

    | class attribute  | meaning                                                                          |
    |------------------|----------------------------------------------------------------------------------|
    | `needs_features` | checked when the learner is built: every module must give `encoder_features`     |
    | `min_agents`     | checked when the configuration is validated                                      |
    """

    needs_features: ClassVar[bool] = True
    min_agents: ClassVar[int] = 2

    @abstractmethod
    def __call__(
        self,
        features: Mapping[AgentID, Tensor],
        logits: Mapping[AgentID, Tensor],
        actions: Mapping[AgentID, Tensor],
        present: Mapping[AgentID, Tensor] | None,
    ) -> Tensor | None:
        """The loss, unweighted.

        Args:
            features: {agent: [B, D]} the actor's features (`encoder_features`); empty if a module gives none.
            logits: {agent: [B, A]} inputs of the action distribution, masked where actions are masked.
            actions: {agent: [B, …]} as sampled, categories from 0.
            present: {agent: [B] bool} whether the agent acted in that row (leave other rows out), or None where
                every agent acted in every row.

        Returns:
            A scalar, or None for no term in this minibatch (reported as 0).
        """


class RedundancyPenalty(CrossAgentLoss):
    """Squared cross-correlation of the agents' features: Σ_{i<j} ‖corr(Z_i, Z_j)‖²_F / (D_i·D_j).

    Args:
        normalization: "dimensions" is the formula above, which grows with the number of pairs (the seed's);
            "pairs" also divides by the number of pairs, which keeps the value in [0, 1] for any number of agents.

    For independent features its expectation is about 1/B per pair, not 0. Frozen agents count, but only the others'
    features move.

    Raises:
        ValueError: another normalization.

    Source: the redundancy term of the seed's joint trainer.
    """

    def __init__(self, normalization: Literal["dimensions", "pairs"] = "dimensions") -> None:
        if normalization not in ("dimensions", "pairs"):
            raise ValueError(f"normalization is {normalization!r}; needed: 'dimensions' or 'pairs'")
        self.normalization: Literal["dimensions", "pairs"] = normalization

    def __call__(
        self,
        features: Mapping[AgentID, Tensor],
        logits: Mapping[AgentID, Tensor],
        actions: Mapping[AgentID, Tensor],
        present: Mapping[AgentID, Tensor] | None,
    ) -> Tensor | None:
        """See the class."""
        masks = None if present is None else [present[agent] for agent in features]
        return redundancy_penalty(list(features.values()), masks, normalization=self.normalization)

    def __repr__(self) -> str:
        return f"RedundancyPenalty(normalization={self.normalization!r})"
