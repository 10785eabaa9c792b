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
from typing import Any, ClassVar, Literal

import gymnasium as gym
from torch import Tensor

from thrust_rllib.envs.spaces import head_sizes
from thrust_rllib.functional import jensen_shannon, linear_cka, redundancy_penalty
from thrust_rllib.joint_batch import AgentID


class CrossAgentLoss(ABC):
    """A loss over several agents on the same joint minibatch of B rows.

    Row b of every tensor is the same time step of the same environment. A frozen agent's tensors are detached. With
    several learners each of them computes the loss of the whole minibatch: it must give the same number for the same
    tensors, without randomness of its own.

    | class attribute  | meaning                                                                          |
    |------------------|----------------------------------------------------------------------------------|
    | `needs_features` | checked when the learner is built: every module must give `encoder_features`;    |
    |                  | a loss that says False gets no features, which spares several learners the most  |
    | `plain_heads`    | checked when the learner is built: no head depends on another's category, so     |
    |                  | that the logits are those of the action space's categories (or of one Box)       |
    | `min_agents`     | checked when the configuration is validated                                      |
    """

    needs_features: ClassVar[bool] = True
    plain_heads: ClassVar[bool] = False
    min_agents: ClassVar[int] = 2

    def prepare(self, action_spaces: Mapping[AgentID, gym.Space]) -> None:  # noqa: B027 (a hook: nothing by default)
        """Called when the learner is built, and again whenever another is: look at the team, refuse what cannot work.

        Each learner has a copy of the loss of its own. A loss that is a plain function needs no such method.

        Args:
            action_spaces: {agent: space} of the whole team.

        Raises:
            ValueError: the loss cannot couple agents with these spaces.
        """

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
            features: {agent: [B, D]} the actor's features (`encoder_features`), of the modules that give some.
            logits: {agent: [B, A]} inputs of the action distribution, masked where actions are masked.
            actions: {agent: [B, …]} as sampled, categories from 0.
            present: {agent: [B] bool} whether the agent acted in that row (leave other rows out), or None where
                every agent acted in every row.

        Returns:
            A scalar, or None for no term in this minibatch (reported as 0).
        """


def reads_features(loss: CrossAgentLoss) -> bool:
    """Whether features are handed to a coupling; a plain function says nothing, and gets them."""
    return getattr(loss, "needs_features", True)


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
        return redundancy_penalty(
            list(features.values()), masks_of(features, present), normalization=self.normalization
        )

    def __repr__(self) -> str:
        return f"RedundancyPenalty(normalization={self.normalization!r})"


class FeatureSimilarity(CrossAgentLoss):
    """Similarity of what the agents' features represent: linear CKA, mean over pairs of agents, in [0, 1].

    Unlike `RedundancyPenalty` it knows no single columns: features that are rotated into each other count as equal,
    and columns of large variance count more. Minimising it makes the agents see different things. For independent
    features of width D it is about D / (D + B), not 0: choose minibatches with many more rows than features. A
    constant agent is similar to nobody.

    Source: Kornblith et al. 2019, "Similarity of neural network representations revisited".
    """

    def __call__(
        self,
        features: Mapping[AgentID, Tensor],
        logits: Mapping[AgentID, Tensor],
        actions: Mapping[AgentID, Tensor],
        present: Mapping[AgentID, Tensor] | None,
    ) -> Tensor | None:
        """See the class."""
        return linear_cka(list(features.values()), masks_of(features, present))

    def __repr__(self) -> str:
        return "FeatureSimilarity()"


class ActionCoupling(CrossAgentLoss):
    """Base of losses on how far apart the agents act, all of them in the same action space.

    Args:
        direction: "raise" (act differently: the loss is -distance) or "lower" (act alike: it is the distance).

    Raises:
        ValueError: another direction.
    """

    needs_features = False
    plain_heads = True

    def __init__(self, direction: Literal["raise", "lower"]) -> None:
        if direction not in ("raise", "lower"):
            raise ValueError(f"direction is {direction!r}; needed: 'raise' (act differently) or 'lower' (act alike)")
        self.direction: Literal["raise", "lower"] = direction
        self._kind: Any = None

    @abstractmethod
    def kind(self, agent: AgentID, space: gym.Space) -> Any:
        """What of an agent's space has to be the same for all; a `ValueError` where the distance is not defined."""

    @abstractmethod
    def distance(self, logits: Mapping[AgentID, Tensor], present: Mapping[AgentID, Tensor] | None, kind: Any) -> Tensor:
        """Scalar, 0 where all act alike; `kind` as the method gave it."""

    def prepare(self, action_spaces: Mapping[AgentID, gym.Space]) -> None:
        """Learns how the agents act.

        Args:
            action_spaces: {agent: space}.

        Raises:
            ValueError: a kind of space for which the distance is not defined, or agents with different actions.
        """
        kinds = {agent: self.kind(agent, space) for agent, space in action_spaces.items()}
        (first, needed), *others = kinds.items()
        for agent, own in others:
            if own != needed:
                raise ValueError(
                    f"agents {first!r} and {agent!r} have different actions: {action_spaces[first]} and "
                    f"{action_spaces[agent]}. {type(self).__name__} compares agents with the same actions; give all "
                    "agents one action space and mask what an agent cannot do, or write a CrossAgentLoss for the "
                    "agents that can be compared."
                )
        self._kind = needed

    def __call__(
        self,
        features: Mapping[AgentID, Tensor],
        logits: Mapping[AgentID, Tensor],
        actions: Mapping[AgentID, Tensor],
        present: Mapping[AgentID, Tensor] | None,
    ) -> Tensor | None:
        """See the class.

        Raises:
            ValueError: `prepare` was not called, or the logits do not fit the action spaces.
        """
        if self._kind is None:
            raise ValueError(
                f"{type(self).__name__} does not know the action spaces; call prepare({{agent: space}}) first, as the "
                "learner does"
            )
        distance = self.distance(logits, present, self._kind)
        return -distance if self.direction == "raise" else distance

    def __repr__(self) -> str:
        return f"{type(self).__name__}(direction={self.direction!r})"


