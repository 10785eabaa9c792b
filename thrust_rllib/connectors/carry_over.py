"""What the pieces of a pipeline have gathered, handed to the pieces of the one that takes its place."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from ray.rllib.connectors.connector_pipeline_v2 import ConnectorPipelineV2


def carry_over(old: ConnectorPipelineV2, new: ConnectorPipelineV2) -> None:
    """Gives every piece of `new` the state of the one of its class in `old`; of several the first goes to the first.

    Both are made of the same configuration for different teams: moments of observations go over for the modules that
    both know. A piece that only one team needs, such as the exchange of messages, is left as it is.
    """
    waiting: dict[type, list[Any]] = defaultdict(list)
    for piece in old.connectors:
        waiting[type(piece)].append(piece)
    for piece in new.connectors:
        if same := waiting[type(piece)]:
            piece.set_state(same.pop(0).get_state())


def rebuilt(
    env_to_module: ConnectorPipelineV2,
    module_to_env: ConnectorPipelineV2,
    config: Any,
    spaces: dict[str, Any],
    env: Any = None,
    device: Any = None,
) -> tuple[ConnectorPipelineV2, ConnectorPipelineV2]:
    """The two pipelines around a team's modules, made for the team of `config`, with what the old ones have gathered.

    Args:
        env_to_module: the old one.
        module_to_env: the old one.
        config: of the changed team.
        spaces: {module: (observation space, action space)}, and RLlib's own entries.
        env: None where there is none, as beside remote runners.
        device: of the modules.
    """
    made = (
        config.build_env_to_module_connector(env=env, spaces=spaces, device=device),
        config.build_module_to_env_connector(env=env.unwrapped if env else None, spaces=spaces),
    )
    for old, new in zip((env_to_module, module_to_env), made, strict=True):
        carry_over(old, new)
    return made
