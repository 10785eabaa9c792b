"""Trains on a Ray cluster of three nodes on this machine, in a process of its own; started by `test_cluster.py`.

    python tests/learners/cluster_run.py FOLDER

The driver is on the first node; each of the other two has room for one runner and one learner. Writes `places.json` and
`parameters.npz` into the folder. Ray's files, its address among them, lie below the environment variable RAY_TMPDIR, so
that nobody else finds this cluster.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import numpy as np
import ray
import torch
from ray.cluster_utils import Cluster

from thrust_rllib import JointPPOConfig, RedundancyPenalty

ITERATIONS = 3
ROWS, MINIBATCH = 96, 32
"""Of a whole rollout and of a joint minibatch, whatever the number of learners is."""
ON_NODES = {
    "runners": {"custom_resources_per_env_runner": {"runners": 1}},
    "learners": {"custom_resources_per_learner": {"learners": 1}},
}


def config(num_learners, runners=None, learners=None):
    """Two remote runners, couplings, two optimizers, normalised observations and values.

    Args:
        num_learners: L; 0 trains in the driver's process.
        runners: further options of `.env_runners(…)`.
        learners: further options of `.learners(…)`.
    """
    many = max(num_learners, 1)
    return (
        JointPPOConfig()
        .environment("bucket_brigade", env_config={"scenario": "minimal_specialization"})
        .env_runners(num_env_runners=2, num_envs_per_env_runner=4, normalize_observations=True, **(runners or {}))
        .learners(num_learners=num_learners, **(learners or {}))
        .rl_module(model_config={"fcnet_hiddens": [16, 12]})
        .training(
            lr=1e-3,
            critic_lr=2e-3,
            train_batch_size_per_learner=ROWS // many,
            minibatch_size=MINIBATCH // many,
            num_epochs=2,
            iterate_all_minibatches=True,
            cross_agent_losses={"redundancy": RedundancyPenalty()},
            cross_agent_coeffs={"redundancy": 0.5},
        )
        .debugging(seed=3)
    )


def train(algo):
    """Some iterations; the parameters after each of them, by "module/name"."""
    found = []
    for _ in range(ITERATIONS):
        algo.train()
        weights = algo.learner_group.get_weights()
        found.append({f"{m}/{name}": np.array(x) for m, module in weights.items() for name, x in module.items()})
    return found


def place(*_):
    """The node of the process that calls this, and with which backend it speaks to other learners."""
    backend = torch.distributed.get_backend() if torch.distributed.is_initialized() else None
    return ray.get_runtime_context().get_node_id(), backend


def main(folder):
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=4, resources={"runners": 1, "learners": 1})
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    algo = config(2, **ON_NODES).build_algo()
    parameters = train(algo)[-1]
    places = {
        "nodes": [node["NodeID"] for node in ray.nodes() if node["Alive"]],
        "driver": place()[0],
        "runners": [node for node, _ in algo.env_runner_group.foreach_env_runner(place, local_env_runner=False)],
        "learners": [found.get()[0] for found in algo.learner_group.foreach_learner(place)],
        "backends": [found.get()[1] for found in algo.learner_group.foreach_learner(place)],
        "env_steps": int(algo.metrics.peek(("env_runners", "num_env_steps_sampled_lifetime"))),
    }
    np.savez(folder / "parameters.npz", **parameters)
    (folder / "places.json").write_text(json.dumps(places))
    algo.stop()
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
