"""The MLP policy for several action dimensions at once."""

from __future__ import annotations

import gymnasium as gym
from ray.rllib.utils.annotations import override

from thrust_rllib.rl_modules.mlp import MLPModule


class MultiDiscreteMLPModule(MLPModule):
    """`MLPModule` for MultiDiscrete actions: one categorical head per dimension over the same features.

    The heads lie side by side in the policy head's output, A = Σ categories (more with `conditional_heads`).
    Log-probability and entropy are those of the joint action: sums over the heads.

    Raises:
        ValueError: the action space is not MultiDiscrete with one axis.
    """

    @staticmethod
    @override(MLPModule)
    def _check_action_space(space: gym.Space) -> None:
        if not isinstance(space, gym.spaces.MultiDiscrete) or len(space.shape) != 1:
            raise ValueError(
                f"MultiDiscreteMLPModule got action space {space}; needed: MultiDiscrete with one axis. Use MLPModule "
                "for Discrete and Box."
            )
