"""Several of Ray's learners against one in more settings than the default tests have; minutes on two idle cores."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray
import torch.distributed as dist
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from tests.learners.ray_learners import (
    check_alike,
    check_metrics,
    group_of,
    in_time,
    of_all,
    rollouts_of,
    snapshot,
    team,
    train_group,
    trained_alone,
    trained_inside,
)
from tests.learners.test_lost_rollouts import wait_until_lost
from tests.support import largest_difference, tiny_config
from thrust_rllib import FeatureSimilarity, MLPModule, learner_group

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow_learners, pytest.mark.usefixtures("ray_session"), pytest.mark.timeout(300)]

SETTINGS = {
    "one optimizer": {"critic_lr": None},
    "plain values": {"value_normalization": False},
    "no couplings": {"cross_agent_losses": {}, "cross_agent_coeffs": {}},
    "feature similarity": {"cross_agent_losses": {"s": FeatureSimilarity()}, "cross_agent_coeffs": {"s": 0.3}},
    "all are trained": {"trained": None},
    "one module for all": {"policies": "shared", "trained": None},
    "own options": {"overrides": {"agent_0": {"lr": 5e-3, "gamma": 0.9}, "agent_2": {"grad_clip": 0.01}}},
    "rates that fall": {"lr": [[0, 2e-3], [500, 1e-4]], "entropy_coeff": [[0, 0.1], [500, 0.0]]},
    "a limit of KL": {"target_kl": 1e-4, "lr": 5e-3, "num_epochs": 4},
    "standardised by minibatch": {"standardize_advantages": "minibatch"},
    "standardised by team": {"standardize_advantages": "team"},
    "whole batches": {"minibatch_size": None},
    "episodes": {"runners": {"sampling": "episodes"}},
    "whole episodes": {"runners": {"sampling": "episodes", "batch_mode": "complete_episodes"}},
}  # fmt: skip


@pytest.fixture(scope="module", params=[2, 3], ids=["two", "three"])
def group(request, ray_session):
    """A group of two, then one of three learners."""
    group = group_of(team(request.param), rollouts_of(team(), 0)[1])
    yield group
    group.shutdown()


@pytest.mark.parametrize(
    ("name", "model"), [*((name, model) for name in SETTINGS for model in ("mlp", "lstm")), ("whole batches", "gru")]
)
def test_ten_updates_give_what_one_learner_gives(group, name, model):
    options = SETTINGS[name]
    rollouts, spaces = rollouts_of(team(0, model, **options), 10)
    check_alike(
        trained_inside(group, team(len(group), model, **options), spaces, rollouts),
        trained_alone(team(0, model, **options), spaces, rollouts),
    )


@pytest.mark.parametrize(("model", "agents"), [("mlp", 5), ("lstm", 2)])
def test_a_hundred_updates_stay_close(group, model, agents):
    """Rounding differs between one sum and several; it does not grow much."""
    options = {"env_config": {"agents": agents, "episode_length": 10}, "trained": None}
    rollouts, spaces = rollouts_of(team(0, model, **options), 100)
    ranks = trained_inside(group, team(len(group), model, **options), spaces, rollouts)
    before, after, _ = trained_alone(team(0, model, **options), spaces, rollouts)
    for rank in ranks:
        assert largest_difference(rank[1], ranks[0][1]) == 0.0
    apart = largest_difference(ranks[0][1]["parameters"], after["parameters"])
    assert apart < 1e-3 < 0.02 < largest_difference(before["parameters"], after["parameters"])


def test_without_a_seed_the_learners_go_on_from_a_state_as_one_does(group):
    rollouts, spaces = rollouts_of(team(), 10)
    (state, *_) = of_all(group, lambda learner: learner.get_state())
    ranks = trained_inside(group, team(len(group), seed=None), spaces, rollouts, state)
    check_alike(ranks, trained_alone(team(seed=8), spaces, rollouts, state))


def ends(learner):
    learner.config.cross_agent_losses["bad"].ends = True


class EndsItsProcess:
    """A coupling that ends the process of the last learner once it is told to."""

    needs_features = False
    ends = False

    def __call__(self, features, logits, actions, present):
        if self.ends and dist.get_rank() == dist.get_world_size() - 1:
            os._exit(1)
        return sum(x.square().mean() for x in logits.values())


@pytest.mark.parametrize("learners", [2, 3])
def test_a_learner_whose_process_ends_is_named_and_the_group_ends(monkeypatch, learners):
    monkeypatch.setattr(learner_group, "GRACE_S", 5.0)
    rollouts, spaces = rollouts_of(team(), 2)
    options = {"cross_agent_losses": {"bad": EndsItsProcess()}, "cross_agent_coeffs": {}}
    group = group_of(team(learners, **options), spaces)
    train_group(group, rollouts[:1])
    of_all(group, ends)
    error, _ = in_time(lambda: train_group(group, rollouts[1:]), 60)
    assert isinstance(error, RuntimeError) and f"learner {learners - 1} of {learners} failed" in str(error), error
    again, _ = in_time(lambda: train_group(group, rollouts[1:]), 5)
    assert str(again) == str(error)
    group.shutdown()


class FailsInOneLearner(MLPModule):
    def setup(self):
        super().setup()
        if dist.is_initialized() and dist.get_rank() == 1:
            raise OSError("no such file on this machine")


def test_a_module_that_one_learner_cannot_build_ends_the_group_soon(build, monkeypatch):
    monkeypatch.setattr(learner_group, "GRACE_S", 2.0)
    algo = build(team(2))
    spec = RLModuleSpec(FailsInOneLearner, model_config={"fcnet_hiddens": [8]})
    error, took = in_time(lambda: algo.add_module("new", spec), 60)
    assert isinstance(error, RuntimeError) and "learner 1 of 2 failed" in str(error), error
    assert "no such file on this machine" in str(error) and took < 30.0


def test_an_algorithm_can_be_stopped_when_ray_is_gone(tmp_path):
    """In a process of its own: no other Ray is started, and nothing is said at exit."""
    script = (
        "import ray\n"
        "from tests.learners.ray_learners import team\n"
        "ray.init(num_cpus=2, include_dashboard=False, logging_level='ERROR', log_to_driver=False)\n"
        "stopped, left = (team(2).build_algo() for _ in range(2))\n"
        "ray.shutdown()\n"
        "stopped.stop()\n"
        "assert not ray.is_initialized()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr[-2000:]


@pytest.mark.parametrize(("learners", "model", "runners"), [(3, "mlp", 0), (2, "lstm", 1)])
def test_an_algorithm_trains_as_with_one_learner(build, learners, model, runners):
    # With the module's group of three learners they fit into the tests' Ray.
    options = {"num_envs": 2, "runners": {"num_env_runners": runners, "num_cpus_per_env_runner": 0.5}}
    several, one = (build(team(n, model, **options)) for n in (learners, 0))
    for _ in range(4):
        check_metrics([several.train()["learners"]], [one.train()["learners"]])
    (alone,) = of_all(one.learner_group, snapshot)
    for other in of_all(several.learner_group, snapshot):
        assert largest_difference(other["parameters"], alone["parameters"]) < 1e-5


# ------------------------------------------------------------------------------------------ runners that die


def test_training_goes_on_when_runners_die_behind_their_sample(build, monkeypatch, caplog):
    algo = build(
        tiny_config(runners={"num_env_runners": 2, "num_cpus_per_env_runner": 0.5}).fault_tolerance(
            restart_failed_env_runners=True
        )
    )
    dying = [1]
    sample = algo._sample

    def sample_and_die():
        found = sample()
        for index in dying:
            ray.kill(algo.env_runner_group._worker_manager.actors()[index], no_restart=False)
        for reference in found[: len(dying)]:
            wait_until_lost(reference)
        return found

    monkeypatch.setattr(algo, "_sample", sample_and_die)
    before = weights(algo)
    with caplog.at_level("WARNING", logger="thrust_rllib"):
        algo.train()
        assert "1 of 2 rollouts are lost" in caplog.text
        after = weights(algo)
        assert largest_difference(before, after) > 1e-5
        dying[:] = [1, 2]
        algo.train()
        assert "all 2 rollouts are lost" in caplog.text
    assert largest_difference(after, weights(algo)) == 0.0
    dying.clear()
    for _ in range(20):  # until a runner has come back
        algo.train()
        if largest_difference(after, weights(algo)) > 1e-5:
            break
    else:
        raise AssertionError("no runner came back")


def weights(algo):
    """A copy of all weights."""
    return {m: {k: x.copy() for k, x in state.items()} for m, state in algo.get_weights().items()}
