"""One training run in this process: Ray, the loop, checkpoints, evaluation, report."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thrust_rllib.command_line.backend_lines import without_lines_of_restarts
from thrust_rllib.command_line.run_folder import RAY_LOGGERS, RunFolder
from thrust_rllib.command_line.stop_signal import StopSignal
from thrust_rllib.command_line.training_progress import Limit, Progress

if TYPE_CHECKING:
    from thrust_rllib.command_line.progress_view import View
    from thrust_rllib.command_line.resume import FoundRun
    from thrust_rllib.config import JointPPOConfig

logger = logging.getLogger(__name__)

ERROR_FILE = "error.txt"
CONNECT_S = 10.0


@dataclass
class Outcome:
    """How a run ended.

    Args:
        progress: after the last iteration; None if there was none.
        checkpoint: the last one.
        plot: the learning curves.
        evaluation: results of the evaluation at the end, and whether its actions were "sampled" (or greedy).
        interrupted: by Ctrl-C, SIGTERM or SIGHUP.
        at_once: by a second one, which left the rest undone.
        error: what failed while it ran.
        stop_reason: why the training itself ended before its limit.
        save_error: why the last checkpoint could not be written; the disk is full, say.
        began_at: the iteration from which the run went on; 0 for a new one.
    """

    progress: Progress | None = None
    checkpoint: Path | None = None
    plot: Path | None = None
    evaluation: dict[str, Any] | None = None
    interrupted: bool = False
    at_once: bool = False
    error: Exception | None = None
    stop_reason: str | None = None
    save_error: OSError | None = None
    began_at: int = 0


def prepare_process(threads: int | None = None) -> int:
    """Sets the number of threads, before torch is imported, and where modules are looked for; returns the number.

    Args:
        threads: of torch here and in Ray's processes; None takes OMP_NUM_THREADS, else 1.
    """
    threads = threads or int(os.environ.get("OMP_NUM_THREADS") or 1)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # `module:callable` of the current folder, as with `python -m`
    return threads


def start_ray(
    config: JointPPOConfig | None, threads: int | None = None, address: str | None = None, cpus: int | None = None
) -> bool:
    """Starts a Ray of our own on this machine, quietly, if none runs in this process; returns whether it did.

    Args:
        config: how many processes there will be; None where `cpus` says it.
        threads: of torch.
        address: of a cluster to join instead.
        cpus: how many Ray counts; None: those of the machine, or as many as there are processes.

    Raises:
        ConnectionError: nothing answers there.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # silences a FutureWarning on every start
    import ray
    import torch

    from thrust_rllib.resources import needed_cpus

    if threads is not None:
        torch.set_num_threads(threads)
    quieten_ray()
    if ray.is_initialized():
        return False
    if address is not None:
        _check_answers(address)
    address = None if address == "local" else address
    if cpus is None:
        cpus = max(os.cpu_count() or 1, 1 + math.ceil(0 if config is None else needed_cpus(config)))
    own = {"include_dashboard": False, "num_cpus": cpus}
    ray.init(
        address=address or "local",
        logging_level=logging.ERROR,
        runtime_env={"worker_process_setup_hook": f"{__name__}.quieten_ray"},
        **({} if address else own),
    )
    quieten_ray()
    return True


def _check_answers(address: str) -> None:
    """Knocks where an address names host and port; Ray would go on trying for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except OSError as error:
        raise ConnectionError(
            f"no cluster answers at {address} within {CONNECT_S:.0f} s ({error}). `ray start --head` prints the "
            "address (port 6379 by default); 'auto' takes the cluster of this machine."
        ) from error


def quieten_ray(level: int = logging.ERROR) -> None:
    """What Ray and RLlib log below `level` stays out of the terminal; a run folder's train.log has it."""
    import ray.rllib  # noqa: F401 - makes the handlers

    for name in RAY_LOGGERS:
        for handler in logging.getLogger(name).handlers:
            if type(handler) is not logging.FileHandler:
                handler.setLevel(level)


@contextlib.contextmanager
def build(config: JointPPOConfig) -> Iterator[Any]:
    """The algorithm; stopped at the end."""
    with without_lines_of_restarts():
        algo = config.build_algo()
    # RLlib makes an empty folder in ~/ray_results for each algorithm, which nothing of ours uses.
    with contextlib.suppress(OSError):
        os.rmdir(algo.logdir)
    try:
        yield algo
    finally:
        quieten_ray(logging.CRITICAL)  # after a failure, RLlib logs again and again that the same process is dead
        algo.stop()
        quieten_ray()


def restore(algo: Any, found: FoundRun) -> None:
    """Takes a checkpoint into a built algorithm.

    Raises:
        ValueError: it does not fit, or cannot be read.
    """
    if missing := _missing_in(found.checkpoint, algo.config.policies):
        raise ValueError(
            f"the checkpoint {found.checkpoint} cannot be restored: it lacks {', '.join(missing)}. Take an earlier one "
            f"of {found.checkpoint.parent}"
        )
    try:
        algo.restore_from_path(str(found.checkpoint.absolute()))
    except Exception as error:
        raise ValueError(
            f"the checkpoint {found.checkpoint} cannot be restored: {type(error).__name__}: "
            f"{str(error).removesuffix('.')}. Leave out what was given beside --resume, or take an earlier one "
            f"of {found.checkpoint.parent}"
        ) from error
    if algo.iteration != found.iteration:
        raise ValueError(
            f"the checkpoint {found.checkpoint} is one of iteration {algo.iteration}: give it its own name back"
        )


