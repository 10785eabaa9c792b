"""What the pieces of a pipeline have gathered, handed to the pieces of the one that takes its place."""

from __future__ import annotations

from typing import Any

from ray.rllib.connectors.connector_pipeline_v2 import ConnectorPipelineV2


def carry_over(old: ConnectorPipelineV2, new: ConnectorPipelineV2) -> None:
    """Gives every piece of `new` the state of the one that stands in its place in `old`.

    The pieces are of the same classes in the same order, made for another team: moments of observations go over for
    the modules that both know.
    """
    for before, after in zip(old.connectors, new.connectors, strict=True):
        after.set_state(before.get_state())


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
