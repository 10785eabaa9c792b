"""What runners are in the middle of, as a component of the algorithm's state: asked of all, and given back."""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Mapping
from typing import Any

import ray
from ray.rllib.utils.annotations import override
from ray.rllib.utils.checkpoints import Checkpointable

from thrust_rllib.sampling.team_runner import TeamRunner

logger = logging.getLogger(__name__)

RUNNERS = "runners"
"""Name of the component."""

RunnerStates = dict[str, dict[int, Any]]
"""{"training" or "evaluation": {worker index, 0 for the local runner: state}}."""


class RunnersComponent(Checkpointable):
    """The runners' states for RLlib's saving and restoring, which go component by component.

    Args:
        algorithm: whose runners; restored states wait in its `states_to_give` until weights and connectors are there.
    """

    def __init__(self, algorithm: Any = None) -> None:
        self._algorithm = algorithm

    @override(Checkpointable)
    def save_to_path(self, path: Any = None, *, use_msgpack: bool = False, **kwargs: Any) -> str:
        """As RLlib's, always pickled: msgpack has no room for the numbers of a generator's state."""
        return super().save_to_path(path, use_msgpack=False, **kwargs)

    @override(Checkpointable)
    def get_state(
        self,
        components: str | Collection[str] | None = None,
        *,
        not_components: str | Collection[str] | None = None,
        **kwargs: Any,
    ) -> RunnerStates:
        return self._algorithm.get_runner_states()

    @override(Checkpointable)
    def set_state(self, state: RunnerStates) -> None:
        self._algorithm.states_to_give = state

    @override(Checkpointable)
    def get_ctor_args_and_kwargs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (), {}


def ask_states(groups: Mapping[str, Any], timeout_s: float | None) -> RunnerStates:
    """The states of all runners; of one that does not answer in time, or fails, is told.

    Args:
        groups: {name: `EnvRunnerGroup`}.
        timeout_s: how long to wait for remote runners; None for as long as it takes.
    """
    states: RunnerStates = {}
    for name, group in groups.items():
        answers = group.foreach_env_runner(_sampling_state, timeout_seconds=timeout_s)
        states[name] = {index: state for index, state, _ in answers if state is not None}
        problems = [f"runner {index}: {problem}" for index, _, problem in answers if problem]
        remote = sum(index > 0 for index, _, _ in answers)
        if remote < group.num_remote_workers():
            problems.append(f"{group.num_remote_workers() - remote} did not answer within {timeout_s} seconds")
        if problems:
            logger.warning(
                "the state of some %s runners is not in the checkpoint (%s): after it is restored, their environments "
                "are reset, with numbers of their own.",
                name,
                "; ".join(problems),
            )
    return states


def give_states(groups: Mapping[str, Any], states: RunnerStates, iteration: int) -> None:
    """Gives all runners their states back; one for which there is none resets, with other numbers than at the start.

    So does one that does not take its state; that is told.

    Args:
        groups: {name: `EnvRunnerGroup`}.
        states: of `ask_states`, perhaps for another number of runners.
        iteration: what the numbers of the others depend on.
    """
    for name, group in groups.items():
        mine = states.get(name, {})
        if group.num_remote_workers() > 0:  # each runner fetches its own only
            mine = {index: ray.put(state) for index, state in mine.items()}
        take = functools.partial(_take_sampling_state, states=mine, iteration=iteration)
        if problems := [problem for problem in group.foreach_env_runner(take) if problem]:
            logger.warning(
                "some %s runners do not go on from their states (%s): their environments are reset, with numbers of "
                "their own.",
                name,
                "; ".join(problems),
            )


def _sampling_state(runner: Any) -> tuple[int, Any, str]:
    """Runs in a runner: (its index, its state or None, why there is none)."""
    index = runner.worker_index or 0
    if not isinstance(runner, TeamRunner) or runner.env is None:
        return index, None, ""
    if runner.team_number is None:
        return index, None, "it was started again and has not sampled yet"
    try:
        return index, runner.get_sampling_state(), ""
    except Exception as error:  # RLlib would end the runner's process
        return index, None, f"{type(error).__name__}: {error}"


def _take_sampling_state(runner: Any, states: Mapping[int, Any], iteration: int) -> str:
    """Runs in a runner: what went wrong."""
    if not isinstance(runner, TeamRunner) or runner.env is None:
        return ""
    index = runner.worker_index or 0
    state = states.get(index)
    if state is None:
        runner.reseed(iteration)
        return ""
    try:
        runner.set_sampling_state(ray.get(state) if isinstance(state, ray.ObjectRef) else state)
    except Exception as error:  # RLlib would end the runner's process, and tell nobody
        runner.reseed(iteration)
        return f"runner {index}: {type(error).__name__}: {error}"
    return ""
