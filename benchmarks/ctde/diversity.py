"""Diversity driven to a target: how far apart agents act in spread, by a coupling whose weight a constraint drives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common.experiment import Experiment, points, train_through, trainer
from common.results import Row, new_figure, panel
from common.rounds import console
from common.tasks import curve_as_text, new_table
from matplotlib.figure import Figure

from thrust_rllib import Constraint, JointPPOConfig
from thrust_rllib.action_spread import ActionSpread
from thrust_rllib.recipes import recipe

STEPS = 200_000
SEED = 0
TARGETS = (0.3, 0.5, 0.7)
WITHIN = 0.1
NAME = "apart"
GAINS = {"kp": 2.0, "ki": 0.1}


def config_of(target: float, seed: int, steps: int) -> JointPPOConfig:
    config = recipe(JointPPOConfig(), total_steps=steps).environment("spread").debugging(seed=seed)
    config.training(gamma=0.95, minibatch_size=512, critic="central", credit="own")
    drive = Constraint(NAME, target, "pid", **GAINS, of="coupling", sense="equal")
    return config.training(cross_agent_losses={NAME: ActionSpread("lower")}, constraints=(drive,))


def measure(target: float, seed: int, steps: int) -> list[Row]:
    path = f"learners/__all_modules__/constraints/{NAME}"
    watched = {"return": "env_runners/episode_return_mean"}
    watched |= {name: f"{path}/{name}" for name in ("cost", "multiplier")}
    watched["probe"] = "learners/__all_modules__/diversity/agent_0_and_2_more/total_variation"
    with trainer(config_of(target, seed, steps)) as algo:
        progress = train_through(algo, steps, watched)
        num_agents = len(algo.config.policy_mapping_fn.table)
    found = progress.late("cost")
    return [
        {
            "target": target,
            "seed": seed,
            "env_steps": progress.env_steps,
            "found": found,
            "off": found / target - 1,
            "same_observations": progress.late("probe"),
            "multiplier": progress.late("multiplier"),
            "return": progress.late("return") / num_agents,
            "training_seconds": progress.seconds,
            "curve": curve_as_text(progress.curves["cost"][::2]),
            "multiplier_curve": curve_as_text(progress.curves["multiplier"][::2]),
        }
    ]


def show(rows: Sequence[Row]) -> bool:
    table = new_table(("target", "seed", "env steps", "found", "off by", "same observations", "weight", "return", "s"))
    for row in rows:
        numbers = [f"{float(row[key]):.3f}" for key in ("same_observations", "multiplier")]
        off, rest = (
            f"{float(row['off']):+.1%}",
            [f"{float(row['return']):.2f}", f"{float(row['training_seconds']):.0f}"],
        )
        table.add_row(row["target"], row["seed"], row["env_steps"], f"{float(row['found']):.4f}", off, *numbers, *rest)
    console.print(table, "means over the last quarter of the updates")
    return all(abs(float(row["off"])) <= WITHIN for row in rows)


def draw(rows: Sequence[Row]) -> Figure:
    figure = new_figure("Diversity driven to a target in spread", 11, 4)
    axes: Any = figure.subplots(1, 2)
    panel(axes[0], "How far apart the agents act", "total variation, mean over pairs")
    panel(axes[1], "The coupling's weight (below 0: apart)", "multiplier")
    for number, row in enumerate(rows):
        color = f"C{number}"
        axes[0].plot(*points(row["curve"]), color=color, linewidth=1.2, label=f"target {float(row['target']):g}")
        axes[0].axhline(float(row["target"]), color=color, linewidth=1.0, linestyle="--")
        axes[1].plot(*points(row["multiplier_curve"]), color=color, linewidth=1.2)
    for one in axes:
        one.set_xlabel("thousands of environment steps", fontsize=9)
    axes[0].legend(fontsize=8)
    return figure


EXPERIMENT = Experiment("centralized", "diversity", ("target", "env_steps", "seed"), measure, show, draw)
