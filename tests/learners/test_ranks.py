"""What learners say to each other: the same numbers arrive at each of them, by threads and by torch's gloo."""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.learners.threads import Meeting, ThreadLearners, ThreadRanks, everything, for_learners
from tests.support import largest_difference, make_runner, parameters, tiny_config
from thrust_rllib import RedundancyPenalty
from thrust_rllib import ranks as ranks_module
from thrust_rllib.ranks import ALONE, Ranks

LIMIT_S = 10
SHAPES = [(), (0,), (1,), (5,), (2, 3), (3, 0, 2), (2, 1, 4)]
DTYPES = [torch.float32, torch.float64, torch.int64]


class GlooOfThreads:
    """Stands for `torch.distributed` inside `ranks.py`: the calling thread's own gloo process group."""

    def __init__(self, size):
        self.size = size
        self._store = dist.HashStore()
        self._mine = threading.local()

    def begin(self, rank):
        """The calling thread is learner `rank` from now on."""
        self._mine.rank = rank
        self._mine.group = dist.ProcessGroupGloo(self._store, rank, self.size, timedelta(seconds=LIMIT_S))

    def get_rank(self):
        return self._mine.rank

    def get_world_size(self):
        return self.size

    def all_reduce(self, x):
        self._mine.group.allreduce(x).wait()

    def all_gather(self, gathered, x):
        self._mine.group.allgather(gathered, x).wait()

    def broadcast(self, x, src):
        self._mine.group.broadcast(x, src).wait()


def in_threads(size, work):
    """`work(rank)` of each thread; the first error is raised again."""
    found, errors = [None] * size, []

    def run(rank):
        try:
            found[rank] = work(rank)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT_S)
        assert not thread.is_alive(), "a learner hangs"
    if errors:
        raise errors[0]
    return found


@pytest.fixture(params=["threads", "gloo"])
def talk(request, monkeypatch):
    """`talk(size, work)`: what `work(ranks)` gives in each of `size` threads."""

    def by_threads(size, work):
        meeting = Meeting(size)
        return in_threads(size, lambda rank: work(ThreadRanks(rank, meeting)))

    def by_gloo(size, work):
        group = GlooOfThreads(size)
        monkeypatch.setattr(ranks_module, "dist", group)

        def begin(rank):
            group.begin(rank)
            return work(Ranks.of(SimpleNamespace(num_learners=size), "cpu"))

        return in_threads(size, begin)

    return by_threads if request.param == "threads" else by_gloo


def numbers(rank, shape, dtype):
    """Other numbers for each learner, of very different size: their sum depends on the order of the summands."""
    generator = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * 10.0 ** (3 * rank)
    return x.to(dtype)


# --------------------------------------------------------------------------------------------------- one learner


class Silent(Ranks):
    """One learner that must not speak."""

    def _all_reduce(self, x):
        raise AssertionError("it spoke")

    def _all_gather(self, gathered, x):
        raise AssertionError("it spoke")

    def _broadcast(self, x):
        raise AssertionError("it spoke")


def test_a_single_learner_says_nothing():
    one, x = Silent(), torch.arange(6.0).view(2, 3)
    assert one.sum_(x) is x
    assert torch.equal(one.gather(x), x[None])
    one.broadcast_([x])
    assert torch.equal(x, torch.arange(6.0).view(2, 3))
    assert (one.traffic.calls, one.traffic.bytes, one.traffic.seconds) == (0, 0, 0.0) and one.take_traffic() is None
    assert one.part(7) == slice(0, 7)
    assert ALONE.size == 1 and ALONE.rank == 0


def test_what_must_not_speak_does_so_with_two():
    x = torch.zeros(2)
    for say in (lambda r: r.sum_(x), lambda r: r.gather(x), lambda r: r.broadcast_([x])):
        with pytest.raises(AssertionError, match="it spoke"):
            say(Silent(0, 2))


