"""The learner group: hands rollouts to the learners, by reference where runners are remote."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import ray
from pyarrow import fs
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.rllib.core import COMPONENT_LEARNER
from ray.rllib.core.learner.learner_group import LearnerGroup
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.utils.actor_manager import RemoteCallResults, ResultOrError
from ray.rllib.utils.annotations import override
from ray.rllib.utils.typing import StateDict

from thrust_rllib.checkpoints import local_path
from thrust_rllib.joint_batch import JointBatch
from thrust_rllib.teams import AgentToModule

GRACE_S = 10.0
"""How long the others may answer once a learner has failed: those that wait for it will never."""
HEALTH_OPTIONS = "healthy_only", "mark_healthy", "return_obj_refs"


class JointLearnerGroup(LearnerGroup):
    """Learners that update one team together: in this process (`num_learners=0`), or so many in others.

    RLlib's group splits episodes between learners by length, which would tear joint rows apart; this one sends every
    rollout to all of them, and each runs the networks on its slice of every joint minibatch (`shared_minibatch`). L
    learners give the parameters of one learner, to float tolerance, which trains with L times `minibatch_size`.
    """

    _failure: str | None = None
    _workers: list[Any] | None

    def update_from_rollouts(
        self, rollouts: Sequence[list[JointBatch] | ray.ObjectRef], timesteps: dict[str, Any], **kwargs: Any
    ) -> list[dict[str, Any]]:
        """One update on all rollouts.

        Args:
            rollouts: of each runner a list of batches, or a Ray reference to one.
            timesteps: lifetime counts for the schedules.
            **kwargs: `num_epochs`, `minibatch_size` (of each learner), `shuffle_batch_per_epoch`.

        Returns:
            The results of the first learner, as `LearnerGroup.update` returns them. They are those of the whole update:
            the other learners compute the same.

        Raises:
            ValueError: batches mixed with references, or what the learners refuse.
            RolloutsLostError: all rollouts are lost with their runners.
            RuntimeError: a learner failed and others did not, now or before; the group is of no use then.
        """
        references = [r for r in rollouts if isinstance(r, ray.ObjectRef)]
        if references and len(references) != len(rollouts):
            raise ValueError("rollouts are a mixture of batches and references; give all of one kind")
        if self.is_local:
            if references:
                data = TrainingData(episodes_refs=references)
            else:
                data = TrainingData(episodes=[batch for part in rollouts for batch in part])
            return [self._learner.update(training_data=data, timesteps=timesteps, **kwargs)]
        self._check_is_alive()
        if not references:
            references = [ray.put(list(part)) for part in rollouts]
        data = TrainingData(episodes_refs=references)
        calls = [w.update.remote(training_data=data, timesteps=timesteps, **kwargs) for w in self._workers or []]
        return self._answers(calls)[:1]

    @override(LearnerGroup)
    def update(
        self,
        *,
        episodes: Sequence[Any] | None = None,
        episodes_refs: Sequence[ray.ObjectRef] | None = None,
        training_data: TrainingData | None = None,
        timesteps: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> list[dict[str, Any]]:
        """RLlib's way to ask for an update; its own cuts episodes into parts for the learners.

        Args:
            episodes: rollouts.
            episodes_refs: references to lists of rollouts.
            training_data: either of these.
            timesteps: as for `update_from_rollouts`, as the result and what is raised.
            **kwargs: as for `update_from_rollouts`.
        """
        data = training_data or TrainingData(episodes=episodes, episodes_refs=episodes_refs)
        rollouts = data.episodes_refs if data.episodes is None else [list(data.episodes)]
        return self.update_from_rollouts(rollouts or [], timesteps or {}, **kwargs)

    @override(LearnerGroup)
    def foreach_learner(
        self,
        func: Callable[..., Any],
        *,
        timeout_seconds: float | None = None,
        remote_actor_ids: list[int] | None = None,
        **kwargs: Any,
    ) -> RemoteCallResults:
        """What `func(learner, **kwargs)` gives for each learner.

        With `timeout_seconds` as RLlib's. Without, an error comes at once: RLlib ends the process of a learner whose
        call has raised, a minute later, and waits for the others, which may wait for it.

        Raises:
            RuntimeError: a learner failed and others did not, now or before; the group is of no use then.
            Exception: what all learners raise.
        """
        self._check_is_alive()
        if self.is_local or timeout_seconds is not None:
            return super().foreach_learner(
                func, timeout_seconds=timeout_seconds, remote_actor_ids=remote_actor_ids, **kwargs
            )
        ids = self._worker_manager.actor_ids() if remote_actor_ids is None else remote_actor_ids
        actors = self._worker_manager.actors()
        ask = functools.partial(func, **{k: v for k, v in kwargs.items() if k not in HEALTH_OPTIONS})
        results = RemoteCallResults()
        for actor_id, answer in zip(ids, self._answers([actors[k].ask.remote(ask) for k in ids]), strict=True):
            results.add_result(actor_id, ResultOrError(result=answer), None)
        return results

    def ask_first(self, question: Callable[..., Any], **kwargs: Any) -> Any:
        """What `question(learner, **kwargs)` says in the first learner's process."""
        ids = None if self.is_local else self._worker_manager.actor_ids()[:1]
        (result,) = self._get_results(self.foreach_learner(question, remote_actor_ids=ids, **kwargs))
        return result

    def set_agent_to_module(self, mapping: AgentToModule) -> None:
        """Tells all learners who plays whom from now on."""
        self._get_results(self.foreach_learner(_set_agent_to_module, mapping=mapping))

    @override(LearnerGroup)
    def get_state(self, *args: Any, **kwargs: Any) -> StateDict:
        self._check_is_alive()
        return super().get_state(*args, **kwargs)

    @override(LearnerGroup)
    def get_checkpointable_components(self) -> list[tuple[str, Any]]:
        self._check_is_alive()
        return super().get_checkpointable_components()

    @override(LearnerGroup)
    def save_to_path(
        self, path: Any = None, *, state: StateDict | None = None, filesystem: Any = None, **kwargs: Any
    ) -> str:
        """As RLlib's, which does not hear of it when a learner in another process cannot write.

        Here such a learner hands its files over, and this process writes them.
        """
        self._check_is_alive()
        if self.is_local:
            return super().save_to_path(path, state=state, filesystem=filesystem, **kwargs)
        path = super().save_to_path(path, state={}, filesystem=filesystem, **kwargs)  # all but the learner
        given = {} if state is None else {"state": ray.put(state[COMPONENT_LEARNER])}
        filesystem = filesystem or fs.LocalFileSystem()
        for name, content in self.ask_first(_saved_files, **given, **kwargs).items():
            place = f"{path}/{COMPONENT_LEARNER}/{name}"
            filesystem.create_dir(place.rpartition("/")[0], recursive=True)
            with filesystem.open_output_stream(place) as file:
                file.write(content)
        return path

    @override(LearnerGroup)
    def restore_from_path(
        self, path: Any, *, component: str | None = None, filesystem: Any = None, **kwargs: Any
    ) -> None:
        """As RLlib's, which does not hear of it when a learner in another process fails.

        Raises:
            FileNotFoundError: there is nothing at `path`.
        """
        self._check_is_alive()
        place = local_path(path, filesystem)
        if self.is_local or place is None:
            super().restore_from_path(path, component=component, filesystem=filesystem, **kwargs)
            return
        name, _, inner = (component or COMPONENT_LEARNER).partition("/")
        if name != COMPONENT_LEARNER:
            return
        if not (folder := place if component else place / name).is_dir():
            raise FileNotFoundError(f"there is no learner's state in {place}")
        files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        self._get_results(self.foreach_learner(_restore_files, files=ray.put(files), component=inner or None))

    def _answers(self, calls: list[ray.ObjectRef]) -> list[Any]:
        """Waits for all learners that were called, but not for those that wait for one that failed."""
        errors: dict[int, RayError] = {}
        waiting = list(calls)
        while waiting:
            done, waiting = ray.wait(waiting, timeout=GRACE_S if errors else None)
            if not done:
                break
            for call in done:
                try:
                    ray.get(call)
                except RayError as error:
                    errors[calls.index(call)] = error
        if not errors:
            return ray.get(calls)
        dead = {k: error for k, error in errors.items() if isinstance(error, RayActorError)}
        first, cause = next(iter((dead or errors).items()))
        if dead or len(errors) < len(calls):
            self._end(first, cause, len(calls))
        if isinstance(cause, RayTaskError):
            raise cause.cause from cause  # all alike: the next call may be better
        raise cause

    def _end(self, failed: int, cause: Exception, count: int) -> NoReturn:
        self._failure = (
            f"learner {failed} of {count} failed, and not all others with it; the learner group has ended. Build the "
            f"algorithm anew, from its last checkpoint. What happened:\n{cause}"
        )
        for worker in self._workers or []:
            ray.kill(worker)
        raise RuntimeError(self._failure) from cause

    def _check_is_alive(self) -> None:
        if self._failure is not None:
            raise RuntimeError(self._failure)

    @override(LearnerGroup)
    def shutdown(self) -> None:
        if self.is_local or self._workers is None:
            super().shutdown()
            return
        if not ray.is_initialized():  # Ray has ended their processes, and asking would start another Ray
            self._workers, self._is_shut_down = None, True
            return
        if self._failure is None:
            # RLlib waits for the first learner to leave and kills the others, of which Ray tells as of an accident.
            leaving = [worker.__ray_terminate__.remote() for worker in self._workers]
            ray.wait(leaving, num_returns=len(leaving), timeout=GRACE_S)
        # Without grace: learners that are gone cannot be asked to leave the process group.
        self._backend_executor.shutdown(graceful_termination=False)
        self._workers, self._is_shut_down = None, True


def _saved_files(learner: Any, state: Any = None, **kwargs: Any) -> dict[str, bytes]:
    """Runs in a learner: {name: content} of what it would save."""
    with tempfile.TemporaryDirectory() as folder:
        learner.save_to_path(folder, state=None if state is None else ray.get(state), **kwargs)
        return {p.relative_to(folder).as_posix(): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}


def _restore_files(learner: Any, files: Any, component: str | None) -> None:
    """Runs in a learner, perhaps on another machine than the files."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in ray.get(files).items():
            (place := Path(folder, name)).parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
        learner.restore_from_path(folder, component=component)


def _set_agent_to_module(learner: Any, mapping: AgentToModule) -> None:
    learner.set_agent_to_module(mapping)
