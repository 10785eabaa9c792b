"""Gradients whose memory is laid out unlike their parameter's, or that share memory, step as torch's own do."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as nnf

from thrust_rllib.optimizer_pass import OptimizerPass, make_adam


class Einsum(nn.Module):
    """Its weight's gradient comes out transposed."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 4))

    def forward(self, x):
        return torch.einsum("bi,oi->bo", x[:, :4], self.weight)


class Batched(nn.Module):
    """As above, by a product of matrices."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 5, 4))

    def forward(self, x):
        return torch.bmm(x[None, :, :4].expand(2, -1, -1), self.weight.transpose(1, 2)).flatten()


class Images(nn.Module):
    """A convolution over observations whose channels stand last."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 5, 2)

    def forward(self, x):
        return self.layer(x.view(-1, 4, 4, 3).permute(0, 3, 1, 2)).flatten(1)


class Expanded(nn.Module):
    """The gradient of a sum is one number, seen many times."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x):
        return x.mean() * self.weight.sum()


class Transposed(nn.Module):
    """A parameter that is a view."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(48, 6)
        self.layer.weight = nn.Parameter(torch.randn(48, 6).t())

    def forward(self, x):
        return self.layer(x)


class ChannelsLast(Images):
    """Weights as convolutions of a CPU like them."""

    def __init__(self):
        super().__init__()
        self.layer.to(memory_format=torch.channels_last)


class Gaps(nn.Module):
    """A parameter between whose numbers lie others."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(48, 6)[:, :4])

    def forward(self, x):
        return x @ self.weight


class Summed(nn.Module):
    """Two parameters have the very same gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(48, 3)) for _ in range(2))

    def forward(self, x):
        return x @ (self.first + self.second)


class PartlyFixed(nn.Module):
    """One parameter is not to be trained."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(48, 5), nn.Tanh(), nn.Linear(5, 2))
        self.layers[0].bias.requires_grad_(False)

    def forward(self, x):
        return self.layers(x)


KINDS = [Einsum, Batched, Images, Expanded, Transposed, ChannelsLast, Gaps, Summed, PartlyFixed]


def objective(net, k):
    x = torch.randn(9, 48, generator=torch.Generator().manual_seed(k))
    return (3 * nnf.elu(net(x.to(next(net.parameters()).dtype))) + 1).square().mean()


def test_what_couplings_are_asked_about_are_parameters_that_may_move():
    net = PartlyFixed()
    optimizer_pass = OptimizerPass(
        {"m": [make_adam(list(net.parameters()))]}, {"m": True}, {"m": None}, "global_norm", "cpu"
    )
    mine = optimizer_pass.params()["m"]
    assert len(mine) == 3 and all(p.requires_grad for p in mine)


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_equal_those_of_torch_in_float64(kind, clip):
    torch.manual_seed(0)
    net = kind()
    reference = copy.deepcopy(net).double()
    start = copy.deepcopy(net.state_dict())
    optimizer = make_adam(list(net.parameters()))
    optimizer.param_groups[0]["lr"] = 1e-2
    ours = OptimizerPass({"m": [optimizer]}, {"m": True}, {"m": clip}, "global_norm", "cpu")
    theirs = torch.optim.Adam(reference.parameters(), lr=1e-2, fused=False)
    for k in range(6):
        ours.compute_gradients(objective(net, k), retain_graph=False)
        norm = ours.clip()
        ours.step(torch.tensor(True))
        theirs.zero_grad()
        objective(reference, k).backward()
        for p in reference.parameters():  # as torch's Adam does by itself where the objective is smooth
            if p.grad is not None:
                p.grad = p.grad.clone().contiguous()
        limit = torch.inf if clip is None else clip
        expected = nn.utils.clip_grad_norm_(reference.parameters(), limit)
        torch.testing.assert_close(norm[0].double(), expected, rtol=1e-4, atol=0)
        theirs.step()
    moved = 0.0
    for name, p in net.state_dict().items():
        torch.testing.assert_close(p.double(), reference.state_dict()[name], rtol=0, atol=5e-5)
        moved += (p - start[name]).abs().max().item()
    assert moved > 1e-2
