"""Distributions of the package against RLlib's, closed forms, and what they sample."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from ray.rllib.core.distribution.torch.torch_distribution import (
    TorchCategorical,
    TorchDiagGaussian,
    TorchMultiCategorical,
)

from thrust_rllib.rl_modules.distributions import distribution_class, logits_width, mask_logits

DISCRETE = gym.spaces.Discrete(5)
HEADS = gym.spaces.MultiDiscrete([3, 2, 4])
EQUAL_HEADS = gym.spaces.MultiDiscrete([3, 3])
CONTINUOUS = gym.spaces.Box(-1, 1, (3,))


def theirs(space, logits):
    if isinstance(space, gym.spaces.Discrete):
        return TorchCategorical.from_logits(logits)
    if isinstance(space, gym.spaces.MultiDiscrete):
        return TorchMultiCategorical.from_logits(logits, input_lens=space.nvec.tolist())
    return TorchDiagGaussian.from_logits(logits)


def logits_for(space, seed=0, rows=7):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, logits_width(space), generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("space", [DISCRETE, HEADS, EQUAL_HEADS, CONTINUOUS], ids=str)
def test_logp_entropy_and_kl_equal_rllibs(space):
    p, q = logits_for(space), logits_for(space, seed=1)
    mine, rllib = distribution_class(space).from_logits(p), theirs(space, p)
    actions = rllib.sample()
    torch.testing.assert_close(mine.logp(actions), rllib.logp(actions))
    torch.testing.assert_close(mine.entropy(), rllib.entropy())
    torch.testing.assert_close(mine.kl(distribution_class(space).from_logits(q)), rllib.kl(theirs(space, q)))
    torch.testing.assert_close(mine.to_deterministic().sample(), rllib.to_deterministic().sample())
    assert logits_width(space) == p.shape[1] == distribution_class(space).required_input_dim(space)


@pytest.mark.parametrize("space", [DISCRETE, HEADS, CONTINUOUS], ids=str)
def test_gradients_equal_rllibs(space):
    actions = theirs(space, logits_for(space)).sample()
    gradients = []
    for make in (lambda x: distribution_class(space).from_logits(x), lambda x: theirs(space, x)):
        logits = logits_for(space).requires_grad_()
        distribution = make(logits)
        (distribution.logp(actions).sum() + 0.3 * distribution.entropy().sum()).backward()
        gradients.append(logits.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("space", [DISCRETE, HEADS, EQUAL_HEADS], ids=str)
def test_sampling_frequencies(space):
    torch.manual_seed(0)
    logits = logits_for(space, rows=1)
    count = 40_000
    actions = distribution_class(space).from_logits(logits.expand(count, -1)).sample()
    assert actions.dtype == torch.int64 and actions.shape == (count, *space.shape)
    sizes = [space.n] if isinstance(space, gym.spaces.Discrete) else space.nvec.tolist()
    for head, (part, size) in enumerate(zip(logits.split(sizes, dim=1), sizes, strict=True)):
        drawn = actions if not space.shape else actions[:, head]
        frequencies = torch.bincount(drawn, minlength=size).double() / count
        probabilities = part.softmax(1)[0]
        assert (frequencies - probabilities).abs().max() < 4 * 0.5 / count**0.5


def test_the_columns_of_heads_of_different_sizes_are_copied_to_a_device_once(monkeypatch):
    logits = logits_for(HEADS).float()
    with torch.inference_mode():
        distribution_class(HEADS).from_logits(logits)  # what is kept must serve training as well
    monkeypatch.setattr(torch, "tensor", None)
    monkeypatch.setattr(torch.Tensor, "to", None)
    logits.requires_grad_()
    distribution_class(HEADS).from_logits(logits).entropy().sum().backward()
    assert logits.grad.abs().sum() > 0


def test_heads_are_sampled_independently():
    torch.manual_seed(0)
    actions = distribution_class(EQUAL_HEADS).from_logits(torch.zeros(40_000, 6)).sample()
    together = torch.bincount(actions[:, 0] * 3 + actions[:, 1], minlength=9) / 40_000
    assert (together - 1 / 9).abs().max() < 0.01


def test_a_gaussian_samples_its_mean_and_deviation():
    torch.manual_seed(0)
    logits = torch.tensor([[1.0, -2.0, 0.0, -1.0, 0.0, 0.5]]).expand(40_000, -1)
    samples = distribution_class(CONTINUOUS).from_logits(logits).sample()
    torch.testing.assert_close(samples.mean(0), torch.tensor([1.0, -2.0, 0.0]), atol=0.03, rtol=0)
    torch.testing.assert_close(samples.std(0), torch.tensor([-1.0, 0.0, 0.5]).exp(), atol=0.03, rtol=0)


@pytest.mark.parametrize("space", [DISCRETE, HEADS], ids=str)
def test_masked_choices_are_never_taken_and_everything_stays_finite(space):
    torch.manual_seed(0)
    logits = logits_for(space, rows=500).float().requires_grad_()
    mask = torch.rand(logits.shape, generator=torch.Generator().manual_seed(1)) < 0.4
    start = 0
    for size in [space.n] if isinstance(space, gym.spaces.Discrete) else space.nvec.tolist():
        mask[:, start] |= ~mask[:, start : start + size].any(1)
        start += size
    distribution = distribution_class(space).from_logits(mask_logits(logits, mask))
    other = distribution_class(space).from_logits(mask_logits(logits * 0.5, mask))
    actions = distribution.sample()
    taken = actions if space.shape else actions[:, None]
    start = 0
    for head, size in enumerate([space.n] if isinstance(space, gym.spaces.Discrete) else space.nvec.tolist()):
        assert mask.gather(1, start + taken[:, head : head + 1]).all()
        start += size
    total = distribution.logp(actions).sum() + distribution.entropy().sum() + distribution.kl(other).sum()
    assert total.isfinite()
    total.backward()
    assert logits.grad.isfinite().all() and (logits.grad[~mask] == 0).all()


def test_one_legal_action_has_probability_one():
    mask = torch.eye(5, dtype=torch.bool)
    distribution = distribution_class(DISCRETE).from_logits(mask_logits(torch.randn(5, 5), mask))
    assert (distribution.sample() == torch.arange(5)).all()
    assert (distribution.logp(torch.arange(5)) == 0).all() and (distribution.entropy() == 0).all()
    assert (distribution.kl(distribution) == 0).all()


def test_entropy_of_several_heads_is_the_joint_one():
    distribution = distribution_class(gym.spaces.MultiDiscrete([10, 2, 2])).from_logits(torch.zeros(1, 14))
    assert distribution.entropy().item() == pytest.approx(np.log(40), abs=1e-5)


def test_logits_of_the_wrong_width_are_an_error():
    with pytest.raises(ValueError, match="8 columns.*9 categories.*9 outputs"):
        distribution_class(HEADS).from_logits(torch.zeros(2, 8))


@pytest.mark.parametrize(
    "space", [gym.spaces.MultiBinary(3), gym.spaces.Box(0, 1, (2, 2)), gym.spaces.MultiDiscrete([[2], [3]])], ids=str
)
def test_other_action_spaces_are_an_error(space):
    with pytest.raises(ValueError, match="needed: Discrete, MultiDiscrete .one axis. or Box"):
        distribution_class(space)


def test_extreme_logits_stay_finite():
    distribution = distribution_class(DISCRETE).from_logits(torch.tensor([[1e4, -1e4, 0.0, 5.0, -5.0]]))
    assert distribution.entropy().isfinite().all() and distribution.sample().item() == 0
    assert distribution.logp(torch.tensor([1])).item() == pytest.approx(-2e4)
