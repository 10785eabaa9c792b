"""The GRU with a backward pass of its own against torch's, and where it is used."""

import numpy as np
import pytest
import torch

from tests.recurrent.test_recurrent_modules import module_of, random_batch
from thrust_rllib import GRUModule
from thrust_rllib.rl_modules import recurrent
from thrust_rllib.rl_modules.gru_steps import gru_with_gradient

R, L, D, H = 3, 7, 4, 5


def gru_and_inputs(dtype=torch.float64, rows=R, steps=L):
    generator = torch.Generator().manual_seed(0)
    cell = torch.nn.GRU(D, H, batch_first=True, dtype=dtype)
    for parameter in cell.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    inputs, state = (torch.randn(*shape, generator=generator, dtype=dtype) for shape in ((rows, steps, D), (rows, H)))
    return cell, inputs.requires_grad_(), state.requires_grad_()


def torchs(cell, inputs, state):
    outputs, last = cell(inputs, state[None])
    return outputs, last[0]


def gradients(forward, cell, inputs, state):
    """Of a loss that weighs every output differently, with respect to inputs, state and parameters."""
    outputs, last = forward(cell, inputs, state)
    weights = torch.linspace(-1.0, 2.0, outputs.numel(), dtype=outputs.dtype).view_as(outputs)
    loss = (weights * outputs).sum() + last.square().sum()
    return torch.autograd.grad(loss, [inputs, state, *cell.parameters()])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize(("rows", "steps"), [(R, L), (1, 1), (1, 40)])
def test_outputs_and_gradients_are_torchs(dtype, tolerance, rows, steps):
    given = gru_and_inputs(dtype, rows, steps)
    found, expected = ([*forward(*given), *gradients(forward, *given)] for forward in (gru_with_gradient, torchs))
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)


def test_gradients_are_those_of_differences():
    cell, inputs, state = gru_and_inputs(rows=2, steps=3)
    assert torch.autograd.gradcheck(lambda x, h, *_: gru_with_gradient(cell, x, h), (inputs, state, *cell.parameters()))


def test_a_graph_may_be_gone_through_twice():
    cell, inputs, state = gru_and_inputs()
    outputs, _ = gru_with_gradient(cell, inputs, state)
    first, second = (torch.autograd.grad(outputs.sum(), [inputs, *cell.parameters()], retain_graph=True) for _ in "ab")
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other) and one.abs().max() > 0


def test_infinite_inputs_give_no_warning_and_no_finite_gradient():
    cell, inputs, state = gru_and_inputs()
    with torch.no_grad():
        inputs[1, 2, 0] = np.inf
    found, _ = gru_with_gradient(cell, inputs, state)
    expected, _ = torchs(cell, inputs, state)
    assert torch.equal(found.isfinite(), expected.isfinite())
    assert not all(x.isfinite().all() for x in gradients(gru_with_gradient, cell, inputs, state))


def test_the_module_takes_it_where_a_gradient_is_needed(monkeypatch):
    used = []
    monkeypatch.setattr(recurrent, "gru_with_gradient", lambda *given: used.append(1) or gru_with_gradient(*given))
    module = module_of(GRUModule).double()
    batch, _ = random_batch(module)
    with torch.no_grad():
        without = module.forward_train(batch)
    assert not used
    with_gradient = module.forward_train(batch)
    assert used
    torch.testing.assert_close(with_gradient, without, rtol=1e-12, atol=1e-12)
