"""The reference trainer itself: checked against definitions, finite differences and torch's Adam."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from tests import reference
from tests.reference import (
    ReferenceAdam,
    ReferenceModule,
    ReferenceRollout,
    ReferenceSettings,
    ReferenceTrainer,
    reference_joint_update,
)

M = 20
ACTIONS = {"discrete": (3, ()), "multi_discrete": (5, (3, 2)), "gaussian": (4, ())}


def module(rng, action="discrete", obs=4, width=5):
    outputs, nvec = ACTIONS[action]
    shapes = {
        "trunk_0.weight": (width, obs),
        "trunk_0.bias": (width,),
        "trunk_1.weight": (width, width),
        "trunk_1.bias": (width,),
        "policy.weight": (outputs, width),
        "policy.bias": (outputs,),
        "value.weight": (1, width),
        "value.bias": (1,),
    }
    return ReferenceModule({name: 0.5 * rng.normal(size=s) for name, s in shapes.items()}, action, nvec)


def rollout(rng, action="discrete", obs=4, present=None):
    actions = {
        "discrete": rng.integers(0, 3, M),
        "multi_discrete": np.stack([rng.integers(0, 3, M), rng.integers(0, 2, M)], 1),
        "gaussian": rng.normal(size=(M, 2)),
    }[action]
    logp_old = {"discrete": -1.1, "multi_discrete": -1.8, "gaussian": -3.0}[action] + 0.2 * rng.normal(size=M)
    a, target, v = rng.normal(size=(3, M))
    return ReferenceRollout(rng.normal(size=(M, obs)), actions, logp_old, a, target, v, present)


def team(seed=0, actions=("discrete", "multi_discrete", "gaussian"), **settings):
    rng = np.random.default_rng(seed)
    modules = {f"m{i}": module(rng, action) for i, action in enumerate(actions)}
    rollouts = {f"m{i}": rollout(rng, action) for i, action in enumerate(actions)}
    return ReferenceTrainer(modules, ReferenceSettings(**settings)), rollouts


def restarted(trainer, **settings):
    modules = {m: dataclasses.replace(x, parameters=trainer.parameters[m]) for m, x in trainer.modules.items()}
    return ReferenceTrainer(modules, dataclasses.replace(trainer.settings, **settings), trainer.agents)


def forward(p, obs):
    h = np.tanh(np.tanh(obs @ p["trunk_0.weight"].T + p["trunk_0.bias"]) @ p["trunk_1.weight"].T + p["trunk_1.bias"])
    return h, h @ p["policy.weight"].T + p["policy.bias"], (h @ p["value.weight"].T + p["value.bias"])[:, 0]


ROWS = np.array([3, 1, 4, 15, 9, 2, 6, 5])


def test_statistics_equal_the_elementwise_references():
    trainer, rollouts = team(redundancy_coeff=0.3, lr=0.0)
    result = trainer.step(rollouts, ROWS)
    features, total = [], 0.0
    for m, r in rollouts.items():
        z, outputs, values = forward(trainer.parameters[m], r.obs[ROWS])
        features.append(z)
        outputs = torch.tensor(outputs)
        if m == "m0":
            heads = [torch.distributions.Categorical(logits=outputs)]
        elif m == "m1":
            heads = [torch.distributions.Categorical(logits=x) for x in outputs.split((3, 2), 1)]
        else:
            mean, log_std = outputs.chunk(2, 1)
            heads = [torch.distributions.Normal(mean[:, k], log_std[:, k].exp()) for k in range(2)]
        actions = torch.tensor(r.actions[ROWS]).reshape(len(ROWS), -1)
        logp = sum(head.log_prob(actions[:, k]) for k, head in enumerate(heads)).numpy()
        surrogate = reference.clipped_surrogate(logp, r.logp_old[ROWS], r.advantages[ROWS], 0.2)
        value = reference.value_loss_change_clipped(values, r.values_old[ROWS], r.value_targets[ROWS], 0.2)
        expected = {
            "policy_loss": -surrogate.mean(),
            "value_loss": value.mean(),
            "entropy": float(sum(head.entropy() for head in heads).mean()),
            "clip_fraction": reference.clip_indicator(logp, r.logp_old[ROWS], 0.2).mean(),
            "kl": reference.approximate_kl(logp, r.logp_old[ROWS]).mean(),
        }
        for name, number in expected.items():
            assert result[name][m] == pytest.approx(number, abs=1e-12), (m, name)
        total += expected["policy_loss"] + 0.5 * expected["value_loss"] - 0.01 * expected["entropy"]
    aux = 0.3 * reference.redundancy_penalty(features)
    assert result["aux_loss"] == pytest.approx(aux, abs=1e-12) and aux > 0
    assert result["total_loss"] == pytest.approx(total + aux, abs=1e-12)


def test_gradients_equal_finite_differences():
    trainer, rollouts = team(redundancy_coeff=0.3, lr=0.0)
    grads = trainer.step(rollouts, ROWS)["grads"]
    rng = np.random.default_rng(1)
    for m in trainer.modules:
        direction = {name: rng.normal(size=p.shape) for name, p in trainer.parameters[m].items()}
        losses = []
        for step in (1e-5, -1e-5):
            moved = restarted(trainer)
            for name, d in direction.items():
                moved.parameters[m][name] = moved.parameters[m][name] + step * d
            losses.append(moved.step(rollouts, ROWS)["total_loss"])
        slope = sum((grads[m][name] * d).sum() for name, d in direction.items())
        assert slope == pytest.approx((losses[0] - losses[1]) / 2e-5, rel=1e-5)


def test_adam_equals_torch():
    rng = np.random.default_rng(2)
    ours = {"w": rng.normal(size=(3, 4)), "b": rng.normal(size=3)}
    theirs = {name: torch.tensor(p, requires_grad=True) for name, p in ours.items()}
    adam, optimizer = ReferenceAdam(1e-2), torch.optim.Adam(theirs.values(), lr=1e-2)
    for scale in (1.0, 100.0, 1e-6, 0.0, 1.0):
        grads = {name: scale * rng.normal(size=p.shape) for name, p in ours.items()}
        adam.step(ours, grads)
        for name, p in theirs.items():
            p.grad = torch.tensor(grads[name])
        optimizer.step()
    for name, p in theirs.items():
        np.testing.assert_allclose(ours[name], p.detach().numpy(), rtol=0, atol=1e-13)


def test_without_coupling_a_module_trains_as_if_alone_with_it_not():
    trainer, rollouts = team()
    together = trainer.update(rollouts, [ROWS, ROWS[:3]])
    first, _ = team()
    alone = ReferenceTrainer({"m1": first.modules["m1"]}, ReferenceSettings())
    separate = alone.update({"m1": rollouts["m1"]}, [ROWS, ROWS[:3]])
    for name, p in alone.parameters["m1"].items():
        np.testing.assert_array_equal(p, trainer.parameters["m1"][name])
        np.testing.assert_array_equal(together[1]["grads"]["m1"][name], separate[1]["grads"]["m1"][name])
    coupled, _ = team(redundancy_coeff=1.0)
    coupled.update(rollouts, [ROWS, ROWS[:3]])
    assert not np.allclose(coupled.parameters["m1"]["trunk_0.bias"], trainer.parameters["m1"]["trunk_0.bias"])


def test_split_gradients_add_up_and_each_reaches_the_trunk():
    whole, rollouts = team(redundancy_coeff=0.3)
    split, _ = team(redundancy_coeff=0.3, critic_lr=1e-3)
    one, two = whole.step(rollouts, ROWS), split.step(rollouts, ROWS)
    for m in whole.modules:
        for name in whole.parameters[m]:
            actor, critic = two["grads"][m][name], two["critic_grads"][m][name]
            np.testing.assert_allclose(actor + critic, one["grads"][m][name], rtol=0, atol=1e-14)
            assert actor.any() == (not name.startswith("value"))
            assert critic.any() == (not name.startswith("policy"))
    value = sum(0.5 * x for x in two["value_loss"].values())
    assert two["total_loss"] == pytest.approx(one["total_loss"] - value)
    assert not np.allclose(split.parameters["m0"]["trunk_0.bias"], whole.parameters["m0"]["trunk_0.bias"])


def test_a_frozen_module_does_not_move_and_sends_its_features_detached():
    free, rollouts = team(redundancy_coeff=0.3)
    frozen, _ = team(redundancy_coeff=0.3, frozen=frozenset({"m1"}))
    a, b = free.step(rollouts, ROWS), frozen.step(rollouts, ROWS)
    assert a["total_loss"] == b["total_loss"] and a["policy_loss"] == b["policy_loss"]
    start, _ = team()
    for name, p in frozen.parameters["m1"].items():
        np.testing.assert_array_equal(p, start.parameters["m1"][name])
        np.testing.assert_array_equal(frozen.parameters["m0"][name], free.parameters["m0"][name])
    assert frozen.optimizers["m1"].steps == 0 and b["grad_norm"]["m1"] == 0
    without, _ = team()
    grads = without.step(rollouts, ROWS)["grads"]
    for name, g in b["grads"]["m1"].items():  # its own losses only, nothing of the coupling
        np.testing.assert_allclose(g, grads["m1"][name], rtol=0, atol=1e-14)
    assert not np.allclose(a["grads"]["m1"]["trunk_0.bias"], grads["m1"]["trunk_0.bias"])


def test_each_module_is_clipped_by_its_own_norm():
    trainer, rollouts = team(grad_clip=0.1)
    result = trainer.step(rollouts, ROWS)
    for m in trainer.modules:
        assert result["grad_norm"][m] == pytest.approx(reference.global_norm(result["grads"][m].values()))
        # After one step Adam's m is 0.1 g: its norm is that of the clipped gradient.
        assert reference.global_norm(trainer.optimizers[m].m.values()) == pytest.approx(0.01, rel=1e-4)
    assert min(result["grad_norm"].values()) > 0.1


def test_entropy_of_a_uniform_multi_discrete_policy_is_the_sum_over_dimensions():
    rng = np.random.default_rng(3)
    uniform = module(rng)
    uniform.action, uniform.nvec = "multi_discrete", (10, 2, 2)
    uniform.parameters |= {"policy.weight": np.zeros((14, 5)), "policy.bias": np.zeros(14)}
    r = dataclasses.replace(rollout(rng), actions=np.zeros((M, 3), dtype=int))
    entropy = ReferenceTrainer({"a": uniform}, ReferenceSettings()).step({"a": r}, ROWS)["entropy"]["a"]
    assert entropy == pytest.approx(math.log(10 * 2 * 2)) and entropy == pytest.approx(3.689, abs=1e-3)
    assert entropy / 3 == pytest.approx(1.23, abs=1e-2)  # the mean over dimensions is another number


def test_a_shared_module_takes_one_mean_over_all_its_agents():
    rng = np.random.default_rng(4)
    shared = module(rng)
    half = np.arange(M) < 12
    r = {"a": rollout(rng, present=half), "b": rollout(rng)}
    one = ReferenceTrainer({"m": shared}, ReferenceSettings(), {"a": "m", "b": "m"})
    result = one.step(r, np.arange(M))
    joined = ReferenceRollout(
        *(
            np.concatenate([getattr(r["a"], f.name)[half], getattr(r["b"], f.name)])
            for f in dataclasses.fields(ReferenceRollout)
            if f.name not in ("present", "action_mask")
        )
    )
    single = ReferenceTrainer({"m": shared}, ReferenceSettings())
    expected = single.step({"m": joined}, np.arange(12 + M))
    assert result["total_loss"] == pytest.approx(expected["total_loss"], abs=1e-13)
    for name, p in single.parameters["m"].items():
        np.testing.assert_allclose(one.parameters["m"][name], p, rtol=0, atol=1e-9)


def test_absent_rows_never_matter():
    present = np.arange(M) % 3 != 0
    results = []
    for garbage in (0.0, np.nan):
        trainer, rollouts = team(redundancy_coeff=0.3)
        r = rollouts["m2"]
        arrays = {
            f.name: np.array(getattr(r, f.name))
            for f in dataclasses.fields(r)
            if f.name not in ("present", "action_mask")
        }
        for x in arrays.values():
            x[~present] = garbage
        rollouts["m2"] = ReferenceRollout(**arrays, present=present)
        trainer.update(rollouts, [ROWS, ROWS])
        results.append(trainer.parameters)
    for m, named in results[0].items():
        for name, p in named.items():
            assert np.isfinite(p).all()
            np.testing.assert_array_equal(p, results[1][m][name])


def test_an_agent_without_rows_loses_nothing():
    trainer, rollouts = team(redundancy_coeff=0.3)
    rollouts["m0"].present = np.zeros(M, bool)
    before = {name: p.copy() for name, p in trainer.parameters["m0"].items()}
    result = trainer.step(rollouts, ROWS)
    assert result["policy_loss"]["m0"] == 0 and result["grad_norm"]["m0"] == 0 < result["grad_norm"]["m1"]
    for name, p in before.items():
        np.testing.assert_array_equal(p, trainer.parameters["m0"][name])


def test_several_updates_in_one_call():
    trainer, rollouts = team(critic_lr=1e-3, redundancy_coeff=0.1)
    start, _ = team()
    updates = [(rollouts, [ROWS, ROWS[::-1]]), (rollouts, [ROWS[:4]])]
    parameters, statistics = reference_joint_update(start.modules, trainer.settings, updates)
    for r, minibatches in updates:
        trainer.update(r, minibatches)
    assert [len(s) for s in statistics] == [2, 1]
    for m, named in parameters.items():
        for name, p in named.items():
            np.testing.assert_array_equal(p, trainer.parameters[m][name])
            assert not np.array_equal(p, start.parameters[m][name])
