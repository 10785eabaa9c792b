"""Sweeps: the same training many times with other settings, on top of `ray.tune`.

| in the folder of a sweep | what |
|---|---|
| `sweep.json` | what was asked for; `Sweep.resume` reads it |
| `space.pkl` | what Tune draws from, with the configuration; trials that have not been drawn need it |
| `trials/` | Tune's experiment: a folder for each trial with its results, TensorBoard events and checkpoints |
| `curves.csv` | each iteration of each trial: steps, score, parameters |
| `trials.csv` | a row for each trial, the best first |
| `best/`, `best.json` | copy of the best trial's checkpoint, and which it is |
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ray import cloudpickle, tune
from ray.rllib.utils.metrics import NUM_ENV_STEPS_SAMPLED_LIFETIME

from thrust_rllib.config import JointPPOConfig
from thrust_rllib.resources import needed_cpus
from thrust_rllib.search_space import Parameter, corners, other_names, put
from thrust_rllib.sweep_callbacks import Csv, Json, RunningSweep, TensorBoard, Watch, Watching
from thrust_rllib.sweep_results import RECORD, SPACE, TRIALS, SweepResults, read_record, read_space
from thrust_rllib.sweep_schedulers import MUTABLE, SCHEDULERS, SEARCHES, import_optuna, make_scheduler, make_search
from thrust_rllib.sweep_trial import SCORE, SweepTrial


@dataclass(frozen=True)
class Sweep:
    """What is varied, how often, and how trials are chosen and ended.

    All trials have the configuration's seed, so that they differ in their parameters alone.

    Args:
        config: what all trials share.
        parameters: what differs.
        steps: environment steps of a trial; it ends with a whole iteration.
        trials: how many; None with a grid, whose size is given.
        scheduler: "none"; "asha": trials that are behind after 1/9 and 1/3 of the steps end; "pbt": ten times in a
            trial, when all have come so far, the worst quarter takes over weights and parameters of the best, and
            changes those in `MUTABLE`.
        search: "random", "grid" (all combinations), or "optuna" (its TPE, which looks at the trials so far).
        concurrent: trials at a time.
        checkpoint_every: iterations between a trial's checkpoints.
    """

    config: JointPPOConfig
    parameters: tuple[Parameter, ...]
    steps: int
    trials: int | None = None
    scheduler: str = "none"
    search: str = "random"
    concurrent: int = 1
    checkpoint_every: int = 10

    @property
    def num_trials(self) -> int:
        """How many there will be."""
        return self.trials or math.prod(len(p.choices) for p in self.parameters)

    def check(self) -> None:
        """Whether all of it fits, and whether a configuration at each end of what is varied is valid.

        Raises:
            ValueError: what was given, what is needed.
        """
        _check_one_of("scheduler", self.scheduler, SCHEDULERS)
        _check_one_of("search", self.search, SEARCHES)
        if not self.parameters:
            raise ValueError("nothing is varied: give at least one option a range or a list, e.g. --lr 1e-4:1e-2")
        paths = [p.path for p in self.parameters]
        for p in self.parameters:
            if paths.count(p.path) > 1:
                raise ValueError(f"{p.name} and another parameter set the same option {'/'.join(p.path)}")
        for name in ("steps", "concurrent", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; needed: at least 1")
        if self.search == "grid":
            for p in self.parameters:
                p.domain(grid=True)
            if self.trials is not None:
                raise ValueError(
                    f"a grid has as many trials as there are combinations; leave trials={self.trials} out, or draw "
                    "them at random"
                )
        elif self.trials is None or self.trials < 1:
            raise ValueError(f"trials is {self.trials}; needed: at least 1")
        if self.scheduler == "pbt":
            self._check_population()
        if self.search == "optuna":
            import_optuna()
        for values in corners(self.parameters):
            try:
                self.at(values).validate()
            except (ValueError, TypeError) as error:
                chosen = ", ".join(f"{p.name}={v}" for p, v in zip(self.parameters, values, strict=True))
                raise ValueError(f"a trial with {chosen} cannot be run: {error}") from error

    def _check_population(self) -> None:
        if self.search == "optuna":
            raise ValueError("scheduler pbt changes parameters itself and needs search random or grid, not optuna")
        if self.num_trials < 2:
            raise ValueError("scheduler pbt needs at least 2 trials, which learn from each other")
        if not self.mutable:
            raise ValueError(
                f"scheduler pbt changes {', '.join(MUTABLE)} while trials run, and none of them is varied; vary one, "
                "or take scheduler asha"
            )

    @property
    def cpus_per_trial(self) -> float:
        """What Ray sets aside for one."""
        return cpus_per_trial(self.config)

    @property
    def mutable(self) -> tuple[Parameter, ...]:
        """What changes within a trial of population based training."""
        return tuple(p for p in self.parameters if p.path[0] in MUTABLE)

    @property
    def _at_a_time(self) -> int:
        # A population is there all at once: its trials take turns, and Ray's CPUs limit how many run.
        return 0 if self.scheduler == "pbt" else self.concurrent

    def at(self, values: tuple[Any, ...]) -> JointPPOConfig:
        """A configuration with these values of the parameters."""
        config = self.config.copy(copy_frozen=False)
        before = {p.path[0]: getattr(config, p.path[0]) for p in self.parameters if len(p.path) > 1}
        config.update_from_dict(put(zip(self.parameters, values, strict=True), before))
        return config

    def space(self) -> dict[str, Any]:
        """The configuration's dict with Tune's domains in it; with "optuna" what is varied is left as it is."""
        space: dict[str, Any] = self.config.to_dict()
        for name in (name for p in self.parameters for name in other_names(p.path[0])):
            space.pop(name, None)
        domains = [] if self.search == "optuna" else [(p, p.domain(self.search == "grid")) for p in self.parameters]
        return put(domains, space)

    def run(self, folder: Path, watch: Watch | None = None) -> SweepResults:
        """Runs the trials in a Ray that runs, or starts with Ray's defaults; returns once all have ended.

        Ctrl-C keeps what is there, and `resume` goes on.

        Args:
            folder: of the sweep.
            watch: is told about all trials whenever something happens.
        """
        self.check()
        folder = folder.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        record = {name: value for name, value in asdict(self).items() if name != "config"}
        record |= {"num_trials": self.num_trials, "cpus_per_trial": self.cpus_per_trial}
        record["folder"] = str(folder)
        (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", "utf-8")
        space = self.space()
        (folder / SPACE).write_bytes(cloudpickle.dumps(space))
        set_up_tune()
        tuner = tune.Tuner(
            SweepTrial,
            param_space=space,
            tune_config=tune.TuneConfig(
                metric=SCORE,
                mode="max",
                num_samples=self.trials or 1,
                scheduler=make_scheduler(self.scheduler, self.steps, self.mutable),
                search_alg=make_search(
                    self.search, self.parameters, self.num_trials, self._at_a_time, self.config.seed
                ),
                reuse_actors=True,
                trial_name_creator=_trial_name,
                trial_dirname_creator=_trial_name,
            ),
            run_config=tune.RunConfig(
                name=TRIALS,
                storage_path=str(folder),
                stop={NUM_ENV_STEPS_SAMPLED_LIFETIME: self.steps},
                # A population takes over others' checkpoints, which must not be gone by then.
                checkpoint_config=tune.CheckpointConfig(
                    num_to_keep=4, checkpoint_frequency=self.checkpoint_every, checkpoint_at_end=True
                ),
                callbacks=[Watching(), Json(), Csv(), TensorBoard()],
                verbose=0,
            ),
        )
        return _fit(tuner, RunningSweep(folder, self.parameters, self.steps, watch))

    @staticmethod
    def resume(folder: Path, watch: Watch | None = None) -> SweepResults:
        """Goes on with an interrupted sweep: trials from their last checkpoints, failed ones again.

        Raises:
            ValueError: no sweep is there, it had not begun, or it was moved before all trials had begun.
        """
        folder = folder.absolute()
        record, before = read_record(folder), SweepResults.read(folder)
        begun, undrawn = Path(record["folder"]), before.num_trials - len(before.rows)
        if undrawn and begun.resolve() != folder.resolve():
            raise ValueError(
                f"the sweep {folder} was begun in {begun}, where Tune would put the {undrawn} trials that "
                f"have not begun; move it back there, or make a link: ln -s {folder} {begun}"
            )
        # Tune saves placeholders for what is no plain number or text, and trials yet to be drawn need what they stand
        # for. With it, those that there are get their first parameters back; all trials of a population are there.
        space = None if record["scheduler"] == "pbt" else read_space(folder)
        set_up_tune()
        tuner = tune.Tuner.restore(
            str(folder / TRIALS),
            SweepTrial,
            resume_unfinished=True,
            resume_errored=True,
            param_space=space,
        )
        return _fit(tuner, RunningSweep(folder, before.parameters, before.steps, watch))


def cpus_per_trial(config: JointPPOConfig) -> float:
    """CPUs of the process of a trial, and of those that it starts."""
    return float(config.num_cpus_for_main_process) + needed_cpus(config)


def set_up_tune() -> None:
    """Environment variables that Tune and its processes read; call it before Ray is started."""
    os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")  # paths in env_config are meant from here
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # the new one prints without being asked
    # A warning about trials that save often, of no use where a checkpoint takes milliseconds.
    os.environ.setdefault("TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S", "0")


def _fit(tuner: tune.Tuner, running: RunningSweep) -> SweepResults:
    Watching.running = running
    try:
        tuner.fit()
    finally:
        Watching.running = None
    results = SweepResults.read(running.folder)
    results.write()
    return results


def _trial_name(trial: Any) -> str:
    return str(trial.trial_id)


def _check_one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} is {value!r}; needed: one of {', '.join(known)}")
