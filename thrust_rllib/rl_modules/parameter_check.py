"""Whether saved parameters fit a module: looked at before the first one is overwritten."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from thrust_rllib.rl_modules.mlp import MLPModule

SETTING_OF = {
    "trunk": "fcnet_hiddens (and the observation space)",
    "cell": "cell, cell_size and fcnet_hiddens (and the observation space)",
    "critic_trunk": "vf_share_layers and fcnet_hiddens",
    "critic_cell": "vf_share_layers",
    "log_std": "free_log_std (and the action space)",
    "encoder": "message_size, encoder, encoder_hiddens and conv_filters (and the observation space)",
    "messages": "message_rounds, message_size, message_content and aggregation",
    "updates": "message_rounds, message_size and cell",
    "memory_norm": "message_size and cell",
    "policy_head": "fcnet_hiddens or cell_size, and conditional_heads (and the action space)",
    "value_head": "fcnet_hiddens or cell_size",
}
"""What decides the shapes of a module's part."""

HEADS = ("policy_head", "value_head")


def check_parameters(module: MLPModule, state: Mapping[str, Any]) -> None:
    """Compares names and shapes of the parameters in `state` with the module's own.

    What only training needs may be missing (the state of an inference-only module), or be there and not be needed.
    RLlib's `set_state` ignores whatever is missing or too much, and finds a wrong shape when half of the module has
    been overwritten.

    Raises:
        ValueError: names the parameters, the shapes given and needed, and the settings that decide them.
    """
    given = {name: np.shape(value) for name, value in state.items()}  # RLlib makes a number of a tensor without axes
    needed = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    parts = module.get_non_inference_attributes()
    for name in given.keys() ^ needed.keys():
        if any(name == part or name.startswith(f"{part}.") for part in parts):
            given.pop(name, None)
            needed.pop(name, None)
    wrong = [name for name in {**needed, **given} if given.get(name) != needed.get(name)]
    if not wrong:
        return
    described = "; ".join(f"{name} is {_shape(given.get(name))}, needed {_shape(needed.get(name))}" for name in wrong)
    changed = list(dict.fromkeys(name.split(".")[0] for name in wrong))
    # The heads' inputs follow from what stands in front of them.
    changed = [part for part in changed if part not in HEADS] or changed
    settings = "; ".join(SETTING_OF.get(part, part) for part in changed)
    raise ValueError(
        f"the state is that of another network than this {type(module).__name__}: {described}. Nothing was changed. "
        f"Build the module with the model_config with which the state was saved; these decide it: {settings}."
    )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "not there" if shape is None else str(list(shape))
