"""The learner's heads for auxiliary targets: linear, one per policy module and target, each called by both names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from ray.rllib.core.rl_module.rl_module import RLModule, RLModuleSpec
from ray.rllib.core.rl_module.torch.torch_rl_module import TorchRLModule
from ray.rllib.utils.annotations import override
from ray.rllib.utils.typing import ModuleID
from torch import Tensor, nn

from thrust_rllib.rl_modules.mlp import ENCODER_FEATURES, linear, settings_of
from thrust_rllib.rl_modules.trial_pass import trial_outputs


class AuxiliaryHeads(TorchRLModule):
    """Predicts K scalars from the features of each policy module: features […, D] to predictions […, K].

    Only learners have it. Heads start at about 0 (orthogonal weights with gain 0.01, biases 0), as the policy's do.
    Policies that come and go while training bring their heads and take them along.

    `model_config`:

    | key       | meaning                                      |
    |-----------|----------------------------------------------|
    | `widths`  | {policy module: D, the width of its features} |
    | `targets` | names of the K targets                       |
    """

    model_config: Any

    @override(TorchRLModule)
    def setup(self) -> None:
        config = settings_of(self.model_config)
        self.targets = tuple(config["targets"])
        self.heads = nn.ModuleDict()
        for module_id in sorted(config["widths"]):
            self.heads[_key(module_id)] = self._new_head(config["widths"][module_id])

    def _new_head(self, width: int) -> nn.ModuleDict:
        # By name, in an order of its own: a checkpoint means the same targets, however they are listed.
        return nn.ModuleDict({_key(name): linear(width, 1, gain=0.01) for name in sorted(self.targets)})

    @property
    def widths(self) -> dict[ModuleID, int]:
        """{policy module: D}."""
        return dict(settings_of(self.model_config)["widths"])

    @staticmethod
    def place(module_id: ModuleID) -> str:
        """What the names of the parameters of a policy module's head begin with, before a dot."""
        return f"heads.{_key(module_id)}"

    def add_policy(self, module_id: ModuleID, width: int) -> nn.Module:
        """New heads, for a policy module whose features have this width."""
        head = self.heads[_key(module_id)] = self._new_head(width)
        self._describe({**self.widths, module_id: width})
        return head

    def remove_policy(self, module_id: ModuleID) -> None:
        """Drops a policy module's head."""
        del self.heads[_key(module_id)]
        self._describe({m: width for m, width in self.widths.items() if m != module_id})

    def _describe(self, widths: dict[ModuleID, int]) -> None:
        """Keeps what this module would be built from in step with the heads that it has."""
        self.model_config = {**settings_of(self.model_config), "widths": widths}
        self.observation_space = _features(widths)

    def predict(self, module_id: ModuleID, features: Tensor) -> Tensor:
        """Predictions […, K] from one policy module's features […, D]."""
        mine: Any = self.heads[_key(module_id)]
        return torch.cat([mine[_key(name)](features) for name in self.targets], dim=-1)

    def by_policy(self) -> list[tuple[ModuleID, nn.Module]]:
        """Each policy module's head."""
        return [(module_id, self.heads[_key(module_id)]) for module_id in sorted(self.widths)]

    @override(TorchRLModule)
    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """{policy module: features […, D]} to {policy module: predictions […, K]}."""
        return {module_id: self.predict(module_id, features) for module_id, features in batch.items()}


def auxiliary_heads_spec(specs: Mapping[ModuleID, RLModuleSpec], targets: Sequence[str]) -> RLModuleSpec:
    """What RLlib builds `AuxiliaryHeads` from.

    How wide a module's features are is found by building it on trial, which leaves torch's random stream as it was.

    Args:
        specs: of the policy modules, complete: with class, spaces and `model_config`.
        targets: names.

    Raises:
        ValueError: a module gives no `encoder_features`.
    """
    with torch.random.fork_rng(devices=[]):
        widths = {module_id: feature_width(module_id, spec.build()) for module_id, spec in specs.items()}
    return RLModuleSpec(
        module_class=AuxiliaryHeads,
        observation_space=_features(widths),
        action_space=_numbers(len(targets)),  # what it gives; RLlib builds no module without spaces
        model_config={"widths": widths, "targets": list(targets)},
        learner_only=True,
    )


def feature_width(module_id: ModuleID, module: RLModule) -> int:
    """D, the width of a module's `encoder_features`, see `trial_outputs`.

    Raises:
        ValueError: it gives none.
    """
    outputs = trial_outputs(module)
    if ENCODER_FEATURES not in outputs:
        raise ValueError(
            f"auxiliary_targets: module {module_id!r} ({type(module).__name__}) gives no features to predict from: its "
            f"forward_train returns {sorted(outputs)}. Let it return the actor's features [B, D] ([B, T, D] where it "
            f"is recurrent) under '{ENCODER_FEATURES}', or use one of this package's modules."
        )
    return int(outputs[ENCODER_FEATURES].shape[-1])


def _features(widths: Mapping[ModuleID, int]) -> gym.spaces.Dict:
    return gym.spaces.Dict({module_id: _numbers(width) for module_id, width in widths.items()})


def _numbers(count: int) -> gym.spaces.Box:
    return gym.spaces.Box(-np.inf, np.inf, (count,))


def _key(module_id: ModuleID) -> str:
    """A name for torch, which takes no dots, and none that its containers have themselves."""
    return "of_" + module_id.replace("%", "%25").replace(".", "%2E")
