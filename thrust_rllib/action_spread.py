"""A coupling that drives how far apart the agents act."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import gymnasium as gym
from torch import Tensor

from thrust_rllib.cross_agent_losses import CrossAgentLoss
from thrust_rllib.functional import system_neural_diversity, total_variation
from thrust_rllib.joint_batch import AgentID


class ActionSpread(CrossAgentLoss):
    """Distance of the agents' action distributions at the same time steps, mean over rows and pairs of agents.

    | action space            | distance                                                                      |
    |-------------------------|-------------------------------------------------------------------------------|
    | Discrete, MultiDiscrete | total variation, in [0, 1], mean over heads (`functional.total_variation`)    |
    | Box                     | 2-Wasserstein of normal policies, in units of the unscaled actions, without a |
    |                         | bound (`functional.system_neural_diversity`)                                  |

    With a positive coefficient the agents come to act differently ("raise": the loss is −distance) or alike ("lower":
    the loss is the distance). As every reported loss, the metric is what is minimised. Its slope in the probabilities
    (in means and standard deviations of normals) is the same however far apart the agents are: with a fixed coefficient
    "raise" goes on to the bound, and for normals without end. To reach a given distance, let a constraint drive the
    weight, which may then be of either sign:

        training(cross_agent_losses={"spread": ActionSpread("lower")},
                 constraints=(Constraint("spread", 0.4, "lagrangian", rate=0.05, of="coupling", sense="equal"),))

    Every agent is taken at its **own** observation: agents with one policy that see different things are apart, too.
    What modules would do with the same observations is the metric `diversity` (`diversity_probe`). Policies that are
    equal to the bit are not moved. Frozen agents count, but only the others' policies move. Another measure for
    discrete actions, steep where agents are sure of different actions, is `JensenShannon`.

    Args:
        direction: "raise" or "lower".

    Raises:
        ValueError: another direction.

    Source: total variation as spread of policies: the seed's metrics; 2-Wasserstein: Bettini et al. 2023, "System
    neural diversity".
    """

    needs_features = False
    plain_heads = True

    def __init__(self, direction: Literal["raise", "lower"]) -> None:
        if direction not in ("raise", "lower"):
            raise ValueError(f"direction is {direction!r}; needed: 'raise' (act differently) or 'lower' (act alike)")
        self.direction: Literal["raise", "lower"] = direction
        self._head_sizes: tuple[int, ...] | None = None
        self._num_dimensions: int | None = None

    def prepare(self, action_spaces: Mapping[AgentID, gym.Space]) -> None:
        """Learns how the agents act.

        Args:
            action_spaces: {agent: space}; all Discrete or MultiDiscrete with the same numbers of actions, or all Box
                with the same number of dimensions.

        Raises:
            ValueError: another kind of space, or agents that act in different ones.
        """
        kinds = {agent: _kind(agent, space) for agent, space in action_spaces.items()}
        (first, needed), *others = kinds.items()
        for agent, own in others:
            if own != needed:
                raise ValueError(
                    f"agents {first!r} and {agent!r} have different actions: {action_spaces[first]} and "
                    f"{action_spaces[agent]}. ActionSpread compares agents with the same actions; give all agents one "
                    "action space and mask what an agent cannot do, or write a CrossAgentLoss for the agents that can "
                    "be compared."
                )
        self._head_sizes, self._num_dimensions = needed

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
        masks = None if present is None else [present[agent] for agent in logits]
        if self._head_sizes is not None:
            distance = total_variation(list(logits.values()), masks, self._head_sizes)
        elif self._num_dimensions is not None:
            for agent, x in logits.items():
                if x.shape[-1] != 2 * self._num_dimensions:
                    raise ValueError(
                        f"the logits of agent {agent!r} have shape {tuple(x.shape)}; needed: [B, "
                        f"{2 * self._num_dimensions}], a mean and a log standard deviation of each dimension"
                    )
            inputs = list(logits.values())
            if masks is not None:  # before the exponential: 0 times an infinite derivative is NaN
                inputs = [x.where(mask.unsqueeze(-1), 0) for x, mask in zip(inputs, masks, strict=True)]
            means, log_stds = zip(*(x.chunk(2, dim=-1) for x in inputs), strict=True)
            distance = system_neural_diversity(means, [x.exp() for x in log_stds], masks)
        else:
            raise ValueError(
                "ActionSpread does not know the action spaces; call prepare({agent: space}) first, as the learner does"
            )
        return -distance if self.direction == "raise" else distance

    def __repr__(self) -> str:
        return f"ActionSpread(direction={self.direction!r})"


def _kind(agent: AgentID, space: gym.Space) -> tuple[tuple[int, ...] | None, int | None]:
    """Categories of each head, or the number of dimensions."""
    if isinstance(space, gym.spaces.Discrete):
        return (int(space.n),), None
    if isinstance(space, gym.spaces.MultiDiscrete) and space.nvec.ndim == 1:
        return tuple(space.nvec.tolist()), None
    if isinstance(space, gym.spaces.Box) and len(space.shape) == 1:
        return None, int(space.shape[0])
    raise ValueError(
        f"agent {agent!r} acts in {space}, for which ActionSpread is not defined; needed: Discrete, or MultiDiscrete "
        "or Box with one axis. Leave the loss out, or couple the features with FeatureSimilarity or RedundancyPenalty."
    )
