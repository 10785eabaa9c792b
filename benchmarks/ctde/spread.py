"""Three agents with one policy cover three landmarks: a critic of the team, beside one for each agent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from common.experiment import Experiment, grouped, points, train_through, trainer
from common.results import Row, draw_bar, new_figure, panel
from common.rounds import console
from common.runs import mean_and_error, plus_minus
from common.tasks import EVALUATION_SEED, curve_as_text, new_table
from matplotlib.figure import Figure

from thrust_rllib import JointPPOConfig
from thrust_rllib.evaluation import play_episodes
from thrust_rllib.recipes import recipe

STEPS = 500_000
SEEDS = (0, 1, 2)
BAR = -17.5
SIDES: dict[str, dict[str, Any]] = {
    "central": {"critic": "central", "credit": "shared"},
    "independent": {},
}
EPISODES, MANY_EPISODES = 100, 1000


def config_of(side: str, seed: int, steps: int) -> JointPPOConfig:
    config = recipe(JointPPOConfig(), total_steps=steps).environment("spread").multi_agent(policies="shared")
    return config.training(gamma=0.95, minibatch_size=512, **SIDES[side]).debugging(seed=seed)


def measure(side: str, seed: int, steps: int) -> list[Row]:
    with trainer(config_of(side, seed, steps)) as algo:
        agents = list(algo.config.policy_mapping_fn.table)
        who = "team_critic" if "critic" in SIDES[side] else "shared"
        watched = {
            "return": "env_runners/episode_return_mean",
            "explained": f"learners/{who}/vf_explained_var",
        }
        progress = train_through(algo, steps, watched)

        def score(episodes: int, explore: bool = False) -> tuple[float, float]:
            played = play_episodes(algo, episodes, seed=EVALUATION_SEED, explore=explore)
            return mean_and_error(played.returns.mean(axis=1).tolist())

        scores = [score(EPISODES), score(MANY_EPISODES), score(MANY_EPISODES, explore=True)]
    names = (f"greedy_{EPISODES}", f"greedy_{MANY_EPISODES}", f"sampled_{MANY_EPISODES}")
    row: Row = {"side": side, "seed": seed, "env_steps": progress.env_steps}
    for name, (mean, error) in zip(names, scores, strict=True):
        row |= {name: mean, f"{name}_error": error}
    curve = [(at, found / len(agents)) for at, found in progress.curves["return"]][4::5]
    return [
        row
        | {
            "bar": BAR,
            "explained_variance": progress.late("explained"),
            "training_seconds": progress.seconds,
            "curve": curve_as_text(curve),
        }
    ]


def show(rows: Sequence[Row]) -> bool:
    names = (f"greedy_{EPISODES}", f"greedy_{MANY_EPISODES}", f"sampled_{MANY_EPISODES}")
    table = new_table(("side", "seed", "env steps", *names, "explained variance", "training s"))
    for row in rows:
        scores = [f"{float(row[name]):.2f} ± {float(row[f'{name}_error']):.2f}" for name in names]
        numbers = [f"{float(row['explained_variance']):.3f}", f"{float(row['training_seconds']):.0f}"]
        table.add_row(row["side"], row["seed"], row["env_steps"], *scores, *numbers)
    console.print(table, "return per agent ± standard error over episodes")
    means = {}
    for (side,), mine in grouped(rows, "side").items():
        means[side] = [float(row[names[0]]) for row in mine]
        console.print(f"{side}: mean over {len(mine)} seeds {plus_minus(means[side], 2)}; bar {BAR:g}", highlight=False)
    return float(np.mean(means.get("central", [-np.inf]))) >= BAR


def draw(rows: Sequence[Row]) -> Figure:
    figure = new_figure("Spread: mean of the last 100 episodes of training", 7, 4)
    axes = figure.subplots()
    panel(axes, "actions sampled, the bar is for greedy ones", "return per agent")
    axes.set_xlabel("thousands of environment steps", fontsize=9)
    colors = dict(zip(SIDES, ("#1f77b4", "#ff7f0e"), strict=True))
    for (side,), mine in grouped(rows, "side").items():
        for number, row in enumerate(mine):
            label = side if number == 0 else None
            axes.plot(*points(row["curve"]), color=colors[side], linewidth=1.1, alpha=0.8, label=label)
    draw_bar(axes, BAR, f"bar {BAR:g}")
    axes.legend(fontsize=8)
    return figure


EXPERIMENT = Experiment("centralized", "spread", ("side", "env_steps", "seed"), measure, show, draw)
