import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import reference
from tests.functional.helpers import examples, seeds
from thrust_rllib.functional import RunningMoments
from thrust_rllib.functional.normalization import STD_FLOOR

shapes = st.sampled_from([(), (3,), (2, 2)])


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-10)


def same(a, b):
    close(a.count, b.count)
    close(a.mean, b.mean)
    close(a.m2, b.m2)


def batches(rng, shape, sizes):
    return [rng.normal(2.0, 3.0, size=(n, *shape)) for n in sizes]


@examples
@given(seed=seeds, shape=shapes, sizes=st.lists(st.integers(0, 6), min_size=1, max_size=5), masked=st.booleans())
def test_equals_all_data_kept(seed, shape, sizes, masked):
    rng = np.random.default_rng(seed)
    moments, kept = RunningMoments(shape), reference.RunningMoments(shape)
    for batch in batches(rng, shape, sizes):
        mask = rng.random(len(batch)) < 0.6 if masked else None
        moments.update(batch, mask)
        kept.update(batch, mask)
    assert moments.count == kept.count and moments.mean.dtype == np.float64
    if kept.count:
        close(moments.mean, kept.mean)
        close(moments.var, kept.var)


@examples
@given(seed=seeds, shape=shapes, decay=st.sampled_from([0.3, 0.9, 0.999]))
def test_decay_equals_the_weighted_definition(seed, shape, decay):
    rng = np.random.default_rng(seed)
    moments, kept = RunningMoments(shape, decay), reference.RunningMoments(shape, decay)
    for batch in batches(rng, shape, [3, 0, 1, 7, 2]):
        moments.update(batch)
        kept.update(batch)
    count, mean, var = kept.merged()
    close(moments.count, count)
    close(moments.count, kept.count)
    close(moments.mean, mean)
    close(moments.var, var)
    exact = RunningMoments(shape)
    for batch in kept.batches:
        exact.update(batch)
    assert not np.allclose(moments.mean, exact.mean, rtol=1e-6)


def test_decay_follows_a_change_that_the_exact_mean_forgets():
    window, exact = RunningMoments(decay=0.5), RunningMoments()
    for value in [0.0] * 50 + [1.0] * 10:
        for moments in (window, exact):
            moments.update(np.full(4, value))
    assert window.mean > 0.99 and exact.mean < 0.2


@examples
@given(seed=seeds, shape=shapes, cut=st.integers(0, 9))
def test_merge_equals_one_that_saw_both(seed, shape, cut):
    (data,) = batches(np.random.default_rng(seed), shape, [9])
    left, right, whole = RunningMoments(shape), RunningMoments(shape), RunningMoments(shape)
    left.update(data[:cut])
    right.update(data[cut:])
    whole.update(data)
    left.merge(right)
    same(left, whole)


@pytest.mark.parametrize("decay", [1.0, 0.8])
def test_what_workers_have_new_equals_one_worker_that_saw_everything(decay):
    rng = np.random.default_rng(0)
    workers = [RunningMoments((3,), decay) for _ in range(4)]
    driver, alone = RunningMoments((3,), decay), RunningMoments((3,), decay)
    for _ in range(3):
        data = batches(rng, (3,), [5, 0, 2, 9])
        for worker, batch in zip(workers, data, strict=True):
            worker.update(batch)
        alone.update(np.concatenate(data))
        driver.merge(*[worker.new for worker in workers if worker.new is not None])
        for worker in workers:
            worker.set_state(driver.get_state())
        for moments in (driver, *workers):
            same(moments, alone)
    # Merging whole states instead of what is new counts the past once per worker.
    driver.merge(*workers)
    assert driver.count > 3 * alone.count


def test_before_any_data_nothing_is_changed():
    moments = RunningMoments((2,))
    assert moments.count == 0 and (moments.mean == 0).all() and (moments.std == 1).all() and moments.new is None


