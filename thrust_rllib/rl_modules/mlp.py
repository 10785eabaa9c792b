"""Feed-forward policies with the architecture and initialisation of the seed's joint trainer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import torch
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis import InferenceOnlyAPI, ValueFunctionAPI
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.rl_module import RLModule
from ray.rllib.core.rl_module.torch.torch_rl_module import TorchRLModule
from ray.rllib.utils.annotations import override
from ray.rllib.utils.typing import StateDict
from torch import nn

from thrust_rllib.envs.names import nearest
from thrust_rllib.rl_modules.distributions import distribution_class, logits_width
from thrust_rllib.rl_modules.heads import check_head_names, head_parents
from thrust_rllib.rl_modules.parameter_check import check_parameters

ENCODER_FEATURES = "encoder_features"
"""Key of the actor's features in a module's `forward_train` output: what couplings read. RLlib's own
`Columns.EMBEDDINGS` comes from the *critic's* encoder and is no substitute."""

READ_BY_OTHERS = {
    **dict.fromkeys(
        ("message_rounds", "message_size", "aggregation", "message_content", "encoder", "encoder_hiddens"),
        "a module whose agents exchange messages reads it: message_rounds in the model_config chooses the class",
    ),
    **dict.fromkeys(
        ("cell_size", "max_seq_len"),
        "a module with a memory reads it: cell='lstm' or cell='gru' in the model_config chooses the class",
    ),
}
"""Keys that a derived class reads, and what has to stand beside them in a `model_config` for it to be chosen."""

ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU, "silu": nn.SiLU, "gelu": nn.GELU}


