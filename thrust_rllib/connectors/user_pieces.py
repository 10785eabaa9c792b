"""The connector pieces that a user's function makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import gymnasium as gym
from ray.rllib.connectors.common.frame_stacking import FrameStacking
from ray.rllib.connectors.connector_pipeline_v2 import ConnectorPipelineV2
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.connectors.env_to_module import EnvToModulePipeline, MeanStdFilter

from thrust_rllib.joint_batch import AgentID

if TYPE_CHECKING:
    from thrust_rllib.config import JointPPOConfig


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


def check_rllibs_pieces(config: JointPPOConfig, pieces: Sequence[ConnectorV2]) -> None:
    """Checks what RLlib's own pieces would do silently wrong.

    Raises:
        ValueError: `MeanStdFilter` in remote runners. Frame stacking: fragments do not look back far enough for the
            learner to make the same stacks, no piece of the learner stacks, or the stacks are normalised.
    """
    if config.num_env_runners > 0 and any(isinstance(piece, MeanStdFilter) for piece in pieces):
        raise ValueError(
            f"env_to_module_connector made a MeanStdFilter, and num_env_runners={config.num_env_runners}: RLlib 2.60 "
            "merges its moments wrongly (the mean halves at the second merge). Set "
            ".env_runners(normalize_observations=True) in its place, or num_env_runners=0."
        )
    frames = max((piece.num_frames for piece in pieces if isinstance(piece, FrameStacking)), default=1)
    if frames == 1:
        return
    if config.episode_lookback_horizon < frames - 1:
        raise ValueError(
            f"episode_lookback_horizon={config.episode_lookback_horizon} with stacks of {frames} frames: behind a cut "
            "the learner would see other stacks than the module saw. Set "
            f".env_runners(episode_lookback_horizon={frames - 1}) or more."
        )
    if config._learner_connector is None:
        raise ValueError(
            f"env_to_module_connector stacks {frames} frames, and learner_connector is not set: the learner would see "
            f"single ones. Set it to make FrameStackingLearner(num_frames={frames}, multi_agent=True)."
        )
    if config.normalize_observations:
        raise ValueError(
            "normalize_observations=True with frame stacking: single frames are in the episodes, and stacks cannot be "
            "normalised. Put RLlib's MeanStdFilter(multi_agent=True) in front of the stacking piece."
        )
