"""The report of what each coupling does to each module's gradient: losses whose gradients are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from thrust_rllib.coupling_gradients import coupling_gradients


def parameters(*vectors, dtype=torch.float64):
    return [torch.tensor(v, dtype=dtype, requires_grad=True) for v in vectors]


def quadratic(params, targets):
    """½ Σ ‖p − target‖², with gradient p − target."""
    return sum(0.5 * (p - torch.tensor(t, dtype=p.dtype)).square().sum() for p, t in zip(params, targets, strict=True))


def linear(param, direction):
    """⟨direction, p⟩, with gradient `direction`."""
    return (torch.tensor(direction, dtype=param.dtype) * param).sum()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_norms_ratios_and_cosines_of_known_gradients(dtype):
    (a,) = parameters([3.0, 4.0], dtype=dtype)
    (b,) = parameters([[1.0, 0.0], [2.0, 2.0]], dtype=dtype)
    objective = quadratic([a], [[0.0, 0.0]]) + quadratic([b], [[[0.0, 0.0], [0.0, 0.0]]])  # gradients: a and b
    terms = [
        linear(a, [6.0, 8.0]) + linear(b, [[-1.0, 0.0], [-2.0, -2.0]]),  # parallel in a, opposed in b
        linear(a, [-4.0, 3.0]),  # orthogonal in a, absent in b
        linear(a, [1.0, 0.0]) + linear(b, [[0.0, 3.0], [0.0, 0.0]]),  # at an angle in a, orthogonal in b
    ]
    report = coupling_gradients(objective, terms, {"a": [a], "b": [b]})
    expected = {
        "norm": [[10.0, 3.0], [5.0, 0.0], [1.0, 3.0]],
        "norm_ratio": [[2.0, 1.0], [1.0, 0.0], [0.2, 1.0]],
        "cosine": [[1.0, -1.0], [0.0, 0.0], [0.6, 0.0]],
    }
    for name, value in expected.items():
        torch.testing.assert_close(getattr(report, name), torch.tensor(value, dtype=dtype))


def test_equals_finite_differences_of_losses_that_share_parameters():
    rng = np.random.default_rng(0)
    weights = {m: [rng.normal(size=(2, 3)), rng.normal(size=2)] for m in ("x", "y")}
    inputs = rng.normal(size=(5, 3))

    def losses(flat):
        parts = torch.as_tensor(flat).split([6, 2, 6, 2])
        x, y = (torch.tanh(torch.tensor(inputs) @ parts[k].view(2, 3).T + parts[k + 1]) for k in (0, 2))
        return x.square().mean() + (y - 1).square().mean(), 0.3 * (x * y).mean(), -2.0 * (x - y).square().mean()

    point = np.concatenate([w.ravel() for own in weights.values() for w in own])
    numeric = np.zeros((3, point.size))
    for k in range(point.size):
        step = np.eye(point.size)[k] * 1e-5
        numeric[:, k] = [
            (float(u) - float(d)) / 2e-5 for u, d in zip(losses(point + step), losses(point - step), strict=True)
        ]

    leaves = [torch.tensor(w, requires_grad=True) for own in weights.values() for w in own]
    objective, *terms = losses(torch.cat([p.flatten() for p in leaves]))
    report = coupling_gradients(objective, terms, {"x": leaves[:2], "y": leaves[2:]})
    for k, columns in enumerate((slice(0, 8), slice(8, 16))):
        ppo, *others = numeric[:, columns]
        for c, g in enumerate(others):
            norm, reference = np.linalg.norm(g), np.linalg.norm(ppo)
            assert report.norm[c, k] == pytest.approx(norm, rel=1e-7)
            assert report.norm_ratio[c, k] == pytest.approx(norm / reference, rel=1e-7)
            assert report.cosine[c, k] == pytest.approx(g @ ppo / norm / reference, abs=1e-7)


def test_doubling_a_coefficient_doubles_the_norm_and_keeps_the_cosine():
    (a,) = parameters([3.0, 4.0])
    coupling = linear(a, [1.0, 1.0])
    report = coupling_gradients(quadratic([a], [[0.0, 1.0]]), [coupling, 2 * coupling, -coupling], {"a": [a]})
    once, twice, opposed = range(3)
    for numbers in (report.norm, report.norm_ratio):
        torch.testing.assert_close(numbers[twice], 2 * numbers[once])
        torch.testing.assert_close(numbers[opposed], numbers[once])
    torch.testing.assert_close(report.cosine[twice], report.cosine[once])
    torch.testing.assert_close(report.cosine[opposed], -report.cosine[once])
    assert (report.cosine[once] > 0.5).all()


def test_zeros_where_there_is_nothing_to_compare():
    a, b = parameters([3.0, 4.0], [1.0])
    # No gradient of PPO in b; a frozen module; a term without a graph, and one that only b knows.
    terms = [linear(a, [1.0, 0.0]) + linear(b, [2.0]), torch.tensor(0.7, dtype=torch.float64), linear(b, [5.0])]
    report = coupling_gradients(quadratic([a], [[0.0, 0.0]]), terms, {"a": [a], "b": [b], "frozen": []})
    torch.testing.assert_close(report.norm, torch.tensor([[1.0, 2, 0], [0, 0, 0], [0, 5, 0]], dtype=torch.float64))
    torch.testing.assert_close(
        report.norm_ratio, torch.tensor([[0.2, 0, 0], [0, 0, 0], [0, 0, 0]], dtype=torch.float64)
    )
    torch.testing.assert_close(report.cosine, torch.tensor([[0.6, 0, 0], [0, 0, 0], [0, 0, 0]], dtype=torch.float64))


def test_everybody_frozen_gives_zeros():
    constant = torch.tensor(1.0)
    report = coupling_gradients(constant, [constant, constant], {"a": [], "b": []})
    for numbers in report:
        assert numbers.shape == (2, 2) and (numbers == 0).all()


@pytest.mark.parametrize("size", [1e-16, 1e15])
def test_very_small_and_very_large_gradients_have_a_direction(size):
    (a,) = parameters([3.0, 4.0], dtype=torch.float32)
    report = coupling_gradients(linear(a, [size, 0.0]), [linear(a, [size * 1e-4, size * 1e-4])], {"a": [a]})
    assert report.cosine[0, 0] == pytest.approx(0.5**0.5, rel=1e-5)
    assert report.norm_ratio[0, 0] == pytest.approx(2**0.5 * 1e-4, rel=1e-5)


def test_a_gradient_that_is_not_finite_is_not_hidden():
    a, b = parameters([3.0, 4.0], [1.0])
    report = coupling_gradients(
        quadratic([a, b], [[0.0, 0.0], [0.0]]), [linear(a, [torch.nan, 0.0]) + linear(b, [1.0])], {"a": [a], "b": [b]}
    )
    assert all(numbers[0, 0].isnan() and numbers[0, 1].isfinite() for numbers in report)
    report = coupling_gradients(linear(a, [torch.nan, 0.0]), [linear(a, [1.0, 1.0])], {"a": [a]})
    assert report.norm.isfinite().all() and report.norm_ratio.isnan().all() and report.cosine.isnan().all()


def test_the_graph_is_kept_and_no_gradient_is_written():
    (a,) = parameters([3.0, 4.0])
    objective, coupling = quadratic([a], [[0.0, 0.0]]), linear(a, [1.0, 2.0])
    report = coupling_gradients(objective, [coupling], {"a": [a]})
    assert a.grad is None and not any(numbers.requires_grad for numbers in report)
    (objective + coupling).backward()
    torch.testing.assert_close(a.grad, torch.tensor([4.0, 6.0], dtype=torch.float64))
