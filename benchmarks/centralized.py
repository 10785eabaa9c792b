"""Critics of the team, credit, budgets, diversity, talking: six experiments, each held against a bar.

    python benchmarks/centralized.py matrix_games --jobs 2           # all runs of one experiment
    python benchmarks/centralized.py spread --side central --seed 0  # one run
    python benchmarks/centralized.py --help                          # all six

| experiment       | what                                                                       | bar                  |
|------------------|----------------------------------------------------------------------------|----------------------|
| matrix_games     | how often ten seeds find the best pair of actions, by three ways of credit | optimists: 8 of 10   |
| spread           | return per agent of simple_spread, greedy, 500,000 steps                   | central: >= -17.5    |
| timing           | seconds of an iteration at eight agents, in turn                           | <= 1.5 x independent |
| budget           | collisions held to a budget, beside fixed prices                           | limit, +- a tenth    |
| diversity        | how far apart agents act, driven to three targets                          | within a tenth       |
| speaker_listener | return, sum over both; who ignores the speaker ends at -32                 | one run >= -24       |

Each has a file in `benchmarks/ctde/` with its settings, adds its rows to `results/centralized_*.csv` and draws what
stands there. Settings were chosen with seeds from 100 on; those of the tables were run once. Scores are of the last
weights.

Takes about 1 to 10 minutes each with --jobs 2; a run is a process with one torch thread.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

from pathlib import Path
from typing import Annotated

import typer
from common.experiment import Case, Experiment, product
from ctde import budget as budgets
from ctde import diversity as diversities
from ctde import games, speaker
from ctde import spread as spreads
from ctde import timing as timings

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, rich_markup_mode=None)
Seeds = Annotated[list[int] | None, typer.Option(help="once for each run")]
Names = Annotated[list[str] | None, typer.Option(help="once for each run")]
Steps = Annotated[int, typer.Option(help="environment steps of a run")]
Jobs = Annotated[int, typer.Option(help="runs at a time")]
Output = Annotated[Path | None, typer.Option(help="CSV file, the plot beside it (default: results/centralized_*.csv)")]


def conduct(experiment: Experiment, cases: list[Case], jobs: int, output: Path | None) -> None:
    """Ends with 1 where a bar is missed."""
    if not experiment.conduct(cases, jobs, output):
        raise typer.Exit(1)


@app.command(games.EXPERIMENT.name)
def matrix_games(
    game: Names = None,
    side: Names = None,
    seed: Seeds = None,
    steps: Steps = games.STEPS,
    jobs: Jobs = 1,
    output: Output = None,
) -> None:
    """How often the best pair of actions is found; the seeds of a game and a side run one after another."""
    cases = product(game=game or games.BEST, side=side or games.SIDES, seed=[tuple(seed or games.SEEDS)], steps=[steps])
    conduct(games.EXPERIMENT, cases, jobs, output)


@app.command()
def spread(
    side: Names = None,
    seed: Seeds = None,
    steps: Steps = spreads.STEPS,
    jobs: Jobs = 1,
    output: Output = None,
) -> None:
    """Return of simple_spread with a central critic, beside independent ones."""
    cases = product(side=side or spreads.SIDES, seed=seed or spreads.SEEDS, steps=[steps])
    conduct(spreads.EXPERIMENT, cases, jobs, output)


@app.command()
def timing(
    agents: Annotated[int, typer.Option()] = timings.AGENTS,
    rounds: Annotated[int, typer.Option(help="measured iterations of each side")] = timings.ROUNDS,
    seed: Annotated[int, typer.Option()] = timings.SEED,
    output: Output = None,
) -> None:
    """Seconds of an iteration with the team's critics, in turn with independent ones."""
    conduct(timings.EXPERIMENT, [{"agents": agents, "rounds": rounds, "seed": seed}], 1, output)


@app.command()
def budget(
    price: Annotated[list[str] | None, typer.Option(help='a fixed one, or "found" by a multiplier')] = None,
    seed: Seeds = None,
    steps: Steps = budgets.STEPS,
    jobs: Jobs = 1,
    output: Output = None,
) -> None:
    """A budget of collisions in spread, beside fixed prices."""
    cases = product(price=price or budgets.PRICES, seed=seed or budgets.SEEDS, steps=[steps])
    conduct(budgets.EXPERIMENT, cases, jobs, output)


@app.command()
def diversity(
    target: Annotated[list[float] | None, typer.Option(help="once for each run")] = None,
    seed: Seeds = None,
    steps: Steps = diversities.STEPS,
    jobs: Jobs = 1,
    output: Output = None,
) -> None:
    """Diversity of actions driven to a target in spread."""
    cases = product(target=target or diversities.TARGETS, seed=seed or [diversities.SEED], steps=[steps])
    conduct(diversities.EXPERIMENT, cases, jobs, output)


@app.command(speaker.EXPERIMENT.name)
def speaker_listener(
    side: Names = None,
    seed: Seeds = None,
    steps: Steps = speaker.STEPS,
    jobs: Jobs = 1,
    output: Output = None,
) -> None:
    """Whether speaker and listener come to talk."""
    cases = product(side=side or speaker.SIDES, seed=seed or speaker.SEEDS, steps=[steps])
    conduct(speaker.EXPERIMENT, cases, jobs, output)


if __name__ == "__main__":
    app()
