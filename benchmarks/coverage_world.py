"""A team surveys a grid and keeps its radio network: mechanisms, roles, growth, the cost of messages, a film.

    python benchmarks/coverage_world.py mechanisms --jobs 2                  # all runs of one experiment
    python benchmarks/coverage_world.py mechanisms --mechanism pid --seed 0  # one mechanism
    python benchmarks/coverage_world.py --help                               # all five

| experiment | what                                                              | bar                               |
|------------|-------------------------------------------------------------------|-----------------------------------|
| mechanisms | coverage and connection by penalty, lagrangian, pid, mask, nothing | one covers 60 %, connected 95 %   |
| roles      | 16 × 16 with footprints of one cell, with and without relays       | none: beside the published 90.9 % |
| growth     | 24 × 24 and six agents from weights of 16 × 16 and four            | warm ahead of scratch             |
| messages   | microseconds per agent and step, N = 4, 16, 64                     | none                              |
| film       | a GIF of one greedy episode of a checkpoint                        | none                              |

Each has a file in `benchmarks/covering/` with its settings; the first four add their rows to
`results/coverage_world_*.csv` and draw what stands there. Settings were chosen with seeds from 100 on; those of the
tables were run once. Scores are of the last weights, in 100 greedy episodes with seeds that training has not seen.

Takes about 25 minutes for mechanisms and 5 for roles with --jobs 2, 20 for growth, 4 for messages; a run is a process
with one torch thread.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

from pathlib import Path
from typing import Annotated

import typer
from common.experiment import Case, Experiment, product
from common.results import RESULTS
from covering import film as films
from covering import growth as growths
from covering import mechanisms as ways
from covering import messages as costs
from covering import roles as parts
from covering.team import TERRAINS

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, rich_markup_mode=None)
Seeds = Annotated[list[int] | None, typer.Option(help="once for each run")]
Names = Annotated[list[str] | None, typer.Option(help="once for each run")]
Steps = Annotated[int, typer.Option(help="environment steps of a run")]
Jobs = Annotated[int, typer.Option(help="runs at a time")]
Output = Annotated[Path | None, typer.Option(help="CSV, the plot beside it (default: results/coverage_world_*.csv)")]


def conduct(experiment: Experiment, cases: list[Case], jobs: int, output: Path | None) -> None:
    """Ends with 1 where a bar is missed."""
    if not experiment.conduct(cases, jobs, output):
        raise typer.Exit(1)


@app.command()
def mechanisms(
    mechanism: Names = None,
    terrain: Names = None,
    seed: Seeds = None,
    steps: Steps = ways.STEPS,
    keep: Annotated[Path | None, typer.Option(help="folder for a checkpoint of each run's last weights")] = None,
    jobs: Jobs = 1,
    output: Output = None,
) -> None:
    """Coverage and connection by what keeps the team together, agents at random beside."""
    kept = {} if keep is None else {"keep": [str(keep.resolve())]}
    chosen = {"terrain": terrain or TERRAINS, "mechanism": mechanism or ways.SIDES, "seed": seed or ways.SEEDS}
    conduct(ways.EXPERIMENT, product(**chosen, steps=[steps], **kept), jobs, output)


@app.command()
def roles(
    roles: Annotated[list[str] | None, typer.Option(help="with or without, once for each run")] = None,
    seed: Seeds = None,
    steps: Steps = parts.STEPS,
    jobs: Jobs = 1,
    output: Output = None,
) -> None:
    """Coverage with roles and without, beside the published figures."""
    conduct(
        parts.EXPERIMENT, product(roles=roles or parts.SIDES, seed=seed or parts.SEEDS, steps=[steps]), jobs, output
    )


@app.command()
def growth(
    seed: Annotated[int, typer.Option()] = growths.SEED,
    minutes: Annotated[float, typer.Option(help="of training in the larger world, each")] = growths.MINUTES,
    small_steps: Annotated[int, typer.Option(help="environment steps in the small world")] = growths.SMALL_STEPS,
    output: Output = None,
) -> None:
    """A larger team in a larger world, from the weights of a small one and from scratch."""
    conduct(growths.EXPERIMENT, [{"seed": seed, "minutes": minutes, "small_steps": small_steps}], 1, output)


@app.command()
def messages(
    rounds: Annotated[int, typer.Option(help="measured iterations of each side")] = costs.ROUNDS,
    seed: Annotated[int, typer.Option()] = costs.SEED,
    output: Output = None,
) -> None:
    """Time per agent and step as the team grows, with messages and without."""
    conduct(costs.EXPERIMENT, [{"rounds": rounds, "seed": seed}], 1, output)


@app.command()
def film(
    checkpoint: Annotated[Path, typer.Argument(help="of one run, such as mechanisms --keep leaves")],
    seed: Annotated[int, typer.Option(help="of the episode")] = films.SEED,
    output: Annotated[Path | None, typer.Option(help="GIF (default: results/coverage_world_<terrain>.gif)")] = None,
) -> None:
    """One greedy episode as a GIF."""
    films.film(checkpoint, seed, output, RESULTS)


if __name__ == "__main__":
    app()
