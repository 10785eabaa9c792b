import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import reference
from tests.functional.helpers import assert_matches, dtypes, examples, random_array, seeds
from thrust_rllib.functional import (
    clip_by_global_norm_,
    clip_by_global_norms_,
    clip_by_norm_,
    clip_by_value_,
    global_norm,
    global_norms,
)

shape_lists = st.lists(st.one_of(st.none(), st.lists(st.integers(0, 4), max_size=3).map(tuple)), max_size=5)


def gradients(seed, shapes=((3, 4), (4,), None, (2, 2)), dtype=torch.float64):
    rng = np.random.default_rng(seed)
    return [None if shape is None else random_array(rng, shape, dtype) for shape in shapes]


def copies(grads):
    return [None if g is None else g.clone() for g in grads]


def arrays(grads):
    return [None if g is None else g.numpy().copy() for g in grads]


def same_bits(a, b):
    return all(
        x is y is None or torch.equal(x.view(torch.int64), y.view(torch.int64)) for x, y in zip(a, b, strict=True)
    )


@dtypes
@examples
@given(seed=seeds, shapes=shape_lists, cap=st.sampled_from([-1.0, 0.0, 0.1, 1.0, 1e3, math.inf]))
def test_all_three_equal_the_reference(dtype, seed, shapes, cap):
    grads = gradients(seed, shapes, dtype)
    before = arrays(grads)
    expected, norm = reference.clip_by_global_norm(before, cap)
    assert_matches(global_norm(grads).to(dtype), norm)
    for function, right in [
        (clip_by_global_norm_, expected),
        (clip_by_norm_, reference.clip_by_norm(before, cap)),
        (clip_by_value_, reference.clip_by_value(before, cap)),
    ]:
        clipped = copies(grads)
        returned = function(clipped, cap)
        for actual, wanted in zip(clipped, right, strict=True):
            assert (actual is None) == (wanted is None)
            if actual is not None:
                assert_matches(actual, wanted)
        if function is clip_by_global_norm_:
            assert_matches(returned.to(dtype), norm)


def test_the_norm_is_that_of_one_long_vector():
    grads = gradients(0)
    vector = torch.cat([g.ravel() for g in grads if g is not None])
    assert_matches(global_norm(grads), vector.norm())
    assert global_norm([]) == 0 and global_norm([None]) == 0 and global_norm(iter([None, torch.ones(4)])) == 2


def test_a_cap_of_ten_times_the_norm_changes_nothing():
    grads = gradients(1)
    before = copies(grads)
    norm = clip_by_global_norm_(grads, 10 * float(global_norm(grads)))
    assert same_bits(grads, before) and norm == global_norm(before)


def test_a_cap_of_a_quarter_is_the_new_norm():
    grads = gradients(2)
    norm = global_norm(grads)
    assert clip_by_global_norm_(grads, float(norm) / 4) == norm
    torch.testing.assert_close(global_norm(grads), norm / 4, rtol=1e-6, atol=0)
    assert global_norm(grads) < norm / 4  # the 1e-6 of the formula


@pytest.mark.parametrize("cap", [0.0, -1.0])
@pytest.mark.parametrize("function", [clip_by_global_norm_, clip_by_norm_, clip_by_value_])
def test_a_cap_of_zero_or_less_changes_nothing(function, cap):
    grads = gradients(3)
    before = copies(grads)
    function(grads, cap)
    assert same_bits(grads, before)
    function(grads, 1e-3)
    assert not same_bits(grads, before)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_norm_that_is_not_finite_changes_nothing(bad):
    grads = gradients(4)
    grads[0][1, 2] = bad
    grads[1][0] = -0.0
    before = copies(grads)
    norm = clip_by_global_norm_(grads, 0.5)
    assert not norm.isfinite() and same_bits(grads, before)
    # Tensor by tensor only the one that holds it is left alone.
    clip_by_norm_(grads, 0.5)
    assert same_bits(grads[:1], before[:1]) and not same_bits(grads[3:], before[3:])


@pytest.mark.parametrize("cap", [0.25, 1.0])
@pytest.mark.parametrize("function", [clip_by_global_norm_, clip_by_norm_, clip_by_value_])
def test_clipping_twice_is_clipping_once(function, cap):
    grads = gradients(5)
    before = copies(grads)
    function(grads, cap)
    once = copies(grads)
    function(grads, cap)
    assert same_bits(grads, once) and not same_bits(grads, before)


def test_the_global_clip_keeps_the_direction_the_others_do_not():
    grads = gradients(6, ((5,), (3, 5)))
    direction = torch.cat([g.ravel() for g in grads]) / global_norm(grads)

    def cosine(function, cap):
        clipped = copies(grads)
        function(clipped, cap)
        return torch.cat([g.ravel() for g in clipped]).dot(direction) / global_norm(clipped)

    assert_matches(cosine(clip_by_global_norm_, 0.5), 1.0)
    assert cosine(clip_by_norm_, 0.5) < 0.999 and cosine(clip_by_value_, 0.1) < 0.999


def test_clips_the_gradients_of_parameters_in_place():
    layer = torch.nn.Linear(3, 2)
    layer(torch.ones(4, 3)).square().sum().backward()
    handle = layer.weight.grad
    clip_by_global_norm_((p.grad for p in layer.parameters()), 1e-3)
    assert layer.weight.grad is handle
    assert global_norm(p.grad for p in layer.parameters()) <= 1e-3


def test_mixed_dtypes():
    grads = [torch.ones(4, dtype=torch.float32), torch.ones(12, dtype=torch.float64)]
    assert_matches(clip_by_global_norm_(grads, 2.0), 4.0)
    assert [g.dtype for g in grads] == [torch.float32, torch.float64]
    torch.testing.assert_close(grads[0], torch.full((4,), 0.5), rtol=1e-6, atol=0)


@dtypes
@examples
@given(seed=seeds, shapes=shape_lists, data=st.data())
def test_groups_are_clipped_each_on_its_own(dtype, seed, shapes, data):
    grads = gradients(seed, shapes, dtype)
    group = data.draw(st.lists(st.integers(0, 2), min_size=len(grads), max_size=len(grads)))
    caps = data.draw(st.lists(st.sampled_from([-1.0, 0.0, 0.1, 1.0, math.inf]), min_size=3, max_size=3))
    before, clipped = arrays(grads), copies(grads)
    which = torch.tensor(group, dtype=torch.long)
    norms = clip_by_global_norms_(clipped, which, torch.tensor(caps, dtype=dtype))
    assert_matches(norms, global_norms(grads, which, 3))
    for k, cap in enumerate(caps):
        mine = [i for i, g in enumerate(group) if g == k]
        expected, norm = reference.clip_by_global_norm([before[i] for i in mine], cap)
        assert_matches(norms[k].to(dtype), norm)
        for i, wanted in zip(mine, expected, strict=True):
            if wanted is not None:
                assert_matches(clipped[i], wanted)


def test_a_group_whose_norm_is_not_finite_is_left_alone_the_others_are_clipped():
    grads = [torch.full((2,), torch.nan), torch.full((2,), 3.0), None]
    norms = clip_by_global_norms_(grads, torch.tensor([0, 1, 2]), torch.ones(3))
    assert norms.isnan().tolist() == [True, False, False] and norms[2] == 0
    assert grads[0].isnan().all() and abs(global_norm(grads[1:]) - 1.0) < 1e-5
