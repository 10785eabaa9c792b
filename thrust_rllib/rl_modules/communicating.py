"""Policies whose agents exchange messages over a graph that they observe, and then act one by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis import ValueFunctionAPI
from ray.rllib.core.rl_module.torch.torch_rl_module import TorchRLModule
from ray.rllib.utils.annotations import override
from torch import Tensor, nn

from thrust_rllib.rl_modules.communication_settings import CommunicationSettings
from thrust_rllib.rl_modules.message_passing import Messages
from thrust_rllib.rl_modules.mlp import ACTIVATIONS, ENCODER_FEATURES, MLPModule, linear, make_trunk
from thrust_rllib.rl_modules.observation_encoders import make_encoder

EXCHANGED = "exchanged"
"""Key of a batch: the agents' features behind the exchange, [R, D], or [R, L, D] of sequences."""


class CommunicatingModule(MLPModule):
    """Encoder, rounds of messages, MLP, policy head and value head.

    z_i = encode(o_i);  in each round r:  a_i = aggregate of what i hears (`Messages`),
    z_i ← layer_norm(relu(W_r [z_i, a_i] + b_r));  then MLP and heads, row by row.

    Shapes, with N agents of the environment, O numbers of an observation that are no links, D features: encoded
    observations are [N + O], the N links first. The rounds need all agents of a step at once and are run by
    `exchange.exchange`; a forward pass takes their result as the column `EXCHANGED`. From observations alone it is that
    of an agent who hears nobody. No parameter depends on N, nor with "conv" on the size of the grid.

    `model_config`, beside `head_names`, `conditional_heads`, `free_log_std`, `log_std_init` of `MLPModule`:

    | key                | default             | meaning                                                           |
    |--------------------|---------------------|-------------------------------------------------------------------|
    | `message_rounds`   | 2                   | R ≥ 0; with it in a model_config this class is chosen             |
    | `message_size`     | 64                  | D                                                                 |
    | `aggregation`      | "max"               | of the messages heard: "max", "mean", "attention"                 |
    | `message_content`  | "learned"           | "learned": a layer of what the sender carries; "distance": of the |
    |                    |                     | link's value; "both": their sum                                   |
    | `encoder`          | "auto"              | "mlp", "conv"; "auto": "conv" for inputs with three axes          |
    | `encoder_hiddens`  | [64]                | MLP in front of the messages, behind the pooling of a "conv"; a   |
    |                    |                     | last layer of width D follows                                     |
    | `conv_filters`     | [[16, 3], [32, 3]]  | [channels, kernel] of each layer; pooling: see `GridEncoder`      |
    | `fcnet_hiddens`    | []                  | MLP between messages and heads                                    |
    | `fcnet_activation` | "relu"              | of both MLPs and the convolutions                                 |
    | `num_links`        | from the spaces     | N                                                                 |
    | `input_shape`      | from the spaces     | of the O numbers; None: one row                                   |

    Weights: orthogonal with gain √2, 0.01 in the heads, biases 0; layer norms begin with scale 1 and shift 0.

    Attributes:
        num_links: N.
        exchange_width: D.
        rounds: R.
        remembers_in_exchange: whether messages have a memory (`MessageGRUModule`).

    Raises:
        ValueError: as `MLPModule`; a key's value that cannot be; `vf_share_layers=False`; observations that do not fit
            `num_links` and `input_shape`; `num_links` missing.

    Source: the graph policy of the seed's team trainer; message passing after Gilmer et al. 2017.
    """

    model_config_keys: ClassVar[tuple[str, ...]] = (
        *MLPModule.model_config_keys, "message_rounds", "message_size", "aggregation", "message_content", "encoder",
        "encoder_hiddens", "conv_filters", "num_links", "input_shape",
    )  # fmt: skip
    remembers_in_exchange: ClassVar[bool] = False
    cell_names: ClassVar[tuple[str, ...]] = ()

    @override(MLPModule)
    def _check_model_config(self, config: Mapping[str, Any]) -> None:
        cell = config.get("cell")
        if cell not in (self.cell_names or (None,)):
            needed = " or ".join(f"cell={name!r}" for name in self.cell_names or (None,))
            raise ValueError(
                f"model_config has cell={cell!r}, but {type(self).__name__} needs {needed}. Leave module_class out, "
                "which then follows from message_rounds and cell."
            )
        super()._check_model_config(config)

    @override(MLPModule)
    def _add_actor(self, config: Mapping[str, Any]) -> int:
        settings = CommunicationSettings.of(config, self.observation_space)
        self.settings = settings
        self.num_links, self.exchange_width, self.rounds = settings.num_links, settings.size, settings.rounds
        self.encoder = make_encoder(settings)
        self.messages = nn.ModuleList(
            Messages(settings.size, settings.aggregation, settings.content) for _ in range(settings.rounds)
        )
        self.updates = nn.ModuleList(self._new_update(settings.size) for _ in range(settings.rounds))
        self.trunk = make_trunk(settings.size, list(settings.hiddens), ACTIVATIONS[settings.activation])
        return settings.hiddens[-1] if settings.hiddens else settings.size

    def _new_update(self, size: int) -> nn.Module:
        """What makes of an agent's features and of what it heard its next features."""
        return nn.Sequential(linear(2 * size, size, gain=2**0.5), nn.ReLU(), nn.LayerNorm(size))

    # --- the exchange, in parts: `exchange.exchange` puts them together ---

    def encode(self, obs: Tensor) -> Tensor:
        """Observations […, N + O] to features […, D]; the links are left out."""
        features: Tensor = self.encoder(obs[..., self.num_links :])
        return features

    def send(self, r: int, z: Tensor) -> Tensor:
        """What agents that carry z […, D] say in round r, […, D']."""
        sent: Tensor = self.messages[r].send(z)  # type: ignore[operator]
        return sent

    def receive(self, r: int, z: Tensor, sent: Tensor, links: Tensor, state: Tensor | None = None) -> Tensor:
        """What this module's agents carry behind round r.

        Args:
            r: the round, from 0.
            z: [n, B, D] features of its agents.
            sent: [J, B, D'] what was said, by agents of any module.
            links: [n, B, J], how well its agents hear them; 0: not at all.
            state: [n, B, D] memory, for modules that remember in the exchange.

        Returns:
            [n, B, D]: the next features, or the next memory.
        """
        carried = z if state is None else state
        return self._updated(r, z, self.messages[r](carried, sent, links), carried)

    def behind_exchange(self, carried: Tensor) -> Tensor:
        """What agents carry behind the last round, […, D], as the features that leave the exchange."""
        return carried

    def _updated(self, r: int, z: Tensor, heard: Tensor, carried: Tensor) -> Tensor:
        """What agents carry behind round r, of what they carried before it and the aggregate of what they heard."""
        updated: Tensor = self.updates[r](torch.cat([carried, heard], dim=-1))
        return updated

    def _unheard(self, z: Tensor, state: Tensor | None = None) -> Tensor:
        """The rounds of agents that hear nobody: what they carry behind the last one."""
        silence, carried = torch.zeros_like(z), z if state is None else state
        for r in range(self.rounds):
            carried = self._updated(r, z, silence, carried)
        return carried

    # --- row by row ---

    def _exchanged(self, batch: dict[str, Any]) -> Tensor:
        if EXCHANGED in batch:
            exchanged: Tensor = batch[EXCHANGED]
            return exchanged
        return self._unheard(self.encode(batch[Columns.OBS]))

    def _run(self, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """What the heads read, and the outputs that only a module with a memory has."""
        return self.trunk(self._exchanged(batch)), {}

    @override(TorchRLModule)
    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        features, memory = self._run(batch)
        return {Columns.ACTION_DIST_INPUTS: self._logits(features), **memory}

    @override(TorchRLModule)
    def _forward_train(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        features, memory = self._run(batch)
        return {
            Columns.ACTION_DIST_INPUTS: self._logits(features),
            Columns.EMBEDDINGS: features,
            ENCODER_FEATURES: features,
            **memory,
        }

    @override(ValueFunctionAPI)
    def compute_values(self, batch: dict[str, Any], embeddings: Tensor | None = None) -> Tensor:
        """Values [R] ([R, L] of sequences) of `batch`, from `embeddings` of a training pass where given."""
        if embeddings is None:
            embeddings, _ = self._run(batch)
        values: Tensor = self.value_head(embeddings).squeeze(-1)
        return values
