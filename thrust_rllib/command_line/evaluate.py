"""`thrust-rllib evaluate` from its options to its exit code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from thrust_rllib.command_line.checkpoints import find_checkpoint
from thrust_rllib.command_line.messages import EXIT_INTERRUPTED, EXIT_OK, exit_with, print_error
from thrust_rllib.command_line.options import parse_pairs
from thrust_rllib.command_line.run_record import origin, write_json
from thrust_rllib.command_line.training_run import prepare_process, quieten_ray

if TYPE_CHECKING:
    from thrust_rllib.command_line.evaluation_result import EvaluationResult
    from thrust_rllib.command_line.rendering import Frames


@dataclass(frozen=True)
class EvaluateOptions:
    """What `thrust-rllib evaluate` was given. See its help."""

    path: Path
    episodes: int = 100
    seed: int = 0
    sample: bool = False
    baselines: Sequence[str] = ()
    render: Path | None = None
    env_config: Sequence[str] = ()
    output: Path | None = None
    traceback: bool = False


def run(options: EvaluateOptions) -> int:
    """Evaluates, with all messages; returns the exit code."""
    console = Console()
    prepare_process()
    try:
        env_config = parse_pairs("--env-config", options.env_config)
        _check_new_file("--output", options.output, ".json")
        _check_new_file("--render", options.render, ".gif")
        if options.episodes < 1:
            raise ValueError(f"--episodes {options.episodes}; needed: at least 1")
        checkpoint = find_checkpoint(options.path)
        result, frames = _play(console, options, checkpoint, env_config)
        result.print(console)
        _write(console, options, result, frames)
        return EXIT_OK
    except KeyboardInterrupt:
        print_error("nothing was written", prefix="stopped")
        return EXIT_INTERRUPTED
    except Exception as error:
        return exit_with(error, options.traceback)


def _check_new_file(option: str, path: Path | None, suffix: str) -> None:
    if path is None:
        return
    if path.suffix.lower() != suffix:
        raise ValueError(f"{option} {path}; needed: a file name that ends in {suffix}, such as {path.stem}{suffix}")
    if path.exists():
        raise ValueError(
            f"{option} {path} exists; nothing is overwritten. Give another name, or remove it first (rm {path})"
        )


def _play(
    console: Console, options: EvaluateOptions, checkpoint: Path, changes: Mapping[str, Any]
) -> tuple[EvaluationResult, Frames | None]:
    with console.status("restoring the team"):
        quieten_ray()
        from thrust_rllib.baselines import check_baseline, play_baseline
        from thrust_rllib.command_line.evaluation_result import EvaluationResult
        from thrust_rllib.command_line.rendering import film_episode
        from thrust_rllib.evaluation import play_episodes
        from thrust_rllib.trained_team import load_team

        team = load_team(checkpoint)
    env_config = {**team.config.env_config, **changes}
    baselines = list(dict.fromkeys(options.baselines))
    for name in baselines:
        check_baseline(team, name, env_config)
    frames = None
    if options.render is not None:
        with console.status("drawing one episode"):
            frames, _ = film_episode(team, seed=options.seed, explore=options.sample, env_config=env_config)
    with console.status(f"playing {options.episodes:,} episodes"):
        played = play_episodes(team, options.episodes, seed=options.seed, explore=options.sample, env_config=env_config)
    reference = {}
    for name in baselines:
        with console.status(f"playing {options.episodes:,} episodes: {name}"):
            reference[name] = play_baseline(team, name, options.episodes, seed=options.seed, env_config=env_config)
    result = EvaluationResult(
        checkpoint=checkpoint,
        iteration=team.iteration,
        env_name=team.env_name,
        env_config=env_config,
        seed=options.seed,
        sampled=options.sample,
        policy=played,
        baselines=reference,
    )
    return result, frames


def _write(console: Console, options: EvaluateOptions, result: EvaluationResult, frames: Frames | None) -> None:
    from thrust_rllib.command_line.rendering import MAX_FRAMES, write_gif

    if options.render is not None and frames is not None:
        options.render.parent.mkdir(parents=True, exist_ok=True)
        write_gif(options.render, frames)
        cut = f", the first {MAX_FRAMES - 1:,} steps" if frames.cut else ""
        console.print(
            f"animation  {options.render} ({len(frames.images)} pictures{cut})", soft_wrap=True, highlight=False
        )
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        write_json(options.output, {**origin(), **result.record()})
        console.print(f"numbers    {options.output}", soft_wrap=True, highlight=False)
