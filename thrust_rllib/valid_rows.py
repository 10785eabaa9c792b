"""The valid joint rows of several batches behind each other. Letters as in `joint_batch`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from thrust_rllib.joint_batch import JointBatch


@dataclass(frozen=True)
class ValidRows:
    """Where the M valid joint rows of all batches stand.

    masks: bool [T, E] of each batch, false on padding. counts: the valid rows of each.
    """

    masks: list[np.ndarray]
    counts: list[int]

    @classmethod
    def of(cls, batches: Sequence[JointBatch]) -> ValidRows:
        """See the class."""
        masks = [batch.valid for batch in batches]
        return cls(masks, [int(np.count_nonzero(mask)) for mask in masks])

    def join(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """An array [T, n, E, …] of each batch to a new one [n, M, …] of their valid rows.

        Raises:
            ValueError: what one step of one agent is differs in shape between batches.
        """
        agents, shape = arrays[0].shape[1], arrays[0].shape[3:]
        dtype = np.result_type(*{array.dtype for array in arrays})
        rows = np.empty((agents, sum(self.counts), *shape), dtype)
        start = 0
        for array, mask, count in zip(arrays, self.masks, self.counts, strict=True):
            if array.shape[3:] != shape:
                raise ValueError(
                    f"batches of different shapes in one update: a step of an agent is {shape} in the first and "
                    f"{array.shape[3:]} in another; sample all of them from the same spaces"
                )
            own, agents_first = rows[:, start : start + count], array.swapaxes(0, 1)
            if count == mask.size:
                own.reshape(agents_first.shape)[:] = agents_first  # a view: one axis of rows becomes T and E
            else:
                own[:] = agents_first[:, mask]
            start += count
        return rows
