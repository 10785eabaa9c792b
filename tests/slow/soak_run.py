"""A long run in a process of its own, with a Ray of its own: memory and metrics of every iteration, one JSON line each.

python -m tests.slow.soak_run DOOR ITERATIONS CHECKPOINT_FOLDER
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
from ray.rllib.env.multi_agent_env import MultiAgentEnv

from thrust_rllib.envs import Seats

CHECKPOINT_EVERY = 50


class Visitors(MultiAgentEnv):
    """One to five visitors in each episode of 6 to 24 steps, with names that never come again.

    Who comes when and for how long is drawn; the first one is there all the time. Visitors see noise and are paid for
    the action 1.
    """

    def __init__(self, config):
        super().__init__()
        self.observation_space = gym.spaces.Box(-10.0, 10.0, (4,))
        self.action_space = gym.spaces.Discrete(3)
        self.random = np.random.default_rng()
        self.named = 0

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.random = np.random.default_rng(seed)
        self.t, self.length = 0, int(self.random.integers(6, 25))
        self.visits = {}
        for number in range(self.random.integers(1, 6)):
            first = int(self.random.integers(0, self.length))
            visit = (first, int(self.random.integers(first, self.length))) if number else (0, self.length - 1)
            self.visits[f"visitor_{self.named}"] = visit
            self.named += 1
        return self._see(), {}

    def _here(self):
        return [agent for agent, (first, last) in self.visits.items() if first <= self.t <= last]

    def _see(self):
        return {agent: self.random.uniform(-10.0, 10.0, 4).astype(np.float32) for agent in self._here()}

    def step(self, actions):
        acted = self._here()
        rewards = {agent: float(actions[agent] == 1) for agent in acted}
        ends = {agent: self.t == self.visits[agent][1] for agent in acted}
        self.t += 1
        over = self.t == self.length
        return {} if over else self._see(), rewards, {**ends, "__all__": over}, {"__all__": False}, {}


def config_of(door):
    """Two remote runners, a learner of its own, LSTMs, normalised observations, two modules."""
    from tests.support import tiny_config

    seats = [f"seat_{i}" for i in range(5)]
    config = tiny_config(
        Seats,
        {"env": Visitors, "seats": len(seats)},
        policies={"even": seats[::2], "odd": seats[1::2]},
        num_envs=4,
        runners={"num_env_runners": 2, "normalize_observations": True, "sampling": door},
        model={"use_lstm": True, "fcnet_hiddens": [16], "lstm_cell_size": 16, "max_seq_len": 16},
        train_batch_size_per_learner=256,
        minibatch_size=64,
    )
    return config.learners(num_learners=1)


def visitors(runner):
    """How many names the environments of a runner have given so far."""
    return sum(env.unwrapped.env.named for env in runner.env.envs)


def memory(pid):
    """Megabytes of a process that it shares with nobody, and all that it has mapped."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines if line.startswith(("RssAnon", "VmRSS"))}
    return [round(found["RssAnon"], 3), round(found["VmRSS"], 3)]


def paths(result, prefix=""):
    """The names of all metrics."""
    for key, value in result.items():
        if isinstance(value, dict):
            yield from paths(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}"


def main(door, iterations, folder):
    """Trains, and tells."""
    import ray

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    algo = config_of(door).build_algo()
    pids = {"driver": os.getpid()}
    pids["learner"], *_ = [found.get() for found in algo.learner_group.foreach_learner(lambda learner: os.getpid())]
    remote = algo.env_runner_group.foreach_env_runner(lambda runner: os.getpid(), local_env_runner=False)
    pids |= {f"runner {i + 1}": pid for i, pid in enumerate(remote)}
    saved = Path(folder) / "checkpoint"
    for iteration in range(1, iterations + 1):
        result = algo.train()
        # The load of the machine (perf/) is in some results only, whatever the team is.
        names = sorted(name for name in paths(result) if not name.startswith(("config/", "perf/")))
        if iteration % CHECKPOINT_EVERY == 0:
            shutil.rmtree(saved, ignore_errors=True)
            algo.save_to_path(str(saved))
        line = {
            "iteration": iteration,
            "memory": {name: memory(pid) for name, pid in pids.items()},
            "metrics": names,
            "episodes": result["env_runners"]["num_episodes_lifetime"],
            "restarts": result["fault_tolerance"]["num_remote_worker_restarts"],
            "visitors": algo.env_runner_group.foreach_env_runner(visitors, local_env_runner=False),
        }
        print(json.dumps(line), flush=True)
    algo.stop()
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
