"""Which way environments are sampled: by arrays (the fast door) or by RLlib's episodes (the general one)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from thrust_rllib.config_checks import what_needs_episodes
from thrust_rllib.env_runner import JointEnvRunner
from thrust_rllib.envs.adapt import takes_turns
from thrust_rllib.envs.joint_env import VectorJointEnv
from thrust_rllib.envs.sync_vector import SyncVectorJointEnv
from thrust_rllib.episode_runner import JointEpisodeRunner

if TYPE_CHECKING:
    from thrust_rllib.config import JointPPOConfig

logger = logging.getLogger(__name__)


def runner_class(config: JointPPOConfig, env: VectorJointEnv) -> type:
    """The runners' class, by what was set and by the environment; says in the log which and why.

    Args:
        config: its `sampling`, `env_runner_cls` and whatever needs episodes.
        env: made from the configuration.

    Raises:
        ValueError: arrays are asked for, by `sampling` or by the class, and something needs episodes.
    """
    reasons = what_needs_episodes(config)
    given = config.env_runner_cls
    if config.sampling == "auto" and isinstance(env, SyncVectorJointEnv) and takes_turns(env.envs[0]):
        name = config.env_spec.name if config.env_spec else config.env
        reasons.append(f"the agents of environment {name!r} take turns, or some come late")
    if config.sampling == "arrays" and reasons:
        raise ValueError(
            f"sampling='arrays' cannot serve this: {'; '.join(reasons)}. Leave sampling at 'auto', or set 'episodes'."
        )
    if config.sampling == "episodes":
        reasons = ["sampling='episodes'"]
    own = given not in (None, JointEnvRunner, JointEpisodeRunner)
    if own and reasons and issubclass(given, JointEnvRunner):
        raise ValueError(
            f"env_runner_cls={given.__name__} samples arrays, but this needs episodes: {'; '.join(reasons)}. Derive "
            "the class from JointEpisodeRunner."
        )
    chosen = given if own else JointEpisodeRunner if reasons else JointEnvRunner
    logger.info(
        "sampling by %s (%s): %s",
        "arrays" if issubclass(chosen, JointEnvRunner) else "episodes",
        chosen.__name__,
        "; ".join(reasons) or "nothing in the configuration or the environment needs episodes",
    )
    return chosen