@pytest.mark.parametrize("num_learners", [0, 1])
def test_up_to_one_learner_needs_no_process_group(num_learners, monkeypatch):
    monkeypatch.setattr(ranks_module, "dist", None)
    found = Ranks.of(SimpleNamespace(num_learners=num_learners), "cpu")
    assert (found.rank, found.size) == (0, 1)


@given(st.integers(0, 200), st.integers(1, 17))
def test_parts_are_stretches_that_cover_everything_once(count, size):
    parts = [Ranks(rank, size).part(count) for rank in range(size)]
    covered = [k for part in parts for k in range(count)[part]]
    assert covered == list(range(count))
    lengths = [part.stop - part.start for part in parts]
    assert max(lengths) - min(lengths) <= 1


# ------------------------------------------------------------------------------------------------------- several


@pytest.mark.parametrize("size", [2, 3])
def test_sums_are_right_and_to_the_bit_the_same_for_each(talk, size):
    kinds = [(shape, dtype) for shape in SHAPES for dtype in DTYPES]
    found = talk(size, lambda r: [r.sum_(numbers(r.rank, *kind)) for kind in kinds])
    for k, (shape, dtype) in enumerate(kinds):
        expected = sum(numbers(rank, shape, dtype).double() for rank in range(size))
        for mine in found:
            assert mine[k].shape == shape and mine[k].dtype == dtype
            assert torch.equal(mine[k], found[0][k])
            torch.testing.assert_close(mine[k].double(), expected, rtol=1e-6, atol=1e-3)


def test_a_sum_is_in_place_and_leaves_other_layouts_in_order(talk):
    def work(ranks):
        x = numbers(ranks.rank, (4, 3), torch.float32)
        turned = x.clone().T
        return ranks.sum_(x), x, ranks.sum_(turned)

    for total, x, turned in talk(2, work):
        assert total is x and torch.equal(turned, total.T)


@pytest.mark.parametrize("size", [2, 3])
def test_gathered_are_all_in_the_order_of_the_ranks(talk, size):
    kinds = [(shape, dtype) for shape in SHAPES for dtype in [*DTYPES, torch.bool, torch.uint8]]

    def given_by(rank, shape, dtype):
        x = numbers(rank, shape, torch.float64)
        return x > 0 if dtype == torch.bool else (x.abs() % 200).to(dtype)

    def work(ranks):
        plain = [ranks.gather(given_by(ranks.rank, *kind)) for kind in kinds]
        return plain, ranks.gather(numbers(ranks.rank, (4, 3), torch.float32).T)

    for plain, turned in talk(size, work):
        for found, kind in zip(plain, kinds, strict=True):
            expected = torch.stack([given_by(rank, *kind) for rank in range(size)])
            assert found.dtype == kind[1] and torch.equal(found, expected)
        assert torch.equal(turned, torch.stack([numbers(rank, (4, 3), torch.float32).T for rank in range(size)]))


def test_gathering_keeps_what_was_given_and_cuts_the_graph(talk):
    def work(ranks):
        weight = torch.full((3,), float(ranks.rank), requires_grad=True)
        x = (2.0 * weight).detach()
        return ranks.gather(x), x

    for found, x in talk(2, work):
        assert torch.equal(found, torch.tensor([[0.0] * 3, [2.0] * 3])) and not found.requires_grad
        assert x.unique().tolist() in ([0.0], [2.0])


def test_the_first_learner_s_tensors_reach_all(talk):
    def work(ranks):
        torch_generator = torch.Generator().manual_seed(ranks.rank)
        layer = nn.Linear(3, 2)
        with torch.no_grad():
            for p in layer.parameters():
                p.fill_(ranks.rank + 1.0)
        turned = numbers(ranks.rank, (4, 3), torch.float32).T
        given = [
            *layer.parameters(),
            turned,
            torch.tensor(ranks.rank),
            torch.tensor([ranks.rank == 0, False]),
            numbers(ranks.rank, (3,), torch.float64),
            torch_generator.get_state(),
            torch.empty(0),
        ]
        kept = [id(x) for x in given]
        ranks.broadcast_(given)
        assert [id(x) for x in given] == kept and all(p.requires_grad for p in layer.parameters())
        return given

    first, second = talk(2, work)
    for x, y in zip(first, second, strict=True):
        assert torch.equal(x, y)
    assert torch.equal(second[0], torch.ones(2, 3)) and torch.equal(second[2], numbers(0, (4, 3), torch.float32).T)
    assert torch.equal(second[-2], torch.Generator().manual_seed(0).get_state())


