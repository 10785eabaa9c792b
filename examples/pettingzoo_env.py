"""Trains on a PettingZoo environment: three agents of MPE's simple_spread cover three landmarks.

    pip install "thrust_rllib[envs]"
    python examples/pettingzoo_env.py [--seed 0]    about a minute on one core
    python examples/pettingzoo_env.py --smoke       2 iterations, seconds

Any function that makes a `ParallelEnv` can be the environment; its arguments come from `env_config`. (Where no code of
yours is needed, `.environment("pettingzoo:mpe2.simple_spread_v3")` is enough.) The agents look alike, so they share one
network. Means over the last 100 episodes of 25 steps, iterations of 2048 steps:

| iteration | team's return, seeds 0, 1, 2 |
|-----------|------------------------------|
| 1         | -86.7, -76.4, -78.1          |
| 20        | -64.4, -63.4, -64.2          |
| 40        | -61.4, -59.2, -58.7          |

(thrust_rllib 0.1.0, Ray 2.60.0, torch 2.13.0, mpe2 1.1.1, Python 3.11)
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from thrust_rllib import JointPPOConfig
from thrust_rllib.recipes import recipe


def spread(local_ratio: float = 0.5):
    """The environment: reward 1 - local_ratio for the team's cover, local_ratio for not bumping into others."""
    from mpe2 import simple_spread_v3

    return simple_spread_v3.parallel_env(N=3, local_ratio=local_ratio, max_cycles=25)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args(argv)

    config = (
        recipe(JointPPOConfig().environment(spread, env_config={"local_ratio": 0.5}))
        .multi_agent(policies="shared")
        .training(gamma=0.95, minibatch_size=512)
        .debugging(seed=args.seed)
    )
    algo = config.build_algo()
    for iteration in range(1, (2 if args.smoke else args.iterations) + 1):
        episodes = algo.train()["env_runners"]
        if iteration == 1 or iteration % 10 == 0 or args.smoke:
            # Both are missing until an episode has ended.
            returns = sorted(episodes.get("agent_episode_returns_mean", {}).items())
            team = episodes.get("episode_return_mean", float("nan"))
            each = "  ".join(f"{agent} {value:6.1f}" for agent, value in returns)
            print(f"iteration {iteration:3}  team {team:7.1f}  {each}")
    algo.stop()


if __name__ == "__main__":
    main()
