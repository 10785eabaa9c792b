import copy
import pickle

import gymnasium as gym
import numpy as np
import pytest
import torch

from tests.diversity import reference
from tests.functional.helpers import assert_matches, gradcheck, random_array, random_mask
from thrust_rllib.action_spread import ActionSpread

SPACES = {
    "discrete": gym.spaces.Discrete(4),
    "several heads": gym.spaces.MultiDiscrete([3, 2]),
    "box": gym.spaces.Box(-1, 1, (2,)),
}
WIDTHS = {"discrete": 4, "several heads": 5, "box": 4}
AGENTS = ("left", "right", "third")
kinds = pytest.mark.parametrize("kind", SPACES)


def spread(kind, direction="lower"):
    loss = ActionSpread(direction)
    loss.prepare({agent: SPACES[kind] for agent in AGENTS})
    return loss


def logits_of(kind, seed=0, B=5):
    rng = np.random.default_rng(seed)
    return {agent: random_array(rng, (B, WIDTHS[kind])) for agent in AGENTS}


def expected(kind, logits, masks=None):
    arrays = [x.detach().numpy() for x in logits.values()]
    if kind == "box":
        return reference.neural_diversity([x[:, :2] for x in arrays], [np.exp(x[:, 2:]) for x in arrays], masks)
    return reference.total_variation(arrays, masks, [4] if kind == "discrete" else [3, 2])


@kinds
def test_it_is_the_distance_at_the_agents_own_rows(kind):
    logits, rng = logits_of(kind), np.random.default_rng(1)
    assert_matches(spread(kind)({}, logits, {}, None), expected(kind, logits))
    present = {agent: random_mask(rng, 5) for agent in reversed(AGENTS)}  # masks are found by name, not by place
    found = spread(kind)({}, logits, {}, present)
    assert_matches(found, expected(kind, logits, [present[agent].numpy() for agent in AGENTS]))
    assert abs(found - spread(kind)({}, logits, {}, None)) > 1e-3


@kinds
def test_a_step_down_the_loss_raises_or_lowers_the_distance(kind):
    for direction, sign in (("raise", 1), ("lower", -1)):
        logits = {agent: x.requires_grad_() for agent, x in logits_of(kind).items()}
        loss = spread(kind, direction)
        value = loss({}, logits, {}, None)
        assert value * sign < 0
        gradients = torch.autograd.grad(value, list(logits.values()))
        moved = {agent: x - 0.1 * g for (agent, x), g in zip(logits.items(), gradients, strict=True)}
        assert loss({}, moved, {}, None) < value
        assert sign * (expected(kind, moved) - expected(kind, logits)) > 0


@kinds
def test_gradients(kind):
    loss, mask = spread(kind), {agent: random_mask(np.random.default_rng(2), 5) for agent in AGENTS}
    inputs = [x.requires_grad_() for x in logits_of(kind).values()]
    for present in (None, mask):
        assert gradcheck(lambda *x, p=present: loss({}, dict(zip(AGENTS, x, strict=True)), {}, p), *inputs)


@kinds
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf])
def test_absent_rows_never_leak(kind, garbage):
    rng = np.random.default_rng(3)
    present = {agent: random_mask(rng, 5) for agent in AGENTS}
    results = []
    for fill in (0.0, garbage):
        logits = {
            agent: x.masked_fill(~present[agent][:, None], fill).requires_grad_()
            for agent, x in logits_of(kind).items()
        }
        value = spread(kind)({}, logits, {}, present)
        results.append([value.detach(), *torch.autograd.grad(value, list(logits.values()))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)) and results[1][0] > 0
    assert all((g[~present[agent]] == 0).all() for agent, g in zip(AGENTS, results[1][1:], strict=True))


def test_what_cannot_be_compared_is_an_early_error():
    with pytest.raises(ValueError, match="direction is 'up'"):
        ActionSpread("up")
    loss = ActionSpread("raise")
    with pytest.raises(ValueError, match=r"does not know the action spaces; call prepare"):
        loss({}, logits_of("discrete"), {}, None)
    with pytest.raises(ValueError, match="agents 'a' and 'b' have different actions"):
        loss.prepare({"a": SPACES["discrete"], "b": gym.spaces.Discrete(5)})
    with pytest.raises(ValueError, match="agents 'a' and 'b' have different actions"):
        loss.prepare({"a": SPACES["discrete"], "b": SPACES["box"]})
    with pytest.raises(ValueError, match=r"agent 'a' acts in .*, for which ActionSpread is not defined"):
        loss.prepare({"a": gym.spaces.Box(-1, 1, (2, 2))})
    loss.prepare({agent: SPACES["box"] for agent in AGENTS})
    with pytest.raises(ValueError, match=r"logits of agent 'left' have shape \(5, 5\); needed: \[B, 4\]"):
        loss({}, logits_of("several heads"), {}, None)
    loss.prepare({agent: SPACES["discrete"] for agent in AGENTS})
    with pytest.raises(ValueError, match=r"needed \[R, 4\]"):
        loss({}, logits_of("several heads"), {}, None)


def test_it_travels_and_says_what_it_is():
    loss = spread("box", "raise")
    logits = logits_of("box")
    for copied in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert copied({}, logits, {}, None) == loss({}, logits, {}, None)
    assert repr(loss) == "ActionSpread(direction='raise')" and not loss.needs_features
