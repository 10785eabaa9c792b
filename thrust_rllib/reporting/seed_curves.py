"""Several curves of one quantity as one: smoothed, on common steps, mean and spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MAX_POINTS = 400  # of a common grid, about a pixel each
SMOOTHING = 12  # windows in a run


@dataclass(frozen=True)
class SeedCurve:
    """Mean and spread of K curves on G common steps, float64 [G].

    | field          | meaning                                                              |
    |----------------|----------------------------------------------------------------------|
    | steps          | increasing                                                           |
    | mean           | over the curves that reach the step                                  |
    | standard_error | deviation (K - 1 in its denominator) / √K; NaN for one curve         |
    | low, high      | smallest and largest                                                 |
    """

    steps: np.ndarray
    mean: np.ndarray
    standard_error: np.ndarray
    low: np.ndarray
    high: np.ndarray


def seed_curve(curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> SeedCurve:
    """Interpolates curves linearly onto common steps, where at least half of them have numbers.

    Where all have the same steps, nothing is interpolated.

    Args:
        curves: (steps [I], values [I]) of each; I may differ, values may be NaN.
    """
    known = [(steps[np.isfinite(values)], values[np.isfinite(values)]) for steps, values in curves]
    known = [(steps, values) for steps, values in known if len(steps)]
    grid = common_steps([steps for steps, _ in known])
    table = np.array([np.interp(grid, steps, values, np.nan, np.nan) for steps, values in known])
    table = table.reshape(len(known), len(grid))
    count = np.isfinite(table).sum(axis=0)
    enough = 2 * count >= len(known)
    grid, table, count = grid[enough], table[:, enough], count[enough]
    mean = np.nansum(table, axis=0) / np.maximum(count, 1)
    variance = np.nansum((table - mean) ** 2, axis=0) / np.maximum(count - 1, 1)
    reached = np.isfinite(table)
    return SeedCurve(
        steps=grid,
        mean=mean,
        standard_error=np.where(count > 1, np.sqrt(variance / np.maximum(count, 1)), np.nan),
        low=np.where(reached, table, np.inf).min(axis=0, initial=np.inf),
        high=np.where(reached, table, -np.inf).max(axis=0, initial=-np.inf),
    )


def common_steps(grids: Sequence[np.ndarray]) -> np.ndarray:
    """All steps of all grids, or `MAX_POINTS` at equal distances where these are fewer."""
    if not grids:
        return np.zeros(0)
    union = np.unique(np.concatenate(grids))
    return union if len(union) <= MAX_POINTS else np.linspace(union[0], union[-1], MAX_POINTS)


def smoothing_window(iterations: int) -> int:
    """Iterations of a moving average: a twelfth of the run."""
    return max(1, iterations // SMOOTHING)


def moving_average(values: np.ndarray, window: int) -> np.ndarray:
    """Centred mean of the finite values in the window, which is shorter at both ends; NaN before the first of them.

    Args:
        values: [I].
        window: in iterations.
    """
    known = np.isfinite(values)
    kernel = np.ones(window)
    # mode "same" is as long as the longer argument: a window longer than the series must be cut.
    middle = slice((window - 1) // 2, (window - 1) // 2 + len(values))
    total = np.convolve(np.where(known, values, 0.0), kernel)[middle]
    count = np.convolve(known.astype(float), kernel)[middle]
    return np.where((count > 0.5) & np.maximum.accumulate(known), total / np.maximum(count, 1), np.nan)
