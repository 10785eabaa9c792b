"""Case 17 of the collection of reported inputs, several learners, by both doors: rows that cannot be dealt out evenly.

Learners that wait for each other in vain are an error after seconds (`threads.Meeting`, `ray_learners.of_all`).
"""

from __future__ import annotations

import pytest

from tests.envs.lives import MultiLives, Plan
from tests.learners import threads
from tests.learners.ray_learners import check_alike, group_of, trained_alone, trained_inside
from tests.learners.test_several_learners import Pair
from tests.learners.threads import ThreadLearners, ThreadRanks, everything, flat, for_learners
from tests.support import largest_difference, parameters, tiny_config
from thrust_rllib import FeatureSimilarity, JensenShannon, RedundancyPenalty
from thrust_rllib.joint_batch import AlignmentError
from thrust_rllib.shared_minibatch import MinibatchShares

pytestmark = pytest.mark.timeout(120)
EVERY_DOOR = pytest.mark.parametrize("door", ["arrays", "episodes"])
EVERY_MODEL = pytest.mark.parametrize(
    "model", [{"fcnet_hiddens": [16, 12]}, {"cell": "lstm", "cell_size": 8, "max_seq_len": 3}], ids=["mlp", "lstm"]
)
EPOCHS, MINIBATCH = 2, 8


class Visits(Plan):
    """p1 is there in every 4th episode."""

    def alive(self):
        return [agent for agent in super().alive() if agent != "p1" or self.episode % 4 == 3]


class MultiVisits(MultiLives):
    """As an RLlib environment."""

    def __init__(self, config):
        super().__init__(config)
        self.plan = Visits(**config)


def config_of(env, length, door="arrays", model=None, **options):
    lives = {"p0": (0, length - 1, "terminated"), "p1": (0, length - 1, "truncated")}
    return tiny_config(
        env,
        {"lives": lives, "length": length},
        num_envs=1,
        runners={"sampling": door},
        model=model,
        **{
            "train_batch_size_per_learner": 32,
            "minibatch_size": MINIBATCH,
            "num_epochs": EPOCHS,
            "lr": 1e-3,
            "critic_lr": 2e-3,
            "iterate_all_minibatches": True,
            "cross_agent_losses": {"apart": JensenShannon("raise")},
            **options,
        },
    )


def sampled(config, count=1, **asked):
    """(spaces, rollouts of one runner)."""
    alone = for_learners(config, 0)
    alone.validate()
    runner = alone.env_runner_cls(config=alone, worker_index=0)
    return runner.get_spaces(), [runner.sample(**asked) for _ in range(count)]


class Slices:
    """Of every joint minibatch that a learner trains on: in how many rows each agent acts, [(of all, of its slice)]."""

    def __init__(self, monkeypatch):
        self.of_rank = {}
        select = MinibatchShares.select

        def watched(shares, indices):
            minibatch = select(shares, indices)
            ranks = shares._ranks
            acts, sizes = minibatch.whole.present.sum(1), minibatch.sizes
            first = sum(sizes[: ranks.rank])
            mine = minibatch.whole.present[:, first : first + sizes[ranks.rank]].sum(1)
            if ranks.size > 1:
                self.of_rank.setdefault(ranks.rank, []).append((acts.tolist(), mine.tolist(), sizes))
            return minibatch

        monkeypatch.setattr(MinibatchShares, "select", watched)


def steps_taken(learner):
    """{optimizer: gradient steps of its parameters}, all of them the same number."""
    counts = {}
    for name, optimizer in learner._named_optimizers.items():
        (counts[name],) = {int(state["step"]) for state in optimizer.state.values()} or {0}
    return counts


def checked(pair):
    """Both learners of the pair are equal to the bit and took the steps that one learner takes; these steps."""
    pair.check()
    expected, *found = map(steps_taken, [pair.one, *pair.several.learners])
    assert all(mine == expected for mine in found)
    return expected


# ------------------------------------------------------------------------------- an agent of every fourth episode


@EVERY_DOOR
@EVERY_MODEL
def test_case_17_an_agent_of_every_fourth_episode(door, model, monkeypatch):
    config = config_of(MultiVisits, 4, door, model)
    spaces, rollouts = sampled(config, 2, num_timesteps=32)
    pair, slices = Pair(config, 2, spaces), Slices(monkeypatch)
    start = parameters(pair.one)
    for k, rollout in enumerate(rollouts):
        found = pair.update(rollout, steps=32 * (k + 1))
        assert found["/__all_modules__/num_env_steps_trained"] == 32 * EPOCHS
        assert found["/p0/num_module_steps_trained"] == 32 * EPOCHS
        assert found["/p1/num_module_steps_trained"] == 8 * EPOCHS
    steps = checked(pair)
    with_p1 = [mine for (_, mine), *_ in slices.of_rank[0]]
    assert steps["p0_default_optimizer"] == steps["p0_critic_optimizer"] == len(with_p1)
    assert steps["p1_default_optimizer"] == steps["p1_critic_optimizer"] == sum(rows > 0 for rows in with_p1)
    # What made others wait for ever: a learner without a row of an agent while the other one has some.
    absent = [{rank for rank, seen in slices.of_rank.items() if seen[k][1][1] == 0} for k in range(len(with_p1))]
    assert {0} in absent or {1} in absent
    if "cell" not in model:
        assert {0, 1} in absent
    for module_id, before in start.items():
        assert largest_difference(before, parameters(pair.one)[module_id]) > 1e-3


