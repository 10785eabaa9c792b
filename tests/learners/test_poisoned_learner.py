"""What is not finite on one learner is skipped by all, in the same minibatch."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from tests.learners.test_several_learners import COUPLED, config_of, rollouts
from tests.learners.threads import ThreadLearners, everything
from tests.support import largest_difference

POISONED = 2  # which minibatch of an update, from 1
MINIBATCHES = 4


def poison_of(value):
    """Learner 1 reads `value` where it should see one of its own rows: nobody else has it."""

    def poison(rank, learner):
        losses, count = learner._losses, [0]

        def poisoned(module, minibatch, *args):
            count[0] += 1
            if rank == 1 and count[0] == POISONED:
                minibatch.own.modules["agent_1"].obs[0, 3] = value
            return losses(module, minibatch, *args)

        learner._losses = poisoned

    return poison


class Explodes(torch.autograd.Function):
    """The identity with an infinite derivative."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch.full_like(gradient, float("inf"))


def poison_gradient(rank, learner):
    """All losses are finite; on learner 2 one module's gradient is not."""
    if rank != 2:
        return
    module = learner.module["agent_1"].unwrapped()
    forward, count = module.forward_train, [0]

    def exploding(batch, **kwargs):
        count[0] += 1
        outputs = forward(batch, **kwargs)
        if count[0] == POISONED:
            outputs["action_dist_inputs"] = Explodes.apply(outputs["action_dist_inputs"])
        return outputs

    module.forward_train = exploding


class Watches:
    """The parameters of a learner after every minibatch, to the bit."""

    def __init__(self, learner):
        self.learner = learner
        self.seen = [self.now()]
        passes = learner._passes

        def watched(trained):
            found = passes(trained)
            step = found[-1].step

            def then_look(finite):
                step(finite)
                self.seen.append(self.now())

            found[-1].step = then_look
            return found

        learner._passes = watched

    def now(self):
        return np.concatenate([
            p.detach().numpy().ravel().copy()
            for m in sorted(self.learner.module.keys())
            for p in self.learner.module[m].parameters()
        ])  # fmt: skip

    def moved(self):
        return [bool((a != b).any()) for a, b in zip(self.seen, self.seen[1:], strict=False)]


@pytest.mark.parametrize("critic_lr", [None, 2e-3])
@pytest.mark.parametrize("poison", [poison_of(float("nan")), poison_gradient], ids=["rows", "gradient"])
def test_all_learners_skip_the_same_minibatch(poison, critic_lr, caplog):
    config = config_of(**{**COUPLED, "critic_lr": critic_lr, "coupling_gradient_interval": 0})
    spaces, data = rollouts(config, updates=2)
    several = ThreadLearners(config, 3, spaces, change=poison)
    watches = [Watches(learner) for learner in several.learners]
    with caplog.at_level(logging.WARNING):
        results = several.update(data[0])
    expected = [k + 1 != POISONED for k in range(MINIBATCHES)]
    for watch, result in zip(watches, results, strict=True):
        assert watch.moved() == expected
        assert np.isfinite(watch.seen[-1]).all()
        shared = result["__all_modules__"]
        assert (shared["num_minibatch_steps"], shared["num_non_finite_minibatches"]) == (MINIBATCHES - 1, 1)
    (told,) = [record.getMessage() for record in caplog.records if "not finite" in record.getMessage()]
    assert told.startswith("module 'agent_1': a loss or gradient was not finite in 1 of 4 minibatches")
    several.update(data[1])
    first, *others = map(everything, several.learners)
    assert all(largest_difference(first, other) == 0.0 for other in others)
    assert watches[0].moved()[MINIBATCHES:] == [True] * MINIBATCHES


CELL = {"cell": "lstm", "cell_size": 8, "max_seq_len": 6}


@pytest.mark.parametrize("model", [None, CELL], ids=["mlp", "lstm"])
@pytest.mark.parametrize("coupled", [True, False])
def test_an_infinite_observation_moves_nobody(coupled, model):
    """Units saturate: the losses may stay finite, and the gradient of one learner is not."""
    options = {} if coupled else {"cross_agent_losses": {}, "cross_agent_coeffs": {}}
    config = config_of(**{**COUPLED, **options}, model=model)
    spaces, (batches,) = rollouts(config, updates=1)
    several = ThreadLearners(config, 2, spaces, change=poison_of(float("inf")))
    watches = [Watches(learner) for learner in several.learners]
    results = several.update(batches)
    for watch, result in zip(watches, results, strict=True):
        assert watch.moved() == [k + 1 != POISONED for k in range(MINIBATCHES)]
        assert np.isfinite(watch.seen[-1]).all()
        assert result["__all_modules__"]["num_non_finite_minibatches"] == 1
    first, second = map(everything, several.learners)
    assert largest_difference(first, second) == 0.0


@pytest.mark.parametrize("coupled", [True, False])
def test_a_frozen_module_stops_nobody_but_by_a_coupling(coupled, caplog):
    options = {} if coupled else {"cross_agent_losses": {}, "cross_agent_coeffs": {}}
    config = config_of(**{**COUPLED, **options}, trained=["agent_0", "agent_2"])
    spaces, (batches,) = rollouts(config, updates=1)
    several = ThreadLearners(config, 2, spaces, change=poison_of(float("nan")))
    watches = [Watches(learner) for learner in several.learners]
    with caplog.at_level(logging.WARNING):
        results = several.update(batches)
    for watch, result in zip(watches, results, strict=True):
        assert watch.moved() == [not coupled or k + 1 != POISONED for k in range(MINIBATCHES)]
        assert np.isfinite(watch.seen[-1]).all()
        assert result["__all_modules__"]["num_non_finite_minibatches"] == int(coupled)
    told = [record.getMessage() for record in caplog.records if "not finite" in record.getMessage()]
    assert len(told) == int(coupled) and all("module 'agent_1'" in text for text in told)


def test_values_that_are_not_finite_on_one_learner_are_refused_by_all():
    config = config_of(**COUPLED)
    spaces, (batches,) = rollouts(config, updates=1)

    def spoil(rank, learner):
        if rank == 1:
            learner._values = lambda module_id, obs, sequences: torch.full((len(obs),), float("nan"))

    several = ThreadLearners(config, 2, spaces, change=spoil)
    before = [everything(learner)["parameters"] for learner in several.learners]
    with pytest.raises(ValueError, match="gives values that are not finite"):
        several.update(batches)
    assert len(several.errors) == 2
    after = [everything(learner)["parameters"] for learner in several.learners]
    assert largest_difference(before, after) == 0.0
