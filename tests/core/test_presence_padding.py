"""What stands at absent rows reaches nothing, and hardly any rows are standardised without a nan."""

from __future__ import annotations

import math
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch

from tests.core.ragged import AGENTS, ENVS, STEPS
from tests.core.test_gradients import copy_scrambled
from tests.support import (
    box,
    declared_config,
    discrete,
    hand_batch,
    hand_streams,
    largest_difference,
    make_learner,
    optimizer_states,
    parameters,
    update,
)
from thrust_rllib import FeatureSimilarity, RedundancyPenalty
from thrust_rllib.joint_losses import compute_joint_losses
from thrust_rllib.joint_rows import CriticRows, JointRows, ModuleRows
from thrust_rllib.loss_settings import LossSettings
from thrust_rllib.module_axis import Coefficients, ModuleAxis
from thrust_rllib.team_outputs import TeamOutputs

# --- padding ----------------------------------------------------------------------------------------------------------

SPACES = {
    "a0": (box(), box(2)),
    "a1": (
        gym.spaces.Dict({"observation": box(), "action_mask": gym.spaces.Box(0, 1, (4,), np.int8)}),
        discrete(4),
    ),
    "a2": (box(), gym.spaces.MultiDiscrete([2, 3])),
}


def padded_batch(garbage):
    """A team of a Box, a masked Discrete and a MultiDiscrete agent; `garbage` in every field at absent rows."""
    rng = np.random.default_rng(0)
    shape, modules = (STEPS, 1, ENVS), {}
    for k, agent in enumerate(AGENTS):
        present = rng.random(shape) < 0.6
        actions = (
            rng.normal(size=(*shape, 2)).astype(np.float32),
            rng.integers(2, 4, size=shape),
            rng.integers(2, size=(*shape, 2)),
        )[k]
        mask = None
        if k == 1:
            mask = rng.random((*shape, 4)) < 0.5
            mask[..., 2:] = True
            mask[~present] = garbage is None
        obs, logp, rewards = rng.normal(size=(*shape, 3)), rng.normal(size=shape) - 1.0, rng.normal(size=shape)
        obs[~present], logp[~present], rewards[~present], actions[~present] = 0.0, 0.0, 0.0, 0
        terminated, truncated = (rng.random(shape) < 0.1 for _ in range(2))
        if garbage is not None:
            finite = np.clip(np.nan_to_num(garbage), -1e6, 1e6)
            obs[~present], logp[~present], rewards[~present] = finite or 1e6, garbage, garbage
            actions[~present] = garbage if k == 0 else 10**6
            terminated[~present] = truncated[~present] = True
        modules[agent] = hand_streams(
            [agent],
            obs,
            actions=actions,
            rewards=rewards,
            logp=logp,
            present=present,
            terminated=terminated,
            truncated=truncated,
            action_mask=mask,
            bootstrap_obs=rng.normal(size=(1, STEPS * ENVS, 3)),
        )
    return hand_batch(modules, np.arange(STEPS * ENVS))


@pytest.mark.parametrize("standardize", ["rollout", "minibatch", "team"])
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 1e6, -1e6])
def test_what_stands_at_absent_rows_changes_no_bit(garbage, standardize):
    learners, results = [], []
    for batch in (padded_batch(None), padded_batch(garbage)):
        observations, actions = zip(*SPACES.values(), strict=True)
        config = declared_config(
            observations,
            actions,
            AGENTS,
            iterate_all_minibatches=True,
            standardize_advantages=standardize,
            cross_agent_losses={"redundancy": RedundancyPenalty(), "similarity": FeatureSimilarity()},
        )
        learners.append(make_learner(config))
        copy_scrambled(learners[-1])
        results.append(update(learners[-1], batch))
    assert results[0]["__all_modules__"]["num_non_finite_minibatches"] == 0
    assert results[0] == results[1]
    assert largest_difference(*map(parameters, learners)) == 0.0
    assert largest_difference(*map(optimizer_states, learners)) == 0.0
    assert largest_difference(parameters(learners[0]), parameters(fresh(learners[0]))) > 1e-4