def _missing_in(checkpoint: Path, modules: Iterable[str]) -> list[str]:
    """Folders that RLlib passes over where they are not there: what they hold would stay as it was built."""
    needed = [f"learner_group/learner/rl_module/{name}" for name in sorted(modules)]
    missing = [name for name in needed if not (checkpoint / name).is_dir()]
    connectors = "env_to_module_connector"  # with a local runner they are a part of it
    if not any((checkpoint / place / connectors).is_dir() for place in (".", "env_runner")):
        missing.append(connectors)
    return missing


def run_training(
    algo: Any,
    folder: RunFolder,
    limit: Limit,
    view: View,
    *,
    checkpoint_every: int,
    evaluate: bool,
    seconds_before: float = 0.0,
) -> Outcome:
    """Trains until `limit`, a signal or the training's own end; then a checkpoint, the evaluation and the report.

    An error ends the run, too, with a checkpoint where the networks are still those of the last whole iteration: what
    an environment raises comes while sampling. A disk that is full does not: what it refuses is tried again.

    Args:
        algo: built.
        folder: of the run.
        limit: when to end.
        view: is told about every iteration.
        checkpoint_every: iterations; the last one is saved in any case.
        evaluate: as the configuration says; not after a signal.
        seconds_before: that the run has trained before it went on.
    """
    outcome = Outcome(began_at=algo.iteration)
    try:
        with StopSignal(view) as stop:
            try:
                _train(algo, folder, limit, view, checkpoint_every, stop, outcome, seconds_before)
                if evaluate and not stop.requested:
                    view.doing("evaluating")
                    played = algo.evaluate()["env_runners"]
                    outcome.evaluation = {**played, "sampled": bool(algo.evaluation_config.explore)}
            except Exception as error:
                outcome.error = error
                with contextlib.suppress(OSError):
                    (folder.path / ERROR_FILE).write_text(traceback.format_exc(), "utf-8")
                if outcome.progress is not None and algo.can_be_saved:
                    _save(algo, folder, outcome)
            outcome.interrupted = stop.requested
            if outcome.progress is not None:
                _report(algo, folder, view, outcome)
    except KeyboardInterrupt:
        outcome.interrupted = outcome.at_once = True
    outcome.checkpoint = next(reversed(folder.checkpoints()), None)
    return outcome


def _report(algo: Any, folder: RunFolder, view: View, outcome: Outcome) -> None:
    from thrust_rllib.report import write_report
    from thrust_rllib.reporting.final_features import write_feature_correlation
    from thrust_rllib.reporting.run_curves import NoIterationError

    view.doing("writing the report")
    try:
        assert outcome.progress is not None
        if outcome.error is None and (why := write_feature_correlation(algo, folder.path, outcome.progress)):
            view.message(why)
        outcome.plot = write_report(folder.path, evaluation=outcome.evaluation)
    except (OSError, NoIterationError) as error:
        logger.warning("the report could not be written (%s); `thrust-rllib report %s` does later", error, folder.shown)


def _save(algo: Any, folder: RunFolder, outcome: Outcome) -> None:
    """A checkpoint of the last iteration; on a full disk a warning, since the run can go on without."""
    assert outcome.progress is not None
    iteration = outcome.progress.iteration
    try:
        folder.save_checkpoint(algo, iteration)
        outcome.save_error = None
    except OSError as error:
        outcome.save_error = error
        newest = next((path.name for path in reversed(folder.checkpoints())), "none")
        logger.warning(
            "the checkpoint of iteration %d could not be written (%s); the newest one is %s", iteration, error, newest
        )
    except Exception as error:
        if outcome.error is None:
            raise
        logger.warning("no checkpoint of iteration %d: %s", iteration, error)


def _train(
    algo: Any,
    folder: RunFolder,
    limit: Limit,
    view: View,
    checkpoint_every: int,
    stop: StopSignal,
    outcome: Outcome,
    seconds_before: float,
) -> None:
    from thrust_rllib.entropy_guard import STOP_REASON

    started = time.perf_counter() - seconds_before
    could_log = True
    while not (stop.requested or outcome.stop_reason) and not (outcome.progress and limit.reached(outcome.progress)):
        result = algo.train()
        try:
            folder.log(result)
            could_log = True
        except OSError as error:
            if could_log:
                logger.warning("results cannot be written (%s); they are kept until there is room", error)
            could_log = False
        outcome.progress = Progress.of(result, time.perf_counter() - started)
        view.update(outcome.progress)
        outcome.stop_reason = result.get(STOP_REASON)
        if checkpoint_every and outcome.progress.iteration % checkpoint_every == 0:
            _save(algo, folder, outcome)
    if outcome.progress is not None:
        _save(algo, folder, outcome)
