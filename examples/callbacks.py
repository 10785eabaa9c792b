"""RLlib's callbacks, and metrics of your own in the result, progress.csv and TensorBoard.

    python examples/callbacks.py [--seed 0]    about 25 s on one core
    python examples/callbacks.py --smoke       2 iterations, seconds

| callback                 | called                                        | here                                    |
|--------------------------|-----------------------------------------------|-----------------------------------------|
| `on_environment_created` | in each runner, once its environments exist   | prints how many                         |
| `on_algorithm_init`      | once, when everything is built                | prints the modules                      |
| `on_sample_end`          | in each runner, with a list of `JointBatch`   | logs how often each agent works         |
| `on_evaluate_start`/`_end` | around an evaluation                        | adds the spread of the agents' returns  |
| `on_train_result`        | after each iteration, the result may be changed | adds the same for training            |

What is logged in `on_sample_end` comes out under `env_runners/`, as a mean over runners. A function in place of the
class does as well: `.callbacks(on_train_result=function)`. Overriding `on_episode_created`, `_start`, `_step` or `_end`
switches to sampling by RLlib's episodes, which takes four times as long as arrays; `on_sample_end` has every step of
the rollout in both.

How often agents 0 to 3 work, and the spread: return of the agent that earns most minus that of the one that earns
least.

| seed | works, iteration 1     | works, iteration 40    | spread at 1, 20, 40 | in evaluation at 20, 40 |
|------|------------------------|------------------------|---------------------|-------------------------|
| 0    | 0.50, 0.50, 0.50, 0.51 | 0.58, 0.48, 0.48, 0.44 | 294, 166, 150       | 264, 129                |
| 1    | 0.48, 0.50, 0.51, 0.50 | 0.54, 0.45, 0.46, 0.47 | 265, 268, 59        | 156, 40                 |
| 2    | 0.50, 0.51, 0.52, 0.50 | 0.46, 0.62, 0.55, 0.54 | 227, 280, 148       | 241, 176                |

(thrust_rllib 0.1.0, Ray 2.60.0, torch 2.13.0, Python 3.11)
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ray.rllib.callbacks.callbacks import RLlibCallback

from thrust_rllib import JointBatch, JointPPOConfig
from thrust_rllib.recipes import recipe

MODE, WORK = 1, 1  # an action of the bucket brigade is (house, mode, signal)


def spread(episodes: dict) -> float:
    """Return of the agent that earns most minus that of the one that earns least."""
    returns = episodes.get("agent_episode_returns_mean", {}).values()  # missing until an episode has ended
    return max(returns) - min(returns) if returns else float("nan")


class TeamCallbacks(RLlibCallback):
    def on_environment_created(self, *, env_runner, env, **kwargs):
        print(f"runner {env_runner.worker_index}: {env.num_envs} environments")

    def on_algorithm_init(self, *, algorithm, **kwargs):
        print(f"modules: {', '.join(sorted(algorithm.config.policies))}")

    def on_sample_end(self, *, metrics_logger, samples, **kwargs):
        for batch in samples:
            if isinstance(batch, JointBatch):  # an evaluation by episodes keeps no steps
                for stream in batch.streams():  # arrays [T, E, …] of one agent
                    works = stream.actions[..., MODE] == WORK
                    metrics_logger.log_value(("works", stream.agent_id), works.mean(), window=1)

    def on_evaluate_start(self, *, algorithm, **kwargs):
        print(f"evaluating after iteration {algorithm.iteration + 1}")  # the iteration is still running

    def on_evaluate_end(self, *, evaluation_metrics, **kwargs):
        evaluation_metrics["return_spread"] = spread(evaluation_metrics["env_runners"])

    def on_train_result(self, *, result, **kwargs):
        result["return_spread"] = spread(result["env_runners"])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args(argv)
    iterations = 2 if args.smoke else args.iterations

    config = (
        recipe(JointPPOConfig().environment("bucket_brigade", env_config={"scenario": "minimal_specialization"}))
        .callbacks(TeamCallbacks)
        .evaluation(evaluation_interval=max(1, iterations // 2), evaluation_duration=100)
        .debugging(seed=args.seed)
    )
    algo = config.build_algo()
    for iteration in range(1, iterations + 1):
        result = algo.train()
        evaluated = result.get("evaluation", {}).get("return_spread")  # missing in iterations without an evaluation
        if iteration == 1 or evaluated is not None:
            shares = sorted(result["env_runners"]["works"].items())
            works = "  ".join(f"{agent} works {share:.3f}" for agent, share in shares)
            also = "" if evaluated is None else f"  evaluation {evaluated:.1f}"
            print(f"iteration {iteration:3}  {works}  spread {result['return_spread']:.1f}{also}")
    algo.stop()


if __name__ == "__main__":
    main()
