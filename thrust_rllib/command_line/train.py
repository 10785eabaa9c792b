"""`thrust-rllib train` from its options to its exit code."""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from thrust_rllib.command_line.lasting_output import lasting_output
from thrust_rllib.command_line.messages import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    exit_with,
    print_end,
    print_error,
    unsaved_text,
)
from thrust_rllib.command_line.options import TrainOptions, build_config, choose_limit, gives_lr, parse_pairs
from thrust_rllib.command_line.progress_view import LiveView, PlainView, View, ViewHandler
from thrust_rllib.command_line.resume import (
    FoundRun,
    find_run,
    limit_of,
    own_options,
    resumed_config,
    with_defaults,
    with_own_options,
)
from thrust_rllib.command_line.run_folder import CONFIG_FILE, RunFolder, choose_folder
from thrust_rllib.command_line.run_record import run_record, write_json
from thrust_rllib.command_line.training_progress import Limit
from thrust_rllib.command_line.training_run import (
    build,
    prepare_process,
    quieten_ray,
    restore,
    run_training,
    start_ray,
)


@lasting_output()
def run(options: TrainOptions) -> int:
    """Trains, with all messages; returns the exit code."""
    console = Console()
    found: FoundRun | None = None
    try:
        for option, pairs in (
            ("--env-config", options.env_config),
            ("--model", options.model),
            ("--set", options.settings),
        ):
            parse_pairs(option, pairs)
        if options.resume is None:
            if options.env is None:
                raise ValueError("ENV is missing: the name of an environment, as `thrust-rllib envs` lists them")
            options, path = with_defaults(options), choose_folder(options.output, str(options.env))
            limit = choose_limit(options.iterations, options.steps, options.minutes)
        else:
            found = find_run(options.resume)
            options, path = with_own_options(options, found), found.folder
            limit = limit_of(options, found)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_messages_in(PlainView(console, limit)))
            return _run(console, options, limit, path, found, stack)
    except KeyboardInterrupt:
        left = "nothing was written" if found is None else f"{found.folder} is as it was"
        print_error(f"before the first iteration; {left}", prefix="stopped")
        return EXIT_INTERRUPTED
    except Exception as error:
        return exit_with(error, options.traceback)


def _run(
    console: Console,
    options: TrainOptions,
    limit: Limit,
    path: Path,
    found: FoundRun | None,
    stack: contextlib.ExitStack,
) -> int:
    threads = prepare_process(options.threads)
    # The folder of a new run is made only when everything stands.
    opened = None if found is None else stack.enter_context(contextlib.closing(RunFolder(path)))
    with console.status("starting Ray and building the networks"):
        quieten_ray()
        record: dict[str, Any] | None = None
        if found is None:
            config = build_config(options)
        else:
            config, record = resumed_config(options, found, limit)
        if start_ray(config, threads, options.address):
            stack.callback(_shut_ray_down)
        algo = stack.enter_context(build(config))
        if found is not None:
            restore(algo, found)
    folder = opened or stack.enter_context(contextlib.closing(RunFolder(path)))
    if found is not None and (aside := folder.go_on_from(found.checkpoint)):
        console.print(f"what lay behind {found.checkpoint.name} is now in {aside}", markup=False, soft_wrap=True)
    record = record or run_record(
        config, limit={limit.kind: limit.amount}, run=own_options(options, not gives_lr(options))
    )
    write_json(folder.path / CONFIG_FILE, record)
    return _train(console, options, limit, algo, folder, found)


def _train(
    console: Console, options: TrainOptions, limit: Limit, algo: Any, folder: RunFolder, found: FoundRun | None
) -> int:
    seed = f"seed {algo.config.seed}"
    agents = sorted(algo.config.policies)
    view: View = PlainView(console, limit)
    if console.is_terminal if options.live is None else options.live:
        view = LiveView(console, limit, f"{options.env} · {len(agents)} networks", f"{folder.shown} · {seed}")
    elif found is None:
        view.message(f"training {options.env}: {limit}, {seed}, networks {', '.join(agents)}; into {folder.shown}")
    with view, _messages_in(view):
        logging.getLogger("thrust_rllib").info(algo.config.door)
        if algo.config.samples_episodes:
            view.message(algo.config.door)
        if found is not None:
            view.message(f"{folder.shown} goes on from iteration {found.iteration:,}: {options.env}, {limit}, {seed}")
        outcome = run_training(
            algo,
            folder,
            limit,
            view,
            checkpoint_every=options.checkpoint_every or 0,
            evaluate=bool(options.eval_episodes),
            seconds_before=0.0 if found is None else found.seconds,
        )
        folder.close()
    if outcome.at_once:
        print_error("at once; what was written stays", prefix="stopped")
    if outcome.error is not None:
        if options.traceback:
            traceback.print_exception(outcome.error)
        print_error(outcome.error)
    if outcome.stop_reason is not None:
        print_error(outcome.stop_reason, prefix="ended early")
    if outcome.save_error is not None:
        print_error(unsaved_text(outcome, folder))
    print_end(console, outcome, folder)
    if outcome.error is not None or outcome.stop_reason is not None or outcome.save_error is not None:
        return EXIT_FAILED
    return EXIT_INTERRUPTED if outcome.interrupted else EXIT_OK


@contextlib.contextmanager
def _messages_in(view: View) -> Iterator[None]:
    """This package's warnings become lines of `view`; its notes (INFO) reach the run's log."""
    logger = logging.getLogger("thrust_rllib")
    handler, level = ViewHandler(view), logger.level
    others = [h for h in logger.handlers if isinstance(h, ViewHandler)]
    for other in others:
        logger.removeHandler(other)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        for other in others:
            logger.addHandler(other)


def _shut_ray_down() -> None:
    import ray

    ray.shutdown()
