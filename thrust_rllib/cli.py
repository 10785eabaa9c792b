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


class Cell(str, enum.Enum):
    """What networks remember with."""

    lstm = "lstm"
    gru = "gru"
    message_gru = "message_gru"


class Baseline(str, enum.Enum):
    """What a team is compared with."""

    random = "random"
    specialist = "specialist"


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


@app.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False}
)
def bench(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Without a name they are listed.", show_default=False)] = None,
) -> None:
    """Run a benchmark of the repository. Options after its name are its own: `thrust-rllib bench floor --rounds 9`.

    It runs in a process of its own; Ctrl-C ends it. Exit code: the benchmark's, 2 for wrong usage.
    """
    from thrust_rllib.command_line.bench import print_benchmarks, run_benchmark
    from thrust_rllib.command_line.messages import print_error

    try:
        if name is None:
            print_benchmarks(Console())
            return
        code = run_benchmark(name, context.args[context.args[:1] == ["--"] :])
    except ValueError as error:
        print_error(error)
        raise typer.Exit(2) from None
    raise typer.Exit(code)


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
_Normalize: TypeAlias = Annotated[
    bool | None,
    _option(_LEARN, "By running mean and deviation.", "--normalize-observations/--no-normalize-observations"),
]
_Settings: TypeAlias = Annotated[
    _Texts, _option(_LEARN, "Any other option of JointPPOConfig; repeatable.", "--set", metavar=_PAIR)
]


