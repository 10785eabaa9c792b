"""Several alike MLP policies as one network in numpy, for acting on the CPU; recurrent ones: `stacked_recurrent`.

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
from thrust_rllib.rl_modules.recurrent import GRUModule, LSTMModule, RecurrentModule


def _tanh(x: np.ndarray) -> np.ndarray:
    return np.tanh(x, out=x)


def _relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0.0, out=x)


Activation = Callable[[np.ndarray], np.ndarray]
ACTIVATIONS: dict[type[nn.Module], Activation] = {nn.Tanh: _tanh, nn.ReLU: _relu}
"""The activations that have a numpy twin, which works in place."""

Layer = tuple[np.ndarray, np.ndarray] | Activation

_OWN_METHODS = (
    "forward_inference", "forward_exploration", "_forward_inference", "_forward_exploration", "_forward", "_logits",
    "get_inference_action_dist_cls", "get_exploration_action_dist_cls",
)  # fmt: skip

_OWN_METHODS_OF_CELLS = ("_encode", "_actor", "_critic", "_run", "_initial", "get_initial_state")


class StackedPolicies:
    """The policies of m alike modules, with the weights they had when this was made.

    logits = W_h φ(W_l … φ(W_1 x + b_1) … + b_l) + b_h for each module, W and b stacked to [m, in, out] and [m, 1, out]

    Args:
        modules: for which `can_be_stacked` holds.
    """

    def __init__(self, modules: Sequence[MLPModule]) -> None:
        self._layers = stacked_layers([[*module.trunk, module.policy_head] for module in modules])
        self._log_std = stacked_log_std(modules)

    def __call__(self, obs: np.ndarray) -> np.ndarray:
        """Inputs of the action distributions [m, R, A] of observations [m, R, …], float32."""
        return with_log_std(through_layers(self._layers, obs.reshape(*obs.shape[:2], -1)), self._log_std)


def stacked_layers(chains: Sequence[Sequence[nn.Module]]) -> list[Layer]:
    """The layers of m alike chains, each stacked to one."""
    layers: list[Layer] = []
    for alike in zip(*chains, strict=True):
        if isinstance(alike[0], nn.Linear):
            weight = stacked([layer.weight.mT for layer in alike])
            layers.append((weight, stacked([layer.bias for layer in alike])[:, None]))
        else:
            layers.append(ACTIVATIONS[type(alike[0])])
    return layers


def through_layers(layers: Sequence[Layer], x: np.ndarray) -> np.ndarray:
    """Inputs [m, R, in] to outputs [m, R, out]."""
    for layer in layers:
        if isinstance(layer, tuple):
            x = np.matmul(x, layer[0])
            x += layer[1]
        else:
            x = layer(x)
    return x


def stacked_log_std(modules: Sequence[MLPModule]) -> np.ndarray | None:
    """The modules' parameters log σ [m, 1, k], or None where they have none."""
    log_stds = [module.log_std for module in modules if module.log_std is not None]
    return stacked(log_stds)[:, None] if log_stds else None


def with_log_std(outputs: np.ndarray, log_std: np.ndarray | None) -> np.ndarray:
    """The policy heads' outputs [m, R, …] as inputs of the action distributions [m, R, A]."""
    if log_std is None:
        return outputs
    return np.concatenate([outputs, np.broadcast_to(log_std, outputs.shape)], axis=-1)


def can_be_stacked(modules: Sequence[Any]) -> bool:
    """Whether the modules act by `MLPModule`'s, `LSTMModule`'s or `GRUModule`'s own forward pass, all by the same one.

    And through layers of the same kinds and shapes: then the numpy twin does what they do.
    """
    return all(map(_is_plain, modules)) and all(_shape(module) == _shape(modules[0]) for module in modules[1:])


def _is_plain(module: Any) -> bool:
    own = next((kind for kind in (LSTMModule, GRUModule, MLPModule) if isinstance(module, kind)), None)
    if own is None:
        return False
    names = _OWN_METHODS + (_OWN_METHODS_OF_CELLS if issubclass(own, RecurrentModule) else ())
    if any(getattr(type(module), name) is not getattr(own, name) for name in names):
        return False
    trunks, cells = _trunks(module), _cells(module)
    if any(type(trunk) is not nn.Sequential for trunk in trunks):
        return False
    chains = _chains(module)
    layers = [layer for chain in chains for layer in chain]
    return (
        # The activations work in place, on what the layer before has made.
        all(type(chain[0]) is nn.Linear for chain in chains if chain)
        and all(layer.bias is not None for layer in layers if isinstance(layer, nn.Linear))
        and all(type(layer) in (nn.Linear, *ACTIVATIONS) for layer in layers)
        and all(map(_is_one_layer, cells))
        and not any(_is_changed(part, names) for part in [module, *trunks, *layers, *cells])
        and module.action_dist_cls is distribution_class(module.action_space, getattr(module, "head_parents", None))
        and all(param.device.type == "cpu" and param.dtype == torch.float32 for param in module.parameters())
    )


def _is_changed(part: nn.Module, names: Sequence[str]) -> bool:
    """Whether this one object does something else than its class: hooks, or a method of its own."""
    return bool(part._forward_hooks or part._forward_pre_hooks or {"forward", *names} & vars(part).keys())


def _is_one_layer(cell: Any) -> bool:
    return type(cell) in (nn.LSTM, nn.GRU) and (
        cell.num_layers == 1 and cell.bias and cell.batch_first and not cell.bidirectional and not cell.proj_size
    )


def _trunks(module: Any) -> list[Any]:
    """The MLPs that acting runs through; the critic's own only where that carries a memory."""
    return [trunk for trunk, _ in module.branches()] if isinstance(module, RecurrentModule) else [module.trunk]


def _cells(module: Any) -> list[Any]:
    return [cell for _, cell in module.branches()] if isinstance(module, RecurrentModule) else []


def _chains(module: Any) -> list[list[nn.Module]]:
    """Layers that follow each other, the cells between the chains."""
    if not _cells(module):
        return [[*module.trunk, module.policy_head]]
    return [*([*trunk] for trunk in _trunks(module)), [module.policy_head]]


def _shape(module: Any) -> list[Any]:
    layers = [[x.weight.shape if isinstance(x, nn.Linear) else type(x) for x in chain] for chain in _chains(module)]
    cells = [(type(cell), cell.input_size, cell.hidden_size) for cell in _cells(module)]
    return [layers, cells, module.log_std is None, module.action_space, module.action_dist_cls]


def stacked(parameters: Sequence[torch.Tensor]) -> np.ndarray:
    """Parameters of m modules as one array [m, …]."""
    return np.stack([p.detach().numpy() for p in parameters])
