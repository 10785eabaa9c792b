"""Several learners begin alike, do the same and stay alike: what they tell each other about it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.learners.threads import talk
from thrust_rllib.joint_batch import AlignmentError
from thrust_rllib.learners_alike import check_same_update, finish_alike, start_alike
from thrust_rllib.ranks import Ranks


class Net(nn.Module):
    """Parameters and buffers of several kinds."""

    def __init__(self, number, width=3, dtype=torch.float32, extra=False):
        super().__init__()
        self.weight = nn.Parameter(torch.full((width, 2), float(number), dtype=dtype))
        self.register_buffer("count", torch.tensor(number))
        self.register_buffer("unsaved", torch.full((2,), float(number)), persistent=False)
        if extra:
            self.more = nn.Parameter(torch.zeros(1))


def test_all_start_with_what_the_first_one_has():
    def work(ranks):
        modules, generator = {"m": Net(ranks.rank + 5)}, torch.Generator().manual_seed(ranks.rank)
        start_alike(modules, generator, ranks)
        return modules["m"], torch.rand(3, generator=generator)

    expected = torch.rand(3, generator=torch.Generator().manual_seed(0))
    for (net, drawn), _ in talk(3, work):
        assert net.weight.unique().tolist() == [5.0] and net.weight.requires_grad
        assert int(net.count) == 5 and net.unsaved.tolist() == [5.0, 5.0]
        assert torch.equal(drawn, expected)


@pytest.mark.parametrize(
    "other", [{"width": 4}, {"dtype": torch.float64}, {"extra": True}], ids=["shape", "dtype", "number"]
)
def test_unlike_networks_are_told_by_every_learner(other):
    def work(ranks):
        with pytest.raises(ValueError, match=r"learners \[1, 2\] have other parameters than learner 0") as raised:
            start_alike({"m": Net(0, **(other if ranks.rank else {}))}, torch.Generator(), ranks)
        return str(raised.value)

    for rank, (message, _) in enumerate(talk(3, work)):
        assert f"Learner {rank} has " in message and "m.weight (" in message


@pytest.mark.parametrize("audit", [False, True])
def test_after_an_update_buffers_are_those_of_the_first_and_parameters_are_compared(audit):
    def work(ranks, of_two=0.0):
        net = Net(ranks.rank)
        with torch.no_grad():
            net.weight.fill_(1.0)
            net.weight[0, 0] += of_two * (ranks.rank == 2)
        finish_alike({"m": net}, ranks, audit)
        return int(net.count), net.unsaved.tolist()

    assert all(found == (0, [0.0, 0.0]) for found, _ in talk(3, work))

    def gone_apart(ranks):
        if not audit:
            return work(ranks, 1e-6)
        with pytest.raises(AlignmentError, match=r"learners \[2\] have other parameters than learner 0 \(m.weight\)"):
            work(ranks, 1e-6)
        return None

    assert len(talk(3, gone_apart)) == 3


def test_weights_that_are_nan_for_all_are_alike():
    def work(ranks):
        net = Net(0)
        nn.init.constant_(net.weight, float("nan"))
        finish_alike({"m": net}, ranks, audit=True)

    assert len(talk(2, work)) == 2


@pytest.mark.parametrize("numbers", [(1, 2, 3), (7, 20, 2)])
def test_the_same_update_is_asked_of_all(numbers):
    assert len(talk(2, lambda ranks: check_same_update(numbers, ranks))) == 2

    def work(ranks):
        with pytest.raises(ValueError, match="the learners were given different updates"):
            check_same_update([numbers[0], numbers[1] + (ranks.rank == 1), numbers[2]], ranks)

    assert len(talk(2, work)) == 2


def test_one_learner_compares_nothing():
    class Unasked(Ranks):
        def gather(self, x):
            raise AssertionError("it asked")

        broadcast_ = gather

    generator = torch.Generator()
    start_alike({"m": Net(0)}, generator, Unasked())
    finish_alike({"m": Net(0)}, Unasked(), audit=True)
    check_same_update([1], Unasked())
    with pytest.raises(AssertionError, match="it asked"):
        check_same_update([1], Unasked(0, 2))
