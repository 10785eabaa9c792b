"""The command line `thrust-rllib`: its commands and options.

Ray and torch are imported by the commands that need them, so that help and `envs` answer at once.
"""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from rich.console import Console

from thrust_rllib import __version__

app = typer.Typer(
    help="Joint multi-agent PPO inside Ray RLlib.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Policies(str, enum.Enum):
    """Which networks play the agents."""

    per_agent = "per_agent"
    shared = "shared"


def _print_version(asked: bool) -> None:
    if asked:
        print(f"thrust_rllib {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
def envs() -> None:
    """List the environments that can be named."""
    from thrust_rllib.command_line.messages import print_envs

    print_envs(Console())


def _option(panel: str, help: str, *names: str, metavar: str | None = None, **settings: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, metavar=metavar, **settings)


def _count(panel: str, help: str, **settings: Any) -> Any:
    return _option(panel, help, metavar="N", **settings)


def _real(panel: str, help: str, *names: str) -> Any:
    return _option(panel, help, *names, metavar="X")


_ENV, _RUN, _LEARN, _TEAM, _OUT = "Environment", "How long, how fast", "Learning", "Team", "Output"
_PAIR = "NAME=VALUE"
_Int: TypeAlias = int | None
_Float: TypeAlias = float | None
_Texts: TypeAlias = list[str] | None


@app.command()
def train(
    env: Annotated[str, typer.Argument(help="A name; `thrust-rllib envs` lists them.")],
    env_config: Annotated[_Texts, _option(_ENV, "A setting; repeatable.", "--env-config", "-e", metavar=_PAIR)] = None,
    iterations: Annotated[_Int, _count(_RUN, "Stop after so many; 100 if no limit is given.")] = None,
    steps: Annotated[_Int, _count(_RUN, "Stop after so many environment steps.")] = None,
    minutes: Annotated[_Float, _real(_RUN, "Stop after so many minutes.")] = None,
    runners: Annotated[_Int, _count(_RUN, "Processes that sample; 0: the main one.", min=0)] = None,
    envs_per_runner: Annotated[_Int, _count(_RUN, "Environments in each.", min=1)] = None,
    threads: Annotated[_Int, _count(_RUN, "Of torch; default: OMP_NUM_THREADS, else 1.", min=1)] = None,
    seed: Annotated[_Int, _count(_RUN, "Drawn, and recorded in config.json, if not given.")] = None,
    lr: Annotated[_Float, _real(_LEARN, "Learning rate.")] = None,
    critic_lr: Annotated[_Float, _real(_LEARN, "The critics' own learning rate.")] = None,
    gamma: Annotated[_Float, _real(_LEARN, "Discount.")] = None,
    lambda_: Annotated[_Float, _real(_LEARN, "λ of the advantages.", "--lambda")] = None,
    entropy: Annotated[_Float, _real(_LEARN, "Coefficient of the entropy.")] = None,
    batch: Annotated[_Int, _count(_LEARN, "Environment steps per iteration.")] = None,
    minibatch: Annotated[_Int, _count(_LEARN, "Joint rows per gradient step.")] = None,
    epochs: Annotated[_Int, _count(_LEARN, "Passes over the batch.")] = None,
    normalize_observations: Annotated[
        bool | None,
        _option(_LEARN, "By running mean and deviation.", "--normalize-observations/--no-normalize-observations"),
    ] = None,
    settings: Annotated[
        _Texts, _option(_LEARN, "Any other option of JointPPOConfig; repeatable.", "--set", metavar=_PAIR)
    ] = None,
    redundancy: Annotated[_Float, _option(_TEAM, "Penalise features that agents share.", metavar="COEFF")] = None,
    policies: Annotated[
        Policies | None,
        _option(_TEAM, "A network for each agent, or one for all."),
    ] = None,
    freeze: Annotated[_Texts, _option(_TEAM, "Leave its network as it is; repeatable.", metavar="AGENT")] = None,
    output: Annotated[
        Path | None,
        _option(_OUT, "Run folder, new or empty; default: runs/<env>-<time>.", "--output", "-o"),
    ] = None,
    checkpoint_every: Annotated[
        int, _count(_OUT, "Iterations between checkpoints; 0: only the last. The latest 3 are kept.", min=0)
    ] = 50,
    eval_episodes: Annotated[int, _count(_OUT, "Episodes played at the end for evaluation.", min=0)] = 100,
    live: Annotated[
        bool | None,
        _option(_OUT, "Live view, or a line per iteration; default: live in a terminal.", "--live/--no-live"),
    ] = None,
    traceback: Annotated[bool, _option(_OUT, "Show Python's traceback of an error.", "--traceback")] = False,
) -> None:
    """Train on ENV. Everything about the run ends up in one folder.

    The folder has config.json, progress.csv, TensorBoard events, checkpoints/ and report/ with the learning curves.

    Ctrl-C (or SIGTERM) ends the run after its iteration, with a checkpoint and the report; a second one at once.

    Options that are not given have the values of thrust_rllib.recipes, then of JointPPOConfig; config.json lists all.

    Exit code: 0 finished, 1 failed while running, 2 wrong usage, 130 stopped by Ctrl-C.
    """
    from thrust_rllib.command_line.options import TrainOptions
    from thrust_rllib.command_line.train import run

    options = TrainOptions(
        env=env, env_config=env_config or (), iterations=iterations, steps=steps, minutes=minutes, runners=runners,
        envs_per_runner=envs_per_runner, threads=threads, seed=seed, lr=lr, critic_lr=critic_lr, gamma=gamma,
        lambda_=lambda_, entropy=entropy, batch=batch, minibatch=minibatch, epochs=epochs,
        normalize_observations=normalize_observations, settings=settings or (), redundancy=redundancy,
        policies=None if policies is None else policies.value, freeze=freeze or (), output=output,
        checkpoint_every=checkpoint_every, eval_episodes=eval_episodes, live=live, traceback=traceback,
    )  # fmt: skip
    raise typer.Exit(run(options))
