"""Trains two of Ray's learners on a team in sets of names, in a process of its own; started by `test_hash_seeds.py`.

    PYTHONHASHSEED=1 python tests/learners/hash_seeds.py FOLDER

The order of a set of strings depends on PYTHONHASHSEED. Writes the order found, a digest of the parameters of both
learners, one of the metrics, and the parameters into the folder. Ray's files lie below the environment variable
RAY_TMPDIR.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from pathlib import Path

import numpy as np
import ray
import torch

from tests.learners.ray_learners import group_of, numbers, of_all, rollouts_of, snapshot, team, train_group

NAMES = ("north", "south", "east", "west")
UPDATES = 3


def config(learners):
    """Modules, trained ones, overrides and couplings from sets."""
    given = team(learners)
    names = frozenset(NAMES)
    settings = team(
        learners,
        env_config={"agents": list(NAMES), "episode_length": 10},
        policies=set(names),
        trained={name for name in names if name != "east"},
        overrides={name: {"lr": 1e-3 * (1 + NAMES.index(name))} for name in names},
        cross_agent_losses=dict(set(given.cross_agent_losses.items())),
    )
    return settings.multi_agent(policy_mapping_fn=lambda agent, *args, **kwargs: agent)


def digest(tree):
    """Of nested dicts of arrays and numbers, in the order of the names."""
    if isinstance(tree, dict):
        text = "".join(f"{key}:{digest(tree[key])}" for key in sorted(tree, key=str))
    elif isinstance(tree, (list, tuple)):
        text = "".join(map(digest, tree))
    else:
        text = np.asarray(tree).tobytes().hex()
    return hashlib.sha256(text.encode()).hexdigest()


def main(folder):
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    rollouts, spaces = rollouts_of(config(0), UPDATES)
    group = group_of(config(2), spaces)
    results = [numbers(found) for found in train_group(group, rollouts)]
    learners = of_all(group, snapshot)
    parameters = {f"{m}/{name}": x for m, module in learners[0]["parameters"].items() for name, x in module.items()}
    np.savez(folder / "parameters.npz", **parameters)
    found = {
        "order": list(frozenset(NAMES)),
        "learners": [digest(learner) for learner in learners],
        "metrics": digest(results),
    }
    (folder / "found.json").write_text(json.dumps(found))
    group.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
