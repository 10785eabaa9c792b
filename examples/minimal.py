"""Trains the bucket brigade through the Python API and prints what each agent earns per episode.

    python examples/minimal.py [--seed 0]    about 25 s on one core
    python examples/minimal.py --smoke       2 iterations, seconds

Four agents guard ten houses against fire, each with a network of its own; an agent works at a house or rests. Means
over the last 100 episodes, iterations of 2048 steps:

| iteration | team's return, seeds 0, 1, 2 | agents 0 to 3, seed 0          |
|-----------|------------------------------|--------------------------------|
| 1         | -1281, -1271, -1221          | -484.7, -341.0, -190.6, -265.1 |
| 20        | -961, -955, -999             | -297.8, -300.9, -134.6, -227.7 |
| 40        | -604, -424, -321             | -153.5, -144.8, -78.0, -227.4  |

Fires are luck: means over 100 episodes swing by 100 to 200 between iterations.
(thrust_rllib 0.1.0, Ray 2.60.0, torch 2.13.0, Python 3.11)
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from thrust_rllib import JointPPOConfig
from thrust_rllib.recipes import recipe


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args(argv)

    config = recipe(JointPPOConfig().environment("bucket_brigade", env_config={"scenario": "minimal_specialization"}))
    algo = config.debugging(seed=args.seed).build_algo()

    for iteration in range(1, (2 if args.smoke else args.iterations) + 1):
        episodes = algo.train()["env_runners"]
        if iteration == 1 or iteration % 10 == 0 or args.smoke:
            # Both are missing until an episode has ended.
            returns = sorted(episodes.get("agent_episode_returns_mean", {}).items())
            team = episodes.get("episode_return_mean", float("nan"))
            each = "  ".join(f"{agent} {value:7.1f}" for agent, value in returns)
            print(f"iteration {iteration:3}  team {team:8.1f}  {each}")
    algo.stop()


if __name__ == "__main__":
    main()