def test_empty_updates_are_ignored_even_with_decay():
    moments = RunningMoments((2,), decay=0.5)
    moments.update(np.ones((3, 2)))
    before = moments.get_state()
    moments.update(np.zeros((0, 2)))
    moments.update(np.zeros((4, 0, 2)))
    moments.update(np.full((3, 2), np.nan), np.zeros(3, bool))
    moments.merge(RunningMoments((2,)))
    assert all(np.array_equal(before[key], value) for key, value in moments.get_state().items())
    moments.update(np.zeros((1, 2)))
    assert moments.count == 2.5


def test_leading_axes_are_flattened():
    data = np.random.default_rng(2).normal(size=(4, 5, 3))
    mask = np.random.default_rng(3).random((4, 5)) < 0.5
    a, b = RunningMoments((3,)), RunningMoments((3,))
    a.update(data, mask)
    b.update(data[mask])
    same(a, b)
    scalar = RunningMoments()
    scalar.update(data)
    scalar.update(7.0)
    assert scalar.count == 61


def test_a_constant_has_exactly_no_variance_and_the_std_is_floored():
    moments = RunningMoments((2,))
    x = np.full((7, 2), 1e8 / 3, dtype=np.float32)
    for _ in range(3):
        moments.update(x)
    assert (moments.var == 0).all() and (moments.std == STD_FLOOR).all()
    assert (moments.mean == x).all()


def test_large_offsets_keep_their_precision():
    data = np.random.default_rng(5).normal(size=(1000,))
    near, far = RunningMoments(), RunningMoments()
    near.update(data)
    for part in np.split(data, 10):
        far.update(part + 1e9)
    np.testing.assert_allclose(far.var, near.var, rtol=1e-6)
    # The textbook E[x^2] - E[x]^2 has no correct digit here.
    assert abs(np.mean((data + 1e9) ** 2) - np.mean(data + 1e9) ** 2 - near.var) > 0.1


def test_state_and_pickle():
    moments = RunningMoments((2,), decay=0.9)
    moments.update(np.random.default_rng(6).normal(size=(4, 2)))
    restored = RunningMoments((2,), decay=0.9)
    restored.update(np.ones((3, 2)))
    restored.set_state(moments.get_state())
    pickled = pickle.loads(pickle.dumps(moments))
    for other in (restored, pickled):
        same(other, moments)
        assert other.decay == 0.9 and other.shape == (2,)
    assert restored.new is None  # nothing is new since then
    assert moments.new.count == pickled.new.count == 4
    state = moments.get_state()
    state["mean"] += 1  # a copy
    same(restored, moments)


def test_takes_tensors():
    x = torch.arange(6.0).view(3, 2)
    moments = RunningMoments((2,))
    moments.update(x, torch.tensor([True, False, True]))
    close(moments.mean, [2.0, 3.0])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_named(bad):
    moments = RunningMoments((2,))
    x = np.zeros((4, 2))
    x[2, 1] = bad
    with pytest.raises(
        ValueError, match=rf"1 of 8 numbers are not finite, the first is {bad} in row 2, element \(1,\)"
    ):
        moments.update(x)
    assert moments.count == 0
    moments.update(x, np.array([True, True, False, True]))
    assert moments.count == 3


def test_errors():
    moments = RunningMoments((2,))
    with pytest.raises(ValueError, match=r"x has shape \(4, 3\), these moments have shape \(2,\)"):
        moments.update(np.zeros((4, 3)))
    with pytest.raises(ValueError, match=r"mask has shape \(3,\).*rows of x have shape \(4,\)"):
        moments.update(np.zeros((4, 2)), np.ones(3, bool))
    with pytest.raises(ValueError, match="dtype float64"):
        moments.update(np.zeros((4, 2)), np.ones(4))
    with pytest.raises(ValueError, match=r"shape \(3,\) cannot be merged into moments of shape \(2,\)"):
        moments.merge(RunningMoments((3,)))
    with pytest.raises(ValueError, match=r"arrays of shape \(3,\), these moments have shape \(2,\)"):
        moments.set_state(RunningMoments((3,)).get_state())
    for decay in (0.0, -1.0, 1.1):
        with pytest.raises(ValueError, match="decay is"):
            RunningMoments(decay=decay)
