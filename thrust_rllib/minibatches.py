"""Which joint rows each gradient step reads: the same for every agent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Units:
    """What minibatches are made of: single joint rows, or whole training sequences.

    Args:
        rows: int64 [M], all joint rows of a batch, unit after unit; within a unit in the order of time.
        lengths: int64 [K], rows of each unit; their sum is M.

    Raises:
        ValueError: a unit without a row, or lengths that do not add up to M.
    """

    rows: Tensor
    lengths: Tensor

    def __post_init__(self) -> None:
        if int(self.lengths.sum()) != len(self.rows) or bool((self.lengths < 1).any()):
            raise ValueError(
                f"{len(self.lengths)} units of together {int(self.lengths.sum())} rows, the shortest of "
                f"{int(self.lengths.min()) if len(self) else 0}, were given for {len(self.rows)} rows; needed: lengths "
                "≥ 1 that add up to the number of rows"
            )

    @classmethod
    def single_rows(cls, num_rows: int) -> Units:
        """Every row on its own."""
        return cls(torch.arange(num_rows), torch.ones(num_rows, dtype=torch.int64))

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_rows(self) -> int:
        """M."""
        return len(self.rows)

    def in_order(self, order: Tensor) -> Tensor:
        """The rows [M] of the units `order` [K], one unit behind the other."""
        lengths = self.lengths[order]
        ends = self.lengths.cumsum(0)[order]
        # Where a unit begins in `rows`, minus where it begins in the result.
        shift = (ends - lengths.cumsum(0)).repeat_interleave(lengths)
        return self.rows[torch.arange(self.num_rows) + shift]


def joint_epochs(
    units: Units,
    *,
    minibatch_size: int | None,
    num_epochs: int,
    iterate_all_minibatches: bool,
    max_minibatches_per_epoch: int | None,
    shuffle: bool,
    generator: torch.Generator,
) -> Iterator[Sequence[Tensor]]:
    """Indices into the joint rows: of each epoch its minibatches, int64 [B] each.

    | setting                              | an epoch is                                                         |
    |--------------------------------------|---------------------------------------------------------------------|
    | default                              | the first minibatch of one shuffle                                  |
    | `iterate_all_minibatches`            | all minibatches of one shuffle, the short last one kept             |
    | … and `max_minibatches_per_epoch` k  | only the first max(k, 1) of these                                   |

    A minibatch holds as many whole units, in the order of the shuffle, as fit into min(minibatch_size, M) rows, and at
    least one: with single rows exactly that number, with longer units fewer rows where they do not fill it, and more
    where one unit is longer.

    An epoch's shuffle is drawn when the epoch is asked for, so that it does not depend on how many minibatches of
    earlier epochs were used.

    Args:
        units: of the batch, M rows.
        minibatch_size: rows per step; None or more than M means all M.
        num_epochs: number of epochs.
        iterate_all_minibatches: see the table.
        max_minibatches_per_epoch: see the table; None for no limit.
        shuffle: draw a new order of the units in each epoch; False keeps their own.
        generator: the only source of randomness.

    Raises:
        ValueError: there is no row.

    Source: the seed's joint and recurrent trainers; RLlib's `MiniBatchCyclicIterator` instead keeps one cursor and one
    permutation per module, after which row k of two modules is no longer the same step.
    """
    if not len(units):
        raise ValueError("the rollout is empty: there is no joint row to draw minibatches from")
    for _ in range(num_epochs):
        order = torch.randperm(len(units), generator=generator) if shuffle else torch.arange(len(units))
        sizes = _rows_of_minibatches(units.lengths[order], minibatch_size)
        kept = _kept(len(sizes), iterate_all_minibatches, max_minibatches_per_epoch)
        yield units.in_order(order).split(sizes)[:kept]


def rows_per_epoch(
    units: Units,
    minibatch_size: int | None,
    iterate_all_minibatches: bool,
    max_minibatches_per_epoch: int | None,
) -> int:
    """How many of the joint rows one epoch of `joint_epochs` reads; with units of different lengths: unshuffled."""
    sizes = _rows_of_minibatches(units.lengths, minibatch_size)
    return sum(sizes[: _kept(len(sizes), iterate_all_minibatches, max_minibatches_per_epoch)])


def _rows_of_minibatches(lengths: Tensor, minibatch_size: int | None) -> list[int]:
    """Rows of each minibatch where units of these lengths come one behind the other."""
    num_rows = int(lengths.sum())
    size = num_rows if minibatch_size is None else minibatch_size
    first = int(lengths[0])
    if bool((lengths == first).all()):  # the common case, without a loop over the units
        full = min(first * max(size // first, 1), num_rows)
        count, rest = divmod(num_rows, full)
        return [full] * count + [rest] * (rest > 0)
    sizes = [0]
    for length in lengths.tolist():
        if sizes[-1] and sizes[-1] + length > size:
            sizes.append(0)
        sizes[-1] += length
    return sizes


def _kept(count: int, iterate_all_minibatches: bool, max_minibatches_per_epoch: int | None) -> int:
    """How many of an epoch's `count` minibatches are used."""
    if not iterate_all_minibatches:
        return 1
    return count if max_minibatches_per_epoch is None else min(max(max_minibatches_per_epoch, 1), count)