def test_what_is_said_is_counted(talk):
    def work(ranks):
        ranks.sum_(torch.zeros(5))
        ranks.gather(torch.zeros(3, dtype=torch.float64))
        ranks.broadcast_([torch.zeros(2, dtype=torch.uint8), torch.zeros(4)])
        first = ranks.take_traffic()
        nothing = ranks.take_traffic()
        ranks.sum_(torch.zeros(1, dtype=torch.int64))
        return first, nothing, ranks.traffic

    for first, nothing, last in talk(2, work):
        assert (first.calls, first.bytes) == (4, 4 * 5 + 8 * 3 + 2 + 4 * 4) and 0.0 < first.seconds < LIMIT_S
        assert (nothing.calls, nothing.bytes, nothing.seconds) == (0, 0, 0.0)
        assert (last.calls, last.bytes) == (1, 8)


def test_the_seconds_hold_the_wait_for_the_slowest(talk):
    def work(ranks):
        if ranks.rank == 1:
            threading.Event().wait(0.3)
        ranks.sum_(torch.zeros(1))
        return ranks.traffic.seconds

    first, second = talk(2, work)
    assert first > 0.2 and first > second


def test_a_learner_that_does_not_come_is_an_error(monkeypatch):
    meeting = Meeting(2)
    meeting.barrier = threading.Barrier(2, timeout=0.2)
    with pytest.raises(threading.BrokenBarrierError):
        in_threads(2, lambda rank: ThreadRanks(rank, meeting).sum_(torch.zeros(1)) if rank else None)


# -------------------------------------------------------------------------------------------- an update by gloo


class GlooRanks(Ranks):
    """Speaks by a gloo process group of its own: learners outlive the threads in which they work."""

    def __init__(self, rank, meeting):
        super().__init__(rank, meeting.size)
        store = vars(meeting).setdefault("store", dist.HashStore())
        self._group = dist.ProcessGroupGloo(store, rank, meeting.size, timedelta(seconds=LIMIT_S))

    def _all_reduce(self, x):
        self._group.allreduce(x).wait()

    def _all_gather(self, gathered, x):
        self._group.allgather(list(gathered.chunk(self.size)), x).wait()

    def _broadcast(self, x):
        self._group.broadcast(x, 0).wait()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("model", [None, {"cell": "lstm", "cell_size": 8, "fcnet_hiddens": [8], "max_seq_len": 4}])
def test_updates_by_gloo_are_those_by_threads(model, size):
    config = tiny_config(
        model=model,
        critic_lr=2e-3,
        iterate_all_minibatches=True,
        cross_agent_losses={"redundancy": RedundancyPenalty()},
        train_batch_size_per_learner=48,
        minibatch_size=24,
    )
    runner = make_runner(for_learners(config, 1))
    data = [runner.sample(num_timesteps=50) for _ in range(3)]
    kinds = [ThreadLearners(config, size, runner.get_spaces(), ranks_class=cls) for cls in (ThreadRanks, GlooRanks)]
    state, start = kinds[0].learners[0].get_state(), parameters(kinds[0].learners[0])
    for learners in kinds:
        learners.set_state(state)
    for batches in data:
        by_threads, by_gloo = (learners.update(batches)[0]["__all_modules__"] for learners in kinds)
        for count in ("num_collectives", "collective_bytes"):
            assert by_threads[count] == by_gloo[count] > 0
    (one, *_), others = (list(map(everything, learners.learners)) for learners in kinds)
    assert largest_difference(one["parameters"], others[0]["parameters"]) < 1e-5
    assert all(largest_difference(others[0], other) == 0.0 for other in others[1:])
    assert largest_difference(start, others[0]["parameters"]) > 1e-3
