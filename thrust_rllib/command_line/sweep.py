"""`thrust-rllib sweep` from its options to its exit code."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from thrust_rllib.command_line.messages import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, exit_with, print_error
from thrust_rllib.command_line.options import TrainOptions, build_config, parse_pairs, parse_value
from thrust_rllib.command_line.run_folder import choose_folder
from thrust_rllib.command_line.training_run import prepare_process, quieten_ray, start_ray

if TYPE_CHECKING:
    from thrust_rllib.command_line.sweep_view import SweepView
    from thrust_rllib.sweep_results import SweepResults
    from thrust_rllib.sweeps import Sweep

FIGURE = "sweep.png"
DEFAULT_STEPS, DEFAULT_TRIALS, DEFAULT_CHECKPOINT_EVERY = 100_000, 8, 10


@dataclass(frozen=True)
class SweepOptions:
    """What `thrust-rllib sweep` was given; None and empty lists stand for not given. See its help."""

    env: str | None = None
    env_config: Sequence[str] = ()
    steps: int | None = None
    trials: int | None = None
    scheduler: str | None = None
    search: str | None = None
    concurrent: int | None = None
    envs_per_runner: int | None = None
    seed: int | None = None
    lr: str | None = None
    critic_lr: str | None = None
    gamma: str | None = None
    lambda_: str | None = None
    entropy: str | None = None
    batch: str | None = None
    minibatch: str | None = None
    epochs: str | None = None
    redundancy: str | None = None
    vary: Sequence[str] = ()
    normalize_observations: bool | None = None
    settings: Sequence[str] = ()
    policies: str | None = None
    cell: str | None = None
    model: Sequence[str] = ()
    freeze: Sequence[str] = ()
    output: Path | None = None
    resume: Path | None = None
    checkpoint_every: int | None = None
    live: bool | None = None
    traceback: bool = False


@dataclass(frozen=True)
class _Varied:
    """How an option's text is read: where its value goes, as what, on which scale, and whether it may be a range."""

    path: tuple[str, ...]
    parse: Callable[[str], Any] = float
    log: bool = False
    ranges: bool = True


VARIED = {
    "lr": _Varied(("lr",), log=True),
    "critic_lr": _Varied(("critic_lr",), log=True),
    "entropy": _Varied(("entropy_coeff",), log=True),
    "redundancy": _Varied(("cross_agent_coeffs", "redundancy"), log=True),
    "gamma": _Varied(("gamma",)),
    "lambda_": _Varied(("lambda_",)),
    "batch": _Varied(("train_batch_size_per_learner",), int, ranges=False),
    "minibatch": _Varied(("minibatch_size",), int, ranges=False),
    "epochs": _Varied(("num_epochs",), int, ranges=False),
}
_PASSED_ON = (
    "env", "env_config", "envs_per_runner", "seed", "normalize_observations", "policies", "cell", "model", "freeze",
)  # fmt: skip
_WITH_RESUME = ("resume", "live", "traceback")


def run(options: SweepOptions) -> int:
    """Runs or resumes a sweep, with all messages; returns the exit code."""
    console = Console()
    folder: Path | None = options.resume
    prepare_process()
    try:
        with contextlib.ExitStack() as stack:
            if folder is not None:
                results = _resume(console, stack, options, folder)
            else:
                if options.env is None:
                    raise ValueError("needed: an environment (`thrust-rllib envs` lists them), or --resume FOLDER")
                folder = choose_folder(options.output, f"sweep-{options.env}")
                results = _run(console, stack, options, build_sweep(options), folder)
        return _end(console, results, folder)
    except KeyboardInterrupt:
        begun = folder is not None and (folder / "trials").exists()
        what = f"at once; resume with {_resume_command(folder)}" if folder and begun else "nothing was run"
        print_error(what, prefix="stopped")
        return EXIT_INTERRUPTED
    except Exception as error:
        return exit_with(error, options.traceback)


