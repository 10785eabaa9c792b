"""The option, the targets out of a batch's extras, and the losses of a minibatch."""

import copy
import dataclasses
import pickle
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.auxiliary import reference
from tests.functional.helpers import assert_matches, dtypes, examples, random_array, random_mask, seeds
from tests.support import hand_batch, hand_streams
from thrust_rllib.auxiliary_losses import auxiliary_losses
from thrust_rllib.auxiliary_targets import AuxiliaryTarget, as_auxiliary_targets, auxiliary_rows
from thrust_rllib.module_axis import ModuleAxis
from thrust_rllib.valid_rows import ValidRows

KINDS = ("mse", "huber", "mse")

# --- the option ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [0, 0.3, 2, [[0, 1.0], [1000, 0.0]], ((0, 0.5), (10, 1), (20, 0.0))])
def test_a_target_is_plain_data(weight):
    target = AuxiliaryTarget("lambda2", "huber", weight)
    assert copy.deepcopy(target) == pickle.loads(pickle.dumps(target)) == target
    assert target != AuxiliaryTarget("lambda2", "mse", weight)
    assert as_auxiliary_targets([dataclasses.asdict(target), AuxiliaryTarget("other")]) == (
        target,
        AuxiliaryTarget("other"),
    )
    assert as_auxiliary_targets(()) == ()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": ""}, "name is ''"),
        ({"name": "a/b"}, "name is 'a/b'.*part of a metric"),
        ({"name": 3}, "name is 3"),
        ({"name": "a", "loss": "l1"}, "loss is 'l1'; needed: 'mse' or 'huber'"),
        *(
            ({"name": "a", "weight": weight}, "weight is .*needed: a finite number")
            for weight in (
                -1, True, "1", None, float("nan"), float("inf"), [], [[0, 1.0]], [[1, 1.0], [2, 0.0]],
                [[0, 1.0], [5, -1.0]], [[0, 1.0], [5, 0.5], [5, 0.0]], [[0, 1.0], 3],
            )
        ),
    ],
)  # fmt: skip
def test_a_wrong_target_is_an_early_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        AuxiliaryTarget(**arguments)


