"""The algorithm's state: saved whole or not at all, and the same for learners and all runners after it is restored."""

from __future__ import annotations

import functools
import logging
import tempfile
import uuid
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray import cloudpickle
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.ppo import PPO
from ray.rllib.core import (
    COMPONENT_ENV_RUNNER,
    COMPONENT_ENV_TO_MODULE_CONNECTOR,
    COMPONENT_EVAL_ENV_RUNNER,
    COMPONENT_LEARNER,
    COMPONENT_LEARNER_GROUP,
    COMPONENT_MODULE_TO_ENV_CONNECTOR,
    COMPONENT_RL_MODULE,
)
from ray.rllib.core.rl_module.rl_module import RLModule
from ray.rllib.utils.annotations import override
from ray.rllib.utils.metrics import ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME, WEIGHTS_SEQ_NO
from ray.rllib.utils.typing import StateDict
from ray.tune.result import TIME_TOTAL_S

from thrust_rllib.checkpoints import check_is_checkpoint, local_path, whole_folder
from thrust_rllib.joint_batch import ModuleID
from thrust_rllib.rl_modules.learner_modules import AUXILIARY_HEADS
from thrust_rllib.runner_states import RUNNERS, RunnersComponent, RunnerStates, ask_states, give_states

logger = logging.getLogger(__name__)

CONNECTORS = COMPONENT_ENV_TO_MODULE_CONNECTOR, COMPONENT_MODULE_TO_ENV_CONNECTOR
OWN_NAMES = {
    "class_and_ctor_args.pkl",
    Algorithm.METADATA_FILE_NAME,
    f"{Algorithm.STATE_FILE_NAME}.pkl",
    f"{Algorithm.STATE_FILE_NAME}.msgpack",
    COMPONENT_ENV_RUNNER,
    COMPONENT_EVAL_ENV_RUNNER,
    COMPONENT_LEARNER_GROUP,
    RUNNERS,
    *CONNECTORS,
}
"""What a checkpoint may consist of."""