@EVERY_DOOR
def test_case_17_correlations_over_the_few_rows_that_both_agents_have(door):
    """Two rows correlate by 1, and the gradient of that is rounding alone: it has to be the same for all learners."""
    couplings = {"redundancy": RedundancyPenalty(), "alike": FeatureSimilarity()}
    config = config_of(
        MultiVisits, 4, door, train_batch_size_per_learner=36, minibatch_size=9, cross_agent_losses=couplings
    )
    spaces, rollouts = sampled(config, 2, num_timesteps=36)
    several = ThreadLearners(config, 3, spaces)
    for rollout in rollouts:
        results = several.update(rollout)
        assert all(flat(mine) == flat(results[0]) for mine in results)
    first, *others = map(everything, several.learners)
    assert all(largest_difference(first, other) == 0.0 for other in others)
    assert all(calls == several.calls[0] for calls in several.calls)
    assert all(steps_taken(learner) == steps_taken(several.learners[0]) for learner in several.learners)


@EVERY_DOOR
def test_case_17_an_agent_that_never_comes(door):
    config = config_of(MultiVisits, 4, door)
    spaces, (rollout,) = sampled(config, num_timesteps=12)
    pair = Pair(config, 2, spaces)
    before = parameters(pair.one)
    pair.update(rollout)
    assert checked(pair)["p1_default_optimizer"] == 0
    after = parameters(pair.several.learners[1])
    assert largest_difference(before["p1"], after["p1"]) == 0.0 < largest_difference(before["p0"], after["p0"])


# ------------------------------------------------------------------------------------------------ a few rows


@EVERY_DOOR
@EVERY_MODEL
@pytest.mark.parametrize("minibatch_size, steps", [(MINIBATCH, 5), (32, 2), (None, 1)])
def test_case_17_33_rows_over_two_learners(door, model, minibatch_size, steps, monkeypatch):
    config = config_of(MultiLives, 11, door, model, minibatch_size=minibatch_size)
    spaces, (rollout,) = sampled(config, num_timesteps=33)
    pair, slices = Pair(config, 2, spaces), Slices(monkeypatch)
    found = pair.update(rollout)
    assert found["/__all_modules__/num_env_steps_trained"] == 33 * EPOCHS
    taken = checked(pair)
    if "cell" not in model:  # minibatches of whole sequences may hold less
        assert set(taken.values()) == {steps * EPOCHS}
    for seen in slices.of_rank.values():
        assert sum(acts[0] for acts, *_ in seen) == 33 * EPOCHS
    both = zip(*slices.of_rank.values(), strict=True)
    assert all(first[1][0] + second[1][0] == first[0][0] for first, second in both)


@EVERY_DOOR
@EVERY_MODEL
@pytest.mark.parametrize("size", [2, 3])
def test_case_17_one_episode_of_one_step(door, model, size, monkeypatch):
    config = config_of(MultiLives, 1, door, model, train_batch_size_per_learner=24, minibatch_size=12)
    spaces, (rollout,) = sampled(config, num_timesteps=1)
    pair, slices = Pair(config, size, spaces), Slices(monkeypatch)
    found = pair.update(rollout)
    assert found["/__all_modules__/num_env_steps_trained"] == EPOCHS
    assert set(checked(pair).values()) == {EPOCHS}
    rows = [[sizes[rank] for *_, sizes in seen] for rank, seen in sorted(slices.of_rank.items())]
    assert len(rows) == size and sum(map(sum, rows)) == EPOCHS and [0] * EPOCHS in rows


@EVERY_DOOR
def test_case_17_a_learner_that_leaves_out_a_message_is_an_error_and_no_wait(door, monkeypatch):
    """What would happen if a learner without rows went on alone."""

    class LeavesOut(ThreadRanks):
        silent = False

        def _all_reduce(self, x):
            if not self.silent:
                super()._all_reduce(x)

    monkeypatch.setattr(threads, "LIMIT_S", 2.0)
    config = config_of(MultiLives, 1, door)
    spaces, (rollout,) = sampled(config, num_timesteps=1)
    several = ThreadLearners(config, 2, spaces, ranks_class=LeavesOut)
    several.update(rollout)
    several.learners[0].ranks.silent = True
    with pytest.raises((RuntimeError, AlignmentError)):  # a barrier that breaks, or messages that do not fit
        several.update(rollout)


# ------------------------------------------------------------------------------------------- Ray's processes


def test_case_17_in_processes(ray_session):
    inputs = (
        (MultiVisits, 4, {"num_timesteps": 32}),
        (MultiLives, 11, {"num_timesteps": 33}),
        (MultiLives, 1, {"num_timesteps": 1}),
    )
    group = None
    try:
        for door in ("arrays", "episodes"):
            for env, length, asked in inputs:
                config = config_of(env, length, door)
                two = for_learners(config, 2, num_cpus_per_learner=0.5)
                spaces, rollouts = sampled(config, 2, **asked)
                group = group or group_of(two.copy(copy_frozen=False), spaces)
                check_alike(
                    trained_inside(group, two, spaces, rollouts),
                    trained_alone(for_learners(config, 0), spaces, rollouts),
                )
    finally:
        if group is not None:
            group.shutdown()
