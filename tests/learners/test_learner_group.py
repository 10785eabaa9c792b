"""Several of Ray's learners: they give the parameters and metrics of one, and an error where one of them fails."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.learners.ray_learners import (
    SEVERAL_ONLY,
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
from tests.support import largest_difference
from thrust_rllib import learner_group

pytestmark = [pytest.mark.usefixtures("ray_session"), pytest.mark.timeout(180)]


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow_learners)], ids=["two", "three"])
def group(request, ray_session):
    """A group of two learners, in the slow tests also one of three."""
    group = group_of(team(request.param), rollouts_of(team(), 0)[1])
    yield group
    group.shutdown()


@pytest.fixture(scope="module")
def ten():
    """Ten rollouts, and the spaces."""
    return rollouts_of(team(), 10)


# ------------------------------------------------------------------------------------------ the same as one learner


def test_the_learners_stand_in_the_order_of_their_ranks_with_one_thread_each(group):
    found = of_all(
        group, lambda learner: (dist.get_rank(), learner.ranks.rank, learner.ranks.size, torch.get_num_threads())
    )
    assert found == [(k, k, len(group), 1) for k in range(len(group))]


def test_ten_updates_of_the_group_give_what_one_learner_gives(group, ten):
    rollouts, spaces = ten
    before = of_all(group, snapshot)
    results = train_group(group, rollouts)
    after = of_all(group, snapshot)
    alone = trained_alone(team(), spaces, rollouts)
    check_alike([(x, y, results) for x, y in zip(before, after, strict=True)], alone)
    own = alone[2][-1]["__all_modules__"]
    assert own["num_minibatch_steps"] == 6 and own["cross_agent_loss"]["divergence"] != 0.0
    counted = results[-1]["__all_modules__"]
    assert counted["num_collectives"] > 2 * 6 and counted["collective_bytes"] > 0 < counted["collective_seconds"]
    assert not SEVERAL_ONLY & own.keys()
    frozen = after[0]["parameters"]["agent_1"]
    assert largest_difference(frozen, before[0]["parameters"]["agent_1"]) == 0.0


def test_ten_updates_of_recurrent_modules_give_what_one_learner_gives(group):
    rollouts, spaces = rollouts_of(team(model="lstm"), 10)
    check_alike(
        trained_inside(group, team(len(group), "lstm"), spaces, rollouts),
        trained_alone(team(model="lstm"), spaces, rollouts),
    )


def test_episodes_give_what_one_learner_gives(group):
    by_episodes = {"runners": {"sampling": "episodes"}}
    rollouts, spaces = rollouts_of(team(**by_episodes), 2)
    check_alike(
        trained_inside(group, team(len(group), **by_episodes), spaces, rollouts),
        trained_alone(team(**by_episodes), spaces, rollouts),
    )


@pytest.mark.parametrize("model", ["mlp", "lstm"])
def test_without_a_seed_the_learners_begin_and_stay_alike(group, model):
    rollouts, spaces = rollouts_of(team(model=model), 2)
    first, second = (trained_inside(group, team(len(group), model, seed=None), spaces, rollouts) for _ in range(2))
    for ranks in (first, second):
        for before, after, _ in ranks[1:]:
            assert largest_difference(before, ranks[0][0]) == largest_difference(after, ranks[0][1]) == 0.0
        assert largest_difference(ranks[0][0]["parameters"], ranks[0][1]["parameters"]) > 1e-3
    assert largest_difference(first[0][0]["parameters"], second[0][0]["parameters"]) > 0.1, "there was a seed"


def test_a_comparison_can_fail(group, ten):
    rollouts, spaces = ten
    ranks = trained_inside(group, team(len(group), lr=1.2e-3), spaces, rollouts[:1])
    with pytest.raises(AssertionError):
        check_alike(ranks, trained_alone(team(), spaces, rollouts[:1]))


# ------------------------------------------------------------------------------------------ rollouts that are no good


def spoiled(rollouts, field, value):
    """A copy whose first row of one agent has this value."""
    rollouts = copy.deepcopy(rollouts)
    array = getattr(rollouts[0].modules["agent_0"], field).copy()
    array[0, 0, 0] = value
    object.__setattr__(rollouts[0].modules["agent_0"], field, array)
    return rollouts


def test_rollouts_that_all_learners_refuse_are_an_error_and_the_next_ones_train(group, ten):
    rollouts, _ = ten
    before = of_all(group, snapshot)
    error, _ = in_time(lambda: train_group(group, [spoiled(rollouts[0], "obs", np.nan)]))
    assert "values that are not finite" in str(error)
    assert (
        largest_difference([x["parameters"] for x in of_all(group, snapshot)], [x["parameters"] for x in before]) == 0
    )
    train_group(group, rollouts[:1])
    first, *others = of_all(group, snapshot)
    assert largest_difference(first["parameters"], before[0]["parameters"]) > 1e-4
    assert all(largest_difference(first, other) == 0.0 for other in others)


def test_a_minibatch_that_is_not_finite_for_one_learner_moves_nobody(group, ten):
    rollouts, spaces = ten
    spoilt = [spoiled(rollouts[0], "action_logp", np.nan)]
    ranks = trained_inside(group, team(len(group)), spaces, spoilt)
    check_alike(ranks, trained_alone(team(), spaces, spoilt))
    found = ranks[0][2][0]["__all_modules__"]
    assert found["num_non_finite_minibatches"] == 2 and found["num_minibatch_steps"] == 4  # one in each epoch


# ------------------------------------------------------------------------------------------ states


def test_a_state_goes_from_one_learner_to_several_and_back(group, ten, tmp_path):
    rollouts, spaces = ten
    one = group_of(team(seed=11), spaces)
    train_group(one, rollouts[:1])  # fewer updates than the group has had: a state goes back as well as forth
    group.set_state(one.get_state())
    (own,), others = of_all(one, snapshot), of_all(group, snapshot)
    assert all(largest_difference(own, other) == 0.0 for other in others)

    check_metrics(train_group(group, rollouts[1:3]), train_group(one, rollouts[1:3]))
    (own,), others = of_all(one, snapshot), of_all(group, snapshot)
    assert all(largest_difference(own["parameters"], other["parameters"]) < 1e-5 for other in others)
    assert all(largest_difference(others[0], other) == 0.0 for other in others)

    group.save_to_path(tmp_path / "several")
    train_group(group, rollouts[3:4])
    one.restore_from_path(tmp_path / "several")
    (own,) = of_all(one, snapshot)
    assert largest_difference(own, others[0]) == 0.0
    one.save_to_path(tmp_path / "one")
    group.restore_from_path(tmp_path / "one")
    assert all(largest_difference(own, other) == 0.0 for other in of_all(group, snapshot))


# ------------------------------------------------------------------------------------------ the whole algorithm


def test_an_algorithm_of_two_learners_reports_what_one_does_and_their_checkpoints_are_exchanged(build, tmp_path):
    two, one = (build(team(learners, num_envs=2)) for learners in (2, 0))
    results = {}
    for name in ("first", "second"):
        found = [algo.train() for algo in (two, one)]
        check_metrics([found[0]["learners"]], [found[1]["learners"]])
        assert found[0]["env_runners"]["episode_return_mean"] == found[1]["env_runners"]["episode_return_mean"]
        assert found[0]["env_runners"]["num_env_steps_sampled"] == 48
        for algo, path in ((two, tmp_path / f"two {name}"), (one, tmp_path / f"one {name}")):
            algo.save_to_path(path)
        results[name] = found[1]["learners"]
    # Back to the first iteration, each by the other's checkpoint: the second one comes out again.
    two.restore_from_path(tmp_path / "one first")
    one.restore_from_path(tmp_path / "two first")
    (alone,) = of_all(one.learner_group, snapshot)
    for other in of_all(two.learner_group, snapshot):
        assert largest_difference(other["parameters"], alone["parameters"]) < 1e-5
        assert largest_difference(other["generator"], alone["generator"]) == 0.0
    check_metrics([two.train()["learners"]], [one.train()["learners"]])


class FailsInOneLearner:
    """A coupling that raises in learner 1 once it is told to: the others wait in the middle of an update."""

    needs_features = False
    fails = False

    def __call__(self, features, logits, actions, present):
        if self.fails and dist.get_rank() == 1:
            raise ZeroDivisionError("this learner alone")
        return sum(x.square().mean() for x in logits.values())


def test_the_failure_of_one_learner_is_told_at_once_and_the_algorithm_stops(build, monkeypatch, tmp_path):
    monkeypatch.setattr(learner_group, "GRACE_S", 2.0)
    algo = build(team(2, cross_agent_losses={"bad": FailsInOneLearner()}, cross_agent_coeffs={}))
    assert np.isfinite(algo.train()["learners"]["__all_modules__"]["total_loss"])
    of_all(algo.learner_group, lambda learner: setattr(learner.config.cross_agent_losses["bad"], "fails", True))
    error, took = in_time(algo.train)
    assert isinstance(error, RuntimeError) and "learner 1 of 2 failed" in str(error), error
    assert "this learner alone" in str(error) and took > 1.9
    later = (
        algo.train,
        algo.get_state,
        algo.get_weights,
        lambda: algo.save_to_path(tmp_path),
        lambda: algo.remove_module("agent_1"),
    )
    for call in later:
        again, _ = in_time(call, 20)
        assert str(again) == str(error)
    algo.stop()


def test_what_all_learners_raise_is_the_callers_and_the_group_lives(group):
    def fails(learner):
        raise KeyError("the same for all")

    error, took = in_time(lambda: group.foreach_learner(fails), 20)
    assert type(error) is KeyError and took < 5.0
    assert "in fails" in str(error.__cause__), "the traceback of the learner is lost"
    assert [found.get() for found in group.foreach_learner(lambda learner: learner.ranks.size)] == [len(group)] * len(
        group
    )


# ------------------------------------------------------------------------------------------ configurations


def test_batch_and_minibatch_are_of_each_learner():
    config = team(2, train_batch_size_per_learner=24, minibatch_size=24)
    config.validate()
    assert config.total_train_batch_size == 48
    with pytest.raises(ValueError, match="minibatch_size=25 is larger than .* train_batch_size_per_learner=24"):
        team(2, train_batch_size_per_learner=24, minibatch_size=25).validate()


def test_a_training_sequence_has_to_fit_into_the_minibatch_of_all_learners_together():
    spaces = rollouts_of(team(model="lstm"), 0)[1]
    message = r"minibatch_size=3 is smaller than one training sequence of 7 steps .* Raise minibatch_size to 7"
    with pytest.raises(ValueError, match=message):
        group_of(team(0, "lstm", minibatch_size=3), spaces)
