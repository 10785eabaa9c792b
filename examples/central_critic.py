"""A critic that sees the whole team, and a limit on collisions whose price is found while training.

    python examples/central_critic.py [--seed 0] [--limit 0.03]    about half a minute on one core
    python examples/central_critic.py --smoke                      3 iterations, seconds

Three agents are paid for standing near three landmarks, and nothing for keeping clear of each other: collisions are a
cost beside the reward. The constraint's multiplier is what a collision costs; it moves after each update.

The team's return over the last 100 episodes, and means over the last 25 iterations:

| seed | limit | team, iteration 1, 25, 75 | collisions a step at 1, 25, 50, 75 | price at 25, 50, 75 |
|------|-------|---------------------------|------------------------------------|---------------------|
| 0    | 0.03  | -85.2, -60.2, -55.7       | 0.0400, 0.0370, 0.0286, 0.0315     | 1.80, 1.71, 1.55    |
| 1    | 0.03  | -75.4, -63.1, -57.4       | 0.0260, 0.0373, 0.0303, 0.0264     | 1.74, 2.02, 1.11    |
| 2    | 0.03  | -76.8, -65.4, -57.8       | 0.0358, 0.0363, 0.0296, 0.0275     | 1.53, 1.58, 1.03    |
| 0    | 1     | -85.2, -56.5, -52.6       | 0.0400, 0.0907, 0.1164, 0.1574     | 0.00, 0.00, 0.00    |

(thrust_rllib 0.1.0, Ray 2.60.0, torch 2.13.0, Python 3.11)
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import fmean

from thrust_rllib import Constraint, JointPPOConfig
from thrust_rllib.recipes import recipe


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--limit", type=float, default=0.03)
    parser.add_argument("--iterations", type=int, default=75)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args(argv)

    config = recipe(JointPPOConfig().environment("spread", env_config={"collision_penalty": False}))
    config.multi_agent(policies="shared").debugging(seed=args.seed)
    limit = Constraint("collisions", args.limit, "pid", kp=100.0, ki=10.0)
    config.training(gamma=0.95, minibatch_size=512, critic="central", constraints=(limit,))

    algo = config.build_algo()
    costs, prices = [], []
    for iteration in range(1, (3 if args.smoke else args.iterations) + 1):
        result = algo.train()
        found = result["learners"]["__all_modules__"]["constraints"]["collisions"]
        costs.append(found["cost"])
        prices.append(found["multiplier"])
        if iteration == 1 or iteration % 25 == 0 or args.smoke:
            # One rollout has few collisions: means over 25. No return is there until an episode has ended.
            team = result["env_runners"].get("episode_return_mean", float("nan"))
            print(
                f"iteration {iteration:3}  team {team:6.1f}  collisions {fmean(costs[-25:]):.4f}  "
                f"price {fmean(prices[-25:]):.2f}"
            )
    algo.stop()


if __name__ == "__main__":
    main()
