"""Gradient isolation: a module learns what it would learn alone, and with a coupling only that is added."""

from __future__ import annotations

import numpy as np
import pytest
import torch

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
from thrust_rllib import CrossAgentLoss, RedundancyPenalty
from thrust_rllib.functional import redundancy_penalty
from thrust_rllib.optimizer_pass import OptimizerPass

AGENTS = ("a0", "a1", "a2")
STEPS, ENVS = 8, 4
COUPLED = {"cross_agent_losses": {"redundancy": RedundancyPenalty()}, "cross_agent_coeffs": {"redundancy": 0.7}}


def team_learner(agents=AGENTS, **options):
    config = declared_config([box()] * len(agents), [discrete(3)] * len(agents), agents, **options)
    learner = make_learner(config)
    copy_scrambled(learner)
    return learner


def copy_scrambled(learner):
    """Every module gets the parameters that belong to its name, whatever the team."""
    for module_id in learner.module.keys():
        generator = torch.Generator().manual_seed(sum(map(ord, module_id)))
        for p in learner.module[module_id].parameters():
            with torch.no_grad():
                p.copy_(0.4 * torch.randn(p.shape, generator=generator))


def team_batch(agents=AGENTS, seed=0):
    """Each agent's data depends on its own name alone."""
    modules = {}
    for agent in agents:
        rng = np.random.default_rng(seed + sum(map(ord, agent)))
        shape = (STEPS, 1, ENVS)
        modules[agent] = hand_streams(
            [agent],
            rng.normal(size=(*shape, 3)),
            actions=rng.integers(3, size=shape),
            rewards=rng.normal(size=shape),
            logp=-1.1 + 0.2 * rng.normal(size=shape),
            bootstrap_obs=rng.normal(size=(1, ENVS, 3)),
        )
    return hand_batch(modules, (STEPS - 1) * ENVS + np.arange(ENVS))


@pytest.fixture
def gradients(monkeypatch):
    """Gradients of every pass of every minibatch, before clipping: [{module: [array or None]}]."""
    seen = []
    clip = OptimizerPass.clip

    def spy(self):
        seen.append(
            {m: [None if g is None else g.clone().numpy() for g in grads] for m, grads in self.gradients().items()}
        )
        return clip(self)

    monkeypatch.setattr(OptimizerPass, "clip", spy)
    return seen


def test_without_a_coupling_each_module_learns_what_it_learns_alone():
    together = team_learner(num_epochs=3)
    results = update(together, team_batch())
    for agent in AGENTS:
        alone = team_learner([agent], num_epochs=3)
        alone_results = update(alone, team_batch([agent]))
        assert largest_difference(parameters(together)[agent], parameters(alone)[agent]) < 1e-7
        for name in ("policy_loss", "vf_loss", "entropy", "approx_kl", "clip_fraction", "vf_explained_var"):
            assert results[agent][name] == pytest.approx(alone_results[agent][name], abs=1e-6), name


def test_without_a_coupling_each_gradient_equals_that_of_training_alone(gradients):
    update(team_learner(num_epochs=1), team_batch())
    together = gradients[:]
    for agent in AGENTS:
        gradients.clear()
        update(team_learner([agent], num_epochs=1), team_batch([agent]))
        assert largest_difference(together[0][agent], gradients[0][agent]) < 1e-7


@pytest.mark.parametrize("critic_lr", [None, 1e-3])
def test_with_a_coupling_the_only_extra_is_its_gradient(gradients, critic_lr):
    options = dict(num_epochs=1, minibatch_size=32, critic_lr=critic_lr)
    batch = team_batch()
    update(team_learner(**options), batch)
    plain = gradients[:]
    gradients.clear()
    learner = team_learner(**options, **COUPLED)
    expected = coupling_gradients(learner, batch)
    update(learner, batch)
    for agent in AGENTS:
        trunk_moved = False
        for without, coupled, extra in zip(plain[0][agent], gradients[0][agent], expected[agent], strict=True):
            if without is None:
                assert coupled is None and extra is None
                continue
            extra = np.zeros_like(without) if extra is None else extra
            np.testing.assert_allclose(coupled, without + extra, atol=2e-6)
            trunk_moved |= bool(np.abs(extra).max() > 1e-3)
        assert trunk_moved
    if critic_lr is not None:  # the critic's pass has no part in the coupling
        assert largest_difference(_zeros(plain[1]), _zeros(gradients[1])) == 0.0


