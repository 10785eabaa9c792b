"""The critic of a team: it sees what all agents see, or the environment's state, and is needed for training only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis import ValueFunctionAPI
from ray.rllib.core.rl_module.rl_module import RLModule
from ray.rllib.core.rl_module.torch.torch_rl_module import TorchRLModule
from ray.rllib.utils.annotations import override
from torch import Tensor, nn

from thrust_rllib.rl_modules.mlp import ACTIVATIONS, layer_widths, linear, make_trunk, settings_of
from thrust_rllib.rl_modules.recurrent import initial_state, new_cell, run_cell

State = dict[str, Any]

POOLINGS = ("mean", "sum", "max")


class TeamCritic(TorchRLModule, ValueFunctionAPI):
    """One value of the team, or one for each agent, from a view of the whole team.

    Shapes, with R rows, O numbers of a view, H the last width, V values: view [R, O] → MLP → (cell) → [R, H] → [R, V].
    Sequences have a second axis, [R, L, O], and `STATE_IN`, where there is a cell. Weights as in `MLPModule`.

    `model_config`:

    | key                | default  | meaning                                                                       |
    |--------------------|----------|-------------------------------------------------------------------------------|
    | `fcnet_hiddens`    | [64, 64] | widths of the MLP                                                             |
    | `fcnet_activation` | "tanh"   | tanh, relu, elu, silu, gelu                                                   |
    | `cell`             | None     | "lstm" or "gru"                                                               |
    | `cell_size`        | 64       | H with a cell                                                                 |
    | `max_seq_len`      | None     | as the policies' where those have cells, too                                  |
    | `num_values`       | 1        | V                                                                             |

    Source: centralised critics with decentralised actors, Lowe et al. 2017 and Yu et al. 2022 (MAPPO).
    """

    model_config_keys: ClassVar[tuple[str, ...]] = (
        "fcnet_hiddens", "fcnet_activation", "cell", "cell_size", "max_seq_len", "num_values",
    )  # fmt: skip

    @override(TorchRLModule)
    def setup(self) -> None:
        config = settings_of(self.model_config)
        self.num_values = int(config.get("num_values", 1))
        self.max_seq_len: int | None = config.get("max_seq_len")
        widths = layer_widths("fcnet_hiddens", config.get("fcnet_hiddens", (64, 64)))
        num_inputs = self._add_encoder(config)
        self.trunk = make_trunk(num_inputs, widths, ACTIVATIONS[config.get("fcnet_activation", "tanh")])
        num_features = widths[-1] if widths else num_inputs
        self.cell_name: str | None = config.get("cell")
        self.cell: nn.RNNBase | None = None
        if self.cell_name is not None:
            self.cell = new_cell(self.cell_name, num_features, int(config.get("cell_size", 64)))
            num_features = self.cell.hidden_size
        self._add_head(num_features)

    def _add_encoder(self, config: Mapping[str, Any]) -> int:
        """Makes what stands in front of the MLP; returns the number of its outputs."""
        return int(self.observation_space.shape[0])

    def _add_head(self, num_features: int) -> None:
        self.value_head = linear(num_features, self.num_values, gain=0.01)

    @override(RLModule)
    def is_stateful(self) -> bool:
        return self.cell is not None

    @override(RLModule)
    def get_initial_state(self) -> State:
        """The state of the cell before an episode's first step, leaves [H] of zeros; {} without a cell."""
        if self.cell is None:
            return {}
        return initial_state(str(self.cell_name), self.cell.hidden_size)

    @override(TorchRLModule)
    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        raise RuntimeError(f"{type(self).__name__} has no actions: it is a critic, and asked by compute_values")

    @override(ValueFunctionAPI)
    def compute_values(self, batch: dict[str, Any], embeddings: Tensor | None = None) -> Tensor:
        """Values [R, V] of the views in `batch` ([R, L, V] of sequences)."""
        return self.value_head(self._features(batch[Columns.OBS], batch.get(Columns.STATE_IN)))

    def _features(self, inputs: Tensor, state: State | None) -> Tensor:
        features = self.trunk(inputs)
        if self.cell is not None:
            assert state is not None
            features, _ = run_cell(self.cell, features, state)
        return features