@app.command()
def train(
    env: Annotated[
        str | None, typer.Argument(help="A name; `thrust-rllib envs` lists them.", show_default=False)
    ] = None,
    env_config: Annotated[_Texts, _option(_ENV, "A setting; repeatable.", "--env-config", "-e", metavar=_PAIR)] = None,
    resume: Annotated[
        Path | None, _option(_RUN, "Go on with a run, in its folder, in place of ENV.", metavar="RUN")
    ] = None,
    iterations: Annotated[_Int, _count(_RUN, "Stop after so many; 100 if no limit is given.")] = None,
    steps: Annotated[_Int, _count(_RUN, "Stop after so many environment steps.")] = None,
    minutes: Annotated[_Float, _real(_RUN, "Stop after so many minutes.")] = None,
    runners: Annotated[_Int, _count(_RUN, "Processes that sample; 0: the main one.", min=0)] = None,
    envs_per_runner: Annotated[_Int, _count(_RUN, "Environments in each.", min=1)] = None,
    learners: Annotated[_Int, _count(_RUN, "Processes that learn together; 0: the main one.", min=0)] = None,
    threads: Annotated[_Int, _count(_RUN, "Of torch; default: OMP_NUM_THREADS, else 1.", min=1)] = None,
    address: Annotated[str | None, _option(_RUN, "Ray cluster: auto, HOST:PORT.", metavar="ADDRESS")] = None,
    seed: Annotated[_Int, _count(_RUN, "Drawn, and recorded in config.json, if not given.")] = None,
    lr: Annotated[_Float, _real(_LEARN, "Learning rate.")] = None,
    critic_lr: Annotated[_Float, _real(_LEARN, "The critics' own learning rate.")] = None,
    gamma: Annotated[_Float, _real(_LEARN, "Discount.")] = None,
    lambda_: Annotated[_Float, _real(_LEARN, "λ of the advantages.", "--lambda")] = None,
    entropy: Annotated[_Float, _real(_LEARN, "Coefficient of the entropy.")] = None,
    batch: Annotated[_Int, _count(_LEARN, "Environment steps per iteration, for each learner.")] = None,
    minibatch: Annotated[_Int, _count(_LEARN, "Joint rows per gradient step, for each learner.")] = None,
    epochs: Annotated[_Int, _count(_LEARN, "Passes over the batch.")] = None,
    normalize_observations: _Normalize = None,
    settings: _Settings = None,
    redundancy: Annotated[_Float, _option(_TEAM, "Penalise features that agents share.", metavar="COEFF")] = None,
    policies: Annotated[
        Policies | None,
        _option(_TEAM, "A network for each agent, or one for all."),
    ] = None,
    cell: Annotated[
        Cell | None,
        _option(_TEAM, "Networks with a memory: LSTM, GRU, or (beside message_rounds) a GRU in the messages."),
    ] = None,
    model: Annotated[
        _Texts,
        _option(
            _TEAM,
            "A setting of the networks, e.g. fcnet_hiddens=[64]; with a memory cell_size=128, max_seq_len=32; "
            "message_rounds=2: agents exchange messages; repeatable.",
            "--model",
            metavar=_PAIR,
        ),
    ] = None,
    freeze: Annotated[_Texts, _option(_TEAM, "Leave its network as it is; repeatable.", metavar="AGENT")] = None,
    output: Annotated[
        Path | None,
        _option(_OUT, "Run folder, new or empty; default: runs/<env>-<time>.", "--output", "-o"),
    ] = None,
    checkpoint_every: Annotated[
        _Int,
        _count(_OUT, "Iterations between checkpoints; 0: only the last. The latest 3 are kept. Default: 50.", min=0),
    ] = None,
    eval_episodes: Annotated[
        _Int, _count(_OUT, "Episodes played at the end for evaluation. Default: 100.", min=0)
    ] = None,
    live: Annotated[
        bool | None,
        _option(_OUT, "Live view, or a line per iteration; default: live in a terminal.", "--live/--no-live"),
    ] = None,
    traceback: Annotated[bool, _option(_OUT, "Show Python's traceback of an error.", "--traceback")] = False,
) -> None:
    """Train on ENV. Everything about the run ends up in one folder.

    The folder has config.json, progress.csv, TensorBoard events, checkpoints/ and report/ with the learning curves.

    Ctrl-C (or SIGTERM) ends the run after its iteration, with a checkpoint and the report; a second one at once. So
    does closing the terminal.

    --resume RUN goes on from RUN's newest checkpoint (or RUN is one of its checkpoints), with the run's own options.

    What may be given beside it: a new end (--iterations and --steps count from the start of the run, --minutes from
    now), --runners, --learners, --threads, --address, --lr, --critic-lr, --entropy, --redundancy, --freeze, --set,
    --checkpoint-every, --eval-episodes, --live.

    Options that are not given have the values of thrust_rllib.recipes, then of JointPPOConfig; config.json lists all.

    Exit code: 0 finished, 1 failed while running, 2 wrong usage, 130 stopped by Ctrl-C.

    A run that min_entropy ends has exit code 1, too, with a checkpoint and the report; so has one whose last
    checkpoint could not be written.
    """
    from thrust_rllib.command_line.options import TrainOptions
    from thrust_rllib.command_line.train import run

    options = TrainOptions(
        env=env, env_config=env_config or (), iterations=iterations, steps=steps, minutes=minutes, runners=runners,
        envs_per_runner=envs_per_runner, learners=learners, threads=threads, address=address, seed=seed, lr=lr,
        critic_lr=critic_lr, gamma=gamma, lambda_=lambda_, entropy=entropy, batch=batch, minibatch=minibatch,
        epochs=epochs, normalize_observations=normalize_observations, settings=settings or (), redundancy=redundancy,
        policies=None if policies is None else policies.value, cell=None if cell is None else cell.value,
        model=model or (), freeze=freeze or (), output=output, checkpoint_every=checkpoint_every,
        eval_episodes=eval_episodes, live=live, traceback=traceback, resume=resume,
    )  # fmt: skip
    raise typer.Exit(run(options))


