"""Batches with costs of every kind, padding and absent agents; all arrays read-only, as out of Ray's object store."""

from __future__ import annotations

import numpy as np

from tests.support import hand_batch, hand_streams

TEAMS = {"left": ("a2", "a0"), "right": ("a1",)}  # not in the order of names
KINDS = ("team", "agent", "pair")


def frozen(array):
    array.setflags(write=False)
    return array


def batch_with_costs(seed, steps=4, envs=2, dtype=np.float32, ragged=True, **extras):
    """A batch of three agents in two modules, with one extra of each kind besides those given."""
    rng = np.random.default_rng(seed)
    agents = sum(map(len, TEAMS.values()))
    valid = np.ones((steps, envs), bool)
    if ragged:
        valid[rng.integers(1, steps) :, rng.integers(envs)] = False
    modules = {}
    for module_id, own in TEAMS.items():
        shape = steps, len(own), envs
        present = rng.random(shape) < 0.7 if ragged else np.ones(shape, bool)
        present &= valid[:, None]
        rewards = rng.normal(size=shape)
        modules[module_id] = hand_streams(own, np.zeros((*shape, 1)), rewards=rewards, present=present)
        for name in ("rewards", "present", "obs"):
            frozen(getattr(modules[module_id], name))
    costs = {
        "team": rng.normal(size=(steps, envs)),
        "agent": rng.normal(size=(steps, agents, envs)),
        "pair": rng.normal(size=(steps, agents, agents, envs)),
    }
    costs = {name: frozen(np.asarray(value, dtype)) for name, value in costs.items()}
    return hand_batch(modules, valid=frozen(valid), extras={**costs, **extras})
