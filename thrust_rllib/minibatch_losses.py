"""Forward pass and losses of one joint minibatch, compiled where the configuration asks for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from thrust_rllib.joint_batch import ModuleID
from thrust_rllib.joint_losses import JointLosses, compute_joint_losses
from thrust_rllib.loss_settings import LossSettings
from thrust_rllib.ranks import Ranks
from thrust_rllib.shared_minibatch import SharedMinibatch, outputs_of_all
from thrust_rllib.team_outputs import forward_team

MinibatchLosses = Callable[..., JointLosses]


def minibatch_losses(
    module: Any,
    minibatch: SharedMinibatch,
    trained: Mapping[ModuleID, bool],
    ranks: Ranks,
    settings: LossSettings,
) -> JointLosses:
    """`compute_joint_losses` of the whole minibatch, of which `forward_team` runs on this learner's rows."""
    own = forward_team(module, minibatch.own, trained, settings.critic)
    outputs = outputs_of_all(own, minibatch.sizes, ranks, settings.cross_agent_losses.values())
    return compute_joint_losses(outputs, minibatch.whole, settings)


def possibly_compiled_losses(config: Any) -> MinibatchLosses:
    """`minibatch_losses`, compiled as a whole with `torch_compile_learner`.

    RLlib compiles single modules' forward passes, which leaves the losses out.

    Args:
        config: has RLlib's options `torch_compile_learner`, `…_dynamo_backend` and `…_dynamo_mode`.
    """
    if not config.torch_compile_learner:
        return minibatch_losses
    compiled = torch.compile(
        minibatch_losses,
        backend=config.torch_compile_learner_dynamo_backend,
        mode=config.torch_compile_learner_dynamo_mode,
    )

    def run(*args: Any) -> JointLosses:
        # Several gradients are taken of one graph: a backward pass must not reuse the memory of the forward pass.
        with torch._functorch.config.patch(donated_buffer=False):
            return compiled(*args)

    return run