def build_sweep(options: SweepOptions) -> Sweep:
    """From the options to what is run; not yet checked.

    Raises:
        ValueError, TypeError: what was given, what is needed.
    """
    from thrust_rllib.search_space import Parameter, parse_parameter
    from thrust_rllib.sweeps import Sweep, cpus_per_trial

    parameters: list[Parameter] = []
    fixed: dict[str, Any] = {}

    def read(option: str, text: str, varied: _Varied) -> Any:
        found = parse_parameter(option, text, varied.path, varied.parse, log=varied.log, ranges=varied.ranges)
        if not isinstance(found, Parameter):
            return found
        parameters.append(found)
        return found.ends[0]

    for name, varied in VARIED.items():
        text = getattr(options, name)
        if text is not None:
            fixed[name] = read(f"--{name.rstrip('_').replace('_', '-')}", text, varied)
    settings = list(options.settings)
    for pair in options.vary:
        (name,) = parse_pairs("--vary", [pair])
        text = pair.partition("=")[2].strip()
        before = len(parameters)
        read(name, text, _Varied((name,), parse_value))
        if len(parameters) == before:
            raise ValueError(f"--vary {pair} has one value; give a range or a list, or --set {pair}")
    steps = DEFAULT_STEPS if options.steps is None else options.steps
    config = build_config(
        TrainOptions(
            **{name: getattr(options, name) for name in _PASSED_ON},
            **fixed, settings=settings, steps=steps, eval_episodes=0,
        )
    )  # fmt: skip
    search = options.search or "random"
    trials = DEFAULT_TRIALS if options.trials is None and search != "grid" else options.trials
    cores = len(os.sched_getaffinity(0))
    concurrent = max(1, int(cores // cpus_per_trial(config))) if options.concurrent is None else options.concurrent
    return Sweep(
        config,
        tuple(parameters),
        steps,
        trials=trials,
        scheduler=options.scheduler or "none",
        search=search,
        concurrent=concurrent,
        checkpoint_every=DEFAULT_CHECKPOINT_EVERY if options.checkpoint_every is None else options.checkpoint_every,
    )


def _run(
    console: Console, stack: contextlib.ExitStack, options: SweepOptions, sweep: Sweep, path: Path
) -> SweepResults:
    with console.status("trying out the ends of what is varied"):
        quieten_ray()
        sweep.check()
    _start_ray(console, stack, sweep.concurrent, sweep.cpus_per_trial)
    varied = ", ".join(f"{p.name} {p}" for p in sweep.parameters)
    how = f"scheduler {sweep.scheduler}, search {sweep.search}, {sweep.concurrent} at a time, seed {sweep.config.seed}"
    console.print(
        f"sweep on {options.env}: {sweep.num_trials} trials of {sweep.steps:,} steps, {how}; {varied}; into {path}",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip
    with _view(console, options, sweep.num_trials, sweep.steps, path) as view, _sigterm_as_sigint():
        return sweep.run(path, view.update)


def _resume(console: Console, stack: contextlib.ExitStack, options: SweepOptions, folder: Path) -> SweepResults:
    given = [
        f.name for f in fields(options) if f.name not in _WITH_RESUME and getattr(options, f.name) not in (None, ())
    ]
    if given:
        raise ValueError(
            f"--resume {folder} goes on with the sweep as it was; {', '.join(given)} cannot be given beside it"
        )
    quieten_ray()
    from thrust_rllib.sweep_results import SweepResults, read_record
    from thrust_rllib.sweeps import Sweep

    record = read_record(folder)
    before = SweepResults.read(folder)
    left = before.unfinished + len(before.failed)
    if not left:
        before.write()
        return before
    _start_ray(console, stack, record["concurrent"], record["cpus_per_trial"])
    console.print(f"sweep {folder}: {left} of {before.num_trials} trials are left", highlight=False, soft_wrap=True)
    with _view(console, options, before.num_trials, before.steps, folder) as view, _sigterm_as_sigint():
        return Sweep.resume(folder, view.update)


def _start_ray(console: Console, stack: contextlib.ExitStack, concurrent: int, cpus_per_trial: float) -> None:
    from thrust_rllib.sweeps import set_up_tune

    set_up_tune()
    with console.status("starting Ray"):
        if start_ray(None, threads=1, cpus=math.ceil(concurrent * cpus_per_trial)):
            stack.callback(_shut_ray_down)


def _shut_ray_down() -> None:
    import ray

    ray.shutdown()


def _view(console: Console, options: SweepOptions, num_trials: int, steps: int, path: Path) -> SweepView:
    from thrust_rllib.command_line.sweep_view import LiveSweepView, PlainSweepView

    if console.is_terminal if options.live is None else options.live:
        return LiveSweepView(console, num_trials, steps, str(path))
    return PlainSweepView(console, num_trials)


@contextlib.contextmanager
def _sigterm_as_sigint() -> Iterator[None]:
    """Tune ends in an orderly way on Ctrl-C alone."""
    previous = signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _end(console: Console, results: SweepResults, folder: Path) -> int:
    """Draws, prints the table and where everything is; the exit code."""
    from thrust_rllib.command_line.sweep_view import in_words, trial_table
    from thrust_rllib.reporting.sweep_figure import draw_sweep
    from thrust_rllib.sweep_results import BEST, TABLE, TRIALS

    console.print(trial_table(results.ranked))
    for row in results.failed:
        print_error(f"{row.error} ({folder}/trials/{row.trial_id}/error.txt)", prefix=f"trial {row.number} failed")
    places = {"sweep": str(folder), "all trials": f"{folder}/{TABLE}"}
    if any(row.curve for row in results.rows):
        places["figure"] = str(draw_sweep(results, f"{folder.name}: {len(results.rows)} trials", folder / FIGURE))
    if results.best is not None:
        places["best trial"] = f"{folder}/{BEST} ({results.best.number}: {in_words(results.best)})"
        places["evaluate it"] = f"thrust-rllib evaluate {shlex.quote(f'{folder}/{BEST}')}"
    places["TensorBoard"] = f"tensorboard --logdir {shlex.quote(f'{folder}/{TRIALS}')}"
    for name, place in places.items():
        line = Text(f"{name:<16} ", style="dim")
        line.append(place, style="not dim")
        console.print(line, soft_wrap=True, highlight=False)
    if results.unfinished:
        print_error(f"{results.unfinished} trials are left; resume with {_resume_command(folder)}", prefix="stopped")
        return EXIT_INTERRUPTED
    return EXIT_FAILED if results.failed else EXIT_OK


def _resume_command(folder: Path) -> str:
    return f"thrust-rllib sweep --resume {shlex.quote(str(folder))}"