class StatefulAlgorithm(PPO):
    """Base of the algorithm: what RLlib's saving and restoring leave out.

    RLlib saves no runner but the local one, and of that neither environments nor generators. It gives weights to
    runners only if they are newer than those they have, and a message to a remote runner not at all while another one
    with the same tag is on its way.
    """

    config: Any
    env_to_module_connector: Any
    module_to_env_connector: Any
    states_to_give: RunnerStates | None = None
    """Of runners, restored and not handed out yet."""

    # --- saving ---------------------------------------------------------------------------------------------------

    @override(Algorithm)
    def get_checkpointable_components(self) -> list[tuple[str, Any]]:
        return [*super().get_checkpointable_components(), (RUNNERS, RunnersComponent(self))]

    @override(Algorithm)
    def get_state(
        self,
        components: str | Collection[str] | None = None,
        *,
        not_components: str | Collection[str] | None = None,
        **kwargs: Any,
    ) -> StateDict:
        """As RLlib's, with what all runners are in the middle of under "runners".

        `["runners"]["training"]` and `["evaluation"]` are {worker index: state}, 0 for the local runner. One that does
        not answer within `sample_timeout_s` is left out with a warning.
        """
        state = super().get_state(components, not_components=not_components, **kwargs)
        if self._check_component(RUNNERS, components, not_components):
            state[RUNNERS] = self.get_runner_states()
        state[TIME_TOTAL_S] = self._time_total
        return state

    def get_runner_states(self) -> RunnerStates:
        """{"training" and "evaluation": {worker index: what the runner is in the middle of}}."""
        return ask_states(self._named_groups(), self.config.sample_timeout_s)

    @override(Algorithm)
    def save_to_path(self, path: Any = None, *, filesystem: Any = None, **kwargs: Any) -> str:
        """Saves a checkpoint; on a local disk whole or not at all.

        It is written beside `path` and renamed. What stands at `path` is replaced only by a complete checkpoint, except
        for files in it that are not of a checkpoint: they stay.

        Args:
            path: of the folder; None for a new one in the system's place for temporary files.
            filesystem: of pyarrow; None for the one that `path` names. Others than local ones are written to directly.
            **kwargs: RLlib's state and use_msgpack.

        Returns:
            The path.

        Raises:
            OSError: it could not be written (the disk is full, say). The checkpoint that was there before still is.
            ValueError: a path that cannot be replaced: a file, a mount point, the working directory.
        """
        if path is None:
            path = Path(tempfile.gettempdir()) / str(uuid.uuid4())
        place = local_path(path, filesystem)
        if place is None:
            return super().save_to_path(path, filesystem=filesystem, **kwargs)
        with whole_folder(place, OWN_NAMES) as unfinished:
            super().save_to_path(unfinished, **kwargs)
        return str(place)

    # --- restoring ------------------------------------------------------------------------------------------------

    @classmethod
    @override(Algorithm)
    def from_checkpoint(cls, path: Any, filesystem: Any = None, **kwargs: Any) -> Any:
        """A new algorithm from a checkpoint.

        Args:
            path: of the folder.
            filesystem: of pyarrow.
            **kwargs: `config` for another configuration than the checkpoint's (another number of runners or learners,
                another learning rate; a validated `JointPPOConfig`), and RLlib's other arguments.
        """
        if filesystem is None and isinstance(path, str | Path) and (place := local_path(path)) is not None:
            path = str(place)
        return super().from_checkpoint(path, filesystem, **kwargs)

    @override(Algorithm)
    def restore_from_path(self, path: Any, *args: Any, **kwargs: Any) -> None:
        """Restores a checkpoint, of an earlier or a later time, into learners and all runners.

        Learning rates, clips, coefficients, coupling weights and `policies_to_train` stay those of this algorithm's
        configuration. Runners go on in the middle of the episodes in which they were saved, where environments can
        say what they are in the middle of; others, and runners for which nothing was saved, begin new episodes.

        Args:
            path: of the folder.
            *args: RLlib's.
            **kwargs: RLlib's component and filesystem.

        Raises:
            ValueError: no checkpoint, or one with modules that this algorithm has not, or with other networks; nothing
                is restored then.
        """
        whole = kwargs.get("component") is None
        if (place := local_path(path, kwargs.get("filesystem"))) is not None:
            path = place
            if whole:
                check_is_checkpoint(place, self.METADATA_FILE_NAME)
                self._check_modules(_modules_in(place))
        self.states_to_give = None
        self._forget_what_is_new()
        super().restore_from_path(path, *args, **kwargs)
        if whole and place is not None:
            self._restore_connectors_of_the_other_place(place)
        self._hand_out_connectors()
        self._hand_out_weights()
        if whole or self.states_to_give is not None:
            self._give_states()

    @override(Algorithm)
    def set_state(self, state: StateDict) -> None:
        """As RLlib's; what it holds reaches learners and all runners, as with `restore_from_path`.

        Raises:
            ValueError: as there.
        """
        state = dict(state)
        modules = state.get(COMPONENT_LEARNER_GROUP, {}).get(COMPONENT_LEARNER, {}).get(COMPONENT_RL_MODULE)
        if modules is not None:
            self._check_modules(modules)
        states = state.pop(RUNNERS, None)
        evaluating = state.pop(COMPONENT_EVAL_ENV_RUNNER, None)  # RLlib would give it the training runner's
        runner = dict(state.pop(COMPONENT_ENV_RUNNER, {}))
        runner |= {name: state.pop(name) for name in CONNECTORS if name in state}  # of one without a local runner
        super().set_state(state)
        if TIME_TOTAL_S in state:
            self._time_total = state[TIME_TOTAL_S]
        if evaluating is not None and self.eval_env_runner is not None:
            self.eval_env_runner.set_state(evaluating)
        if runner:
            self._forget_what_is_new()
            self._set_connectors(runner)
            self._hand_out_connectors()
        if COMPONENT_LEARNER_GROUP in state:
            self._hand_out_weights()
        if states is not None:
            self.states_to_give = states
            self._give_states()

    def _check_modules(self, saved: Mapping[ModuleID, StateDict]) -> None:
        """Before anything changes: RLlib finds a module of another shape when it has restored those in front of it."""
        mine = sorted([*self.config.policies, *self.config.learner_modules])
        if unknown := sorted(set(saved) - set(mine)):
            raise ValueError(
                f"the checkpoint has modules {unknown}, which this algorithm has not: its modules are {mine}. Take "
                "JointPPO.from_checkpoint(path), or first add them: algo.add_module(...); those of a critic or of "
                "auxiliary targets come with the options critic and auxiliary_targets."
            )
        shapes = {m: {name: np.shape(value) for name, value in state.items()} for m, state in saved.items()}
        self.learner_group.ask_first(_check_shapes, shapes=shapes)
        if missing := sorted(set(mine) - set(saved)):
            logger.warning("modules %s are not in the checkpoint: they stay as they are", missing)

    def _set_connectors(self, state: StateDict) -> None:
        if self.env_runner is not None:
            self.env_runner.set_state(state)
            return
        for name, pieces in self._pipelines().items():
            if name in state:
                pieces.set_state(state[name])

    def _restore_connectors_of_the_other_place(self, path: Path) -> None:
        """With a local runner, connectors are saved as a part of it, without beside it: both are read by both."""
        if self.env_runner is not None:
            for name in CONNECTORS:
                if not (path / COMPONENT_ENV_RUNNER).is_dir() and (path / name).is_dir():
                    self.env_runner.restore_from_path(path / name, component=name)
            return
        for name, pieces in self._pipelines().items():
            if (path / COMPONENT_ENV_RUNNER / name).is_dir():
                pieces.restore_from_path(path / COMPONENT_ENV_RUNNER / name)

    # --- the same for all -----------------------------------------------------------------------------------------

    def _named_groups(self) -> dict[str, Any]:
        """The runners that train, and those of the evaluation where there are any."""
        groups = {"training": self.env_runner_group, "evaluation": self.eval_env_runner_group}
        return {name: group for name, group in groups.items() if group is not None}

    def _runner_groups(self) -> list[Any]:
        return list(self._named_groups().values())

    def _hand_out_weights(self) -> None:
        """The learner's weights to every runner, whatever sequence number they have."""
        state = self.learner_group.get_state(
            components=f"{COMPONENT_LEARNER}/{COMPONENT_RL_MODULE}", inference_only=True
        )[COMPONENT_LEARNER]
        weights = {name: state[name] for name in (COMPONENT_RL_MODULE, WEIGHTS_SEQ_NO)}
        self._tell_runners(self._runner_groups(), _take_weights, weights)

    def _hand_out_connectors(self) -> None:
        """What the connectors of this process have gathered, and the count of steps, to the runners that train."""
        steps = self.metrics.peek((ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME), default=0)
        state = {**self._connector_state(*CONNECTORS), NUM_ENV_STEPS_SAMPLED_LIFETIME: int(steps)}
        self._tell_runners([self.env_runner_group], _take_state, state)

    def _give_states(self) -> None:
        states, self.states_to_give = self.states_to_give or {}, None
        give_states(self._named_groups(), states, self.iteration)

    def _forget_what_is_new(self) -> None:
        """Lets remote runners forget what RLlib would merge into a restored state."""
        self._tell_runners([self.env_runner_group], _take_state, self._connector_state(*CONNECTORS))

    def _tell_runners(self, groups: Sequence[Any], tell: Any, state: Any) -> None:
        """Calls `tell(runner, state)` in all runners and waits: RLlib's own messages may be dropped on the way."""
        for group in groups:
            given = ray.put(state) if group.num_remote_workers() > 0 else state
            group.foreach_env_runner(functools.partial(tell, state=given))

    def _connector_state(self, *names: str) -> dict[str, Any]:
        """What connector pieces have gathered, of all runners together, as a runner's state.

        Args:
            *names: of the pipelines; none for those in front of the modules.
        """
        names = names or (COMPONENT_ENV_TO_MODULE_CONNECTOR,)
        if self.env_runner is not None:
            state = self.env_runner.get_state(components=list(names))
            return {name: state[name] for name in names}
        return {name: self._pipelines()[name].get_state() for name in names}

    def _pipelines(self) -> dict[str, Any]:
        """This process's pipelines where there is no local runner."""
        return dict(zip(CONNECTORS, (self.env_to_module_connector, self.module_to_env_connector), strict=True))


