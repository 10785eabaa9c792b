"""The team that surveys the coverage world: its settings, the mechanisms that keep it connected, and its scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.results import Row
from common.runs import mean_and_error
from common.tasks import EVALUATION_SEED
from ray.rllib.algorithms.algorithm import Algorithm

from thrust_rllib import Constraint, JointPPOConfig
from thrust_rllib.baselines import play_baseline
from thrust_rllib.evaluation import PlayedEpisodes, play_episodes

SCRIPT = "coverage_world"
NAME = "coverage"
WORLD: dict[str, Any] = {"grid": 16, "num_agents": 4, "comm_r": 5, "cover_r": 1, "observation": "window"}
TERRAINS = ("open", "rooms")
MARGIN, LIMIT = "local_edge_margin", 0.02
MECHANISMS: dict[str, Constraint | None] = {
    "none": None,
    "penalty": Constraint(MARGIN, LIMIT, "penalty", coefficient=1.0),
    "lagrangian": Constraint(MARGIN, LIMIT, "lagrangian", rate=1.0),
    "pid": Constraint(MARGIN, LIMIT, "pid", kp=10.0, ki=1.0),
    "mask": None,
}
MODEL = {"message_rounds": 2, "message_size": 64, "encoder": "mlp", "encoder_hiddens": [64]}
ENVS, ROLLOUT = 32, 50
EPISODES = 100


def world_of(mechanism: str, terrain: str, **changes: Any) -> dict[str, Any]:
    """Settings of a world; the mask is one of them."""
    mask = "safe_goals" if mechanism == "mask" else "none"
    return WORLD | {"terrain": terrain, "mask": mask} | changes


def config_of(world: Mapping[str, Any], mechanism: str, seed: int, steps: int) -> JointPPOConfig:
    """The same settings for every mechanism; the learning rate falls to 0 through `steps` environment steps."""
    constraint = MECHANISMS[mechanism]
    config = JointPPOConfig().environment(NAME, env_config=dict(world)).multi_agent(policies="shared")
    config.env_runners(num_envs_per_env_runner=ENVS).rl_module(model_config=MODEL).debugging(seed=seed)
    return config.training(
        train_batch_size_per_learner=ENVS * ROLLOUT,
        minibatch_size=200,
        num_epochs=6,
        iterate_all_minibatches=True,
        lr=[[0, 1e-3], [steps, 0.0]],
        gamma=0.95,
        entropy_coeff=0.001,
        credit="difference",
        constraints=(constraint,) if constraint else (),
    )


def scores(played: PlayedEpisodes) -> Row:
    """Coverage at the end of an episode with its standard error, shares of steps at both bars, return per agent."""
    coverage, error = mean_and_error(played.final_extras["coverage"].tolist())
    shares = {name: float(played.mean_extras[name].mean()) for name in ("connected", "firmly_connected")}
    return {"coverage": coverage, "coverage_error": error, **shares, "return": float(played.returns.mean())}


def play(algo: Algorithm) -> Row:
    """Scores of greedy episodes, with seeds that training has not seen."""
    return scores(play_episodes(algo, EPISODES, seed=EVALUATION_SEED))


def play_at_random(algo: Algorithm) -> Row:
    """Scores of agents that act at random in the same episodes."""
    return scores(play_baseline(algo, "random", EPISODES, seed=EVALUATION_SEED))
