"""What hears from Tune while a sweep runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ray import tune
from ray.tune.logger import CSVLoggerCallback, JsonLoggerCallback, LoggerCallback, TBXLoggerCallback

from thrust_rllib.search_space import Parameter
from thrust_rllib.sweep_results import TrialRow, log_result, numbered, trial_row

Watch = Callable[[list[TrialRow]], None]


@dataclass(frozen=True)
class RunningSweep:
    """The sweep that runs in this process."""

    folder: Path
    parameters: tuple[Parameter, ...]
    steps: int
    watch: Watch | None


class Watching(tune.Callback):
    """Hears from Tune. An instance is saved with the experiment, so that what runs stands in the class."""

    running: ClassVar[RunningSweep | None] = None

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """A trial has ended an iteration."""
        if self.running is not None:
            log_result(self.running.folder, trial, result, self.running.parameters)

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Something may have happened."""
        now = self.running
        if now is not None and now.watch is not None:
            now.watch([trial_row(k, trial, now.parameters, now.steps) for k, trial in numbered(trials)])


class _ClosesFiles(LoggerCallback):
    """Tune's loggers leave the files of trials open that an interruption ends."""

    def on_experiment_end(self, trials: list[Any], **info: Any) -> None:
        """Closes them."""
        for trial in trials:
            self.log_trial_end(trial)


class Json(_ClosesFiles, JsonLoggerCallback):
    """`result.json` of each trial."""


class Csv(_ClosesFiles, CSVLoggerCallback):
    """`progress.csv` of each trial."""


class TensorBoard(_ClosesFiles, TBXLoggerCallback):
    """Events of each trial."""
