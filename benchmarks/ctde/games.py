"""Matrix games: how often a team of two finds the best pair of actions, which is paid only to those who agree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from common.experiment import Experiment, grouped, train_through, trainer
from common.results import Row, draw_bar, new_figure, panel
from common.rounds import console
from common.tasks import EVALUATION_SEED, new_table
from matplotlib.figure import Figure

from thrust_rllib import JointPPOConfig
from thrust_rllib.envs import Climbing, MatrixGame, Penalty
from thrust_rllib.envs.difference import DIFFERENCE_REWARD
from thrust_rllib.evaluation import play_episodes
from thrust_rllib.recipes import recipe

STEPS = 100_000
SEEDS = tuple(range(10))
BEST = {"climbing": 275.0, "penalty": 250.0}
SIDES = {
    "independent": {},
    "central": {"critic": "central", "credit": "shared"},
    "optimistic": {"critic": "central", "credit": "difference"},
}
OPTIMISM = 0.3
BAR = 8


class ToldToAnOptimist(MatrixGame):
    """A game of `BEST` that tells, beside what is paid, what it is worth to an optimist: (exp(βr) − 1) / β.

    The order of the payoffs stays, so that the best pair of actions does. An average over what the other one may do is
    now ruled by the best that it may do.
    """

    def __init__(self, num_envs: int = 1, game: str = "climbing", optimism: float = OPTIMISM) -> None:
        super().__init__(num_envs, {"climbing": Climbing, "penalty": Penalty}[game]().payoff)
        self.optimism = optimism

    def _pay(self, actions: np.ndarray) -> np.ndarray:
        self._paid = super()._pay(actions)
        return self._paid

    def _extras(self) -> dict[str, np.ndarray]:
        worth = np.expm1(self.optimism * self._paid) / self.optimism
        return {DIFFERENCE_REWARD: np.broadcast_to(worth, (2, self.num_envs)).astype(np.float32)}


def config_of(game: str, side: str, seed: int, steps: int) -> JointPPOConfig:
    config = recipe(JointPPOConfig(), total_steps=steps).environment(ToldToAnOptimist, env_config={"game": game})
    config.rl_module(model_config={"fcnet_hiddens": [32, 32]})
    return config.training(**SIDES[side]).debugging(seed=seed)


def learn(game: str, side: str, seed: int, steps: int) -> Row:
    with trainer(config_of(game, side, seed, steps)) as algo:
        progress = train_through(algo, steps, {"return": "env_runners/agent_episode_returns_mean/agent_0"})
        score = float(play_episodes(algo, 1, seed=EVALUATION_SEED).returns[0, 0])
    return {
        "game": game,
        "side": side,
        "seed": seed,
        "env_steps": progress.env_steps,
        "score": score,
        "best": BEST[game],
        "reached": math.isclose(score, BEST[game]),
        "sampled": progress.late("return"),
        "training_seconds": progress.seconds,
    }


def measure(game: str, side: str, seed: Sequence[int], steps: int) -> list[Row]:
    return [learn(game, side, one, steps) for one in seed]


def show(rows: Sequence[Row]) -> bool:
    table = new_table(("task", "side", "runs", "best found", "greedy returns (runs)", "training s"))
    bars = []
    for (game, side), mine in grouped(rows, "game", "side").items():
        reached = sum(row["reached"] == "True" for row in mine)
        table.add_row(game, side, str(len(mine)), str(reached), ends(mine), f"{mean(mine, 'training_seconds'):.1f}")
        if side == "optimistic":
            bars.append(reached >= BAR / len(SEEDS) * len(mine))
    console.print(table)
    return all(bars)


def ends(rows: Sequence[Row]) -> str:
    scores = [float(row["score"]) for row in rows]
    return ", ".join(f"{score:g} ({scores.count(score)})" for score in sorted(set(scores), reverse=True))


def mean(rows: Sequence[Row], column: str) -> float:
    return float(np.mean([float(row[column]) for row in rows]))


def draw(rows: Sequence[Row]) -> Figure:
    figure = new_figure("Matrix games: greedy return of each run", 9, 3.8)
    panels: Any = figure.subplots(1, len(BEST))
    for axes, game in zip(panels, BEST, strict=True):
        panel(axes, game, "return of an episode")
        for place, side in enumerate(SIDES):
            scores = [float(row["score"]) for row in rows if (row["game"], row["side"]) == (game, side)]
            offsets = np.linspace(-0.25, 0.25, len(scores)) if len(scores) > 1 else [0.0] * len(scores)
            axes.plot(place + np.array(offsets), scores, "o", markersize=4)
        axes.set_xticks(range(len(SIDES)), list(SIDES))
        draw_bar(axes, BEST[game], "best")
        axes.set_ylim(min(0.0, axes.get_ylim()[0]))
        axes.legend(fontsize=8, loc="lower right")
    return figure


EXPERIMENT = Experiment("centralized", "matrix_games", ("game", "side", "env_steps", "seed"), measure, show, draw)
