"""Means of independent samples with 95 % confidence intervals (Student's t), and what is computed from them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import stdtrit

LEVEL = 0.95


@dataclass(frozen=True)
class MeanInterval:
    """A mean, or a difference of two, and how well it is known.

    The interval is `mean ± t · standard_error`, t the quantile (1 + 0.95) / 2 of Student's t distribution. With a
    single sample nothing is known about the spread: all but the mean is NaN.

    Args:
        mean: the estimate.
        standard_error: its standard deviation.
        degrees: degrees of freedom of t.
    """

    mean: float
    standard_error: float
    degrees: float

    @property
    def half_width(self) -> float:
        """Half the length of the interval: t · standard_error."""
        return float(stdtrit(self.degrees, (1 + LEVEL) / 2)) * self.standard_error if self.degrees > 0 else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """The lower and the upper end of the 95 % interval."""
        return self.mean - self.half_width, self.mean + self.half_width

    def __sub__(self, other: MeanInterval) -> MeanInterval:
        """The difference of two independent means, with the degrees of freedom of Welch and Satterthwaite.

        degrees = (s₁² + s₂²)² / (s₁⁴ / ν₁ + s₂⁴ / ν₂), s the standard errors and ν the degrees of freedom.
        """
        variances = self.standard_error**2, other.standard_error**2
        degrees = min(self.degrees, other.degrees)
        if degrees > 0 and sum(variances) > 0:
            degrees = sum(variances) ** 2 / (variances[0] ** 2 / self.degrees + variances[1] ** 2 / other.degrees)
        return MeanInterval(self.mean - other.mean, math.sqrt(sum(variances)), degrees)


def mean_interval(values: Any) -> MeanInterval:
    """Mean of independent samples; its standard error is s / √K with the deviation s of K - 1 degrees of freedom.

    Args:
        values: [K].

    Raises:
        ValueError: no sample, or more than one axis.
    """
    samples = np.asarray(values, np.float64)
    if samples.ndim != 1 or not samples.size:
        raise ValueError(f"values have shape {samples.shape}; needed: [samples], at least one")
    count = len(samples)
    error = float(samples.std(ddof=1)) / math.sqrt(count) if count > 1 else math.nan
    return MeanInterval(float(samples.mean()), error, count - 1)


@dataclass(frozen=True)
class GapClosed:
    """How far a policy is on the way from random to a specialist: 0 at random, 1 at the specialist.

    Args:
        value: g = (x - r) / (s - r); NaN where specialist and random are equal.
        standard_error: √(σ_x² + (1 - g)² σ_r² + g² σ_s²) / |s - r|, to first order in the errors of the three
            independent means.
    """

    value: float
    standard_error: float


def gap_closed_of(policy: MeanInterval, random: MeanInterval, specialist: MeanInterval) -> GapClosed:
    """The gap closed by a policy, from the three means."""
    gap = specialist.mean - random.mean
    if gap == 0:
        return GapClosed(math.nan, math.nan)
    value = (policy.mean - random.mean) / gap
    errors = (policy.standard_error, (1 - value) * random.standard_error, value * specialist.standard_error)
    return GapClosed(value, math.hypot(*errors) / abs(gap))
