"""Intervals against formulas written out here, and against how often they hold the true mean."""

import math

import numpy as np
import pytest
from scipy import stats

from thrust_rllib.confidence import MeanInterval, gap_closed_of, mean_interval


def test_interval_is_students():
    values = np.random.default_rng(0).normal(3.0, 2.0, size=7)
    found = mean_interval(values)
    assert found.interval == pytest.approx(stats.ttest_1samp(values, 0.0).confidence_interval(0.95), rel=1e-12)
    assert found.mean == pytest.approx(values.sum() / 7) and found.standard_error == pytest.approx(stats.sem(values))
    normal = 1.96 * found.standard_error
    assert found.half_width > 1.2 * normal  # seven samples: the normal interval would be too short


def test_difference_is_welchs():
    rng = np.random.default_rng(1)
    first, second = rng.normal(1.0, 3.0, size=9), rng.normal(0.0, 0.5, size=30)
    found = mean_interval(first) - mean_interval(second)
    test = stats.ttest_ind(first, second, equal_var=False)
    assert found.interval == pytest.approx(test.confidence_interval(0.95), rel=1e-12)
    assert found.degrees == pytest.approx(test.df)


def test_the_true_mean_lies_inside_in_95_percent():
    rng = np.random.default_rng(2)
    inside = [
        low <= 1.0 <= high for low, high in (mean_interval(rng.normal(1.0, 5.0, 5)).interval for _ in range(4000))
    ]
    assert abs(np.mean(inside) - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 4000)


def test_one_sample_has_a_mean_and_no_interval():
    alone = mean_interval([4.0])
    assert alone.mean == 4.0 and math.isnan(alone.half_width)
    assert (alone - mean_interval([1.0])).mean == 3.0 and math.isnan((alone - mean_interval([1.0, 2.0])).half_width)


def test_constants_have_an_interval_of_no_width():
    assert mean_interval([2.0, 2.0]).interval == (2.0, 2.0)
    assert (mean_interval([2.0, 2.0]) - mean_interval([5.0, 5.0, 5.0])).interval == (-3.0, -3.0)


@pytest.mark.parametrize("values", [[], [[1.0, 2.0]]])
def test_values_of_another_shape_are_errors(values):
    with pytest.raises(ValueError, match="at least one"):
        mean_interval(values)


def test_gap_closed_and_its_error_against_repeated_draws():
    errors = {"policy": 0.3, "random": 0.2, "specialist": 0.25}
    means = {"policy": 6.0, "random": -10.0, "specialist": 10.0}
    found = gap_closed_of(*(MeanInterval(means[name], errors[name], 99) for name in means))
    assert found.value == pytest.approx(0.8)
    rng = np.random.default_rng(3)
    x, r, s = (rng.normal(means[name], errors[name], 200_000) for name in means)
    assert found.standard_error == pytest.approx(((x - r) / (s - r)).std(), rel=0.02)


def test_no_gap_is_no_number():
    same = MeanInterval(1.0, 0.1, 9)
    assert math.isnan(gap_closed_of(same, same, same).value)
