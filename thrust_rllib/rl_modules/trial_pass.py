"""What a module puts out, found by running it once."""

from __future__ import annotations

from typing import Any

import torch
from ray.rllib.core.rl_module.rl_module import RLModule

from thrust_rllib.rl_modules.memory import in_first_state


def trial_outputs(module: RLModule) -> dict[str, Any]:
    """The outputs of `forward_train` for two rows of zeros, the first steps of episodes; without gradient."""
    device = next((p.device for p in module.parameters()), None)
    with torch.no_grad():
        outputs: dict[str, Any] = module.forward_train(
            in_first_state(module, torch.zeros(2, *module.observation_space.shape, device=device))
        )
    return outputs
