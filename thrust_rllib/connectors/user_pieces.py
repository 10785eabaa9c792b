"""The connector pieces that a user's function makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
from ray.rllib.connectors.connector_pipeline_v2 import ConnectorPipelineV2
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.connectors.env_to_module import EnvToModulePipeline

from thrust_rllib.joint_batch import AgentID


def user_pieces(option: str, factory: Callable[..., Any] | None, *arguments: Any) -> list[ConnectorV2]:
    """What `factory` makes, as a list of single pieces; empty where there is none.

    Args:
        option: name of the option that holds the function, for messages.
        factory: returns a ConnectorV2 (a piece or a pipeline) or several.
        *arguments: which RLlib gives it.

    Raises:
        ValueError: it makes something else, or one of RLlib's pieces for a single agent.
    """
    if factory is None:
        return []
    made = factory(*arguments)
    pieces: list[ConnectorV2] = []
    for piece in made if isinstance(made, (list, tuple)) else [made]:
        if not isinstance(piece, ConnectorV2):
            raise ValueError(f"{option} made {made!r}; needed: a ConnectorV2, or a list of them")
        # RLlib's pipelines cannot call one another.
        pieces += piece.connectors if isinstance(piece, ConnectorPipelineV2) else [piece]
    for piece in pieces:
        if getattr(piece, "_multi_agent", True) is False:
            name = type(piece).__name__
            raise ValueError(f"{option} made a {name} for a single agent; needed: {name}(multi_agent=True, ...)")
    return pieces


def check_spaces_behind_pieces(pipeline: EnvToModulePipeline, agents: Sequence[AgentID]) -> None:
    """Checks that the user's pieces leave every agent its space.

    Raises:
        ValueError: what they leave is no Dict {agent: space} of exactly these agents.
    """
    for name, space in (("observation", pipeline.observation_space), ("action", pipeline.action_space)):
        if not isinstance(space, gym.spaces.Dict) or set(space.spaces) != set(agents):
            raise ValueError(
                f"the pieces of env_to_module_connector leave the {name} space {space}; needed: a Dict with one space "
                f"for each agent of {list(agents)} (recompute_output_{name}_space)"
            )
