"""Joint multi-agent PPO inside Ray RLlib: every agent's loss and their couplings, one backward pass, the same steps.

Names are loaded when they are first used: importing this package imports no Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from thrust_rllib.action_spread import ActionSpread
    from thrust_rllib.algorithm import JointPPO
    from thrust_rllib.auxiliary_targets import AuxiliaryTarget
    from thrust_rllib.config import JointPPOConfig
    from thrust_rllib.connectors.episodes_to_joint_batch import EpisodesToJointBatch
    from thrust_rllib.constraints import Constraint
    from thrust_rllib.cross_agent_losses import (
        CrossAgentLoss,
        FeatureSimilarity,
        JensenShannon,
        RedundancyPenalty,
    )
    from thrust_rllib.env_runner import JointEnvRunner
    from thrust_rllib.envs.joint_env import JointEnv, JointStepResult, VectorJointEnv
    from thrust_rllib.envs.pettingzoo import JointEnvParallel, PettingZooJointEnv
    from thrust_rllib.episode_runner import JointEpisodeRunner
    from thrust_rllib.joint_batch import JointBatch
    from thrust_rllib.joint_episode import JointEpisode
    from thrust_rllib.learner import JointPPOLearner
    from thrust_rllib.learner_group import JointLearnerGroup
    from thrust_rllib.registration import register
    from thrust_rllib.rl_modules.communicating import CommunicatingModule
    from thrust_rllib.rl_modules.mlp import MLPModule
    from thrust_rllib.rl_modules.multi_discrete import MultiDiscreteMLPModule
    from thrust_rllib.rl_modules.recurrent import GRUModule, LSTMModule
    from thrust_rllib.trained_team import load_team

_HOME_OF = {
    "ActionSpread": "action_spread",
    "AuxiliaryTarget": "auxiliary_targets",
    "CommunicatingModule": "rl_modules.communicating",
    "Constraint": "constraints",
    "CrossAgentLoss": "cross_agent_losses",
    "EpisodesToJointBatch": "connectors.episodes_to_joint_batch",
    "FeatureSimilarity": "cross_agent_losses",
    "GRUModule": "rl_modules.recurrent",
    "JensenShannon": "cross_agent_losses",
    "JointBatch": "joint_batch",
    "JointEnv": "envs.joint_env",
    "JointEnvParallel": "envs.pettingzoo",
    "JointEnvRunner": "env_runner",
    "JointEpisode": "joint_episode",
    "JointEpisodeRunner": "episode_runner",
    "JointLearnerGroup": "learner_group",
    "JointPPO": "algorithm",
    "JointPPOConfig": "config",
    "JointPPOLearner": "learner",
    "JointStepResult": "envs.joint_env",
    "LSTMModule": "rl_modules.recurrent",
    "MLPModule": "rl_modules.mlp",
    "MultiDiscreteMLPModule": "rl_modules.multi_discrete",
    "PettingZooJointEnv": "envs.pettingzoo",
    "RedundancyPenalty": "cross_agent_losses",
    "VectorJointEnv": "envs.joint_env",
    "load_team": "trained_team",
    "register": "registration",
}

__all__ = [
    "ActionSpread",
    "AuxiliaryTarget",
    "CommunicatingModule",
    "Constraint",
    "CrossAgentLoss",
    "EpisodesToJointBatch",
    "FeatureSimilarity",
    "GRUModule",
    "JensenShannon",
    "JointBatch",
    "JointEnv",
    "JointEnvParallel",
    "JointEnvRunner",
    "JointEpisode",
    "JointEpisodeRunner",
    "JointLearnerGroup",
    "JointPPO",
    "JointPPOConfig",
    "JointPPOLearner",
    "JointStepResult",
    "LSTMModule",
    "MLPModule",
    "MultiDiscreteMLPModule",
    "PettingZooJointEnv",
    "RedundancyPenalty",
    "VectorJointEnv",
    "load_team",
    "register",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {__all__}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
