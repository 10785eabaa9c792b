"""Joint environments: the contract, adapters both ways, and built-in tasks.

Names are loaded when they are first used, so that this package imports neither Ray nor PettingZoo.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thrust_rllib.envs.bucket_brigade import SCENARIOS, BucketBrigade, Scenario
    from thrust_rllib.envs.bucket_brigade_policies import (
        calibrate,
        gap_closed,
        houses_from_observations,
        random_policy,
        specialist_policy,
    )
    from thrust_rllib.envs.coverage import CoverageWorld
    from thrust_rllib.envs.difference import WithDifferenceRewards, difference_rewards
    from thrust_rllib.envs.gymnasium import GymnasiumJointEnv, GymnasiumVectorJointEnv
    from thrust_rllib.envs.joint_env import AgentID, JointEnv, JointStepResult, VectorJointEnv, episode_over
    from thrust_rllib.envs.matrix_games import Climbing, MatrixGame, Penalty, TwoStepGame
    from thrust_rllib.envs.pettingzoo import JointEnvParallel, PettingZooJointEnv
    from thrust_rllib.envs.registry import (
        EnvSpec,
        list_envs,
        make_joint_env,
        make_vector_env,
        register_joint_env,
        resolve_env,
    )
    from thrust_rllib.envs.rllib import JointEnvMultiAgentEnv, RLlibJointEnv
    from thrust_rllib.envs.seats import Seats
    from thrust_rllib.envs.single import SingleJointEnv
    from thrust_rllib.envs.spaces import check_spaces
    from thrust_rllib.envs.speaker_listener import SpeakerListener
    from thrust_rllib.envs.spread import Spread
    from thrust_rllib.envs.sync_vector import SyncVectorJointEnv
    from thrust_rllib.envs.tuple_style import TupleJointEnv
    from thrust_rllib.envs.turn_based import AECJointEnv

_HOMES = {
    "bucket_brigade": ("SCENARIOS", "BucketBrigade", "Scenario"),
    "bucket_brigade_policies": (
        "calibrate",
        "gap_closed",
        "houses_from_observations",
        "random_policy",
        "specialist_policy",
    ),
    "coverage": ("CoverageWorld",),
    "difference": ("WithDifferenceRewards", "difference_rewards"),
    "gymnasium": ("GymnasiumJointEnv", "GymnasiumVectorJointEnv"),
    "joint_env": ("AgentID", "JointEnv", "JointStepResult", "VectorJointEnv", "episode_over"),
    "matrix_games": ("Climbing", "MatrixGame", "Penalty", "TwoStepGame"),
    "pettingzoo": ("JointEnvParallel", "PettingZooJointEnv"),
    "registry": (
        "EnvSpec",
        "list_envs",
        "make_joint_env",
        "make_vector_env",
        "register_joint_env",
        "resolve_env",
    ),
    "rllib": ("JointEnvMultiAgentEnv", "RLlibJointEnv"),
    "seats": ("Seats",),
    "single": ("SingleJointEnv",),
    "spaces": ("check_spaces",),
    "speaker_listener": ("SpeakerListener",),
    "spread": ("Spread",),
    "sync_vector": ("SyncVectorJointEnv",),
    "tuple_style": ("TupleJointEnv",),
    "turn_based": ("AECJointEnv",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "SCENARIOS",
    "AECJointEnv",
    "AgentID",
    "BucketBrigade",
    "Climbing",
    "CoverageWorld",
    "EnvSpec",
    "GymnasiumJointEnv",
    "GymnasiumVectorJointEnv",
    "JointEnv",
    "JointEnvMultiAgentEnv",
    "JointEnvParallel",
    "JointStepResult",
    "MatrixGame",
    "Penalty",
    "PettingZooJointEnv",
    "RLlibJointEnv",
    "Scenario",
    "Seats",
    "SingleJointEnv",
    "SpeakerListener",
    "Spread",
    "SyncVectorJointEnv",
    "TupleJointEnv",
    "TwoStepGame",
    "VectorJointEnv",
    "WithDifferenceRewards",
    "calibrate",
    "check_spaces",
    "difference_rewards",
    "episode_over",
    "gap_closed",
    "houses_from_observations",
    "list_envs",
    "make_joint_env",
    "make_vector_env",
    "random_policy",
    "register_joint_env",
    "resolve_env",
    "specialist_policy",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