def fresh(learner):
    other = make_learner(learner.config)
    copy_scrambled(other)
    return other


@pytest.mark.parametrize("standardize", ["minibatch", "team", False])
@pytest.mark.parametrize("limits", [math.inf, 0.2])
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e6, -1e6])
def test_the_gradient_of_an_absent_row_is_exactly_zero(garbage, limits, standardize):
    generator = torch.Generator().manual_seed(0)
    N, B = 3, 6
    present = torch.rand(N, B, generator=generator) < 0.5
    assert present.any() and not present.all()

    def losses(fill):
        generator.manual_seed(1)
        columns = torch.randn(4, N, B, generator=generator).masked_fill(~present, fill)
        leaves = [torch.randn(N, B, generator=generator).masked_fill(~present, fill).requires_grad_() for _ in range(3)]
        numbers = SimpleNamespace(
            clip_param=0.2, value_clip_range=limits, vf_clip_param=limits, vf_loss_coeff=0.5, entropy_coeff=0.0
        )
        axis = ModuleAxis([2, 1], "cpu")
        own = ModuleRows(("x", "y"), torch.zeros(2, B, 1), torch.zeros(2, B), None)
        other = ModuleRows(("z",), torch.zeros(1, B, 1), torch.zeros(1, B), None)
        result = compute_joint_losses(
            TeamOutputs(*leaves[:2], leaves[2], {}, {}),
            JointRows({"m": own, "o": other}, columns[:2], present, CriticRows(columns[2:], present)),
            LossSettings(
                axis=axis,
                critic_axis=axis,
                coefficients=Coefficients.of(axis, [numbers, numbers], [0.01, 0.02], axis, [numbers, numbers]),
                standardize_advantages=standardize,
                all_present=False,
                cross_agent_losses={},
                cross_agent_coeffs={},
            ),
        )
        (result.actor.sum() + result.critic.sum()).backward()
        return result, [leaf.grad for leaf in leaves]

    clean, expected = losses(0.0)
    result, gradients = losses(garbage)
    for gradient, needed in zip(gradients, expected, strict=True):
        assert torch.equal(gradient, needed) and (gradient[~present] == 0.0).all()
    assert any((gradient[present] != 0.0).any() for gradient in gradients)
    assert torch.equal(result.statistics, clean.statistics) and torch.isfinite(result.statistics).all()
    assert result.counts.tolist() == [present[:2].sum(), present[2:].sum()]


# --- standardisation of hardly any rows -------------------------------------------------------------------------------


@pytest.mark.parametrize("standardize", ["rollout", "minibatch", "team"])
def test_one_row_or_equal_advantages_are_standardised_to_zero(standardize):
    """Episodes of one step, one row for a1; a0's advantages are all equal."""
    steps, envs = 4, 3
    shape = (steps, 1, envs)
    present = np.zeros(shape, bool)
    present[2, 0, 1] = True
    modules = {
        "a0": hand_streams(["a0"], np.ones((*shape, 3)), rewards=np.full(shape, 0.3), terminated=np.ones(shape, bool)),
        "a1": hand_streams(
            ["a1"], np.ones((*shape, 3)), rewards=np.full(shape, 5.0), terminated=np.ones(shape, bool), present=present
        ),
    }
    if standardize == "team":  # all agents' rows share a mean: the team has one row
        modules["a0"].present = np.zeros(shape, bool)
    config = declared_config(
        [box()] * 2, [discrete()] * 2, AGENTS[:2], standardize_advantages=standardize, minibatch_size=None
    )
    learner = make_learner(config)
    results = update(learner, hand_batch(modules), num_epochs=1)
    for agent in ("a0", "a1") if standardize != "team" else ("a1",):
        assert results[agent]["policy_loss"] == 0.0
        assert results[agent]["entropy"] > 0.0 and results[agent]["vf_explained_var"] == 1.0
    for values in parameters(learner).values():
        assert all(np.isfinite(p).all() for p in values.values())
