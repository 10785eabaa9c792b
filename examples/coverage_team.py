"""Agents that talk while they survey a house, and a limit on how far apart they may drift.

    python examples/coverage_team.py [--seed 0] [--gif episode.gif]    about four minutes on one core
    python examples/coverage_team.py --smoke                          3 iterations, seconds

Three agents cover the cells of four rooms. Each sees a window around itself, hears those within five cells, and
exchanges two rounds of messages with them. How much of its links an agent lacks is a cost beside the reward; the
constraint's multiplier finds its price.

Greedy episodes before and behind 50 iterations (102,400 steps), and the price that the multiplier found:

| seed | covered            | all connected      | price at 10, 30, 50 | links lacking at 10, 30, 50 |
|------|--------------------|--------------------|---------------------|-----------------------------|
| 0    | 0.310, then 0.862  | 1.000, then 1.000  | 0.53, 0.88, 1.11    | 0.041, 0.057, 0.050         |
| 1    | 0.407, then 0.787  | 0.972, then 1.000  | 0.51, 0.87, 1.08    | 0.054, 0.057, 0.036         |

(thrust_rllib 0.1.0, Ray 2.60.0, torch 2.13.0, Python 3.11)
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from thrust_rllib import Constraint, JointPPOConfig
from thrust_rllib.envs import make_vector_env
from thrust_rllib.envs.animation import save_gif
from thrust_rllib.envs.joint_env import over_after
from thrust_rllib.evaluation import TeamPolicy, play_episodes
from thrust_rllib.recipes import recipe

WORLD = {"grid": 12, "num_agents": 3, "terrain": "rooms", "horizon": 60, "observation": "window"}


def tell(algo, when: str) -> None:
    """Coverage at the end of greedy episodes, and in which share of their steps all were connected."""
    played = play_episodes(algo, 50, seed=1)
    covered, together = played.final_extras["coverage"].mean(), played.mean_extras["connected"].mean()
    print(f"{when:12} covered {covered:.3f}  connected {together:.3f}")


def film(algo, path: Path) -> None:
    env = make_vector_env("coverage", WORLD, 1)
    policy = TeamPolicy(algo, env)
    observations, frames, over = env.reset_joint([1]), [env.render()], False
    while not over:
        result = env.step_joint(policy(observations))
        observations, over = result.observations, bool(over_after(result)[0])
        frames.append(env.render_final() if over else env.render())
    save_gif(path, frames, fps=10)
    print("wrote", path)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gif", type=Path)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args(argv)
    iterations = 3 if args.smoke else args.iterations

    config = recipe(JointPPOConfig().environment("coverage", env_config=WORLD))
    config.multi_agent(policies="shared").debugging(seed=args.seed)
    config.rl_module(model_config={"message_rounds": 2, "message_size": 64})
    limit = Constraint("local_edge_margin", 0.02, "pid", kp=2.0, ki=0.5)
    config.training(gamma=0.95, minibatch_size=384, entropy_coeff=0.0, credit="difference", constraints=(limit,))

    algo = config.build_algo()
    tell(algo, "untrained")
    for iteration in range(1, iterations + 1):
        found = algo.train()["learners"]["__all_modules__"]["constraints"]["local_edge_margin"]
        if iteration % 10 == 0 or args.smoke:
            print(f"iteration {iteration:3}  links lacking {found['cost']:.3f}  price {found['multiplier']:.2f}")
    tell(algo, "trained")
    if args.gif:
        film(algo, args.gif)
    algo.stop()


if __name__ == "__main__":
    main()
