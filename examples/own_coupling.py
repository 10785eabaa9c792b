"""A loss of your own that couples the agents: two of them should rarely choose the same house.

    python examples/own_coupling.py [--seed 0]    about a minute on one core
    python examples/own_coupling.py --smoke       8 iterations at three times the learning rate, seconds

`Crowding` below is the chance that two agents, at the same time step, choose the same house; ten houses chosen evenly
give 0.1. Only a loss that sees the agents' outputs for the same step can ask for that. The example trains twice, with
weight 0 (only reported) and with `--weight`; value of the loss, and the team's return over the last 100 episodes:

| seed | weight | crowding at iteration 1, 20, 40 | team's return at iteration 40 |
|------|--------|---------------------------------|-------------------------------|
| 0    | 0      | 0.1000, 0.1005, 0.0987          | -604                          |
| 0    | 10     | 0.1000, 0.0448, 0.0055          | -760                          |
| 1    | 0      | 0.0999, 0.0985, 0.0971          | -424                          |
| 1    | 10     | 0.0999, 0.0539, 0.0066          | -564                          |
| 2    | 0      | 0.0999, 0.1008, 0.0997          | -321                          |
| 2    | 10     | 0.0999, 0.0561, 0.0069          | -633                          |

The coupling does what it asks for, and here that costs return: where an agent stands matters only while it works.

(thrust_rllib 0.1.0, Ray 2.60.0, torch 2.13.0, Python 3.11)
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import combinations

from thrust_rllib import CrossAgentLoss, JointPPOConfig
from thrust_rllib.recipes import recipe

HOUSES = 10


class Crowding(CrossAgentLoss):
    """Mean over pairs of agents and rows of Σ_h p_i(h) p_j(h), the chance of a choice in common."""

    needs_features = False  # the logits are enough

    def __call__(self, features, logits, actions, present):
        # An action is (house, mode, signal): the first HOUSES logits choose the house. In this environment every agent
        # acts in every step, so `present` is None.
        chances = [agent_logits[:, :HOUSES].softmax(-1) for agent_logits in logits.values()]
        pairs = [(p * q).sum(-1).mean() for p, q in combinations(chances, 2)]
        return sum(pairs) / len(pairs)


def train(weight: float, iterations: int, lr: float, seed: int) -> None:
    config = (
        recipe(JointPPOConfig().environment("bucket_brigade", env_config={"scenario": "minimal_specialization"}))
        .training(cross_agent_losses={"crowding": Crowding()}, cross_agent_coeffs={"crowding": weight}, lr=lr)
        .debugging(seed=seed)
    )
    algo = config.build_algo()
    for iteration in range(1, iterations + 1):
        result = algo.train()
        if iteration in (1, iterations) or iteration % 10 == 0:
            crowding = result["learners"]["__all_modules__"]["cross_agent_loss"]["crowding"]
            team = result["env_runners"].get("episode_return_mean", float("nan"))  # missing until an episode has ended
            print(f"weight {weight:g}  iteration {iteration:3}  crowding {crowding:.4f}  team {team:8.1f}")
    algo.stop()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--weight", type=float, default=10.0)
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args(argv)
    for weight in (0.0, args.weight):
        train(weight, 8 if args.smoke else args.iterations, 3e-3 if args.smoke else 1e-3, args.seed)


if __name__ == "__main__":
    main()
