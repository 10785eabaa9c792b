"""Which module class a `model_config` asks for."""

from __future__ import annotations

import difflib
from typing import Any

from thrust_rllib.envs.names import nearest
from thrust_rllib.rl_modules.communicating import CommunicatingModule
from thrust_rllib.rl_modules.communicating_recurrent import CommunicatingRecurrentModule, MessageGRUModule
from thrust_rllib.rl_modules.communication_settings import MESSAGE_GRU
from thrust_rllib.rl_modules.mlp import MLPModule, settings_of
from thrust_rllib.rl_modules.recurrent import GRUModule, LSTMModule

CELLS: dict[str, type[MLPModule]] = {kind.cell_name: kind for kind in (LSTMModule, GRUModule)}
ROUNDS = "message_rounds"
"""The key with which a communicating module is chosen: misspelt, it would silently choose another class."""

SPEAKING_CELLS: dict[str, type[MLPModule]] = {
    **dict.fromkeys(CELLS, CommunicatingRecurrentModule),
    MESSAGE_GRU: MessageGRUModule,
}


def module_class_for(model_config: Any) -> type[MLPModule]:
    """The module that a `model_config` asks for.

    With `message_rounds` a communicating one, by `cell`; else by `cell`, or RLlib's `use_lstm`; `MLPModule` without any
    of them.

    Raises:
        ValueError: `message_rounds` misspelt; an unknown cell, or one that there is only with messages; `use_lstm` with
            messages.
    """
    config = settings_of(model_config)
    if near := set(difflib.get_close_matches(ROUNDS, map(str, config), cutoff=0.8)) - {ROUNDS}:
        raise ValueError(f"model_config has {min(near)!r}, which no module reads; did you mean {ROUNDS!r}?")
    cell, speaks = config.get("cell"), ROUNDS in config
    if speaks and cell is None:
        if config.get("use_lstm"):
            raise ValueError("model_config has message_rounds and use_lstm; needed: cell='lstm' in place of use_lstm")
        return CommunicatingModule
    if cell is None:
        return LSTMModule if config.get("use_lstm") else MLPModule
    known = SPEAKING_CELLS if speaks else CELLS
    if not isinstance(cell, str) or cell not in known:
        advice = nearest(cell, known)
        if cell == MESSAGE_GRU:
            advice = f". A memory inside the messages needs {ROUNDS} in the model_config."
        raise ValueError(f"cell={cell!r} in the model_config; needed: one of {', '.join(known)}{advice}")
    return known[cell]
