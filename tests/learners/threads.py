"""Several learners in threads of one process: the messages of `Ranks` without a process group.

learners = ThreadLearners(config, 2, spaces)      # config: of one learner, see `for_learners`
learners.update(batches)
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from tests.support import make_learner, optimizer_states, parameters, update
from thrust_rllib import JointPPOLearner
from thrust_rllib.ranks import Ranks

LIMIT_S = 20.0
GRACE_S = 1.0


class Meeting:
    """Where L threads give each other tensors; whoever is missing for `LIMIT_S` breaks it for all."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=LIMIT_S)
        self._given: list[Tensor] = [torch.empty(0)] * size

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        """What every thread gave, in the order of the ranks."""
        self._given[rank] = x.clone()
        self.barrier.wait()
        found = list(self._given)
        self.barrier.wait()
        return found


class ThreadRanks(Ranks):
    """Keeps a list of what it was asked, (kind, numbers), in `calls`."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        super().__init__(rank, meeting.size)
        self.meeting = meeting
        self.calls: list[tuple[str, int]] = []

    def _ask(self, kind: str, x: Tensor) -> list[Tensor]:
        self.calls.append((kind, x.numel()))
        return self.meeting.exchange(self.rank, x)

    def _all_reduce(self, x: Tensor) -> None:
        first, *others = self._ask("sum", x)
        total = first.clone()
        for other in others:
            total += other
        x.copy_(total)

    def _all_gather(self, gathered: Tensor, x: Tensor) -> None:
        gathered.copy_(torch.cat(self._ask("gather", x)))

    def _broadcast(self, x: Tensor) -> None:
        x.copy_(self._ask("broadcast", x)[0])


def talk(size: int, work: Callable[[ThreadRanks], Any]) -> list[tuple[Any, list[tuple[str, int]]]]:
    """[(what `work(ranks)` gives, what it asked)] of `size` threads; an error of one is raised."""
    meeting = Meeting(size)
    ranks = [ThreadRanks(rank, meeting) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        return list(zip(pool.map(work, ranks), [mine.calls for mine in ranks], strict=True))


def for_learners(config: Any, size: int, learner_class: type = JointPPOLearner, **options: Any) -> Any:
    """The configuration of one learner for `size` of them: batch and minibatch are per learner."""
    config = config.copy(copy_frozen=False)
    if size > 1:
        assert config.train_batch_size_per_learner % size == 0
        config.training(train_batch_size_per_learner=config.train_batch_size_per_learner // size)
        if config.minibatch_size is not None:
            assert config.minibatch_size % size == 0
            config.training(minibatch_size=config.minibatch_size // size)
    return config.learners(num_learners=size, learner_class=learner_class, **options)


class ThreadLearners:
    """L learners, built together.

    Args:
        config: of one learner.
        size: L.
        spaces: of the runner.
        learner_class: of the learners.
        ranks_class: how they speak.
        change: called with (rank, learner) in each thread after the learner was built.
    """

    def __init__(
        self,
        config: Any,
        size: int,
        spaces: Any,
        learner_class: type = JointPPOLearner,
        ranks_class: type = ThreadRanks,
        change: Callable[[int, Any], None] | None = None,
    ) -> None:
        meeting = Meeting(size)
        self.size = size

        def build(rank: int) -> Any:
            class Learner(learner_class):
                def make_ranks(self) -> Ranks:
                    return ranks_class(rank, meeting)

            learner = make_learner(for_learners(config, size, Learner), spaces)
            if change is not None:
                change(rank, learner)
            return learner

        self._meeting = meeting
        self.learners = self._in_threads(build)

    def _in_threads(self, work: Callable[[int], Any]) -> list[Any]:
        results: list[Any] = [None] * self.size
        errors: list[BaseException | None] = [None] * self.size

        def run(rank: int) -> None:
            try:
                results[rank] = work(rank)
            except BaseException as error:
                errors[rank] = error

        self._meeting.barrier.reset()
        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            threads[0].join(0.01)
            threads[-1].join(0.01)
            if any(errors) and not self._meeting.barrier.broken:
                for thread in threads:
                    thread.join(GRACE_S)
                self._meeting.barrier.abort()  # whoever still waits for one that failed
        self.errors = [error for error in errors if error and not isinstance(error, threading.BrokenBarrierError)]
        if any(errors):
            raise self.errors[0] if self.errors else next(filter(None, errors))
        return results

    def each(self, work: Callable[[Any], Any]) -> list[Any]:
        """`work(learner)` for all learners at once, each in its thread; an error of one is raised."""
        return self._in_threads(lambda rank: work(self.learners[rank]))

    def update(self, batches: Any, **options: Any) -> list[dict[str, Any]]:
        """One update; each learner's results."""
        return self.each(lambda learner: update(learner, batches, **options))

    def set_state(self, state: Any) -> None:
        """Gives every learner the state of another one."""
        self.each(lambda learner: learner.set_state(copy.deepcopy(state)))

    @property
    def calls(self) -> list[list[tuple[str, int]]]:
        """Of each learner what it asked."""
        return [learner.ranks.calls for learner in self.learners]


def everything(learner: Any) -> dict[str, Any]:
    """All numbers of a learner that the next update depends on."""
    return {
        "parameters": parameters(learner),
        "optimizers": optimizer_states(learner),
        "values": {m: moments.get_state() for m, moments in learner._value_normalizers.items()},
        "generator": learner._generator.get_state().numpy().copy(),
        "low_entropy": dict(learner._entropy_guard.low_updates),
    }


def flat(results: Any, path: str = "") -> dict[str, float]:
    """{path: number} of the metrics that do not measure time or messages."""
    if isinstance(results, dict):
        return {
            key: value
            for name, inner in results.items()
            if not any(word in name for word in ("throughput", "collective", "timer"))
            for key, value in flat(inner, f"{path}/{name}").items()
        }
    return {path: float(results)}
