"""Communicating policies with a memory: of each agent's own behind the exchange, or inside the messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModule
from ray.rllib.utils.annotations import override
from torch import Tensor, nn

from thrust_rllib.rl_modules.communicating import EXCHANGED, CommunicatingModule
from thrust_rllib.rl_modules.communication_settings import MESSAGE_GRU
from thrust_rllib.rl_modules.recurrent import (
    State,
    entering_state,
    initial_state,
    new_cell,
    run_cell,
    sequence_length,
    whole_number,
    with_first_weights,
)

_KEYS = (*CommunicatingModule.model_config_keys, "cell", "cell_size", "max_seq_len")


class CommunicatingRecurrentModule(CommunicatingModule):
    """A `CommunicatingModule` whose agents each remember what they made of the messages.

    exchange → MLP → GRU or LSTM [R, L, H] → policy head and value head. Sequences and states as in `RecurrentModule`.

    `model_config`, beside that of `CommunicatingModule`:

    | key           | default | meaning                                                                           |
    |---------------|---------|-----------------------------------------------------------------------------------|
    | `cell`        |         | "gru" or "lstm"                                                                   |
    | `cell_size`   | 64      | H                                                                                 |
    | `max_seq_len` | None    | steps of a training sequence; None: the whole rollout                             |

    Raises:
        ValueError: as `CommunicatingModule`; another cell; a `cell_size` or `max_seq_len` that is no whole number ≥ 1.
    """

    model_config_keys: ClassVar[tuple[str, ...]] = _KEYS
    cell_names: ClassVar[tuple[str, ...]] = ("gru", "lstm")

    @override(CommunicatingModule)
    def _add_actor(self, config: Mapping[str, Any]) -> int:
        num_features = super()._add_actor(config)
        self.cell_name: str = config["cell"]
        self.cell_size = whole_number("cell_size", config.get("cell_size", 64))
        self.max_seq_len = sequence_length(config.get("max_seq_len"))
        self.cell = new_cell(self.cell_name, num_features, self.cell_size)
        return self.cell_size

    @override(RLModule)
    def get_initial_state(self) -> State:
        """The state before an episode's first step, leaves [H] of zeros."""
        return initial_state(self.cell_name, self.cell_size)

    @override(CommunicatingModule)
    def _run(self, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        features, state = run_cell(self.cell, self.trunk(self._exchanged(batch)), entering_state(batch))
        return features, {Columns.STATE_OUT: state}


class MessageGRUModule(CommunicatingModule):
    """A `CommunicatingModule` whose messages are made of what agents remember.

    h_i [D] is agent i's memory. In each round r: a_i = aggregate of the messages made of the others' h,
    h_i ← GRU_r([z_i, a_i], h_i), with z_i = encode(o_i) as it is. Behind the last round: layer_norm(h_i), then MLP and
    heads. `exchange.exchange` and `exchange.scan` carry h, [n, B, D]; its state here is {"h": [D]}.

    With `EXCHANGED` in a batch the memory has been at work already: rows are free of state, with or without a time
    axis, and `STATE_OUT` is `STATE_IN`. From observations alone [R, L, N + O] the memory runs over L, and nobody is
    heard.

    `model_config` is that of `CommunicatingModule` with `message_rounds` ≥ 1, `cell="message_gru"` and `max_seq_len`;
    `cell_size` is D.

    Source: a recurrent cell on a graph, Seo et al. 2018; gates as in `torch.nn.GRUCell`.
    """

    model_config_keys: ClassVar[tuple[str, ...]] = _KEYS
    remembers_in_exchange: ClassVar[bool] = True
    cell_names: ClassVar[tuple[str, ...]] = (MESSAGE_GRU,)

    @override(CommunicatingModule)
    def _add_actor(self, config: Mapping[str, Any]) -> int:
        num_features = super()._add_actor(config)
        if self.rounds < 1:
            raise ValueError(
                "message_rounds is 0 with cell='message_gru', whose memory is renewed by messages; needed: 1 or more, "
                "or cell='gru' for a memory without messages"
            )
        size = config.get("cell_size", self.exchange_width)
        if size != self.exchange_width:
            raise ValueError(
                f"cell_size is {size!r} and message_size {self.exchange_width} with cell='message_gru', where they are "
                "one number; leave cell_size out"
            )
        self.max_seq_len = sequence_length(config.get("max_seq_len"))
        self.memory_norm = nn.LayerNorm(self.exchange_width)
        return num_features

    @override(CommunicatingModule)
    def _new_update(self, size: int) -> nn.Module:
        return with_first_weights(nn.GRUCell(2 * size, size))

    @override(CommunicatingModule)
    def _updated(self, r: int, z: Tensor, heard: Tensor, carried: Tensor) -> Tensor:
        inputs = torch.cat([z, heard], dim=-1)
        updated: Tensor = self.updates[r](inputs.flatten(end_dim=-2), carried.flatten(end_dim=-2))
        return updated.reshape(carried.shape)

    @override(CommunicatingModule)
    def behind_exchange(self, carried: Tensor) -> Tensor:
        features: Tensor = self.memory_norm(carried)
        return features

    @override(RLModule)
    def get_initial_state(self) -> State:
        """The memory before an episode's first step, {"h": [D]} of zeros."""
        return initial_state("gru", self.exchange_width)

    @override(CommunicatingModule)
    def _run(self, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        if EXCHANGED in batch:
            passed_on = {Columns.STATE_OUT: batch[Columns.STATE_IN]} if Columns.STATE_IN in batch else {}
            return self.trunk(batch[EXCHANGED]), passed_on
        h, carried = entering_state(batch)["h"], []
        for z in self.encode(batch[Columns.OBS]).unbind(1):
            h = self._unheard(z, h)
            carried.append(h)
        return self.trunk(self.behind_exchange(torch.stack(carried, dim=1))), {Columns.STATE_OUT: {"h": h}}
