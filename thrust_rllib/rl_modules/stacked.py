"""Several alike MLP policies as one network in numpy, for acting on the CPU.

Acting passes few rows through small networks: it costs what calling its operations costs. Stacked, a layer of all
modules is one product, and numpy's calls cost less than torch's, its tanh a third (4 modules of 2 × 64 on one core: one
row each 6 µs against 111 µs module by module in torch, 16 rows each 18 µs against 147 µs).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from thrust_rllib.rl_modules.distributions import distribution_class
from thrust_rllib.rl_modules.mlp import MLPModule


def _tanh(x: np.ndarray) -> np.ndarray:
    return np.tanh(x, out=x)


def _relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0.0, out=x)


Activation = Callable[[np.ndarray], np.ndarray]
ACTIVATIONS: dict[type[nn.Module], Activation] = {nn.Tanh: _tanh, nn.ReLU: _relu}
"""The activations that have a numpy twin, which works in place."""

_OWN_METHODS = (
    "forward_inference", "forward_exploration", "_forward_inference", "_forward_exploration", "_forward", "_logits",
    "get_inference_action_dist_cls", "get_exploration_action_dist_cls",
)  # fmt: skip


class StackedPolicies:
    """The policies of m alike modules, with the weights they had when this was made.

    logits = W_h φ(W_l … φ(W_1 x + b_1) … + b_l) + b_h for each module, W and b stacked to [m, in, out] and [m, 1, out]

    Args:
        modules: for which `can_be_stacked` holds.
    """

    def __init__(self, modules: Sequence[MLPModule]) -> None:
        self._layers: list[tuple[np.ndarray, np.ndarray] | Activation] = []
        for alike in zip(*map(_layers, modules), strict=True):
            if isinstance(alike[0], nn.Linear):
                weight = _stack([layer.weight.mT for layer in alike])
                self._layers.append((weight, _stack([layer.bias for layer in alike])[:, None]))
            else:
                self._layers.append(ACTIVATIONS[type(alike[0])])
        log_stds = [module.log_std for module in modules if module.log_std is not None]
        self._log_std = _stack(log_stds)[:, None] if log_stds else None

    def __call__(self, obs: np.ndarray) -> np.ndarray:
        """Inputs of the action distributions [m, R, A] of observations [m, R, …], float32."""
        x = obs.reshape(*obs.shape[:2], -1)
        for layer in self._layers:
            if isinstance(layer, tuple):
                x = np.matmul(x, layer[0])
                x += layer[1]
            else:
                x = layer(x)
        if self._log_std is None:
            return x
        return np.concatenate([x, np.broadcast_to(self._log_std, x.shape)], axis=-1)


def can_be_stacked(modules: Sequence[Any]) -> bool:
    """Whether the modules act by `MLPModule`'s own forward pass, through layers of the same kinds and shapes."""
    return all(map(_is_plain, modules)) and all(_shape(module) == _shape(modules[0]) for module in modules[1:])


def _is_plain(module: Any) -> bool:
    if not isinstance(module, MLPModule) or type(module.trunk) is not nn.Sequential:
        return False
    layers = _layers(module)
    parts: list[nn.Module] = [module, module.trunk, *layers]
    return (
        # The activations work in place, on what the layer before has made.
        type(layers[0]) is nn.Linear
        and all(layer.bias is not None for layer in layers if isinstance(layer, nn.Linear))
        and not any(map(_is_changed, parts))
        and all(getattr(type(module), name) is getattr(MLPModule, name) for name in _OWN_METHODS)
        and module.action_dist_cls is distribution_class(module.action_space)
        and all(type(layer) in (nn.Linear, *ACTIVATIONS) for layer in layers)
        and all(param.device.type == "cpu" and param.dtype == torch.float32 for param in module.parameters())
    )


def _is_changed(module: nn.Module) -> bool:
    """Whether this one object does something else than its class: hooks, or a method of its own."""
    methods = {"forward", *_OWN_METHODS} & vars(module).keys()
    return bool(module._forward_hooks or module._forward_pre_hooks or methods)


def _layers(module: MLPModule) -> list[nn.Module]:
    return [*module.trunk, module.policy_head]


def _shape(module: MLPModule) -> list[Any]:
    described = [x.weight.shape if isinstance(x, nn.Linear) else type(x) for x in _layers(module)]
    return [*described, module.log_std is None, module.action_space]


def _stack(parameters: Sequence[torch.Tensor]) -> np.ndarray:
    return np.stack([p.detach().numpy() for p in parameters])
