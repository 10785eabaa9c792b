"""Running mean and variance of a stream of arrays, mergeable across processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

STD_FLOOR = 1e-6


class RunningMoments:
    """Mean and population variance of everything seen, in float64, per element of `shape`.

    Two sets of n and m numbers, with d the difference of their means, merge to (Chan)

    count = n + m
    mean  = mean_n + d m / (n + m)
    m2    = m2_n + m2_m + d^2 n m / (n + m)          var = m2 / count

    With `decay` < 1 the old count and m2 are multiplied by it before each update or merge: an exponential
    window.

    Distributed use: each worker calls `update`; the driver merges every worker's `new` into what it sent out last and
    sends the result back, which each worker takes over with `set_state`. Then all hold what one worker would that saw
    all data, and nothing is counted twice (the purpose of the buffer of RLlib's `MeanStdFilter`).

    | field | shape | meaning |
    |---|---|---|
    | count | number | rows seen (a weight, not an integer, once decayed) |
    | mean | shape | mean, 0 before any data |
    | m2 | shape | sum of squared deviations |
    | new | RunningMoments or None | rows since the last `set_state` |

    Args:
        shape: shape of one row.
        decay: factor in (0, 1] on the past; 1 is exact and cumulative.

    Raises:
        ValueError: decay outside (0, 1].

    Source: Chan, Golub, LeVeque 1983, "Algorithms for computing the sample variance".
    """

    def __init__(self, shape: tuple[int, ...] = (), decay: float = 1.0) -> None:
        if not 0.0 < decay <= 1.0:
            raise ValueError(f"decay is {decay}, needed a number in (0, 1]; 1 keeps everything.")
        self.shape = tuple(shape)
        self.decay = decay
        self.count = 0.0
        self.mean: NDArray[np.float64] = np.zeros(self.shape)
        self.m2: NDArray[np.float64] = np.zeros(self.shape)
        self.new: RunningMoments | None = None

    @property
    def var(self) -> NDArray[np.float64]:
        """[*shape] population variance; 1 before any data."""
        return self.m2 / self.count if self.count > 0 else np.ones(self.shape)

    @property
    def std(self) -> NDArray[np.float64]:
        """[*shape] population standard deviation, at least `STD_FLOOR`; 1 before any data."""
        return np.maximum(np.sqrt(self.var), STD_FLOOR)

    def update(self, x: ArrayLike, mask: ArrayLike | None = None) -> None:
        """Takes in the rows of `x`, all leading axes flattened.

        Args:
            x: [..., *shape] numbers.
            mask: [...] bool, the rows that count; None means all. If none counts, nothing changes.

        Raises:
            ValueError: `x` does not end in `shape`, the mask does not match its rows, or a row that counts
                has a non-finite number.
        """
        rows = self._rows(x, mask)
        if not len(rows):
            return
        batch = RunningMoments(self.shape)
        batch.count = float(len(rows))
        # Around one of its own rows: equal rows give exactly no variance.
        shifted = rows - rows[0]
        offset = shifted.mean(0)
        batch.mean = rows[0] + offset
        batch.m2 = np.square(shifted - offset).sum(0)
        if self.new is None:
            self.new = RunningMoments(self.shape)
        self.new._absorb(batch)
        self.merge(batch)

    def merge(self, *others: RunningMoments) -> None:
        """Adds what others have seen, decaying the own past once; not part of `new`. Empty ones are ignored.

        Args:
            others: moments of the same shape.

        Raises:
            ValueError: a shape differs.
        """
        for other in others:
            if other.shape != self.shape:
                raise ValueError(
                    f"moments of shape {other.shape} cannot be merged into moments of shape {self.shape}: "
                    "keep one RunningMoments per kind of array."
                )
        if any(other.count > 0 for other in others):
            self.count *= self.decay
            self.m2 = self.m2 * self.decay
        for other in others:
            self._absorb(other)

    def get_state(self) -> dict[str, NDArray[np.float64]]:
        """{"count": [], "mean": shape, "m2": shape}, copies."""
        return {"count": np.array(self.count), "mean": self.mean.copy(), "m2": self.m2.copy()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Replaces everything by a state of `get_state`; `new` is dropped.

        Args:
            state: of `get_state`.

        Raises:
            ValueError: its arrays have another shape.
        """
        mean, m2 = (np.array(state[key], dtype=np.float64) for key in ("mean", "m2"))
        if mean.shape != self.shape or m2.shape != self.shape:
            raise ValueError(
                f"the state has arrays of shape {mean.shape}, these moments have shape {self.shape}: "
                f"build RunningMoments(shape={mean.shape}) for it."
            )
        self.count, self.mean, self.m2, self.new = float(state["count"]), mean, m2, None

    def _rows(self, x: ArrayLike, mask: ArrayLike | None) -> NDArray[np.float64]:
        x = np.asarray(x, dtype=np.float64)
        leading = x.ndim - len(self.shape)
        if leading < 0 or x.shape[leading:] != self.shape:
            raise ValueError(
                f"x has shape {x.shape}, these moments have shape {self.shape}: needed [..., *{self.shape}]; "
                "move the axes of one row to the end."
            )
        rows = x.reshape(-1, *self.shape) if x.size else np.zeros((0, *self.shape))
        if mask is not None:
            mask = np.asarray(mask)
            if mask.shape != x.shape[:leading] or mask.dtype != np.bool_:
                raise ValueError(
                    f"mask has shape {mask.shape} and dtype {mask.dtype}, the rows of x have shape "
                    f"{x.shape[:leading]}: needed one bool per row."
                )
            rows = rows[mask.reshape(-1)] if x.size else rows
        finite = np.isfinite(rows)
        if not finite.all():
            place = tuple(int(k) for k in np.argwhere(~finite)[0])
            raise ValueError(
                f"{int((~finite).sum())} of {rows.size} numbers are not finite, the first is {rows[place]} "
                f"in row {place[0]}, element {place[1:]}: mask such rows, or find out where they come from."
            )
        return rows

    def _absorb(self, other: RunningMoments) -> None:
        if other.count == 0:
            return
        total = self.count + other.count
        difference = other.mean - self.mean
        if self.count == 0:
            self.mean, self.m2 = other.mean.copy(), other.m2.copy()
        else:
            self.mean = self.mean + difference * (other.count / total)
            self.m2 = self.m2 + other.m2 + np.square(difference) * (self.count * other.count / total)
        self.count = total
