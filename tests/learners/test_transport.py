"""Rollouts go from runners to learners as references: not through the driver, and without a copy at the learner."""

from __future__ import annotations

import pickle
from dataclasses import fields

import numpy as np
import pytest
import ray

from tests.support import make_learner, make_runner, tiny_config
from thrust_rllib import JointPPOLearner
from thrust_rllib.joint_batch import ModuleStreams
from thrust_rllib.learner_group import JointLearnerGroup

IN_BAND = 2_000
"""Bytes of a pickled rollout of three modules besides its arrays: names, shapes, types."""


class WatchingLearner(JointPPOLearner):
    """Notes which of the arrays it is given could be written to, and how many bytes they have."""

    def _batches(self, rollouts):
        found = super()._batches(rollouts)
        arrays = [array for batch in found for array in arrays_of(batch)]
        self.seen = {
            "writable": sum(array.flags.writeable or array.flags.owndata for array in arrays if array.size),
            "bytes": sum(array.nbytes for array in arrays),
        }
        return found


def arrays_of(batch):
    """All arrays of a `JointBatch`."""
    own = [batch.bootstrap_rows, batch.episode_start, batch.valid, batch.sequence_rows, *batch.extras.values()]
    for streams in batch.modules.values():
        own += [getattr(streams, field.name) for field in fields(ModuleStreams) if field.name != "agents"]
    return [array for array in own if array is not None]


def pickled(value):
    """(bytes of the pickle itself, bytes of the buffers beside it), as Ray's protocol 5 splits them."""
    buffers = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return len(data), sum(buffer.raw().nbytes for buffer in buffers)


def rollout(steps, **options):
    return make_runner(tiny_config("debug/random_observations", **options)).sample(num_timesteps=2 * steps)[0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"policies": "shared"},
        {"model": {"cell": "lstm", "cell_size": 8, "max_seq_len": 4}},
        {"runners": {"normalize_observations": True}},
    ],
    ids=["per agent", "shared", "lstm", "normalised"],
)
def test_a_rollout_is_pickled_beside_its_arrays(options):
    for steps in (16, 256):
        batch = rollout(steps, **options)
        in_band, beside = pickled(batch)
        assert in_band < IN_BAND, steps
        assert beside == sum(array.nbytes for array in arrays_of(batch))


def test_an_array_that_is_not_one_block_would_be_pickled_in_band():
    batch = rollout(256)
    streams = next(iter(batch.modules.values()))
    streams.obs = np.repeat(streams.obs, 2, axis=2)[:, :, ::2]
    assert pickled(batch)[0] > max(IN_BAND, streams.obs.nbytes)


@pytest.fixture
def fetched(monkeypatch):
    """References that this process gets from now on."""
    found, get = set(), ray.get

    def watched(references, **kwargs):
        found.update(references if isinstance(references, list) else [references])
        return get(references, **kwargs)

    monkeypatch.setattr(ray, "get", watched)
    return found


def test_the_driver_fetches_no_rollout_and_the_learner_reads_shared_memory(build, fetched):
    config = tiny_config("debug/random_observations", runners={"num_env_runners": 1})
    algo = build(config.learners(num_learners=1, learner_class=WatchingLearner))
    rollouts, update = [], algo.learner_group.update_from_rollouts

    def watched(references, **kwargs):
        rollouts.extend(references)
        return update(references, **kwargs)

    algo.learner_group.update_from_rollouts = watched
    fetched.clear()
    algo.train()
    assert rollouts and all(isinstance(reference, ray.ObjectRef) for reference in rollouts)
    assert fetched and not fetched & set(rollouts)  # it does fetch: metrics, weights
    seen = algo.learner_group.ask_first(lambda learner, **_: learner.seen)
    sampled = [batch for part in ray.get(rollouts) for batch in part]
    assert seen == {"writable": 0, "bytes": sum(array.nbytes for batch in sampled for array in arrays_of(batch))}
    first, again = (ray.get(rollouts[0])[0] for _ in range(2))
    assert all(np.shares_memory(a, b) for a, b in zip(arrays_of(first), arrays_of(again), strict=True) if a.size)


def test_a_learner_in_the_drivers_process_does_fetch_them(ray_session, fetched):
    config = tiny_config("debug/random_observations")
    batches = make_runner(config).sample(num_timesteps=64)
    group = JointLearnerGroup(config=config, module_spec=make_learner(config)._module_spec)
    reference = ray.put(batches)
    group.update_from_rollouts([reference], {}, num_epochs=1, minibatch_size=16, shuffle_batch_per_epoch=True)
    assert reference in fetched
    group.shutdown()
