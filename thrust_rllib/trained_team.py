"""A trained team out of a checkpoint, ready to play: without a learner, remote runners or a running Ray."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from ray import cloudpickle
from ray.rllib.core import (
    COMPONENT_ENV_RUNNER,
    COMPONENT_ENV_TO_MODULE_CONNECTOR,
    COMPONENT_LEARNER,
    COMPONENT_LEARNER_GROUP,
    COMPONENT_RL_MODULE,
)

from thrust_rllib.algorithm import JointPPO
from thrust_rllib.checkpoints import check_is_checkpoint
from thrust_rllib.config import JointPPOConfig
from thrust_rllib.env_runner import JointEnvRunner
from thrust_rllib.envs.action_masks import without_choice
from thrust_rllib.envs.batching import ObservationBatch
from thrust_rllib.envs.names import nearest
from thrust_rllib.envs.spaces import batch_row
from thrust_rllib.evaluation import seeds_for, team_actor
from thrust_rllib.joint_batch import AgentID
from thrust_rllib.sampling.acting import TeamActor
from thrust_rllib.sampling.agent_groups import env_actions
from thrust_rllib.teams import DeclaredTeam

Memories = dict[AgentID, np.ndarray]
"""{agent: [S], what its recurrent module remembers}; empty where no module remembers."""


@dataclass(frozen=True)
class TrainedTeam:
    """Plays step by step with `act`, and whole episodes with `thrust_rllib.evaluation.play_episodes`.

    Args:
        config: of the run, with one environment and no remote process.
        env_runner: has the networks and the moments of observations.
        iteration: of the checkpoint.
        seed: of the actions that are sampled.
    """

    config: JointPPOConfig
    env_runner: JointEnvRunner
    iteration: int
    seed: int = 0

    @property
    def env_name(self) -> str:
        """The environment, as the run named it."""
        assert self.config.env_spec is not None
        return self.config.env_spec.name

    def act(
        self, observations: Mapping[AgentID, Any], state: Memories | None = None, explore: bool = False
    ) -> tuple[dict[AgentID, Any], Memories]:
        """One step of the agents that act now, in one environment.

        The actions are to the bit those of `play_episodes` with `num_envs=1` and the same seed, and of
        `thrust-rllib evaluate` for that environment. Several games can be played side by side, each with its state.

        Args:
            observations: {agent: observation} as the environment shows them; who is absent or waits is left out.
            state: as returned by the step before; None in the first step of an episode. It is not written into.
            explore: sample from the policies; False takes the mode of each.

        Returns:
            {agent: element of its action space} of the agents in `observations`, and the state for the next step.

        Raises:
            TypeError: `observations` or `state` is no dict, or an observation is of no numbers.
            ValueError: an unknown agent, an observation that is not in the agent's space, a mask that allows nothing,
                or the state of another team.
        """
        actor, declared = self._actor, self._declared
        _check_names("observations", observations, declared.possible_agents)
        batch, arrays = self._batch.zeros()
        self._batch.write_some(arrays, 0, observations, _where, shown=observations)
        encoded = [group.encode(batch) for group in actor.groups]
        masks = [group.masks(batch) for group in actor.groups]
        self._check_seen(encoded, masks)
        actor.restart()
        self._enter(state)
        present = np.array([[agent in observations] for agent in declared.possible_agents])
        acted = actor.act(encoded, masks, explore, present=present)
        actor.advance(present, np.zeros(1, bool))
        actions = env_actions(actor.groups, [mine.actions for mine in acted])
        played = {agent: batch_row(declared.action_spaces[agent], actions[agent].copy(), 0) for agent in observations}
        return played, {agent: memory.copy() for agent, memory in self._memories().items()}

    @cached_property
    def _declared(self) -> DeclaredTeam:
        assert self.config.declared_team is not None
        return dataclasses.replace(self.config.declared_team, stacked=False)

    @cached_property
    def _actor(self) -> TeamActor:
        return team_actor(self, self._declared, seeds_for(self.seed, 1)[-1])

    @cached_property
    def _batch(self) -> ObservationBatch:
        return ObservationBatch(self._declared.possible_agents, self._declared.observation_spaces, 1, stacked=False)

    def _memories(self) -> Memories:
        """{agent: [S]}, views of what the actor enters its next step with."""
        return {
            agent: memory[row, 0]
            for index, group in enumerate(self._actor.groups)
            if (memory := self._actor.memory(index, 1)) is not None
            for row, agent in enumerate(group.agents)
        }

    def _enter(self, state: Memories | None) -> None:
        """Writes a state into the actor, whose agents have forgotten everything."""
        if state is None:
            return
        memories = self._memories()
        hint = "; needed: what act() of this team returned, or None in the first step of an episode"
        _check_names("state", state, memories, hint)
        for agent, memory in memories.items():
            if agent not in state:
                raise ValueError(f"state has no entry for agent {agent!r}{hint}")
            given = np.asarray(state[agent])
            if given.shape != memory.shape or given.dtype.kind != "f":
                raise ValueError(
                    f"state of agent {agent!r} has shape {given.shape} and type {given.dtype}; its module remembers "
                    f"{memory.shape} numbers of type {memory.dtype}{hint}"
                )
            if not np.isfinite(given).all():
                raise ValueError(f"state of agent {agent!r} has numbers that are not finite{hint}")
            memory[:] = given

    def _check_seen(self, encoded: list[np.ndarray], masks: list[np.ndarray | None]) -> None:
        for group, obs, mask in zip(self._actor.groups, encoded, masks, strict=True):
            found = group.encoder.first_violation(obs, not self.config.disable_env_checking)
            if found is not None:
                (row, _), problem = found
                raise ValueError(
                    f"{_where()}: the observation of agent {group.agents[row]!r} is not in its observation space "
                    f"{group.observation_space}: {problem}"
                )
            if mask is not None and (stuck := without_choice(mask, group.action_space)).any():
                row = int(np.argwhere(stuck)[0, 0])
                raise ValueError(
                    f"{_where()}: the action mask of agent {group.agents[row]!r} allows no action: "
                    f"{mask[row, 0].astype(int).tolist()}; leave an agent that has nothing to choose out"
                )


def _where() -> str:
    return "TrainedTeam.act"


def _check_names(what: str, given: Any, known: Collection[AgentID], hint: str = "") -> None:
    if not isinstance(given, Mapping):
        raise TypeError(f"{_where()}: {what} is a {type(given).__name__}; needed: a dict with an entry per agent{hint}")
    for agent in given:
        if agent not in known:
            raise ValueError(
                f"{_where()}: {what} names agent {agent!r}{nearest(str(agent), map(str, known))} "
                f"Known here: {list(known)}{hint}"
            )


def load_team(checkpoint: str | Path, *, seed: int = 0) -> TrainedTeam:
    """Restores what plays from a checkpoint of `JointPPO`.

    `JointPPO.from_checkpoint` restores all of it, with the optimizers, and starts Ray and the run's remote runners.

    Args:
        checkpoint: the folder that `save_to_path` wrote, or Tune (`result.checkpoint.path`). It holds pickles: load
            only what you trust.
        seed: of the actions that `TrainedTeam.act` samples with `explore=True`.

    Raises:
        ValueError: no checkpoint, another algorithm's, or one that cannot be read here.
    """
    path = Path(checkpoint).absolute()
    check_is_checkpoint(path, JointPPO.METADATA_FILE_NAME)
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
    return TrainedTeam(config, runner, int(state["training_iteration"]), seed)


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
