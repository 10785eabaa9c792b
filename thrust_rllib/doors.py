"""Which way environments are sampled: by arrays (the fast door) or by RLlib's episodes (the general one)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
from ray.rllib.utils import force_list

from thrust_rllib.communicating_teams import speaking_modules
from thrust_rllib.env_runner import JointEnvRunner
from thrust_rllib.envs.adapt import takes_turns
from thrust_rllib.envs.joint_env import VectorJointEnv
from thrust_rllib.envs.sync_vector import SyncVectorJointEnv
from thrust_rllib.episode_runner import JointEpisodeRunner
from thrust_rllib.unserved_options import ON_EPISODE, check_read_by_arrays, overridden

if TYPE_CHECKING:
    from thrust_rllib.config import JointPPOConfig

logger = logging.getLogger(__name__)


def runner_class(config: JointPPOConfig, given: type | None, env: VectorJointEnv) -> tuple[type, str]:
    """The runners' class, by what was set and by the environment, and a line that says which and why; it is logged.

    Args:
        config: its `sampling` and whatever needs episodes.
        given: the user's `env_runner_cls`, or None.
        env: made from the configuration.

    Raises:
        ValueError: arrays are asked for, by `sampling` or by the class, and something needs episodes.
    """
    reasons = what_needs_episodes(config)
    if given is not None and not issubclass(given, JointEnvRunner):
        reasons.append(f"env_runner_cls={given.__name__}")
    if config.sampling == "auto" and isinstance(env, SyncVectorJointEnv) and takes_turns(env.envs[0]):
        name = config.env_spec.name if config.env_spec else config.env
        reasons.append(f"the agents of environment {name!r} take turns, or some come late")
        if config.cross_agent_losses:
            logger.warning(
                "environment %r: where only one agent acts at a time, no joint row holds two, and cross_agent_losses "
                "%s couple nobody",
                name,
                sorted(config.cross_agent_losses),
            )
    if config.sampling == "arrays" and reasons:
        raise ValueError(
            f"sampling='arrays' cannot serve this: {'; '.join(reasons)}. Leave sampling at 'auto', or set 'episodes'."
        )
    if config.sampling == "episodes":
        reasons = ["sampling='episodes'"]
    if given is not None and issubclass(given, JointEnvRunner) and reasons:
        raise ValueError(
            f"env_runner_cls={given.__name__} samples arrays, but this needs episodes: {'; '.join(reasons)}. Derive "
            "the class from JointEpisodeRunner."
        )
    chosen = given or (JointEpisodeRunner if reasons else JointEnvRunner)
    way = "arrays" if issubclass(chosen, JointEnvRunner) else "episodes"
    why = "; ".join(reasons) or "nothing in the configuration or the environment needs episodes"
    line = f"sampling by {way} ({chosen.__name__}): {why}"
    logger.info(line)
    return chosen, line


def what_needs_episodes(config: JointPPOConfig) -> list[str]:
    """What was set that only sampling by episodes can serve, in words; `env_runner_cls` aside."""
    reasons = []
    if not config.in_evaluation and config.batch_mode != "truncate_episodes":
        reasons.append(f"batch_mode={config.batch_mode!r}")
    for name in ("_env_to_module_connector", "_module_to_env_connector", "_learner_connector"):
        if getattr(config, name) is not None:
            reasons.append(f"{name[1:]} is set")
    for name in ON_EPISODE:
        if getattr(config, f"callbacks_{name}") is not None:
            reasons.append(f"the callback {name} is set")
        for cls in force_list(config.callbacks_class):
            if overridden(cls, [name]):
                reasons.append(f"{getattr(cls, '__name__', cls)} overrides {name}")
    return reasons


def check_door(config: JointPPOConfig) -> None:
    """Checks what depends on how the runners sample.

    Raises:
        ValueError: an option that this way of sampling would ignore, or a runner class that cannot serve it.
    """
    if not config.samples_episodes:
        check_read_by_arrays(config)
        if config.in_evaluation and (reasons := what_needs_episodes(config)):
            raise ValueError(
                f"the evaluation's own settings need episodes ({'; '.join(reasons)}), and the training samples arrays; "
                "set .env_runners(sampling='episodes')"
            )
    elif not issubclass(config.env_runner_cls, MultiAgentEnvRunner):
        raise ValueError(
            f"env_runner_cls={config.env_runner_cls.__name__} is no MultiAgentEnvRunner; derive it from "
            "JointEpisodeRunner (RLlib's loop) or JointEnvRunner (arrays)"
        )
    elif config.normalize_observations and not issubclass(config.env_runner_cls, JointEpisodeRunner):
        raise ValueError(
            f"normalize_observations=True with env_runner_cls={config.env_runner_cls.__name__}: RLlib's own runners do "
            "not keep what their modules saw. Derive the class from JointEpisodeRunner, or normalise in a connector."
        )
    elif not issubclass(config.env_runner_cls, JointEpisodeRunner) and (recurrent := _recurrent_modules(config)):
        raise ValueError(
            f"env_runner_cls={config.env_runner_cls.__name__} with recurrent modules {recurrent}: RLlib's own runners "
            "lose what an agent remembers while its step is open. Derive the class from JointEpisodeRunner."
        )
    elif not issubclass(config.env_runner_cls, JointEpisodeRunner) and (speaking := speaking_modules(config)):
        raise ValueError(
            f"env_runner_cls={config.env_runner_cls.__name__} with modules whose agents exchange messages, {speaking}: "
            "with RLlib's own runners the first step after an update would be made of messages from before it. Derive "
            "the class from JointEpisodeRunner."
        )


def _recurrent_modules(config: JointPPOConfig) -> list[str]:
    """Ids of the modules with a state; they are built for it."""
    modules = config.get_multi_rl_module_spec(spaces=config.module_spaces(), inference_only=True).build()
    return [module_id for module_id in sorted(modules.keys()) if modules[module_id].is_stateful()]
