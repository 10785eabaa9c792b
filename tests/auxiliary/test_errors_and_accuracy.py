import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.auxiliary import reference
from tests.functional.helpers import assert_matches, dtypes, examples, gradcheck, random_array, random_mask, seeds
from thrust_rllib.functional import huber_error, relative_accuracy, squared_error

ERRORS = {"mse": squared_error, "huber": huber_error}


@pytest.mark.parametrize("kind", ERRORS)
@dtypes
@examples
@given(seed=seeds, scale=st.sampled_from([0.1, 1.0, 30.0]))
def test_errors_equal_the_loops(kind, dtype, seed, scale):
    rng = np.random.default_rng(seed)
    p, y = random_array(rng, 12, dtype, scale), random_array(rng, 12, dtype, scale)
    expected = [reference.error(kind, float(a), float(b)) for a, b in zip(p, y, strict=True)]
    assert_matches(ERRORS[kind](p, y), expected)
    p.requires_grad_()
    (slope,) = torch.autograd.grad(ERRORS[kind](p, y).sum(), p)
    assert_matches(slope, [reference.slope(kind, float(a), float(b)) for a, b in zip(p.detach(), y, strict=True)])


def test_huber_equals_torch_and_has_one_slope_where_the_branches_meet():
    p = torch.tensor([-3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0], dtype=torch.float64, requires_grad=True)
    for delta in (1.0, 0.4, 2.5):
        found = huber_error(p, torch.zeros_like(p), delta)
        torch.testing.assert_close(found, torch.nn.functional.huber_loss(p, p * 0, reduction="none", delta=delta))
        (slope,) = torch.autograd.grad(found.sum(), p)
        torch.testing.assert_close(slope, p.detach().clamp(-delta, delta))
    assert huber_error(p, torch.zeros_like(p)).tolist() == [2.5, 0.5, 0.125, 0, 0.125, 0.5, 2.5]
    assert squared_error(p, torch.ones_like(p)).tolist() == [16, 4, 2.25, 1, 0.25, 0, 4]


def test_gradients():
    rng = np.random.default_rng(0)
    p, y = random_array(rng, (3, 4)).requires_grad_(), random_array(rng, (3, 4))
    assert gradcheck(lambda x: squared_error(x, y), p) and gradcheck(lambda x: huber_error(x, y), p)


@dtypes
@examples
@given(seed=seeds, B=st.integers(1, 9), masked=st.booleans())
def test_accuracy_equals_the_loops(dtype, seed, B, masked):
    rng = np.random.default_rng(seed)
    y = random_array(rng, (3, 2, B), dtype) * torch.from_numpy(rng.random((3, 2, B)) < 0.7)  # some are 0
    p = y + 0.4 * random_array(rng, (3, 2, B), dtype)
    mask = random_mask(rng, (2, B), 0.6) if masked else None
    here = np.ones((2, B), bool) if mask is None else mask.numpy()
    expected = reference.accuracy(p.double().numpy(), y.double().numpy(), here, [1, 1])
    assert_matches(relative_accuracy(p, y, mask), expected)
    if mask is not None:
        garbage = p.masked_fill(~mask, torch.nan), y.masked_fill(~mask, torch.nan), mask
        assert torch.equal(relative_accuracy(*garbage), relative_accuracy(p, y, mask))


def test_accuracy_by_hand():
    y = torch.tensor([1.0, 2.0, 4.0, -10.0])
    assert relative_accuracy(y, y) == 1 and relative_accuracy(-y, y) == 0
    errors = torch.tensor([0.1, 0.2, 0.4, 0.8])
    assert relative_accuracy(y * (1 + errors), y) == pytest.approx(0.7)  # an even number: the mean of 0.2 and 0.4
    three = torch.tensor([True, True, True, False])
    assert relative_accuracy(y * (1 - errors), y, three) == pytest.approx(0.8)
    assert relative_accuracy(y, y, ~three & three) == 0 and relative_accuracy(y[:0], y[:0]) == 0
    zeros = torch.zeros(3)
    assert relative_accuracy(zeros, zeros) == 0 and relative_accuracy(zeros + 1, zeros + 1e-3) == 0
    rare = torch.tensor([0.0, 2.0, 0.0, 0.0])
    assert relative_accuracy(torch.tensor([5.0, 1.5, -3.0, 9.0]), rare) == 0.75
    assert not relative_accuracy(y.clone().requires_grad_(), y).requires_grad


def test_errors():
    x = torch.zeros(4)
    for function in (squared_error, huber_error, relative_accuracy):
        with pytest.raises(ValueError, match=r"predictions has shape \(4,\), targets has shape \(4, 1\)"):
            function(x, x[:, None])
    with pytest.raises(ValueError, match="delta is 0"):
        huber_error(x, x, 0)
    for mask in (torch.zeros(4), torch.zeros(3, dtype=torch.bool), torch.zeros(2, 4, dtype=torch.bool)):
        with pytest.raises(ValueError, match="needed bool that broadcasts"):
            relative_accuracy(x, x, mask)