class MLPModule(TorchRLModule, InferenceOnlyAPI, ValueFunctionAPI):
    """Trunk, policy head and value head; Discrete, MultiDiscrete and Box actions.

    Shapes, with O the flattened observation, D the last trunk width, A the logits of the action space:
    trunk O → … → D, policy head D → A, value head D → 1. The trunk's last activation is `encoder_features`, the
    tensor that both heads read. Weights are orthogonal with gain √2 in the trunk and 0.01 in both heads, biases 0.

    `model_config`, in RLlib's names:

    | key                | default   | meaning                                                                |
    |--------------------|-----------|------------------------------------------------------------------------|
    | `fcnet_hiddens`    | [64, 64]  | widths of the trunk, its last one is D                                 |
    | `fcnet_activation` | "tanh"    | tanh, relu, elu, silu, gelu                                            |
    | `vf_share_layers`  | True      | False: the value head gets a trunk of its own                          |
    | `free_log_std`     | True      | Box actions: log σ is a parameter, not an output of the policy head    |
    | `log_std_init`     | 0.0       | its first value                                                        |
    | `head_names`       | None      | names of a MultiDiscrete's dimensions; None: "0", "1", …               |
    | `conditional_heads` | {}       | {head: the head it depends on}: {"goal": "skill"} gives the goal its   |
    |                    |           | own logits for each category of the skill; the sampled one says which  |
    |                    |           | count. A = S + S·G instead of S + G (`ConditionalCategorical`)         |

    RLlib's other settings (`DefaultModelConfig`) may be there with their default values. A derived class that reads
    more adds its keys to `model_config_keys`.

    Raises:
        ValueError: an unsupported action space, an unknown activation, no hidden layer, an unknown key, a setting
            of RLlib's that is not read here and does not have its default, or heads that the actions do not have.

    Source: the plain network of the seed's joint trainer; orthogonal initialisation after Saxe et al. 2014.
    """

    model_config_keys: ClassVar[tuple[str, ...]] = (
        "fcnet_hiddens", "fcnet_activation", "vf_share_layers", "free_log_std", "log_std_init", "head_names",
        "conditional_heads",
    )  # fmt: skip

    @override(TorchRLModule)
    def setup(self) -> None:
        config = settings_of(self.model_config)
        self._check_model_config(config)
        self._check_action_space(self.action_space)
        self.head_names = config.get("head_names")
        names = check_head_names(self.action_space, self.head_names)
        self.head_parents = head_parents(self.action_space, names, config.get("conditional_heads"))
        self.action_dist_cls = distribution_class(self.action_space, self.head_parents)
        num_logits = self.action_dist_cls.required_input_dim(self.action_space)
        self.free_log_std = isinstance(self.action_space, gym.spaces.Box) and bool(config.get("free_log_std", True))
        self.separate_critic = not config.get("vf_share_layers", True)

        num_features = self._add_actor(config)
        self.policy_head = linear(num_features, num_logits // 2 if self.free_log_std else num_logits, gain=0.01)
        self.log_std: nn.Parameter | None = None
        if self.free_log_std:
            self.log_std = nn.Parameter(torch.full((num_logits // 2,), float(config.get("log_std_init", 0.0))))
        self.critic_trunk: nn.Module | None = None
        if self.separate_critic:
            self._add_critic(config)
        self.value_head = linear(num_features, 1, gain=0.01)

    def _add_actor(self, config: Mapping[str, Any]) -> int:
        """Makes what stands in front of the policy head; returns D, the number of its outputs."""
        self.trunk, num_features = self._new_trunk(config)
        return num_features

    def _add_critic(self, config: Mapping[str, Any]) -> None:
        """Makes what stands in front of the value head where that shares nothing with the policy."""
        self.critic_trunk, _ = self._new_trunk(config)

    def _hiddens(self, config: Mapping[str, Any]) -> list[int]:
        widths = layer_widths("fcnet_hiddens", config.get("fcnet_hiddens", (64, 64)))
        if not widths:
            raise ValueError("fcnet_hiddens is []; needed: at least one layer of width 1 or more")
        return widths

    def _new_trunk(self, config: Mapping[str, Any]) -> tuple[nn.Sequential, int]:
        widths, name = self._hiddens(config), config.get("fcnet_activation", "tanh")
        if name not in ACTIVATIONS:
            raise ValueError(f"fcnet_activation is {name!r}; needed: one of {', '.join(ACTIVATIONS)}")
        num_inputs = int(np.prod(self.observation_space.shape))
        return make_trunk(num_inputs, widths, ACTIVATIONS[name]), widths[-1] if widths else num_inputs

    def _check_model_config(self, config: Mapping[str, Any]) -> None:
        name, rllibs = type(self).__name__, vars(DefaultModelConfig())
        advice = (
            f"It reads {', '.join(self.model_config_keys)}. For anything else pass an RLModule of your own, or a class "
            f"derived from {name} that adds the keys it reads to model_config_keys."
        )
        if config.get("cell") is not None and "cell" not in self.model_config_keys:
            raise ValueError(
                f"model_config has cell={config['cell']!r}, but {name} has no memory. Leave module_class out, which "
                "then follows from the cell, or name LSTMModule or GRUModule."
            )
        others = {key: value for key, value in config.items() if key not in (*self.model_config_keys, "cell")}
        for key in others:
            if key not in rllibs:
                raise ValueError(f"{name} knows no model_config key {key!r}{self._hint(key)} {advice}")
        ignored = {key: others[key] for key in sorted(others) if not _same(others[key], rllibs[key])}
        if ignored:
            hints = {self._hint(key) for key in ignored if key in READ_BY_OTHERS} or {"."}
            raise ValueError(f"{name} does not read the model_config {ignored}{''.join(sorted(hints))} {advice}")

    def _hint(self, key: str) -> str:
        """What an unknown key may have been meant for."""
        if key in READ_BY_OTHERS:
            return f"; {READ_BY_OTHERS[key]}."
        hint = nearest(key, self.model_config_keys)
        return nearest(key, READ_BY_OTHERS) if hint == "." else hint

    @staticmethod
    def _check_action_space(space: gym.Space) -> None:
        logits_width(space)

    @override(InferenceOnlyAPI)
    def get_non_inference_attributes(self) -> list[str]:
        return ["value_head"] + (["critic_trunk"] if self.separate_critic else [])

    @override(TorchRLModule)
    def set_state(self, state: StateDict) -> None:
        """Takes over the parameters in `state`; those that only training needs may be missing, or be there.

        Raises:
            ValueError: before anything is taken over, where `state` is that of another network.
        """
        check_parameters(self, state)
        super().set_state(state)

    # TorchRLModule switches between training and evaluation mode around each forward, which takes as long as the
    # forward of a small network. Nothing here depends on the mode: no dropout, no batch statistics.
    @override(TorchRLModule)
    def forward_inference(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return self._forward_inference(batch, **kwargs)

    @override(TorchRLModule)
    def forward_exploration(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return self._forward_exploration(batch, **kwargs)

    @override(TorchRLModule)
    def forward_train(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return RLModule.forward_train(self, batch, **kwargs)

    @override(TorchRLModule)
    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {Columns.ACTION_DIST_INPUTS: self._logits(self.trunk(_flat(batch[Columns.OBS])))}

    @override(TorchRLModule)
    def _forward_train(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        features = self.trunk(_flat(batch[Columns.OBS]))
        outputs = {Columns.ACTION_DIST_INPUTS: self._logits(features), ENCODER_FEATURES: features}
        if self.critic_trunk is None:
            outputs[Columns.EMBEDDINGS] = features
        return outputs

    @override(ValueFunctionAPI)
    def compute_values(self, batch: dict[str, Any], embeddings: torch.Tensor | None = None) -> torch.Tensor:
        """Values [B] of the observations in `batch`, from `embeddings` [B, D] of the shared trunk where given."""
        if self.critic_trunk is not None:
            embeddings = self.critic_trunk(_flat(batch[Columns.OBS]))
        elif embeddings is None:
            embeddings = self.trunk(_flat(batch[Columns.OBS]))
        return self.value_head(embeddings).squeeze(-1)

    def _logits(self, features: torch.Tensor) -> torch.Tensor:
        outputs = self.policy_head(features)
        if self.log_std is None:
            return outputs
        return torch.cat([outputs, self.log_std.expand_as(outputs)], dim=-1)


def settings_of(model_config: Any) -> Mapping[str, Any]:
    """A `model_config` as a mapping: it may be RLlib's dataclass, a dict, or None."""
    return vars(model_config) if dataclasses.is_dataclass(model_config) else model_config or {}


def _same(value: Any, default: Any) -> bool:
    return (list(value) if isinstance(value, tuple) else value) == default


def _flat(obs: torch.Tensor) -> torch.Tensor:
    return obs if obs.ndim == 2 else obs.flatten(start_dim=1)


def layer_widths(name: str, value: Any) -> list[int]:
    """The widths of an MLP's layers.

    Raises:
        ValueError: something else than whole numbers ≥ 1; a text, too, whose characters would become layers.
    """
    if not isinstance(value, Sequence) or not all(isinstance(w, (int, np.integer)) and w >= 1 for w in value):
        raise ValueError(f"{name} is {value!r}; needed: layers of width 1 or more, a list such as [64, 64]")
    return [int(w) for w in value]


def make_trunk(num_inputs: int, widths: list[int], activation: type[nn.Module]) -> nn.Sequential:
    """Layers of the given widths, each with its activation; orthogonal weights with gain √2, biases 0."""
    layers: list[nn.Module] = []
    for width in widths:
        layers += [linear(num_inputs, width, gain=math.sqrt(2.0)), activation()]
        num_inputs = width
    return nn.Sequential(*layers)


def linear(num_inputs: int, num_outputs: int, gain: float) -> nn.Linear:
    """A layer with orthogonal weights of this gain and biases 0."""
    layer = nn.Linear(num_inputs, num_outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer
