"""Which joint rows each gradient step reads: the same for every agent."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def joint_minibatches(
    num_rows: int,
    *,
    minibatch_size: int | None,
    num_epochs: int,
    iterate_all_minibatches: bool,
    max_minibatches_per_epoch: int | None,
    shuffle: bool,
    generator: torch.Generator,
) -> Iterator[torch.Tensor]:
    """Indices into the joint rows, one int64 tensor [B] per gradient step, epoch after epoch.

    | setting                              | an epoch is                                                       |
    |--------------------------------------|-------------------------------------------------------------------|
    | default                              | one shuffled draw of min(minibatch_size, num_rows) rows           |
    | `iterate_all_minibatches`            | one shuffle, every chunk of minibatch_size, the short last one kept |
    | … and `max_minibatches_per_epoch` k  | only the first max(k, 1) of these chunks                          |

    Args:
        num_rows: M, the valid joint rows of the batch.
        minibatch_size: rows per step; None or more than M means all M.
        num_epochs: number of epochs.
        iterate_all_minibatches: see the table.
        max_minibatches_per_epoch: see the table; None for no limit.
        shuffle: draw a new order in each epoch; False keeps the order of time.
        generator: the only source of randomness.

    Raises:
        ValueError: there is no row.

    Source: the seed's joint trainer; RLlib's `MiniBatchCyclicIterator` instead keeps one cursor and one permutation
    per module, after which row k of two modules is no longer the same step.
    """
    if num_rows < 1:
        raise ValueError("the rollout is empty: there is no joint row to draw minibatches from")
    size = num_rows if minibatch_size is None else min(minibatch_size, num_rows)
    for _ in range(num_epochs):
        order = torch.randperm(num_rows, generator=generator) if shuffle else torch.arange(num_rows)
        chunks = order.split(size)
        limit = 1
        if iterate_all_minibatches:
            limit = len(chunks) if max_minibatches_per_epoch is None else max(max_minibatches_per_epoch, 1)
        yield from chunks[:limit]


def rows_per_epoch(
    num_rows: int,
    minibatch_size: int | None,
    iterate_all_minibatches: bool,
    max_minibatches_per_epoch: int | None,
) -> int:
    """How many of `num_rows` joint rows one epoch of `joint_minibatches` reads."""
    size = num_rows if minibatch_size is None else min(minibatch_size, num_rows)
    if not iterate_all_minibatches:
        return size
    if max_minibatches_per_epoch is None:
        return num_rows
    return min(num_rows, size * max(max_minibatches_per_epoch, 1))