class JensenShannon(ActionCoupling):
    """Jensen-Shannon divergence of the agents' policies at the same time steps, in nats, mean over pairs of agents.

    With a positive coefficient the team learns to act differently ("raise": the loss is -JS) or alike ("lower": the
    loss is JS). As every reported loss, the metric is what is minimised: between -ln 2 and 0 with "raise", between 0
    and ln 2 with "lower". With several heads (MultiDiscrete) it is the mean of the heads' divergences. A masked action
    has probability 0, so that agents with different masks differ for that reason, too. The gradient fades as policies
    become certain: agents that are sure of the same action are not parted. Frozen agents count, but only the others'
    policies move. All agents act in Discrete or MultiDiscrete spaces with the same numbers of actions.

    Source: Lin 1991, "Divergence measures based on the Shannon entropy".
    """

    def kind(self, agent: AgentID, space: gym.Space) -> tuple[int, ...]:
        """Number of categories of each head."""
        if (sizes := head_sizes(space)) is not None:
            return sizes
        why = " (between two normal distributions it has no closed form)" if isinstance(space, gym.spaces.Box) else ""
        raise ValueError(
            f"agent {agent!r} acts in {space}, for which JensenShannon is not defined{why}; needed: Discrete, or "
            "MultiDiscrete with one axis. Leave the loss out, or couple the features with FeatureSimilarity or "
            "RedundancyPenalty."
        )

    def distance(
        self, logits: Mapping[AgentID, Tensor], present: Mapping[AgentID, Tensor] | None, kind: tuple[int, ...]
    ) -> Tensor:
        """See the class."""
        return jensen_shannon(list(logits.values()), masks_of(logits, present), head_sizes=kind)


def masks_of(by_agent: Mapping[AgentID, Tensor], present: Mapping[AgentID, Tensor] | None) -> list[Tensor] | None:
    """The presence of the agents in their order in `by_agent`."""
    return None if present is None else [present[agent] for agent in by_agent]
