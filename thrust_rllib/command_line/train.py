"""`thrust-rllib train` from its options to its exit code."""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from thrust_rllib.command_line.messages import print_end, print_error
from thrust_rllib.command_line.options import TrainOptions, build_config, choose_limit, parse_pairs
from thrust_rllib.command_line.progress_view import LiveView, PlainView, View, ViewHandler
from thrust_rllib.command_line.run_folder import CONFIG_FILE, RunFolder, choose_folder
from thrust_rllib.command_line.run_record import run_record, write_json
from thrust_rllib.command_line.training_progress import Limit
from thrust_rllib.command_line.training_run import build, prepare_process, quieten_ray, run_training, start_ray

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130


def run(options: TrainOptions) -> int:
    """Trains, with all messages; returns the exit code."""
    console = Console()
    threads = prepare_process(options.threads)
    try:
        limit = choose_limit(options.iterations, options.steps, options.minutes)
        for option, pairs in (
            ("--env-config", options.env_config),
            ("--model", options.model),
            ("--set", options.settings),
        ):
            parse_pairs(option, pairs)
        path = choose_folder(options.output, options.env)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_messages_in(PlainView(console, limit)))
            with console.status("starting Ray and building the networks"):
                quieten_ray()
                config = build_config(options)
                if start_ray(config, threads, options.address):
                    stack.callback(_shut_ray_down)
                algo = stack.enter_context(build(config))
            return _train(console, options, limit, config, algo, RunFolder(path))
    except KeyboardInterrupt:
        print_error("before the first iteration; nothing was written", prefix="stopped")
        return EXIT_INTERRUPTED
    except Exception as error:
        if options.traceback:
            traceback.print_exc()
        print_error(error)
        return EXIT_USAGE if isinstance(error, (ValueError, TypeError)) else EXIT_FAILED


def _train(console: Console, options: TrainOptions, limit: Limit, config: Any, algo: Any, folder: RunFolder) -> int:
    write_json(folder.path / CONFIG_FILE, run_record(config, limit={limit.kind: limit.amount}))
    seed = f"seed {config.seed}"
    agents = sorted(config.policies)
    view: View = PlainView(console, limit)
    if console.is_terminal if options.live is None else options.live:
        view = LiveView(console, limit, f"{options.env} · {len(agents)} networks", f"{folder.shown} · {seed}")
    else:
        view.message(f"training {options.env}: {limit}, {seed}, networks {', '.join(agents)}; into {folder.shown}")
    try:
        with view, _messages_in(view):
            logging.getLogger("thrust_rllib").info(algo.config.door)
            if algo.config.samples_episodes:
                view.message(algo.config.door)
            outcome = run_training(
                algo,
                folder,
                limit,
                view,
                checkpoint_every=options.checkpoint_every,
                evaluate=options.eval_episodes > 0,
            )
    finally:
        folder.close()
    if outcome.at_once:
        print_error("at once; what was written stays", prefix="stopped")
    if outcome.error is not None:
        if options.traceback:
            traceback.print_exception(outcome.error)
        print_error(outcome.error)
    if outcome.stop_reason is not None:
        print_error(outcome.stop_reason, prefix="ended early")
    print_end(console, outcome, folder)
    if outcome.error is not None or outcome.stop_reason is not None:
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
