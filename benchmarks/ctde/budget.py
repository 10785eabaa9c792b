"""A budget of collisions in spread: a multiplier that finds its price, beside prices that are set beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common.results import Row, new_figure, panel
from common.rounds import console
from common.tasks import curve_as_text, new_table
from matplotlib.figure import Figure

from ctde.experiment import Experiment, points, train_through, trainer
from thrust_rllib import Constraint, JointPPOConfig
from thrust_rllib.recipes import recipe

STEPS = 300_000
SEEDS = (0, 1)
LIMIT = 0.03
FOUND = "found"
PRICES = (FOUND, "0", "0.5", "1.5", "4")
WITHIN = 0.1
COST = "collisions"


def constraint_of(price: float | None) -> Constraint:
    if price is None:
        return Constraint(COST, LIMIT, "lagrangian", rate=1.0)
    return Constraint(COST, LIMIT, "penalty", coefficient=price)


def config_of(price: float | None, seed: int, steps: int) -> JointPPOConfig:
    config = recipe(JointPPOConfig(), total_steps=steps).environment("spread", env_config={"collision_penalty": False})
    config.multi_agent(policies="shared").debugging(seed=seed)
    return config.training(
        gamma=0.95, minibatch_size=512, critic="central", credit="own", constraints=(constraint_of(price),)
    )


def measure(price: str, seed: int, steps: int) -> list[Row]:
    asked = None if price == FOUND else float(price)
    path = f"learners/__all_modules__/constraints/{COST}"
    watched = {"return": "env_runners/episode_return_mean"}
    watched |= {name: f"{path}/{name}" for name in ("cost", "multiplier", "violation")}
    with trainer(config_of(asked, seed, steps)) as algo:
        progress = train_through(algo, steps, watched)
        num_agents = len(algo.config.policy_mapping_fn.table)
    cost = progress.late("cost")
    return [
        {
            "price": price,
            "seed": seed,
            "env_steps": progress.env_steps,
            "limit": LIMIT,
            "collisions": cost,
            "over_the_limit": cost / LIMIT - 1,
            "return": progress.late("return") / num_agents,
            "multiplier": progress.late("multiplier"),
            "training_seconds": progress.seconds,
            "cost_curve": curve_as_text(progress.curves["cost"][::2]),
            "multiplier_curve": curve_as_text(progress.curves["multiplier"][::2]),
        }
    ]


def show(rows: Sequence[Row]) -> bool:
    table = new_table(("price", "seed", "env steps", "collisions", "limit", "over by", "return", "multiplier", "s"))
    kept = []
    for row in rows:
        numbers = [f"{float(row[key]):.4f}" for key in ("collisions", "limit")]
        over = float(row["over_the_limit"])
        rest = [f"{float(row[key]):{form}}" for key, form in (("return", ".2f"), ("multiplier", ".2f"))]
        seconds = f"{float(row['training_seconds']):.0f}"
        table.add_row(row["price"], row["seed"], row["env_steps"], *numbers, f"{over:+.1%}", *rest, seconds)
        if row["price"] == FOUND:
            kept.append(over <= WITHIN)
    console.print(table, "means over the last quarter of the updates, per agent: collisions a step, return an episode")
    return bool(kept) and all(kept)


def draw(rows: Sequence[Row]) -> Figure:
    figure = new_figure("A budget of collisions in spread", 11, 4)
    axes: Any = figure.subplots(1, 2)
    panel(axes[0], "Last quarter of the updates", "return per agent (without collisions)")
    axes[0].set_xlabel("collisions per agent and step", fontsize=9)
    panel(axes[1], "With a budget", "collisions per agent and step")
    axes[1].set_xlabel("thousands of environment steps", fontsize=9)
    fixed = sorted((row for row in rows if row["price"] != FOUND), key=lambda row: float(row["price"]))
    found = [row for row in rows if row["price"] == FOUND]
    for price in dict.fromkeys(row["price"] for row in fixed):
        mine = [row for row in fixed if row["price"] == price]
        x, y = ([float(row[key]) for row in mine] for key in ("collisions", "return"))
        label = "a fixed price" if price == fixed[0]["price"] else None
        axes[0].plot(x, y, "o", color="#1f77b4", markersize=5, label=label)
        for at in zip(x, y, strict=True):
            axes[0].annotate(price, at, xytext=(-6, -3), textcoords="offset points", fontsize=8, ha="right")
    if found:
        x, y = ([float(row[key]) for row in found] for key in ("collisions", "return"))
        axes[0].plot(x, y, "D", color="#ff7f0e", markersize=6, label="a budget (multiplier)")
    right = axes[1].twinx()
    right.set_ylabel("multiplier (dotted)", fontsize=9)
    right.tick_params(labelsize=8.5)
    for number, row in enumerate(found):
        color = ("#ff7f0e", "#2ca02c")[number % 2]
        axes[1].plot(*points(row["cost_curve"]), color=color, linewidth=1.2, label=f"seed {row['seed']}")
        right.plot(*points(row["multiplier_curve"]), color=color, linewidth=1.0, linestyle=":")
    for place in (axes[0].axvline, axes[1].axhline):
        place(LIMIT, color="black", linewidth=1.1, linestyle="--", label=f"limit {LIMIT:g}")
    axes[0].legend(fontsize=8, loc="lower right")
    axes[1].legend(fontsize=8, loc="center right")
    return figure


EXPERIMENT = Experiment("budget", ("price", "limit", "env_steps", "seed"), measure, show, draw)
