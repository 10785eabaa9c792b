"""A budget of collisions in spread: a multiplier that finds its price, beside prices that are set beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from common.experiment import Experiment, points, train_through, trainer
from common.results import Row, new_figure, panel
from common.rounds import console
from common.tasks import curve_as_text, new_table
from matplotlib.figure import Figure

from thrust_rllib import Constraint, JointPPOConfig
from thrust_rllib.recipes import recipe

STEPS = 300_000
SEEDS = (0, 1)
LIMIT = 0.03
FOUND = "found"
PRICES = (FOUND, "0", "0.5", "1.5", "4")
WITHIN = 0.1
COST = "collisions"
WINDOW = 9
GAINS = {"kp": 100.0, "ki": 10.0}


def constraint_of(price: float | None) -> Constraint:
    if price is None:
        return Constraint(COST, LIMIT, "pid", **GAINS)
    return Constraint(COST, LIMIT, "penalty", coefficient=price)


def config_of(price: float | None, seed: int, steps: int) -> JointPPOConfig:
    config = recipe(JointPPOConfig(), total_steps=steps).environment("spread", env_config={"collision_penalty": False})
    config.multi_agent(policies="shared").debugging(seed=seed)
    return config.training(
        gamma=0.95, minibatch_size=512, critic="central", credit="own", constraints=(constraint_of(price),)
    )


def measure(price: str, seed: int, steps: int) -> list[Row]:
    asked = None if price == FOUND else float(price)
    gains = GAINS if asked is None else {"coefficient": asked}
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
            "mechanism": " ".join([constraint_of(asked).mechanism, *(f"{key}={x:g}" for key, x in gains.items())]),
            "collisions": cost,
            "off": cost / LIMIT - 1,
            "return": progress.late("return") / num_agents,
            "multiplier": progress.late("multiplier"),
            "training_seconds": progress.seconds,
            "cost_curve": curve_as_text(progress.curves["cost"][::2]),
            "multiplier_curve": curve_as_text(progress.curves["multiplier"][::2]),
        }
    ]


def show(rows: Sequence[Row]) -> bool:
    table = new_table(("price", "seed", "env steps", "collisions", "limit", "off by", "return", "multiplier", "s"))
    kept = []
    for row in rows:
        numbers = [f"{float(row[key]):.4f}" for key in ("collisions", "limit")]
        off = float(row["off"])
        rest = [f"{float(row[key]):{form}}" for key, form in (("return", ".2f"), ("multiplier", ".2f"))]
        seconds = f"{float(row['training_seconds']):.0f}"
        table.add_row(row["price"], row["seed"], row["env_steps"], *numbers, f"{off:+.1%}", *rest, seconds)
        if row["price"] == FOUND:
            kept.append(abs(off) <= WITHIN)
    console.print(table, "means over the last quarter of the updates, per agent: collisions a step, return an episode")
    return bool(kept) and all(kept)


def draw(rows: Sequence[Row]) -> Figure:
    figure = new_figure("A budget of collisions in spread", 13.5, 4)
    axes: Any = figure.subplots(1, 3)
    panel(axes[0], "Last quarter of the updates", "return per agent (without collisions)")
    axes[0].set_xlabel("collisions per agent and step", fontsize=9)
    panel(axes[1], f"With a budget (thick: mean of {WINDOW} points)", "collisions per agent and step")
    panel(axes[2], "Price that the budget found", "multiplier")
    for one in axes[1:]:
        one.set_xlabel("thousands of environment steps", fontsize=9)
    fixed = sorted((row for row in rows if row["price"] != FOUND), key=lambda row: float(row["price"]))
    found = [row for row in rows if row["price"] == FOUND]
    for price in dict.fromkeys(row["price"] for row in fixed):
        mine = [row for row in fixed if row["price"] == price]
        x, y = ([float(row[key]) for row in mine] for key in ("collisions", "return"))
        label = "a fixed price" if price == fixed[0]["price"] else None
        axes[0].plot(x, y, "o", color="#1f77b4", markersize=5, label=label)
        leftmost = min(zip(x, y, strict=True))
        axes[0].annotate(price, leftmost, xytext=(-6, -3), textcoords="offset points", fontsize=8, ha="right")
    if found:
        x, y = ([float(row[key]) for row in found] for key in ("collisions", "return"))
        axes[0].plot(x, y, "D", color="#ff7f0e", markersize=6, label="a budget (multiplier)")
    for number, row in enumerate(found):
        color = ("#ff7f0e", "#2ca02c")[number % 2]
        for one, curve in zip(axes[1:], (row["cost_curve"], row["multiplier_curve"]), strict=True):
            steps, values = points(curve)
            one.plot(steps, values, color=color, linewidth=0.7, alpha=0.35)
            one.plot(*smooth(steps, values), color=color, linewidth=1.6, label=f"seed {row['seed']}")
    for place in (axes[0].axvline, axes[1].axhline):
        place(LIMIT, color="black", linewidth=1.1, linestyle="--", label=f"limit {LIMIT:g}")
    axes[0].legend(fontsize=8, loc="lower right")
    axes[1].legend(fontsize=8, loc="upper right")
    return figure


def smooth(steps: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Means over windows of `WINDOW` points, each at the middle of its window."""
    middle = range(WINDOW // 2, len(values) - WINDOW // 2)
    return [steps[k] for k in middle], [fmean(values[k - WINDOW // 2 : k + WINDOW // 2 + 1]) for k in middle]


EXPERIMENT = Experiment("centralized", "budget", ("price", "limit", "env_steps", "seed"), measure, show, draw)
