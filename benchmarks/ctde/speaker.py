"""Speaker and listener: does the team come to talk? With a critic of the team and without, signalling paid or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from common.experiment import Experiment, points, train_through, trainer
from common.results import Row, draw_bar, new_figure, panel
from common.rounds import console
from common.runs import mean_and_error
from common.tasks import EVALUATION_SEED, curve_as_text, new_table
from matplotlib.figure import Figure
from torch import Tensor

from thrust_rllib import CrossAgentLoss, JointPPOConfig
from thrust_rllib.envs.speaker_listener import LISTENER, SPEAKER
from thrust_rllib.evaluation import play_episodes
from thrust_rllib.recipes import recipe

STEPS = 300_000
SEEDS = (0, 1)
BAR = -24.0
EPISODES = 1000
WEIGHT = 0.5
TEAM: dict[str, Any] = {"critic": "central", "credit": "shared"}
SIDES: dict[str, dict[str, Any]] = {
    "independent": {},
    "central": TEAM,
    "independent, signalling": {"signalling": WEIGHT},
    "central, signalling": TEAM | {"signalling": WEIGHT},
}


class Signalling(CrossAgentLoss):
    """H(word | seen) / 2 - H(word): the speaker uses all words alike, and is sure which one belongs to what it sees.

    In nats, -ln 3 at best: each goal has a word of its own, whatever that word is. H(word) is of the mean of the word's
    probabilities over the rows. With the whole H(word | seen), minus the mutual information, speakers end at one word
    for two goals and are too sure to leave it. After positive signalling in Eccles et al. 2019, "Biases for emergent
    communication in multi-agent reinforcement learning".
    """

    needs_features = False
    min_agents = 1

    def __call__(
        self,
        features: Mapping[Any, Tensor],
        logits: Mapping[Any, Tensor],
        actions: Mapping[Any, Tensor],
        present: Mapping[Any, Tensor] | None,
    ) -> Tensor:
        words = logits[SPEAKER].softmax(-1)
        return torch.special.entr(words).sum(-1).mean() / 2 - torch.special.entr(words.mean(0)).sum()


def config_of(side: str, seed: int, steps: int) -> JointPPOConfig:
    options = dict(SIDES[side])
    weight = options.pop("signalling", 0.0)
    config = recipe(JointPPOConfig(), total_steps=steps).environment("speaker_listener").debugging(seed=seed)
    config.rl_module(model_config={"fcnet_hiddens": [128, 128]})
    config.training(gamma=0.95, minibatch_size=512, num_epochs=10, **options)
    if weight:
        config.training(cross_agent_losses={"signalling": Signalling()}, cross_agent_coeffs={"signalling": weight})
    return config


def measure(side: str, seed: int, steps: int) -> list[Row]:
    who = ["team_critic"] * 2 if "critic" in SIDES[side] else [SPEAKER, LISTENER]
    watched = {"return": "env_runners/episode_return_mean"}
    for name, critic in zip((SPEAKER, LISTENER), who, strict=True):
        watched[f"{name}_explained"] = f"learners/{critic}/vf_explained_var"
    with trainer(config_of(side, seed, steps)) as algo:
        progress = train_through(algo, steps, watched)

        def score(**kwargs: Any) -> tuple[float, float]:
            played = play_episodes(algo, EPISODES, seed=EVALUATION_SEED, **kwargs)
            return mean_and_error(played.team_returns.tolist())

        greedy, error = score()
        sampled, _ = score(explore=True)
        without, _ = score(random_agents=[SPEAKER])
    return [
        {
            "side": side,
            "seed": seed,
            "env_steps": progress.env_steps,
            "greedy": greedy,
            "greedy_error": error,
            "sampled": sampled,
            "random_speaker": without,
            "bar": BAR,
            "speaker_explained_variance": progress.late(f"{SPEAKER}_explained"),
            "listener_explained_variance": progress.late(f"{LISTENER}_explained"),
            "training_seconds": progress.seconds,
            "curve": curve_as_text(progress.curves["return"][4::5]),
        }
    ]


def show(rows: Sequence[Row]) -> bool:
    names = ("greedy", "sampled", "random_speaker")
    explained = ("speaker_explained_variance", "listener_explained_variance")
    table = new_table(("side", "seed", "env steps", *names, "explained: speaker", "listener", "training s"))
    for row in rows:
        scores = [f"{float(row[name]):.2f}" for name in names]
        numbers = [f"{float(row[name]):.3f}" for name in explained]
        table.add_row(
            row["side"], row["seed"], row["env_steps"], *scores, *numbers, f"{float(row['training_seconds']):.0f}"
        )
    console.print(table, "sum over both agents; random_speaker: the greedy listener hears random words")
    return max((float(row["greedy"]) for row in rows), default=-torch.inf) >= BAR


def draw(rows: Sequence[Row]) -> Figure:
    figure = new_figure("Speaker and listener: mean of the last 100 episodes of training", 7.5, 4.2)
    axes = figure.subplots()
    panel(axes, "the bar is for greedy actions", "return, sum over both")
    axes.set_xlabel("thousands of environment steps", fontsize=9)
    for place, side in enumerate(SIDES):
        for number, row in enumerate(row for row in rows if row["side"] == side):
            axes.plot(*points(row["curve"]), color=f"C{place}", linewidth=1.1, label=side if number == 0 else None)
    draw_bar(axes, BAR, f"bar {BAR:g}")
    axes.set_ylim(bottom=-60)
    axes.legend(fontsize=8)
    return figure


EXPERIMENT = Experiment("centralized", "speaker_listener", ("side", "env_steps", "seed"), measure, show, draw)