class SetCritic(TeamCritic):
    """A `TeamCritic` to which it does not matter in which order the agents stand.

    ψ = pool_i φ_k(o_i) over the agents that are present,  V = ρ([ψ, s]),  with one value per agent ρ([φ_k(o_i), ρ'])

    φ_k is one encoder for all agents whose observations have the same shape, s are numbers of the team. A view holds
    the agents' observations behind each other, a flag for each that is present, and s.

    `model_config` beside that of `TeamCritic`:

    | key               | default | meaning                                                                |
    |-------------------|---------|------------------------------------------------------------------------|
    | `encoder_hiddens` | [64]    | widths of φ                                                            |
    | `pooling`         | "mean"  | "mean" over those present, "sum", "max"                                |
    | `agent_kinds`     |         | [kind of each agent], agents of one kind share φ                       |
    | `agent_widths`    |         | [numbers of each agent's observation]                                  |

    Source: Zaheer et al. 2017, "Deep sets".
    """

    model_config_keys: ClassVar[tuple[str, ...]] = (
        *TeamCritic.model_config_keys, "encoder_hiddens", "pooling", "agent_kinds", "agent_widths",
    )  # fmt: skip

    @override(TeamCritic)
    def _add_encoder(self, config: Mapping[str, Any]) -> int:
        self.pooling = config.get("pooling", "mean")
        self.agent_widths: Sequence[int] = list(config["agent_widths"])
        self.agent_kinds: Sequence[str] = list(config["agent_kinds"])
        widths = layer_widths("encoder_hiddens", config.get("encoder_hiddens", (64,)))
        activation = ACTIVATIONS[config.get("fcnet_activation", "tanh")]
        inputs = dict(zip(self.agent_kinds, self.agent_widths, strict=True))
        self.encoders = nn.ModuleDict({kind: make_trunk(inputs[kind], widths, activation) for kind in sorted(inputs)})
        self.encoded_width = widths[-1]
        num_scalars = int(self.observation_space.shape[0]) - sum(self.agent_widths) - len(self.agent_widths)
        return self.encoded_width + num_scalars

    @override(TeamCritic)
    def _add_head(self, num_features: int) -> None:
        own = self.encoded_width if self.num_values > 1 else 0
        self.value_head = linear(num_features + own, 1, gain=0.01)

    @override(TeamCritic)
    def compute_values(self, batch: dict[str, Any], embeddings: Tensor | None = None) -> Tensor:
        view = batch[Columns.OBS]
        n = len(self.agent_widths)
        *observations, present, scalars = view.split(
            [*self.agent_widths, n, view.shape[-1] - sum(self.agent_widths) - n], dim=-1
        )
        encoded = self._encode(observations)  # […, N, D]
        pooled = self._pool(encoded, present.unsqueeze(-1))
        features = self._features(torch.cat([pooled, scalars], dim=-1), batch.get(Columns.STATE_IN))
        if self.num_values > 1:
            features = torch.cat([encoded, features.unsqueeze(-2).expand(*encoded.shape[:-1], -1)], dim=-1)
            return self.value_head(features).squeeze(-1)
        return self.value_head(features)

    def _encode(self, observations: Sequence[Tensor]) -> Tensor:
        found: dict[int, Tensor] = {}
        for kind, encoder in self.encoders.items():
            mine = [i for i, other in enumerate(self.agent_kinds) if other == kind]
            encoded = encoder(torch.stack([observations[i] for i in mine], dim=-2))
            found |= dict(zip(mine, encoded.unbind(-2), strict=True))
        return torch.stack([found[i] for i in range(len(observations))], dim=-2)

    def _pool(self, encoded: Tensor, present: Tensor) -> Tensor:
        if self.pooling == "max":
            highest = encoded.masked_fill(present == 0, -torch.inf).amax(-2)
            return highest.masked_fill(highest == -torch.inf, 0.0)  # of nobody
        total = (encoded * present).sum(-2)
        return total if self.pooling == "sum" else total / present.sum(-2).clamp(min=1.0)