def _modules_in(path: Path) -> dict[ModuleID, StateDict]:
    """The states of all modules in a checkpoint; empty ones where it was written with msgpack."""
    folder = path / COMPONENT_LEARNER_GROUP / COMPONENT_LEARNER / COMPONENT_RL_MODULE
    folders = [each for each in folder.iterdir() if each.is_dir()] if folder.is_dir() else []
    if not folders:
        raise ValueError(f"the checkpoint {path} is not complete: it has no modules in {folder.relative_to(path)}")
    files = {each.name: each / f"{RLModule.STATE_FILE_NAME}.pkl" for each in folders}
    return {m: cloudpickle.loads(file.read_bytes()) if file.is_file() else {} for m, file in files.items()}


def _check_shapes(learner: Any, shapes: Mapping[ModuleID, Mapping[str, tuple[int, ...]]]) -> None:
    """Runs in a learner."""
    for module_id, given in shapes.items():
        if not given:  # written with msgpack
            continue
        module = learner.module[module_id].unwrapped()
        needed = {name: np.shape(value) for name, value in module.get_state().items()}
        if module_id == AUXILIARY_HEADS:  # a policy that is not in the checkpoint keeps its head as well
            staying = tuple(f"{module.place(m)}." for m in module.widths if m not in shapes)
            needed = {name: shape for name, shape in needed.items() if not name.startswith(staying)}
        if wrong := [name for name in {**needed, **given} if given.get(name) != needed.get(name)]:
            described = "; ".join(
                f"{name} is {[*given[name]] if name in given else 'not there'}, "
                f"needed {[*needed[name]] if name in needed else 'no such parameter'}"
                for name in wrong
            )
            raise ValueError(
                f"module {module_id!r} of the checkpoint has another network: {described}. Nothing was changed. "
                "Needed: the model_config with which it was saved, and the same observation and action spaces."
            )


def _take_weights(runner: Any, state: Any) -> None:
    runner._weights_seq_no = 0
    _take_state(runner, state)


def _take_state(runner: Any, state: Any) -> None:
    runner.set_state(ray.get(state) if isinstance(state, ray.ObjectRef) else state)
