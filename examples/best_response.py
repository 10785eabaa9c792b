"""Freezes all agents but one and trains this one's best response to the others.

    python examples/best_response.py [--seed 0] [--agent agent_0]    about a minute on one core
    python examples/best_response.py --smoke                         2 + 2 iterations, seconds

First a team of four trains briefly on the bucket brigade. Then a second algorithm starts from its checkpoint with
`policies_to_train=[one agent]`: the others act and are reported, but nothing of them moves, neither their weights nor
the moments by which their observations are normalised.

Returns per episode before and after 40 iterations of 2048 steps, means over 1000 episodes (± standard error):

| seed | agent_0          | team                        | agents 1 to 3, before and after                  |
|------|------------------|-----------------------------|--------------------------------------------------|
| 0    | -360.9 to -147.5 | -1001.7 ± 35 to -768.0 ± 33 | -310.4, -153.5, -176.9 to -299.9, -150.3, -170.3 |
| 1    | -354.4 to -152.1 | -1001.2 ± 35 to -789.9 ± 33 | -329.8, -144.6, -172.3 to -324.1, -146.3, -167.3 |
| 2    | -291.9 to -151.3 | -911.8 ± 34 to -774.7 ± 33  | -316.7, -158.5, -144.7 to -317.6, -161.3, -144.5 |

The agent's own return rises, and the team's by as much: the others' hardly change. The largest change of a weight
of its network is 0.23 to 0.25; the others' weights are equal to the bit.

(thrust_rllib 0.1.0, Ray 2.60.0, torch 2.13.0, Python 3.11)
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence

import numpy as np

from thrust_rllib import JointPPO, JointPPOConfig
from thrust_rllib.evaluation import play_episodes
from thrust_rllib.recipes import recipe


def make_config(seed: int) -> JointPPOConfig:
    config = JointPPOConfig().environment("bucket_brigade", env_config={"scenario": "minimal_specialization"})
    return recipe(config).debugging(seed=seed)


def print_returns(moment: str, algo: JointPPO, num_episodes: int) -> None:
    played = play_episodes(algo, num_episodes, explore=True)  # same seeds each time, the algorithm's own are untouched
    team = played.team_returns
    error = team.std() / len(team) ** 0.5
    each = "  ".join(f"{a} {value:7.1f}" for a, value in zip(played.agents, played.returns.mean(axis=0), strict=True))
    print(f"{moment}  team {team.mean():8.1f} ± {error:.1f}  {each}")


def print_changes(before: dict[str, dict[str, np.ndarray]], after: dict[str, dict[str, np.ndarray]]) -> None:
    print("largest change of a weight:")
    for agent in before:
        change = max(float(abs(after[agent][name] - before[agent][name]).max()) for name in before[agent])
        print(f"  {agent} {change:.6f}" + ("  (equal to the bit)" if change == 0 else ""))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--agent", default="agent_0", help="whose best response")
    parser.add_argument("--team-iterations", type=int, default=20)
    parser.add_argument("--iterations", type=int, default=40, help="of the best response")
    parser.add_argument("--episodes", type=int, default=1000, help="played to measure returns")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args(argv)
    if args.smoke:
        args.team_iterations, args.iterations, args.episodes = 2, 2, 32

    with tempfile.TemporaryDirectory() as checkpoint:
        team = make_config(args.seed).build_algo()
        for _ in range(args.team_iterations):
            team.train()
        team.save_to_path(checkpoint)
        team.stop()

        # `JointPPO.from_checkpoint` would bring the old configuration back; this one keeps the new.
        algo = make_config(args.seed).multi_agent(policies_to_train=[args.agent]).build_algo()
        algo.restore_from_path(checkpoint)

    before = algo.learner_group.get_weights()
    print_returns("before", algo, args.episodes)
    for _ in range(args.iterations):
        algo.train()
    print_returns("after ", algo, args.episodes)
    print_changes(before, algo.learner_group.get_weights())
    algo.stop()


if __name__ == "__main__":
    main()
