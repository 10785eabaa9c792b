"""What a module must put out for acting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.rllib.core.columns import Columns


def check_acting_outputs(module_id: str, module: Any, outputs: Mapping[str, Any], recurrent: bool) -> None:
    """Looks at what `forward_exploration` or `forward_inference` returned.

    Args:
        module_id: whose.
        module: the module.
        outputs: what it returned.
        recurrent: it has a state.

    Raises:
        ValueError: no inputs of the action distribution, or no state after the step.
    """
    needed = {Columns.ACTION_DIST_INPUTS: "the inputs of the action distribution (logits)"}
    if recurrent:
        needed[Columns.STATE_OUT] = "its state after the step"
    for name, meaning in needed.items():
        if name not in outputs:
            raise ValueError(
                f"module {module_id!r} ({type(module).__name__}) returned {sorted(outputs)}; needed: {name!r}, "
                f"{meaning}, from forward_exploration and forward_inference"
            )