def _zeros(gradients):
    return {m: [np.zeros(1) if g is None else g for g in grads] for m, grads in gradients.items()}


def coupling_gradients(learner, batch, coefficient=0.7):
    """Of coefficient · penalty over all rows of the batch, straight from torch."""
    features, params = [], {}
    for agent in AGENTS:
        module = learner.module[agent]
        params[agent] = list(module.parameters())
        obs = torch.from_numpy(batch.stream(agent).obs.reshape(-1, 3))
        features.append(module.forward_train({"obs": obs})["encoder_features"])
    loss = coefficient * redundancy_penalty(features)
    flat = [p for agent in AGENTS for p in params[agent]]
    grads = iter(torch.autograd.grad(loss, flat, allow_unused=True))
    return {a: [None if (g := next(grads)) is None else g.numpy() for _ in params[a]] for a in AGENTS}


def test_the_coupling_does_not_reach_the_heads(gradients):
    learner = team_learner(num_epochs=1, minibatch_size=32, **COUPLED)
    extra = coupling_gradients(learner, team_batch())
    names = [name for name, _ in learner.module["a0"].named_parameters()]
    for agent in AGENTS:
        for name, gradient in zip(names, extra[agent], strict=True):
            assert (gradient is None) == ("head" in name)


def test_shuffling_one_agents_rows_changes_the_coupling_and_nothing_else():
    batch, shuffled = team_batch(), team_batch()
    order = np.random.default_rng(0).permutation(STEPS)
    streams = shuffled.modules["a1"]
    # Whole steps are moved; values at λ = 0 and γ = 0 do not know about time.
    for name in ("obs", "actions", "action_logp", "rewards"):
        setattr(streams, name, getattr(streams, name)[order])
    results = []
    for data in (batch, shuffled):
        learner = team_learner(num_epochs=1, minibatch_size=32, gamma=0.0, lambda_=0.0, **COUPLED)
        results.append(update(learner, data))
    same, other = (r["__all_modules__"]["cross_agent_loss"]["redundancy"] for r in results)
    assert abs(same - other) > 1e-3
    for agent in AGENTS:
        for name in ("policy_loss", "vf_loss", "entropy"):
            assert results[0][agent][name] == pytest.approx(results[1][agent][name], abs=1e-6)


def test_agents_of_one_module_are_one_mean_over_their_rows():
    # Two agents with the same data count as one agent.
    config = declared_config([box()] * 2, [discrete(3)] * 2, ["a0", "b"], policies="shared", num_epochs=3)
    both = make_learner(config)
    one = make_learner(declared_config([box()], [discrete(3)], ["a0"], policies="shared", num_epochs=3))
    for learner in (both, one):
        copy_scrambled(learner)
    alone = team_batch(["a0"]).modules["a0"]
    doubled = {
        name: np.repeat(getattr(alone, name), 2, axis=1)
        for name in ("obs", "actions", "action_logp", "rewards", "present", "terminated", "truncated", "origin")
    }
    rows = (STEPS - 1) * ENVS + np.arange(ENVS)
    twice = type(alone)(agents=("a0", "b"), bootstrap_obs=np.repeat(alone.bootstrap_obs, 2, axis=0), **doubled)
    update(one, hand_batch({"shared": alone}, rows))
    update(both, hand_batch({"shared": twice}, rows))
    assert largest_difference(parameters(one), parameters(both)) < 1e-7


# ------------------------------------------------------------------------------------------------- freezing


@pytest.mark.parametrize("trained", [["a0"], lambda module_id, batch=None: module_id == "a0"], ids=["list", "callable"])
@pytest.mark.parametrize("critic_lr", [None, 1e-3])
def test_frozen_modules_do_not_move_by_one_bit(trained, critic_lr):
    learner = team_learner(trained=trained, critic_lr=critic_lr, **COUPLED)
    # Moments that exist must stay, too: one update in which everybody learns comes first.
    learner.config.policies_to_train = None
    update(learner, team_batch())
    learner.config.policies_to_train = trained
    before, moments = parameters(learner), optimizer_states(learner)
    assert all(moments.values())
    results = update(learner, team_batch(seed=1))
    after, moments_after = parameters(learner), optimizer_states(learner)
    for agent in ("a1", "a2"):
        assert largest_difference(before[agent], after[agent]) == 0.0
        for name in moments:
            if name.startswith(agent):
                assert largest_difference(moments[name], moments_after[name]) == 0.0
        assert np.isfinite(results[agent]["policy_loss"]) and results[agent]["entropy"] > 0.0
        assert results[agent]["gradients_default_optimizer_global_norm"] == 0.0
    assert largest_difference(before["a0"], after["a0"]) > 1e-4


