"""The learners that train one team together, as one of them sees them.

Every learner makes the same calls in the same order, whatever its share of the data is: a call waits for all others.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class Traffic:
    """What one learner has said to the others: calls, bytes that it gave into them, seconds inside them.

    The seconds hold the wait for the slowest learner. With nccl a call returns before it is carried out, so that they
    say little.
    """

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0


class Ranks:
    """One of L learners, with the three things that it says to the others; a single learner says nothing.

    | attribute | meaning                         |
    |-----------|---------------------------------|
    | rank      | which one this is, from 0       |
    | size      | L                               |
    | traffic   | `Traffic` since `take_traffic`  |

    Args:
        rank: from 0.
        size: L.
        device: where the collectives of the process group want their tensors: the learner's.
    """

    def __init__(self, rank: int = 0, size: int = 1, device: torch.device | str = "cpu") -> None:
        self.rank = rank
        self.size = size
        self.traffic = Traffic()
        self._device = torch.device(device)

    @classmethod
    def of(cls, config: Any, device: torch.device | str) -> Ranks:
        """Of torch's process group, which RLlib's learner group sets up for `num_learners` > 1."""
        if config.num_learners < 2:
            return cls(device=device)
        return cls(dist.get_rank(), dist.get_world_size(), device)

    def sum_(self, x: Tensor) -> Tensor:
        """The sum over all learners, to the bit the same for each; in place where `x` lies on the learner's device."""
        if self.size == 1:
            return x
        started = time.perf_counter()
        given = x.to(self._device).contiguous()
        self._all_reduce(given)
        self._count(given, started)
        return given.to(x.device)

    def gather(self, x: Tensor) -> Tensor:
        """[L, …], `x` of every learner in the order of the ranks; all give the same shape."""
        if self.size == 1:
            return x[None]
        started = time.perf_counter()
        given = x.to(self._device).contiguous()
        gathered = given.new_empty(self.size * given.numel())
        self._all_gather(gathered, given.view(-1))
        self._count(given, started)
        return gathered.view(self.size, *x.shape).to(x.device)

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        """Writes what the first learner has in `tensors` into those of all others."""
        if self.size == 1:
            return
        for x in tensors:
            started = time.perf_counter()
            given = x.detach().to(self._device).contiguous()
            self._broadcast(given.view(-1).view(torch.uint8))  # gloo does not know all types
            self._count(given, started)
            x.detach().copy_(given)

    def take_traffic(self) -> Traffic | None:
        """What was said since this was asked last; None of a single learner."""
        taken, self.traffic = self.traffic, Traffic()
        return None if self.size == 1 else taken

    def part(self, count: int) -> slice:
        """Which of `count` things are this learner's: a stretch, as long as the others' or one longer."""
        return slice(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def _count(self, given: Tensor, started: float) -> None:
        self.traffic.calls += 1
        self.traffic.bytes += given.numel() * given.element_size()
        self.traffic.seconds += time.perf_counter() - started

    # --- the process group ----------------------------------------------------------------------------------------

    def _all_reduce(self, x: Tensor) -> None:
        dist.all_reduce(x)

    def _all_gather(self, gathered: Tensor, x: Tensor) -> None:
        dist.all_gather(list(gathered.chunk(self.size)), x)

    def _broadcast(self, x: Tensor) -> None:
        dist.broadcast(x, src=0)


ALONE = Ranks()
"""A single learner."""
