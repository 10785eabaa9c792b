"""A plain Python loop: reads each agent's return, stops by a rule of its own, saves and restores a checkpoint.

    python examples/training_loop.py [--seed 0] [--checkpoint FOLDER]    about half a minute on one core
    python examples/training_loop.py --smoke                             2 iterations, seconds

No Tune and no command line: `algo.train()` returns a dict. The rule is one that a threshold on the team's return cannot
express: stop when even the agent that earns least has earned more than `--target` (mean over the last 100 episodes) in
three iterations running. The restored algorithm plays the same episodes as the saved one and trains on from there.

| seed | stopped after | team's return at 1, 10, 20, last | least agent's return at the same | plays, saved and loaded |
|------|---------------|----------------------------------|----------------------------------|-------------------------|
| 0    | 32 iterations | -1281, -1360, -961, -567         | -485, -457, -301, -177           | -482.520, -482.520      |
| 1    | 35            | -1271, -1047, -955, -297         | -459, -423, -388, -161           | -463.170, -463.170      |
| 2    | 33            | -1221, -1076, -999, -424         | -417, -326, -419, -178           | -389.380, -389.380      |

"Plays" is the team's mean return over 100 episodes with the most probable actions; training samples them.

(thrust_rllib 0.1.0, Ray 2.60.0, torch 2.13.0, Python 3.11)
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from thrust_rllib import JointPPO, JointPPOConfig
from thrust_rllib.evaluation import play_episodes
from thrust_rllib.recipes import recipe

PATIENCE = 3


def train(algo: JointPPO, target: float, max_iterations: int) -> None:
    reached = 0
    for iteration in range(1, max_iterations + 1):
        result = algo.train()
        returns = result["env_runners"].get("agent_episode_returns_mean", {})  # missing until an episode has ended
        if not returns:
            continue
        agent = min(returns, key=returns.get)
        reached = reached + 1 if returns[agent] > target else 0
        if iteration == 1 or iteration % 10 == 0 or reached or iteration == max_iterations:
            team = result["env_runners"].get("episode_return_mean", float("nan"))
            print(f"iteration {iteration:3}  team {team:8.1f}  least {returns[agent]:7.1f} ({agent})")
        if reached == PATIENCE:
            print(f"stopped: every agent above {target:g} in {PATIENCE} iterations running")
            return
    print(f"stopped: {max_iterations} iterations")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", type=float, default=-250.0, help="return that each agent must exceed")
    parser.add_argument("--max-iterations", type=int, default=100)
    parser.add_argument("--checkpoint", type=Path, help="folder; default: a temporary one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args(argv)

    config = recipe(JointPPOConfig().environment("bucket_brigade", env_config={"scenario": "minimal_specialization"}))
    algo = config.debugging(seed=args.seed).build_algo()
    train(algo, args.target, 2 if args.smoke else args.max_iterations)

    with tempfile.TemporaryDirectory() as temporary:
        path = str(args.checkpoint.absolute() if args.checkpoint else temporary)  # RLlib wants a full path
        algo.save_to_path(path)
        print(f"saved     after iteration {algo.iteration:3}  plays {play_episodes(algo, 100).team_returns.mean():.3f}")
        algo.stop()

        restored = JointPPO.from_checkpoint(path)
    played = play_episodes(restored, 100).team_returns.mean()
    print(f"restored  after iteration {restored.iteration:3}  plays {played:.3f}")
    print(f"goes on with    iteration {restored.train()['training_iteration']:3}")
    restored.stop()


if __name__ == "__main__":
    main()