def test_a_frozen_module_still_enters_the_coupling_of_the_others():
    def trunk(coefficient):
        options = dict(COUPLED, cross_agent_coeffs={"redundancy": coefficient})
        learner = team_learner(trained=["a0"], **options)
        results = update(learner, team_batch())
        assert results["__all_modules__"]["cross_agent_loss"]["redundancy"] > 0.0
        return parameters(learner)["a0"]

    assert largest_difference(trunk(0.0), trunk(1.0)) > 1e-4


def test_freeze_then_unfreeze():
    class Switch:
        frozen = True

        def __call__(self, module_id, batch=None):
            return not (self.frozen and module_id == "a1")

    switch = Switch()
    learner = team_learner(trained=switch, **COUPLED)
    switch = learner.config.policies_to_train
    start = parameters(learner)
    update(learner, team_batch())
    assert largest_difference(start["a1"], parameters(learner)["a1"]) == 0.0
    switch.frozen = False
    update(learner, team_batch(seed=1))
    assert largest_difference(start["a1"], parameters(learner)["a1"]) > 1e-4
    switch.frozen = True
    now = parameters(learner)
    update(learner, team_batch(seed=2))
    assert largest_difference(now["a1"], parameters(learner)["a1"]) == 0.0
    assert largest_difference(now["a0"], parameters(learner)["a0"]) > 1e-4


def test_freezing_everybody_by_a_callable_moves_nobody():
    learner = team_learner(trained=lambda module_id, batch=None: False, **COUPLED)
    before = parameters(learner)
    results = update(learner, team_batch())
    assert largest_difference(before, parameters(learner)) == 0.0
    assert np.isfinite(results["__all_modules__"]["total_loss"])


def test_a_frozen_agents_features_reach_the_coupling_detached():
    seen = {}

    class Look(CrossAgentLoss):
        def __call__(self, features, logits, actions, present):
            seen.update({a: (features[a].requires_grad, logits[a].requires_grad) for a in features})
            return None

    learner = team_learner(trained=["a0"], cross_agent_losses={"look": Look()})
    update(learner, team_batch())
    assert seen == {"a0": (True, True), "a1": (False, False), "a2": (False, False)}


# ------------------------------------------------------------------------------------------------- clipping


def test_each_module_is_clipped_by_its_own_norm(gradients):
    # a0's rewards are 1,000 times larger; without its own norm the others would hardly be left a gradient.
    batch = team_batch()
    batch.modules["a0"].rewards *= 1000.0
    options = dict(num_epochs=1, minibatch_size=32, value_normalization=False, grad_clip=0.05)
    learner = team_learner(**options)
    results = update(learner, batch)
    norms = {a: results[a]["gradients_default_optimizer_global_norm"] for a in AGENTS}
    assert norms["a0"] > 100 * norms["a1"]
    state = {a: learner._named_optimizers[f"{a}_default_optimizer"].state_dict()["state"] for a in AGENTS}
    for agent in AGENTS:  # after one step Adam's first moment is 0.1 times the clipped gradient
        norm = np.sqrt(sum(float((entry["exp_avg"] * 10.0).square().sum()) for entry in state[agent].values()))
        assert norm == pytest.approx(min(0.05, norms[agent]), rel=1e-3)
        raw = np.sqrt(sum(np.square(g).sum() for g in gradients[0][agent] if g is not None))
        assert raw == pytest.approx(norms[agent], rel=1e-5)


@pytest.mark.parametrize("by", ["norm", "value"])
def test_other_ways_of_clipping(by):
    learner = team_learner(num_epochs=1, minibatch_size=32)
    learner.config.grad_clip_by, learner.config.grad_clip = by, 0.01
    update(learner, team_batch())
    largest = 0.0
    for entry in learner._named_optimizers["a0_default_optimizer"].state_dict()["state"].values():
        gradient = entry["exp_avg"] * 10.0
        size = gradient.norm() if by == "norm" else gradient.abs().max()
        assert size <= 0.01 * (1 + 1e-4)
        largest = max(largest, float(size))
    assert largest == pytest.approx(0.01, rel=1e-3)
