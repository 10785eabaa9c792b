"""Updates of several learners equal the independent float64 loops, which know of one learner only."""

from __future__ import annotations

import dataclasses

import pytest

from tests.core import test_reference_update as feed_forward
from tests.learners.threads import ThreadLearners, ThreadRanks, everything, for_learners
from tests.recurrent import test_reference_update as recurrent
from tests.support import largest_difference, make_runner

TOLERANCE = 1e-5
FEED_FORWARD = [
    "critic_lr and redundancy", "frozen agent and redundancy", "raw value targets", "standardised by minibatch",
    "standardised by team", "options per module", "shared module, agents interleaved", "runs of equal action spaces",
    "action masks", "padded batches",
]  # fmt: skip
RECURRENT = [
    "max_seq_len 4, coupled, ragged, two batches", "other spaces, a mask", "critics with their own memory, critic_lr",
    "agents come and go, max_seq_len 4, ragged, two optimizers", "an agent never acts",
    "nobody acts in some minibatches", "shared module", "target_kl",
]  # fmt: skip


def of_several(module):
    """The comparison of `module` with L learners in the place of one."""

    class Several(module.Both):
        def __init__(self, case, size, **options):
            super().__init__(case)
            config = self.learner.config
            self.several = ThreadLearners(config, size, make_runner(for_learners(config, 1)).get_spaces(), **options)
            self.several.set_state(self.learner.get_state())
            self.learner = self.several.learners[0]

        def run(self, updates=3):
            """(results, statistics of the reference) of each update."""
            log = []
            for _ in range(updates):
                data = self.data()
                results, *_ = self.several.update([module.joint_batch(fixed, self.agents) for fixed in data])
                log.append((results, self.reference.update(data)))
            return log

        def check(self, still):
            """All learners have what the reference has, and every module moved but those that stand `still`."""
            assert self.difference() < TOLERANCE
            first, *others = map(everything, self.several.learners)
            assert all(largest_difference(first, other) == 0.0 for other in others)
            assert all(calls == self.several.calls[0] for calls in self.several.calls)
            for module_id in self.first:
                moved = self.movement(module_id)
                assert moved == 0.0 if module_id in still else moved > 100 * TOLERANCE

    return Several


FeedForward, Recurrent = of_several(feed_forward), of_several(recurrent)


@pytest.mark.parametrize("name", FEED_FORWARD)
def test_feed_forward_teams(name):
    both = FeedForward(feed_forward.CASES[name], 2)
    log = both.run()
    frozen = both.case.step.get("frozen", frozenset())
    both.check(frozen)
    for results, steps in log:
        feed_forward.check_statistics(results, steps, frozen)


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_teams(name):
    case = recurrent.CASES[name]
    both = Recurrent(case, 2 if "minibatch_size" in case.config else 3)
    log = both.run()
    still = case.step.get("frozen", frozenset()) | both.idle()
    both.check(still)
    if "target_kl" in case.loop:
        recurrent.check_stops(both, log)
    elif not both.idle():
        for results, steps in log:
            recurrent.check_statistics(results, steps, still)


# ------------------------------------------------------------------------------------ the comparison sees mistakes


class OwnGradients(ThreadRanks):
    """Takes its own gradient for the sum: the longest message that is summed."""

    longest = 0

    def _all_reduce(self, x):
        own = x * self.size
        super()._all_reduce(x)
        OwnGradients.longest = max(OwnGradients.longest, x.numel())
        if x.numel() == OwnGradients.longest:
            x.copy_(own)


class OtherOrder(ThreadRanks):
    """Puts the learners' slices into the wrong order."""

    def _all_gather(self, gathered, x):
        super()._all_gather(gathered, x)
        if x.is_floating_point():
            gathered.copy_(gathered.view(self.size, -1).flip(0).flatten())


class TwiceTheGradient(ThreadRanks):
    """Sums messages of which every learner has the whole already."""

    def _all_reduce(self, x):
        super()._all_reduce(x)
        x *= self.size


@pytest.mark.parametrize("ranks_class", [OwnGradients, OtherOrder, TwiceTheGradient])
@pytest.mark.parametrize("both_class, case", [
    (FeedForward, feed_forward.CASES["critic_lr and redundancy"]),
    (Recurrent, recurrent.CASES["max_seq_len 4, coupled, ragged, two batches"]),
])  # fmt: skip
def test_the_comparison_sees_messages_that_are_wrong(both_class, case, ranks_class, monkeypatch):
    monkeypatch.setattr(OwnGradients, "longest", 0)
    audit_off = {**case.config, "audit": False}
    both = both_class(dataclasses.replace(case, config=audit_off), 2, ranks_class=ranks_class)
    both.run(1)
    assert both.difference() > 10 * TOLERANCE


def test_the_comparison_sees_minibatches_of_another_size():
    case = recurrent.CASES["lstm, gru and mlp, coupled"]
    both = Recurrent(dataclasses.replace(case, loop={**case.loop, "minibatch_size": 9}), 2)
    both.run(1)
    assert both.difference() > 10 * TOLERANCE