def test_a_wrong_option_is_an_early_error():
    for wrong in ("lambda2", AuxiliaryTarget("a"), {"name": "a"}, None):
        with pytest.raises(ValueError, match=r"needed: a tuple of AuxiliaryTarget\(name, …\), or dicts"):
            as_auxiliary_targets(wrong)
    for wrong, message in (
        ("lambda2", "auxiliary_targets has 'lambda2'; needed: AuxiliaryTarget"),
        ({"name": "a", "wieght": 1.0}, "has no 'wieght'.*did you mean 'weight'"),
        ({"weight": 1.0}, r"lacks \['name'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            as_auxiliary_targets([wrong])
    with pytest.raises(ValueError, match="auxiliary_targets has 'a' more than once"):
        as_auxiliary_targets((AuxiliaryTarget("a"), AuxiliaryTarget("a", "huber")))


# --- targets of a batch -------------------------------------------------------------------------------------------


def batch_of(steps, envs, seed=0, **extras):
    """Module b has two agents, module a one; padding in the last row of the last environment."""
    rng = np.random.default_rng(seed)
    present = rng.random((steps, 3, envs)) < 0.8
    valid = np.ones((steps, envs), bool)
    valid[-1, -1] = False
    modules = {
        "a": hand_streams(["z"], np.zeros((steps, 1, envs, 2)), present=present[:, :1]),
        "b": hand_streams(["x", "y"], np.zeros((steps, 2, envs, 2)), present=present[:, 1:]),
    }
    return hand_batch(modules, valid=valid, extras=extras), present


def present_rows(batches):
    """[N, M]."""
    every = [
        np.concatenate([s.present for s in b.modules.values()], axis=1).swapaxes(0, 1)[:, b.valid] for b in batches
    ]
    return torch.from_numpy(np.concatenate(every, axis=1))


def test_team_and_agent_extras_of_several_batches_become_rows():
    rng = np.random.default_rng(1)
    parts = []
    for steps, envs in ((3, 2), (4, 3)):
        team, own = rng.integers(9, size=(steps, envs)), rng.normal(size=(steps, 3, envs))
        parts.append((batch_of(steps, envs, steps, team=team, own=own), team, own))
    batches = [batch for (batch, _), *_ in parts]
    present = present_rows(batches)
    rows = auxiliary_rows(batches, ValidRows.of(batches), ["own", "team"], present)
    expected, column = np.zeros((2, 3, present.shape[1])), 0
    for (batch, acted), team, own in parts:
        for t, e in np.argwhere(batch.valid):
            for i in range(3):
                if acted[t, i, e]:
                    expected[:, i, column] = own[t, i, e], team[t, e]
            column += 1
    assert rows.dtype == torch.float32 and column == present.shape[1]
    np.testing.assert_allclose(rows.numpy(), expected, rtol=1e-6)
    assert auxiliary_rows(batches, ValidRows.of(batches), [], present).shape == (0, 3, column)


def test_numbers_at_absent_rows_do_not_matter_and_others_must_be_finite():
    own = np.random.default_rng(2).normal(size=(3, 3, 2))
    batch, acted = batch_of(3, 2, own=own)
    garbage, _ = batch_of(3, 2, own=np.where(acted, own, np.nan))
    rows = [auxiliary_rows([b], ValidRows.of([b]), ["own"], present_rows([b])) for b in (batch, garbage)]
    assert torch.equal(*rows)
    t, i, e = np.argwhere(acted & batch.valid[:, None])[-1]
    own[t, i, e] = np.inf
    with pytest.raises(ValueError, match=f"'own' is not finite for agent '{batch.agents[i]}'"):
        auxiliary_rows([batch], ValidRows.of([batch]), ["own"], present_rows([batch]))


def test_a_missing_or_misshapen_extra_is_told():
    batch, _ = batch_of(3, 2, team=np.zeros((3, 2)), pair=np.zeros((3, 3, 3, 2)), turned=np.zeros((3, 2, 3)))

    def rows(name):
        return auxiliary_rows([batch], ValidRows.of([batch]), [name], present_rows([batch]))

    with pytest.raises(ValueError, match=r"'teem' is not among the rollout's extras \['pair', 'team', 'turned'\]"):
        rows("teem")
    for name, shape in (("pair", r"\(3, 3, 3, 2\)"), ("turned", r"\(3, 2, 3\)")):
        with pytest.raises(ValueError, match=rf"{name}' has shape {shape}; .*\[T, E\] = \(3, 2\).*= \(3, 3, 2\)"):
            rows(name)


@pytest.mark.parametrize("own", ["0.5", None, 1j, np.datetime64("2020-01-01")])
def test_what_is_no_real_number_is_told(own):
    for values in (np.full((3, 2), own), np.full((3, 3, 2), own)):
        batch, _ = batch_of(3, 2, own=values)
        with pytest.raises(ValueError, match=rf"auxiliary target 'own' has dtype {re.escape(str(values.dtype))}; need"):
            auxiliary_rows([batch], ValidRows.of([batch]), ["own"], present_rows([batch]))


@pytest.mark.parametrize("dtype", [bool, np.int8, np.uint64, np.float16, np.float64])
def test_any_real_number_will_do(dtype):
    own = (np.arange(18).reshape(3, 3, 2) % 3).astype(dtype)
    batch, acted = batch_of(3, 2, own=own)
    rows = auxiliary_rows([batch], ValidRows.of([batch]), ["own"], present_rows([batch]))
    assert rows.dtype == torch.float32 and rows.max() == own.max() and acted.any()


def test_what_is_too_large_for_float32_is_told():
    batch, _ = batch_of(3, 2, own=np.full((3, 2), 1e300))
    with pytest.raises(ValueError, match=r"'own' is not finite .* finite number \(of float32\)"):
        auxiliary_rows([batch], ValidRows.of([batch]), ["own"], present_rows([batch]))


# --- losses -------------------------------------------------------------------------------------------------------


@dtypes
@examples
@given(
    seed=seeds, sizes=st.sampled_from([[1, 1, 1], [2, 2], [3], [1, 2], [2, 1, 1]]), p=st.sampled_from([None, 0.0, 0.6])
)
def test_losses_equal_the_loops(dtype, seed, sizes, p):
    rng, N, B = np.random.default_rng(seed), sum(sizes), 5
    targets = random_array(rng, (3, N, B), dtype, 2.0)
    predictions = targets + random_array(rng, (3, N, B), dtype)
    mask = None if p is None else random_mask(rng, (N, B), p)
    here = np.ones((N, B), bool) if mask is None else mask.numpy()
    weights = torch.tensor([0.5, 2.0, 0.0], dtype=dtype)
    axis = ModuleAxis(sizes, "cpu")
    found = auxiliary_losses(predictions, targets, mask, kinds=KINDS, weights=weights, axis=axis)
    arrays = [x.double().numpy() for x in (predictions, targets)]
    expected = reference.losses(*arrays, here, KINDS, sizes)
    assert_matches(found.losses, expected)
    assert_matches(found.weighted, weights.double().numpy() @ expected)
    assert_matches(found.accuracy, reference.accuracy(*arrays, here, sizes))
    assert not found.losses.requires_grad and not found.accuracy.requires_grad


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf])
def test_absent_rows_never_leak(garbage):
    rng, axis = np.random.default_rng(3), ModuleAxis([1, 2], "cpu")
    mask = random_mask(rng, (3, 6))
    base = [random_array(rng, (3, 3, 6)) for _ in range(2)]
    results = []
    for fill in (0.0, garbage):
        predictions, targets = (x.masked_fill(~mask, fill) for x in base)
        predictions.requires_grad_()
        found = auxiliary_losses(predictions, targets, mask, kinds=KINDS, weights=torch.ones(3), axis=axis)
        (gradient,) = torch.autograd.grad(found.weighted.sum(), predictions)
        results.append([found.weighted.detach(), found.losses, found.accuracy, gradient])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert (results[1][3][:, ~mask] == 0).all() and (results[1][3][:, mask] != 0).any()
