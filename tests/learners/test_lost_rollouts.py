"""Rollouts whose runner ends before the learners have fetched them: the update goes on with the others."""

from __future__ import annotations

import time

import pytest
import ray
from ray.rllib.core.learner.training_data import TrainingData

from tests.learners.threads import talk
from tests.support import make_runner, tiny_config
from thrust_rllib.rollouts import RolloutsLostError, fetch_parts, rollouts_of


@pytest.fixture(scope="module")
def parts():
    """What three runners would give: rollouts of 24, 48 and 72 steps."""
    runner = make_runner(tiny_config(num_envs=1))
    yield [runner.sample(num_timesteps=steps, explore=True) for steps in (24, 48, 72)]
    runner.stop()


@pytest.mark.parametrize("size", [2, 3])
def test_what_one_learner_could_not_fetch_is_left_out_by_all(parts, size, caplog):
    def work(ranks):
        mine = list(parts)
        if ranks.rank == size - 1:
            mine[1] = None
        return rollouts_of(mine, ranks)

    with caplog.at_level("WARNING", logger="thrust_rllib"):
        answers = talk(size, work)
    for found, _ in answers:
        assert [id(x) for x in found] == [id(x) for part in (parts[0], parts[2]) for x in part]
    assert [record.getMessage()[:26] for record in caplog.records] == ["1 of 3 rollouts are lost: "]  # told by one


def test_without_any_rollout_all_learners_raise(parts):
    def work(ranks):
        with pytest.raises(RolloutsLostError, match="all 2 rollouts are lost"):
            rollouts_of([parts[0], None] if ranks.rank else [None, parts[1]], ranks)

    assert len(talk(2, work)) == 2


def test_learners_with_other_rollouts_refuse_them(parts):
    def work(ranks):
        with pytest.raises(ValueError, match=r"different rollouts, of \[\[24, 48\], \[48, 24\]\] steps"):
            rollouts_of(parts[:2] if ranks.rank == 0 else parts[1::-1], ranks)

    assert len(talk(2, work)) == 2


@pytest.mark.usefixtures("ray_session")
def test_a_process_that_ends_takes_along_what_it_has_put():
    @ray.remote(num_cpus=0)
    class Runner:
        def put(self, number):
            return ray.put([number])

    stays, ends = Runner.remote(), Runner.remote()
    references = ray.get([stays.put.remote(1), ends.put.remote(2), stays.put.remote(3)])
    assert fetch_parts(TrainingData(episodes_refs=references)) == [[1], [2], [3]]
    ray.kill(ends)
    wait_until_lost(references[1])
    assert fetch_parts(TrainingData(episodes_refs=references)) == [[1], None, [3]]


def wait_until_lost(reference):
    """Until Ray has noticed that the process behind a reference is gone."""
    end = time.monotonic() + 30.0
    while fetch_parts(TrainingData(episodes_refs=[reference])) != [None]:
        assert time.monotonic() < end, "the rollout is still there"
        time.sleep(0.1)
