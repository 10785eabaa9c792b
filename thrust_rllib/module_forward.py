"""One module's forward pass over rows of its agents: row by row, or in sequences where it has a memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ray.rllib.core.columns import Columns
from torch import Tensor

from thrust_rllib.rl_modules.joint_input import input_column
from thrust_rllib.rl_modules.mlp import ENCODER_FEATURES
from thrust_rllib.sequences import ModuleSequences

_VALUES = "values"


@dataclass(frozen=True)
class ModuleOutputs:
    """Of R rows: logits [R, A] (unmasked), values [R] or None, and features [R, D] or None."""

    logits: Tensor
    values: Tensor | None
    features: Tensor | None


def forward_module(
    rl_module: Any, obs: Tensor, sequences: ModuleSequences | None, with_values: bool = True
) -> ModuleOutputs:
    """Runs a module in training mode.

    Args:
        rl_module: with RLlib's `ValueFunctionAPI`, where values are asked for.
        obs: [R, …]; of a communicating module what its agents have made of their observations and each other's
            messages (`exchanged_rows`).
        sequences: of a recurrent module.
        with_values: whether its values are.
    """

    def forward(batch: dict[str, Any]) -> dict[str, Tensor]:
        trained = rl_module.forward_train(batch)
        logits = trained[Columns.ACTION_DIST_INPUTS]
        found = {Columns.ACTION_DIST_INPUTS: logits}
        if with_values:
            values = rl_module.compute_values(batch, embeddings=trained.get(Columns.EMBEDDINGS))
            found[_VALUES] = values.view(logits.shape[:-1])
        if ENCODER_FEATURES in trained:
            found[ENCODER_FEATURES] = trained[ENCODER_FEATURES]
        return found

    column = input_column(rl_module)
    outputs = forward({column: obs}) if sequences is None else sequences.run(obs, forward, column)
    return ModuleOutputs(outputs[Columns.ACTION_DIST_INPUTS], outputs.get(_VALUES), outputs.get(ENCODER_FEATURES))


def module_values(rl_module: Any, obs: Tensor, sequences: ModuleSequences | None) -> Tensor:
    """Values [R] of observations [R, …], or [R, V] as the module gives them; see `forward_module`."""
    column = input_column(rl_module)
    if sequences is None:
        return rl_module.compute_values({column: obs})
    return sequences.run(obs, lambda batch: {_VALUES: rl_module.compute_values(batch)}, column)[_VALUES]
