"""What the tests of the mathematics share: examples, tolerances, random arrays."""

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st

# Derandomized: the same examples everywhere, so that a tolerance cannot fail by luck.
examples = settings(max_examples=30, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)
dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def random_array(rng, shape, dtype=torch.float64, scale=1.0):
    """Normal numbers that both dtypes represent exactly, so that only the arithmetic differs."""
    return torch.tensor(rng.normal(size=shape) * scale, dtype=torch.float32).to(dtype)


def random_mask(rng, shape, probability=0.7):
    return torch.tensor(rng.random(shape) < probability)


def assert_matches(actual, expected):
    """Equal to a float64 reference: 1e-10 in float64, 1e-5 in float32."""
    expected = torch.as_tensor(np.asarray(expected, dtype=np.float64))
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.detach().double(), expected, rtol=tolerance, atol=tolerance)


def gradcheck(function, *inputs):
    return torch.autograd.gradcheck(function, inputs, eps=1e-6, atol=1e-6, rtol=1e-5)
