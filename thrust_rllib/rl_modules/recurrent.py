"""Policies with a memory: an LSTM or GRU layer in front of the heads, run over whole sequences at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import torch
from ray.rllib.core.columns import Columns
from ray.rllib.core.models.base import ACTOR, CRITIC
from ray.rllib.core.rl_module.apis import InferenceOnlyAPI, ValueFunctionAPI
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.rl_module import RLModule
from ray.rllib.core.rl_module.torch.torch_rl_module import TorchRLModule
from ray.rllib.utils.annotations import override
from torch import Tensor, nn

from thrust_rllib.rl_modules.mlp import ENCODER_FEATURES, MLPModule, layer_widths

State = dict[str, Any]
Cell = TypeVar("Cell", bound=nn.RNNBase | nn.RNNCellBase)


class RecurrentModule(MLPModule):
    """Optional MLP, one recurrent layer, policy head and value head: base of `LSTMModule` and `GRUModule`.

    Shapes, with R rows, L steps, O the flattened observation, H the cell's size, A the logits: observations [R, L, O]
    → MLP → cell [R, L, H] → policy head [R, L, A] and value head [R, L]. The cell's outputs are `encoder_features`.
    `STATE_IN` has the state before the first step, leaves [R, H], `STATE_OUT` the one after the last. A sequence is
    run as one, from its first step to its last: padding stands at its end and is never read, and what begins anew is
    another row.

    `model_config` of `MLPModule` (`fcnet_hiddens`: default [], no MLP), and:

    | key               | default | meaning                                                                       |
    |-------------------|---------|-------------------------------------------------------------------------------|
    | `cell`            | its own | "lstm" or "gru": which class it is where none is named (`module_choice`)      |
    | `cell_size`       | 64      | H                                                                             |
    | `max_seq_len`     | None    | steps of a training sequence; None: the whole rollout                         |
    | `vf_share_layers` | True    | False: the value head gets an MLP and a cell of its own; the state is then    |
    |                   |         | {"actor": {…}, "critic": {…}}, and sampling carries both                      |

    Weights: orthogonal with gain 1 for each gate, input and recurrent ones; biases 0, but 1 where a bias of 1 lets the
    memory last (the LSTM's forget gate, the GRU's update gate; in the first of torch's two bias vectors). MLP and
    heads as in `MLPModule`.

    Raises:
        ValueError: as `MLPModule`; another cell than the class has; a `cell_size` or `max_seq_len` that is no whole
            number ≥ 1.

    Source: the recurrent trainer of the seed; forget-gate bias after Jozefowicz et al. 2015.
    """

    model_config_keys: ClassVar[tuple[str, ...]] = (
        *MLPModule.model_config_keys, "cell", "cell_size", "max_seq_len",
    )  # fmt: skip
    cell_name: ClassVar[str]

    @override(MLPModule)
    def _check_model_config(self, config: Mapping[str, Any]) -> None:
        super()._check_model_config(config)
        if config.get("cell") not in (None, self.cell_name):
            raise ValueError(
                f"model_config has cell={config['cell']!r}, but {type(self).__name__} has cell={self.cell_name!r}. "
                "Leave module_class out, which then follows from the cell, or name the other class."
            )

    def _cell_size(self, config: Mapping[str, Any]) -> Any:
        return config.get("cell_size", 64)

    def _sequence_length(self, config: Mapping[str, Any]) -> Any:
        return config.get("max_seq_len")

    @override(MLPModule)
    def _hiddens(self, config: Mapping[str, Any]) -> list[int]:
        return layer_widths("fcnet_hiddens", config.get("fcnet_hiddens", ()))

    @override(MLPModule)
    def _add_actor(self, config: Mapping[str, Any]) -> int:
        self.cell_size = whole_number("cell_size", self._cell_size(config))
        length = self._sequence_length(config)
        self.max_seq_len = sequence_length(length)
        self.cell = self._new_cell(super()._add_actor(config))
        self.critic_cell: nn.RNNBase | None = None
        return self.cell_size

    @override(MLPModule)
    def _add_critic(self, config: Mapping[str, Any]) -> None:
        self.critic_trunk, num_inputs = self._new_trunk(config)
        self.critic_cell = self._new_cell(num_inputs)

    def branches(self) -> list[tuple[nn.Module, nn.RNNBase]]:
        """MLP and cell of the actor, then those of the critic where it has its own: the order of the state."""
        actor = (self.trunk, self.cell)
        if self.critic_trunk is None or self.critic_cell is None:
            return [actor]
        return [actor, (self.critic_trunk, self.critic_cell)]

    def _new_cell(self, num_inputs: int) -> Any:
        """A cell of `cell_size` with its first weights."""
        return new_cell(self.cell_name, num_inputs, self.cell_size)

    def _initial(self) -> State:
        """The state of one cell before an episode's first step, leaves [H]."""
        return initial_state(self.cell_name, self.cell_size)

    def _run(self, cell: Any, inputs: Tensor, state: State) -> tuple[Tensor, State]:
        """Inputs [R, L, …] and the state before them to outputs [R, L, H] and the state after them."""
        return run_cell(cell, inputs, state)

    # The critic's memory goes on while sampling, so that training finds the state that enters a sequence.
    @override(InferenceOnlyAPI)
    def get_non_inference_attributes(self) -> list[str]:
        return ["value_head"]

    @override(RLModule)
    def get_initial_state(self) -> State:
        """The state before an episode's first step, leaves [H] of zeros."""
        return {ACTOR: self._initial(), CRITIC: self._initial()} if self.separate_critic else self._initial()

    @override(TorchRLModule)
    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        features, _, state = self._encode(batch)
        return {Columns.ACTION_DIST_INPUTS: self._logits(features), Columns.STATE_OUT: state}

    @override(TorchRLModule)
    def _forward_train(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        features, critic_features, state = self._encode(batch)
        return {
            Columns.ACTION_DIST_INPUTS: self._logits(features),
            Columns.STATE_OUT: state,
            Columns.EMBEDDINGS: critic_features,
            ENCODER_FEATURES: features,
        }

    @override(ValueFunctionAPI)
    def compute_values(self, batch: dict[str, Any], embeddings: Tensor | None = None) -> Tensor:
        """Values [R, L] of the observations in `batch`, from `embeddings` [R, L, H] of the critic where given."""
        if embeddings is None:
            obs, state = _sequences(batch)
            embeddings, _ = self._critic(obs, state[CRITIC]) if self.separate_critic else self._actor(obs, state)
        return self.value_head(embeddings).squeeze(-1)

    def _encode(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor, State]:
        """Features of actor and critic [R, L, H], and the state after the last step."""
        obs, state = _sequences(batch)
        if not self.separate_critic:
            features, state = self._actor(obs, state)
            return features, features, state
        features, actor_state = self._actor(obs, state[ACTOR])
        critic_features, critic_state = self._critic(obs, state[CRITIC])
        return features, critic_features, {ACTOR: actor_state, CRITIC: critic_state}

    def _actor(self, obs: Tensor, state: State) -> tuple[Tensor, State]:
        return self._run(self.cell, self.trunk(obs), state)

    def _critic(self, obs: Tensor, state: State) -> tuple[Tensor, State]:
        assert self.critic_trunk is not None and self.critic_cell is not None
        return self._run(self.critic_cell, self.critic_trunk(obs), state)


class LSTMModule(RecurrentModule):
    """`RecurrentModule` with one LSTM layer; its state is {"c": [H], "h": [H]}.

    i, f, o = σ(W x + U h + b) each,  g = tanh(W_g x + U_g h + b_g),  c' = f∘c + i∘g,  h' = o∘tanh(c')

    RLlib's names are read, too: `use_lstm`, with RLlib's defaults `lstm_cell_size` 256 and `max_seq_len` 20.

    Source: Hochreiter and Schmidhuber 1997; gates as in `torch.nn.LSTM`.
    """

    model_config_keys: ClassVar[tuple[str, ...]] = (
        *RecurrentModule.model_config_keys, "use_lstm", "lstm_cell_size",
    )  # fmt: skip
    cell_name: ClassVar[str] = "lstm"

    @override(RecurrentModule)
    def _cell_size(self, config: Mapping[str, Any]) -> Any:
        sizes = [config[key] for key in ("cell_size", "lstm_cell_size") if key in config]
        if len(sizes) == 2 and sizes[0] != sizes[1]:
            raise ValueError(
                f"model_config has cell_size={sizes[0]!r} and lstm_cell_size={sizes[1]!r}: two names of one number. "
                "Leave one of them out."
            )
        return sizes[0] if sizes else DefaultModelConfig.lstm_cell_size if config.get("use_lstm") else 64

    @override(RecurrentModule)
    def _sequence_length(self, config: Mapping[str, Any]) -> Any:
        return config.get("max_seq_len", DefaultModelConfig.max_seq_len if config.get("use_lstm") else None)


class GRUModule(RecurrentModule):
    """`RecurrentModule` with one GRU layer; its state is {"h": [H]}.

    r, z = σ(W x + U h + b) each,  n = tanh(W_n x + b_n + r∘(U_n h + b'_n)),  h' = (1 − z)∘n + z∘h

    Source: Cho et al. 2014; gates as in `torch.nn.GRU`.
    """

    cell_name: ClassVar[str] = "gru"


def whole_number(name: str, value: Any, least: int = 1, otherwise: str = "") -> int:
    """`value` as an int.

    Raises:
        ValueError: it is no whole number ≥ `least`.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r}; needed: a whole number ≥ {least}{otherwise}")
    return value


def sequence_length(value: Any) -> int | None:
    """`max_seq_len`: steps of a training sequence, None for the whole rollout.

    Raises:
        ValueError: something else than None or a whole number ≥ 1.
    """
    return None if value is None else whole_number("max_seq_len", value, otherwise=", or None for the whole rollout")


def _sequences(batch: dict[str, Any]) -> tuple[Tensor, State]:
    """Observations [R, L, O] and the state that enters them."""
    state = entering_state(batch)
    return batch[Columns.OBS].flatten(start_dim=2), state


def entering_state(batch: dict[str, Any]) -> State:
    """The states that enter the sequences of a batch, leaves [R, H].

    Raises:
        ValueError: there are none.
    """
    if Columns.STATE_IN not in batch:
        raise ValueError(
            f"a recurrent module got {sorted(batch)}; needed: {Columns.OBS!r} [rows, steps, …] and "
            f"{Columns.STATE_IN!r}, a batch of states as get_initial_state() returns one"
        )
    state: State = batch[Columns.STATE_IN]
    return state


def new_cell(name: str, num_inputs: int, size: int) -> nn.RNNBase:
    """An "lstm" or "gru" of this size with its first weights."""
    kind = {"lstm": nn.LSTM, "gru": nn.GRU}[name]
    return with_first_weights(kind(num_inputs, size, batch_first=True))


def initial_state(name: str, size: int) -> State:
    """The state of an "lstm" or "gru" before an episode's first step, leaves [H] of zeros."""
    return {leaf: torch.zeros(size) for leaf in ({"lstm": ("c", "h"), "gru": ("h",)}[name])}


def run_cell(cell: nn.RNNBase, inputs: Tensor, state: State) -> tuple[Tensor, State]:
    """Inputs [R, L, …] and the state before them to outputs [R, L, H] and the state after them."""
    if isinstance(cell, nn.LSTM):
        outputs, (h, c) = cell(inputs, (_as_layer(state["h"]), _as_layer(state["c"])))
        return outputs, {"c": c[0], "h": h[0]}
    outputs, h = cell(inputs, _as_layer(state["h"]))
    return outputs, {"h": h[0]}


def _as_layer(state: Tensor) -> Tensor:
    """[R, H] as torch's cells want it: [1, R, H] in one piece, which a slice of a vector of states is not."""
    return state.unsqueeze(0).contiguous()


def with_first_weights(cell: Cell) -> Cell:
    """Orthogonal weights for each gate, biases 0, but 1 where that lets the memory last."""
    for name, parameter in cell.named_parameters():
        gates = parameter.data.split(cell.hidden_size)
        for gate in gates:
            if name.startswith("weight"):
                nn.init.orthogonal_(gate)
            else:
                nn.init.zeros_(gate)
        if name.startswith("bias_ih"):
            nn.init.ones_(gates[1])  # in torch's order the LSTM's forget gate, the GRU's update gate
    return cell
