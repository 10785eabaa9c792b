"""What an algorithm's processes need of a cluster, and what is said where it has less."""

from __future__ import annotations

import pytest

from tests.support import tiny_config
from thrust_rllib.resources import needed_cpus, warn_of_too_few


@pytest.mark.parametrize(
    ("learners", "expected"),
    [
        ({}, 3.0),
        ({"num_learners": 2}, 5.0),
        ({"num_learners": 2, "num_cpus_per_learner": 0.25}, 3.5),
        ({"num_learners": 2, "num_gpus_per_learner": 1}, 3.0),
    ],
)
def test_needed_cpus(learners, expected):
    config = tiny_config(runners={"num_env_runners": 4, "num_cpus_per_env_runner": 0.5}).learners(**learners)
    config.evaluation(evaluation_num_env_runners=2)
    assert needed_cpus(config) == expected


@pytest.mark.parametrize(
    ("has", "told"), [({"CPU": 5.0}, ["GPU"]), ({"CPU": 4.0, "GPU": 2.0}, ["CPU"]), ({"CPU": 5.0, "GPU": 2.0}, [])]
)
def test_a_cluster_that_is_too_small_is_told(monkeypatch, caplog, has, told):
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.cluster_resources", lambda: has)
    config = tiny_config(runners={"num_env_runners": 3})
    config.learners(num_learners=2, num_cpus_per_learner=1, num_gpus_per_learner=1)
    with caplog.at_level("WARNING", logger="thrust_rllib"):
        warn_of_too_few(config)
    assert [kind for kind in ("CPU", "GPU") if f" {kind}s and the cluster has" in caplog.text] == told


def test_without_ray_nothing_is_known(monkeypatch, caplog):
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    warn_of_too_few(tiny_config(runners={"num_env_runners": 99}))
    assert not caplog.records
