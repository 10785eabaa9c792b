"""A coupling that drives how far apart the agents act."""

from __future__ import annotations

from collections.abc import Mapping

import gymnasium as gym
from torch import Tensor

from thrust_rllib.cross_agent_losses import ActionCoupling, masks_of
from thrust_rllib.envs.spaces import head_sizes
from thrust_rllib.functional import system_neural_diversity, total_variation
from thrust_rllib.joint_batch import AgentID


class ActionSpread(ActionCoupling):
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

    Source: total variation as spread of policies: the seed's metrics; 2-Wasserstein: Bettini et al. 2023, "System
    neural diversity".
    """

    def kind(self, agent: AgentID, space: gym.Space) -> tuple[tuple[int, ...], int]:
        """Number of categories of each head, and of dimensions."""
        if isinstance(space, gym.spaces.Box) and len(space.shape) == 1:
            return (), int(space.shape[0])
        if (sizes := head_sizes(space)) is not None:
            return sizes, 0
        raise ValueError(
            f"agent {agent!r} acts in {space}, for which ActionSpread is not defined; needed: Discrete, or "
            "MultiDiscrete or Box with one axis. Leave the loss out, or couple the features with FeatureSimilarity or "
            "RedundancyPenalty."
        )

    def distance(
        self,
        logits: Mapping[AgentID, Tensor],
        present: Mapping[AgentID, Tensor] | None,
        kind: tuple[tuple[int, ...], int],
    ) -> Tensor:
        """See the class."""
        masks = masks_of(logits, present)
        sizes, num_dimensions = kind
        if sizes:
            return total_variation(list(logits.values()), masks, sizes)
        for agent, x in logits.items():
            if x.shape[-1] != 2 * num_dimensions:
                raise ValueError(
                    f"the logits of agent {agent!r} have shape {tuple(x.shape)}; needed: [B, {2 * num_dimensions}], a "
                    "mean and a log standard deviation of each dimension"
                )
        inputs = list(logits.values())
        if masks is not None:  # before the exponential: 0 times an infinite derivative is NaN
            inputs = [x.where(mask.unsqueeze(-1), 0) for x, mask in zip(inputs, masks, strict=True)]
        means, log_stds = zip(*(x.chunk(2, dim=-1) for x in inputs), strict=True)
        return system_neural_diversity(means, [x.exp() for x in log_stds], masks)