_PLAY, _COMPARE = "What is played", "What is compared"


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="A run folder (its latest checkpoint), or a checkpoint.")],
    episodes: Annotated[int, _count(_PLAY, "Episodes.", min=1)] = 100,
    seed: Annotated[int, _count(_PLAY, "Of environments and sampled actions.", min=0)] = 0,
    sample: Annotated[
        bool, _option(_PLAY, "Sample actions, or take the most likely ones.", "--sample/--greedy")
    ] = False,
    env_config: Annotated[
        _Texts, _option(_PLAY, "Change a setting of the environment; repeatable.", "--env-config", "-e", metavar=_PAIR)
    ] = None,
    baseline: Annotated[
        list[Baseline] | None,
        _option(_COMPARE, "Also play this in the same environments; repeatable. Specialist: bucket_brigade only."),
    ] = None,
    render: Annotated[
        Path | None, _option(_OUT, "Draw one episode into a new animated GIF.", metavar="FILE.gif")
    ] = None,
    output: Annotated[
        Path | None, _option(_OUT, "Write all numbers into a new file.", "--output", "-o", metavar="FILE.json")
    ] = None,
    traceback: Annotated[bool, _option(_OUT, "Show Python's traceback of an error.", "--traceback")] = False,
) -> None:
    """Play episodes with a trained team: means with 95 % intervals, for the team and each agent.

    Intervals are Student's t over episodes. With both baselines the gap closed is printed, too.

    Exit code: 0 finished, 1 failed while playing, 2 wrong usage, 130 stopped by Ctrl-C.
    """
    from thrust_rllib.command_line.evaluate import EvaluateOptions
    from thrust_rllib.command_line.evaluate import run as evaluate_run

    options = EvaluateOptions(
        path=run, episodes=episodes, seed=seed, sample=sample, baselines=[b.value for b in baseline or ()],
        render=render, env_config=env_config or (), output=output, traceback=traceback,
    )  # fmt: skip
    raise typer.Exit(evaluate_run(options))


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, e.g. runs/*.", metavar="RUN")],
    output: Annotated[
        Path | None,
        _option(_OUT, "Default: report/ of a single run, else report-<time> here.", "--output", "-o", metavar="FOLDER"),
    ] = None,
    label: Annotated[
        _Texts, _option(_OUT, "Name of a group, in their order; repeatable.", "--label", metavar="NAME")
    ] = None,
) -> None:
    """Compare runs: learning curves, final numbers, feature correlation, in one report.html and as PNGs.

    Runs whose config.json differs in the seed only are one group: its mean with a band. Groups are compared and named
    after the settings in which they differ.

    Exit code: 0 written, 1 the files could not be written, 2 wrong usage, such as a folder that is no run.
    """
    from thrust_rllib.command_line.report import run

    raise typer.Exit(run(runs, output, label or ()))


class Scheduler(str, enum.Enum):
    """Which trials of a sweep go on."""

    none = "none"
    asha = "asha"
    pbt = "pbt"


class Search(str, enum.Enum):
    """Where the parameters of a sweep's trials come from."""

    random = "random"
    grid = "grid"
    optuna = "optuna"


_SWEEP, _VARIED = "Sweep", "What is varied: one value, A,B,C, LOW:HIGH or LOW:HIGH:linear"
_Text: TypeAlias = str | None


def _spec(help: str, *names: str) -> Any:
    return _option(_VARIED, help, *names, metavar="SPEC")


@app.command()
def sweep(
    env: Annotated[_Text, typer.Argument(help="A name; `thrust-rllib envs` lists them.", show_default=False)] = None,
    env_config: Annotated[_Texts, _option(_ENV, "A setting; repeatable.", "--env-config", "-e", metavar=_PAIR)] = None,
    trials: Annotated[_Int, _count(_SWEEP, "How many; 8 unless it is a grid.", min=1)] = None,
    steps: Annotated[_Int, _count(_SWEEP, "Environment steps of each; default: 100,000.", min=1)] = None,
    scheduler: Annotated[
        Scheduler | None,
        _option(_SWEEP, "asha: ends trials that are behind; pbt: they take over from better ones. Default: none."),
    ] = None,
    search: Annotated[
        Search | None,
        _option(_SWEEP, "grid: all combinations; optuna: looks at trials so far (TPE). Default: random."),
    ] = None,
    concurrent: Annotated[_Int, _count(_SWEEP, "Trials at a time; default: as many as cores.", min=1)] = None,
    seed: Annotated[_Int, _count(_SWEEP, "Of every trial and of the search; drawn if not given.", min=0)] = None,
    resume: Annotated[
        Path | None, _option(_SWEEP, "Go on with an interrupted sweep; failed trials run again.", metavar="FOLDER")
    ] = None,
    lr: Annotated[_Text, _spec("Learning rate.")] = None,
    critic_lr: Annotated[_Text, _spec("The critics' own learning rate.")] = None,
    entropy: Annotated[_Text, _spec("Coefficient of the entropy.")] = None,
    redundancy: Annotated[_Text, _spec("Coefficient of the penalty for features that agents share.")] = None,
    gamma: Annotated[_Text, _spec("Discount.")] = None,
    lambda_: Annotated[_Text, _spec("λ of the advantages.", "--lambda")] = None,
    batch: Annotated[_Text, _spec("Environment steps per iteration; no range.")] = None,
    minibatch: Annotated[_Text, _spec("Joint rows per gradient step; no range.")] = None,
    epochs: Annotated[_Text, _spec("Passes over the batch; no range.")] = None,
    vary: Annotated[
        _Texts, _option(_VARIED, "Any other option of JointPPOConfig; repeatable.", "--vary", metavar="NAME=SPEC")
    ] = None,
    envs_per_runner: Annotated[_Int, _count(_LEARN, "Environments side by side.", min=1)] = None,
    normalize_observations: _Normalize = None,
    settings: _Settings = None,
    policies: Annotated[Policies | None, _option(_TEAM, "A network for each agent, or one for all.")] = None,
    cell: Annotated[
        Cell | None,
        _option(_TEAM, "Networks with a memory: LSTM, GRU, or (beside message_rounds) a GRU in the messages."),
    ] = None,
    model: Annotated[_Texts, _option(_TEAM, "A setting of the networks; repeatable.", "--model", metavar=_PAIR)] = None,
    freeze: Annotated[_Texts, _option(_TEAM, "Leave its network as it is; repeatable.", metavar="AGENT")] = None,
    output: Annotated[
        Path | None,
        _option(_OUT, "Folder, new or empty; default: runs/sweep_<env>-<time>.", "--output", "-o"),
    ] = None,
    checkpoint_every: Annotated[
        _Int, _count(_OUT, "Iterations between a trial's checkpoints; default: 10.", min=1)
    ] = None,
    live: Annotated[
        bool | None, _option(_OUT, "Live table, or lines; default: live in a terminal.", "--live/--no-live")
    ] = None,
    traceback: Annotated[bool, _option(_OUT, "Show Python's traceback of an error.", "--traceback")] = False,
) -> None:
    """Train on ENV many times with other settings, by Ray Tune, and keep the best team.

    A range LOW:HIGH is drawn log-uniformly (gamma, lambda and --vary: uniformly), LOW:HIGH:linear uniformly.

    A trial's score is the return of all agents, mean of its latest episodes. All trials have the same seed.

    The folder has trials.csv, sweep.png, best/ (a checkpoint for `thrust-rllib evaluate`) and trials/ (Tune's).

    Ctrl-C (or SIGTERM) ends the sweep; --resume goes on from the trials' last checkpoints.

    Exit code: 0 finished, 1 a trial failed, 2 wrong usage, 130 stopped by Ctrl-C.
    """
    from thrust_rllib.command_line.sweep import SweepOptions
    from thrust_rllib.command_line.sweep import run as sweep_run

    options = SweepOptions(
        env=env, env_config=env_config or (), steps=steps, trials=trials,
        scheduler=None if scheduler is None else scheduler.value, search=None if search is None else search.value,
        concurrent=concurrent, envs_per_runner=envs_per_runner, seed=seed, lr=lr, critic_lr=critic_lr, gamma=gamma,
        lambda_=lambda_, entropy=entropy, batch=batch, minibatch=minibatch, epochs=epochs, redundancy=redundancy,
        vary=vary or (), normalize_observations=normalize_observations, settings=settings or (),
        policies=None if policies is None else policies.value, cell=None if cell is None else cell.value,
        model=model or (), freeze=freeze or (), output=output, resume=resume, checkpoint_every=checkpoint_every,
        live=live, traceback=traceback,
    )  # fmt: skip
    raise typer.Exit(sweep_run(options))
