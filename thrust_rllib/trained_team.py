"""A trained team out of a checkpoint, ready to play: without a learner, remote runners or a running Ray."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray import cloudpickle
from ray.rllib.core import (
    COMPONENT_ENV_RUNNER,
    COMPONENT_ENV_TO_MODULE_CONNECTOR,
    COMPONENT_LEARNER,
    COMPONENT_LEARNER_GROUP,
    COMPONENT_RL_MODULE,
)

from thrust_rllib.algorithm import JointPPO
from thrust_rllib.config import JointPPOConfig
from thrust_rllib.env_runner import JointEnvRunner


@dataclass(frozen=True)
class TrainedTeam:
    """What `thrust_rllib.evaluation` needs of an algorithm.

    Args:
        config: of the run, with one environment and no remote process.
        env_runner: has the networks and the moments of observations.
        iteration: of the checkpoint.
    """

    config: JointPPOConfig
    env_runner: JointEnvRunner
    iteration: int

    @property
    def env_name(self) -> str:
        """The environment, as the run named it."""
        assert self.config.env_spec is not None
        return self.config.env_spec.name


def load_team(checkpoint: str | Path) -> TrainedTeam:
    """Restores what plays from a checkpoint of `JointPPO`.

    `JointPPO.from_checkpoint` restores all of it, with the optimizers, and starts Ray and the run's remote runners.

    Args:
        checkpoint: the folder that `save_to_path` wrote. It holds pickles: load only what you trust.

    Raises:
        ValueError: no checkpoint, another algorithm's, or one that cannot be read here.
    """
    path = Path(checkpoint).absolute()
    if not (path / JointPPO.METADATA_FILE_NAME).is_file():
        raise ValueError(f"{checkpoint} is no checkpoint of an algorithm: it has no {JointPPO.METADATA_FILE_NAME}")
    try:
        made = cloudpickle.loads((path / JointPPO.CLASS_AND_CTOR_ARGS_FILE_NAME).read_bytes())
        state = cloudpickle.loads((path / f"{JointPPO.STATE_FILE_NAME}.pkl").read_bytes())
    except Exception as error:
        raise ValueError(
            f"the checkpoint {checkpoint} cannot be read: {type(error).__name__}: {error}. It needs the packages and "
            "modules that it was written with: run where they can be imported"
        ) from error
    if not issubclass(made["class"], JointPPO):
        raise ValueError(f"the checkpoint {checkpoint} is one of {made['class'].__name__}; needed: JointPPO")
    config = _config_to_play(made["ctor_args_and_kwargs"][0][0])
    runner = config.env_runner_cls(config=config, worker_index=0)
    runner.restore_from_path(
        path / COMPONENT_LEARNER_GROUP / COMPONENT_LEARNER / COMPONENT_RL_MODULE, component=COMPONENT_RL_MODULE
    )
    # A run without a local runner keeps the moments beside the learner.
    places = [path / COMPONENT_ENV_RUNNER / COMPONENT_ENV_TO_MODULE_CONNECTOR, path / COMPONENT_ENV_TO_MODULE_CONNECTOR]
    for place in places:
        if place.is_dir():
            runner.restore_from_path(place, component=COMPONENT_ENV_TO_MODULE_CONNECTOR)
    return TrainedTeam(config, runner, int(state["training_iteration"]))


def _config_to_play(state: dict[str, Any]) -> JointPPOConfig:
    """The run's configuration for one process without an accelerator."""
    config: JointPPOConfig = JointPPOConfig.from_state(state)
    if config.env_spec is not None:
        config.env = config.env_spec  # a name that another process registered is unknown here
    config.env_runners(
        num_env_runners=0, num_envs_per_env_runner=1, num_gpus_per_env_runner=0, create_local_env_runner=True
    )
    config.learners(num_learners=0, num_gpus_per_learner=0)
    config.evaluation(evaluation_interval=None, evaluation_num_env_runners=0, evaluation_config=None)
    config.validate()
    config.freeze()
    return config
