"""Runners that are saved in the middle of episodes, and what it means that two have sampled the same.

As a script: continues the runners of a pickled list of cases in this process, and pickles what they have sampled.
"""

from __future__ import annotations

import dataclasses
import pickle
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from tests.support import runner_metrics, tiny_config
from thrust_rllib.connectors.episodes_to_joint_batch import EpisodesToJointBatch
from thrust_rllib.sampling.episode_state import episode_state

DOORS = ("arrays", "episodes")
STEPS = 7
"""Of a rollout, in each environment; no divisor of an episode's length."""
NO_NUMBERS_OF_THE_GAME = ("timer", "time", "duration", "throughput", "seq_no")
"""Parts of metrics' names that clocks decide."""


@dataclass
class Case:
    """A runner to be saved.

    Args:
        env: as in `tiny_config`.
        door: "arrays" or "episodes".
        lstm: recurrent modules instead of MLPs.
        normalize: normalised observations.
        num_envs: E.
        env_config: as in `tiny_config`.
        options: of `tiny_config`.
        worker_index: of the runner.
    """

    env: object
    door: str
    lstm: bool = False
    normalize: bool = False
    num_envs: int = 2
    env_config: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)
    worker_index: int = 1

    def __str__(self):
        env = self.env if isinstance(self.env, str) else self.env.__name__
        kind = f"{'lstm' if self.lstm else 'mlp'}-{'normalized' if self.normalize else 'raw'}-{self.num_envs}"
        return f"{env}-{self.door}-{kind}"

    def runner(self):
        model = {"fcnet_hiddens": [8]} | (
            {"use_lstm": True, "lstm_cell_size": 5, "max_seq_len": 3} if self.lstm else {}
        )
        options = {"num_envs": self.num_envs, "model": model, **self.options}
        runners = {"sampling": self.door, "normalize_observations": self.normalize, **options.pop("runners", {})}
        if self.door == "episodes":
            runners.setdefault("episode_lookback_horizon", 2)
        module_class = options.pop("module_class", None)
        evaluation = options.pop("in_evaluation", False)
        config = tiny_config(self.env, dict(self.env_config), runners=runners, audit=True, **options)
        if module_class is not None:
            config.rl_module(rl_module_spec=RLModuleSpec(module_class=module_class, model_config=model))
        config.validate()
        config.in_evaluation = evaluation
        return config.env_runner_cls(config=config, worker_index=self.worker_index)


def sample(runner, count=1, steps=STEPS, **kwargs):
    """What `count` rollouts gave: comparable things, see `same`."""
    sampled = []
    for _ in range(count):
        rollout = runner.sample(num_timesteps=steps * runner.num_envs, **kwargs)
        if runner.door == "episodes":
            batch = EpisodesToJointBatch(codec=runner.config.team_codec(), audit=True).joint_batch(rollout)
            states = [episode_state(episode) for episode in rollout]
            sampled.append({"episodes": states, "batch": batch, "ids": [e.id_ for e in rollout]})
        else:
            sampled.append({"batch": rollout[0]})
    told = sorted(flat(runner_metrics(runner)))
    metrics = {name: value for name, value in told if not timing(name)}
    return {"rollouts": sampled, "metrics": metrics}


def timing(name):
    return name == "/sample" or any(part in name for part in NO_NUMBERS_OF_THE_GAME)


def flat(tree, path=""):
    """Pairs of path and leaf of nested dicts."""
    for key, value in tree.items():
        name = f"{path}/{key}"
        yield from flat(value, name) if isinstance(value, dict) else [(name, value)]


def differences(left, right, path=""):
    """The paths at which two things are not the same to the bit, types and shapes included."""
    if type(left) is not type(right):
        return [f"{path}: {type(left).__name__} and {type(right).__name__}"]
    if dataclasses.is_dataclass(left):
        return differences(vars(left), vars(right), path)
    if isinstance(left, dict):
        if list(left) != list(right):
            return [f"{path}: keys {list(left)} and {list(right)}"]
        return [found for key in left for found in differences(left[key], right[key], f"{path}/{key}")]
    if isinstance(left, (list, tuple)):
        if len(left) != len(right):
            return [f"{path}: lengths {len(left)} and {len(right)}"]
        return [
            found for i, pair in enumerate(zip(left, right, strict=True)) for found in differences(*pair, f"{path}/{i}")
        ]
    if isinstance(left, torch.Tensor):
        left, right = left.numpy(), right.numpy()
    if isinstance(left, np.ndarray):
        equal = left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    else:
        equal = left == right or left != left
    return [] if equal else [f"{path}: {left!r} and {right!r}"]


def not_the_same(left, right):
    """`differences` of what two runners have sampled; ids of episodes are random, and count by where they are equal."""
    return differences(without_ids(left), without_ids(right))


def without_ids(sampled):
    """The same with episodes counted in the order in which they appear."""
    numbers: dict = {}

    def number(id_):
        return numbers.setdefault(id_, len(numbers))

    rollouts = []
    for rollout in sampled["rollouts"]:
        if "episodes" not in rollout:
            rollouts.append(rollout)
            continue
        episodes = [
            {
                **state,
                "fields": strip(state["fields"]),
                "agents": {a: strip_agent(s) for a, s in state["agents"].items()},
            }
            for state in rollout["episodes"]
        ]
        batch = vars(rollout["batch"]) | {"modules": {}}
        for module_id, streams in rollout["batch"].modules.items():
            origin = streams.origin.copy()
            origin[..., 0] = np.vectorize(number)(origin[..., 0])
            batch["modules"][module_id] = vars(streams) | {"origin": origin}
        rollouts.append({"episodes": episodes, "batch": batch, "ids": [number(i) for i in rollout["ids"]]})
    return {"rollouts": rollouts, "metrics": sampled["metrics"]}


def strip(fields):
    return {name: value for name, value in fields.items() if name not in ("id_", "multi_agent_episode_id")}


def strip_agent(state):
    return {**state, "fields": strip(state["fields"])}


def agents_of(episode):
    """What an episode's agents have seen, done and got."""
    return {agent: strip_agent(state) for agent, state in episode_state(episode)["agents"].items()}


def random_weights(runner, seed=5):
    """Random weights of some size, which are returned."""
    generator = torch.Generator().manual_seed(seed)
    for module_id in sorted(runner.module.keys()):
        for p in runner.module[module_id].parameters():
            with torch.no_grad():
                p.copy_(0.5 * torch.randn(p.shape, generator=generator))


def saved(runner):
    """Weights, connector state, and what the runner is in the middle of."""
    return runner.get_state(components=["rl_module", "env_to_module_connector", "module_to_env_connector", "sampling"])


def begun(case, rollouts=3):
    """A runner that has sampled, with its metrics taken."""
    runner = case.runner()
    random_weights(runner)
    sample(runner, rollouts)
    return runner


def continued(case, state, count=3):
    """What a new runner samples that is given a state."""
    runner = case.runner()
    runner.set_state(state)
    return sample(runner, count)


def main(path):
    """Continues all cases of a file in this process."""
    cases = pickle.loads(Path(path).read_bytes())
    Path(path + ".sampled").write_bytes(pickle.dumps([continued(case, state) for case, state in cases]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
