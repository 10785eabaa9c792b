"""The learner as RLlib sees it: modules of others, couplings, schedules, metrics, non-finite minibatches, state."""

from __future__ import annotations

import copy
import logging

import gymnasium as gym
import numpy as np
import pytest
import torch
from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import DefaultPPOTorchRLModule
from ray.rllib.core.rl_module.apis import ValueFunctionAPI
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch.torch_rl_module import TorchRLModule
from ray.tune.utils import flatten_dict

from tests.support import (
    box,
    declared_config,
    discrete,
    hand_batch,
    hand_streams,
    largest_difference,
    make_learner,
    make_runner,
    optimizer_states,
    parameters,
    tiny_config,
    update,
)
from thrust_rllib import CrossAgentLoss, MLPModule, RedundancyPenalty


def batch_for(config, steps=64):
    (batch,) = make_runner(config).sample(num_timesteps=steps)
    return batch


def trained(config, updates=1, **options):
    learner, batch = make_learner(config), batch_for(config)
    return learner, [update(learner, batch, **options) for _ in range(updates)]


# --------------------------------------------------------------------------------------------- compiled


# Torch's compiler looks at .grad of intermediate tensors where it breaks a graph, and looks through caches.
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped function:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_update_equals_the_plain_one(monkeypatch, backend):
    """With two gradient passes and the couplings' gradients on the same graph."""

    def config(**options):
        coupled = tiny_config(cross_agent_losses={"redundancy": RedundancyPenalty()}, critic_lr=1e-3)
        return coupled.framework(**options)

    seen = {}
    compile_function = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **given: seen.update(given) or compile_function(f, **given))
    plain, _ = trained(config())
    assert not seen
    compiled, _ = trained(config(torch_compile_learner=True, torch_compile_learner_dynamo_backend=backend))
    assert seen == {"backend": backend, "mode": None}
    assert largest_difference(parameters(plain), parameters(compiled)) < 1e-6
    assert largest_difference(parameters(plain), parameters(make_learner(config()))) > 1e-4


# --------------------------------------------------------------------------------------------- coupling gradients


def pulls(result, module, name):
    return {key.rsplit("/", 1)[-1]: v for key, v in flatten_dict(result[module]).items() if f"gradient/{name}/" in key}


def test_the_couplings_gradients_are_reported_every_so_many_updates():
    losses = {"plain": RedundancyPenalty(), "none": lambda *_: None}
    options = {"cross_agent_losses": losses, "cross_agent_coeffs": {"plain": 10.0}, "coupling_gradient_interval": 2}
    _, results = trained(tiny_config(**options), updates=3)
    first, second, third = (pulls(result, "agent_0", "plain") for result in results)
    assert first == second != third
    assert first["norm"] > 0 and first["norm_ratio"] > 0 and -1 <= first["cosine"] <= 1
    assert pulls(results[0], "agent_0", "none") == {"norm": 0.0, "norm_ratio": 0.0, "cosine": 0.0}
    options["cross_agent_coeffs"] = {"plain": 20.0}
    _, (doubled,) = trained(tiny_config(**options))
    assert pulls(doubled, "agent_0", "plain")["norm"] == pytest.approx(2 * first["norm"], rel=1e-5)
    assert pulls(doubled, "agent_0", "plain")["cosine"] == pytest.approx(first["cosine"], abs=1e-5)


def test_looking_at_the_couplings_gradients_moves_nothing():
    def after(interval):
        options = {"cross_agent_losses": {"r": RedundancyPenalty()}, "coupling_gradient_interval": interval}
        learner, results = trained(tiny_config(**options), updates=2)
        return parameters(learner), pulls(results[-1], "agent_0", "r")

    with_report, without = after(1), after(0)
    assert with_report[1] and not without[1]
    assert largest_difference(with_report[0], without[0]) == 0.0


def test_a_restored_learner_knows_the_last_gradients():
    config = tiny_config(cross_agent_losses={"r": RedundancyPenalty()})
    learner, (first,) = trained(config)
    other = make_learner(config)
    other.set_state(learner.get_state())
    assert pulls(update(other, batch_for(config)), "agent_0", "r") == pulls(first, "agent_0", "r") != {}


def test_a_frozen_modules_share_of_a_coupling_is_nothing():
    options = {"cross_agent_losses": {"r": RedundancyPenalty()}, "trained": ["agent_0"]}
    _, (result,) = trained(tiny_config(**options))
    assert set(pulls(result, "agent_1", "r").values()) == {0.0} and pulls(result, "agent_0", "r")["norm"] > 0


# --------------------------------------------------------------------------------------------- modules


@pytest.mark.parametrize("env", ["debug/random_observations", "debug/multi_discrete", "debug/match_target"])
@pytest.mark.parametrize("share", [True, False])
def test_rllibs_default_module_trains(env, share):
    config = tiny_config(env)
    config.rl_module(
        rl_module_spec=RLModuleSpec(module_class=DefaultPPOTorchRLModule),
        model_config={"fcnet_hiddens": [8], "vf_share_layers": share},
    )
    learner = make_learner(config)
    before, batch = parameters(learner), batch_for(config)
    result = update(learner, batch)
    for module_id in before:
        assert all(np.isfinite(v) for v in result[module_id].values())
        # The policy and the value network learn.
        moved = [name for name, p in parameters(learner)[module_id].items() if (p != before[module_id][name]).any()]
        assert any("pi" in name for name in moved) and any("vf" in name for name in moved)


def test_rllibs_default_module_with_a_coupling_on_features_is_an_early_error():
    config = tiny_config(cross_agent_losses={"redundancy": RedundancyPenalty()})
    config.rl_module(rl_module_spec=RLModuleSpec(module_class=DefaultPPOTorchRLModule))
    with pytest.raises(
        ValueError, match="redundancy.*'agent_0' .DefaultPPOTorchRLModule. gives none.*encoder_features"
    ):
        make_learner(config)


def test_a_coupling_without_features_runs_with_rllibs_module():
    class SameActions(CrossAgentLoss):
        needs_features = False

        def __call__(self, features, logits, actions, present):
            assert not features
            first, *others = logits.values()
            return sum((first - other).square().mean() for other in others)

    config = tiny_config(cross_agent_losses={"same": SameActions()})
    config.rl_module(rl_module_spec=RLModuleSpec(module_class=DefaultPPOTorchRLModule))
    _, (result,) = trained(config)
    assert result["__all_modules__"]["cross_agent_loss"]["same"] >= 0.0


class Plain(TorchRLModule, ValueFunctionAPI):
    """A user's own: no features, no embeddings."""

    def setup(self):
        self.net = torch.nn.Linear(int(np.prod(self.observation_space.shape)), int(self.action_space.n) + 1)

    def _forward(self, batch, **kwargs):
        return {"action_dist_inputs": self.net(batch["obs"])[:, 1:]}

    def compute_values(self, batch, embeddings=None):
        return self.net(batch["obs"])[:, 0]


def test_a_users_own_module_trains():
    config = tiny_config()
    config.rl_module(rl_module_spec=RLModuleSpec(module_class=Plain), model_config={})
    learner = make_learner(config)
    before = parameters(learner)
    update(learner, batch_for(config))
    assert all(largest_difference(before[m], parameters(learner)[m]) > 1e-4 for m in before)


def test_a_module_without_values_is_an_early_error():
    class NoValues(TorchRLModule):
        def setup(self):
            self.net = torch.nn.Linear(5, 3)

        def _forward(self, batch, **kwargs):
            return {"action_dist_inputs": self.net(batch["obs"])}

    config = tiny_config()
    config.rl_module(rl_module_spec=RLModuleSpec(module_class=NoValues), model_config={})
    with pytest.raises(ValueError, match="ValueFunctionAPI"):
        make_learner(config)


# --------------------------------------------------------------------------------------------- couplings


def test_what_a_coupling_is_given():
    seen = []

    class Look(CrossAgentLoss):
        def __call__(self, features, logits, actions, present):
            seen.append((features, logits, actions, present))
            return None

    config = tiny_config("debug/mixed_spaces", cross_agent_losses={"look": Look()})
    _, (result,) = trained(config)
    assert result["__all_modules__"]["cross_agent_loss"] == {"look": 0.0, "total": 0.0}
    features, logits, actions, present = seen[0]
    agents = ["agent_0", "agent_1", "agent_2", "agent_3"]
    assert sorted(features) == sorted(logits) == sorted(actions) == agents and present is None
    assert all(x.shape == (16, 12) for x in features.values())
    assert [logits[a].shape[1] for a in agents] == [2, 3, 5, 4]
    assert [tuple(actions[a].shape) for a in agents] == [(16,), (16,), (16, 2), (16, 2)]
    assert int(actions["agent_1"].min()) >= 0 and int(actions["agent_1"].max()) <= 2


def test_a_coupling_is_told_who_acted():
    seen = []

    def look(features, logits, actions, present):
        seen.append(present)

    look.needs_features = False
    config = declared_config([box()] * 2, [discrete()] * 2, cross_agent_losses={"look": look}, minibatch_size=8)
    rng = np.random.default_rng(0)
    acted = rng.random((8, 1, 1)) < 0.5
    acted[0], acted[-1] = False, True
    streams = {
        "a0": hand_streams(["a0"], rng.normal(size=(8, 1, 1, 3)), present=acted),
        "a1": hand_streams(["a1"], rng.normal(size=(8, 1, 1, 3))),
    }
    update(make_learner(config), hand_batch(streams), num_epochs=1)
    assert sorted(seen[0]) == ["a0", "a1"]
    assert int(seen[0]["a0"].sum()) == int(acted.sum()) and bool(seen[0]["a1"].all())


def test_several_couplings_are_weighed_and_reported():
    losses = {
        "b": lambda features, *rest: features["agent_0"].square().mean(),
        "a": lambda features, *rest: features["agent_1"].mean() * 0.0 + 2.0,
    }
    config = tiny_config(cross_agent_losses=losses, cross_agent_coeffs={"b": 0.5})
    _, (result,) = trained(config)
    shared = result["__all_modules__"]
    assert shared["cross_agent_loss"]["a"] == 2.0
    assert shared["cross_agent_coeff"] == {"a": 1.0, "b": 0.5}  # 1.0 where nothing is said
    expected = 2.0 + 0.5 * shared["cross_agent_loss"]["b"]
    assert shared["cross_agent_loss"]["total"] == pytest.approx(expected, rel=1e-5)
    agents = sum(result[m]["total_loss"] for m in ("agent_0", "agent_1", "agent_2"))
    assert shared["total_loss"] == pytest.approx(agents + expected, rel=1e-5)


@pytest.mark.parametrize("value", [torch.zeros(3), torch.zeros(1, 1), "text"])
def test_a_coupling_that_returns_no_scalar_is_an_error_that_names_it(value):
    config = tiny_config(cross_agent_losses={"odd": lambda *args: value})
    with pytest.raises(ValueError, match="cross-agent loss 'odd'.*scalar"):
        trained(config)


# --------------------------------------------------------------------------------------------- schedules


def test_schedules_move_with_the_sampled_steps():
    config = tiny_config(
        lr=[[0, 1e-3], [1000, 0.0]],
        critic_lr=[[0, 1e-2], [1000, 0.0]],
        entropy_coeff=[[0, 0.1], [1000, 0.0]],
        cross_agent_losses={"redundancy": RedundancyPenalty()},
        cross_agent_coeffs={"redundancy": [[0, 0.0], [1000, 1.0]]},
    )
    learner, batch = make_learner(config), batch_for(config)
    # The number of steps with which the rollout began counts.
    first, second, third = (update(learner, batch, steps=64 + before) for before in (0, 500, 1000))
    coeffs = [r["__all_modules__"]["cross_agent_coeff"]["redundancy"] for r in (first, second, third)]
    assert coeffs == pytest.approx([0.0, 0.5, 1.0])
    entropy = [r["agent_0"]["curr_entropy_coeff"] for r in (first, second, third)]
    assert entropy == pytest.approx([0.1, 0.05, 0.0])
    totals = [r["__all_modules__"]["cross_agent_loss"] for r in (first, second)]
    assert totals[0]["redundancy"] > 0 and totals[0]["total"] == 0.0
    assert totals[1]["total"] == pytest.approx(0.5 * totals[1]["redundancy"], rel=1e-5)
    # At the end both rates are 0: nothing moves.
    before = parameters(learner)
    update(learner, batch, steps=5000)
    assert largest_difference(before, parameters(learner)) == 0.0


def test_a_schedule_per_module():
    config = tiny_config(
        overrides={"agent_1": {"entropy_coeff": [[0, 1.0], [100, 0.0]], "lr": [[0, 0.0], [100, 1e-2]]}}
    )
    learner, batch = make_learner(config), batch_for(config)
    before = parameters(learner)
    first = update(learner, batch, steps=64)
    assert largest_difference(before["agent_1"], parameters(learner)["agent_1"]) == 0.0
    assert largest_difference(before["agent_0"], parameters(learner)["agent_0"]) > 0.0
    second = update(learner, batch, steps=64 + 50)
    assert largest_difference(before["agent_1"], parameters(learner)["agent_1"]) > 1e-3
    assert [r["agent_1"]["curr_entropy_coeff"] for r in (first, second)] == pytest.approx([1.0, 0.5])
    assert [r["agent_0"]["curr_entropy_coeff"] for r in (first, second)] == pytest.approx([0.01, 0.01])


# --------------------------------------------------------------------------------------------- metrics


def test_statistics_are_means_over_the_gradient_steps(monkeypatch):
    from thrust_rllib import minibatch_losses as module_of_losses

    seen = []
    compute = module_of_losses.compute_joint_losses

    def spy(*args, **kwargs):
        losses = compute(*args, **kwargs)
        seen.append(losses)
        return losses

    monkeypatch.setattr(module_of_losses, "compute_joint_losses", spy)
    config = tiny_config(iterate_all_minibatches=True, minibatch_size=24)  # the short last chunk counts as one step
    _, (result,) = trained(config)
    assert result["__all_modules__"]["num_minibatch_steps"] == len(seen) == 6
    policy = np.mean([losses.statistics[0, 0].item() for losses in seen])
    assert result["agent_0"]["policy_loss"] == pytest.approx(policy, rel=1e-5)


def test_counts_of_steps_and_rows():
    config = tiny_config(iterate_all_minibatches=True)
    learner, results = trained(config, updates=2)
    for k, result in enumerate(results):
        shared = result["__all_modules__"]
        assert shared["num_minibatch_steps"] == 8
        assert shared["num_env_steps_trained"] == 128 and shared["num_module_steps_trained"] == 3 * 128
        assert shared["num_env_steps_trained_lifetime"] == 128  # of this update; the algorithm adds up
        assert result["agent_0"]["num_module_steps_trained"] == 128
        assert result["agent_0"]["module_train_batch_size_mean"] == 16
        assert result["agent_0"]["weights_seq_no"] == k + 1


def test_what_is_reported_for_every_module():
    _, (result,) = trained(tiny_config())
    expected = {
        "policy_loss", "vf_loss", "vf_loss_unclipped", "entropy", "clip_fraction", "approx_kl", "vf_explained_var",
        "total_loss", "gradients_default_optimizer_global_norm", "curr_entropy_coeff",
        "default_optimizer_learning_rate",
    }  # fmt: skip
    for module_id in ("agent_0", "agent_1", "agent_2"):
        assert expected <= set(result[module_id])
        r = result[module_id]
        assert r["total_loss"] == pytest.approx(r["policy_loss"] + 0.5 * r["vf_loss"] - 0.01 * r["entropy"], rel=1e-5)


def test_with_critic_lr_the_total_loss_is_the_actors():
    _, (result,) = trained(tiny_config(critic_lr=1e-3))
    agents = [result[f"agent_{i}"] for i in range(3)]
    expected = sum(r["policy_loss"] - 0.01 * r["entropy"] for r in agents)
    assert result["__all_modules__"]["total_loss"] == pytest.approx(expected, rel=1e-5)


def test_an_epochs_share_of_the_rollout_is_told_once(caplog):
    config = tiny_config()
    with caplog.at_level(logging.INFO, logger="thrust_rllib"):
        trained(config, updates=2)
    told = [r.getMessage() for r in caplog.records if "joint rows" in r.getMessage()]
    assert len(told) == 1 and "16 of the 64 joint rows" in told[0] and "iterate_all_minibatches=True" in told[0]


# --------------------------------------------------------------------------------------------- non-finite


def poison(monkeypatch, agent, at):
    """Makes the policy loss of `agent` NaN in minibatch `at` (counted from 1)."""
    from thrust_rllib import minibatch_losses as module_of_losses

    forward, count = module_of_losses.forward_team, [0]

    def forward_team(module, rows, trained, critic):
        outputs = forward(module, rows, trained, critic)
        count[0] += 1
        if count[0] == at:
            index = [a for m in rows.modules.values() for a in m.agents].index(agent)
            outputs.logp.data[index, 0] = float("nan")
        return outputs

    monkeypatch.setattr(module_of_losses, "forward_team", forward_team)


@pytest.mark.parametrize("critic_lr", [None, 1e-3])
def test_a_minibatch_with_a_nan_moves_nobody_and_is_counted(monkeypatch, caplog, critic_lr):
    options = dict(
        cross_agent_losses={"redundancy": RedundancyPenalty()}, iterate_all_minibatches=True, critic_lr=critic_lr
    )
    snapshots = {}
    for bad in (0, 3):
        learner = make_learner(tiny_config(**options))
        batch = batch_for(tiny_config(**options))
        with monkeypatch.context() as patch:
            poison(patch, "agent_0", bad)
            with caplog.at_level(logging.WARNING, logger="thrust_rllib"):
                result = update(learner, batch)
                if bad:
                    again = update(learner, batch)
        snapshots[bad] = result
        for named in parameters(learner).values():
            assert all(np.isfinite(p).all() for p in named.values())
        for state in optimizer_states(learner).values():
            assert all(np.isfinite(x).all() for x in state)
    shared = snapshots[3]["__all_modules__"]
    assert shared["num_non_finite_minibatches"] == 1 and shared["num_minibatch_steps"] == 7
    assert snapshots[0]["__all_modules__"]["num_non_finite_minibatches"] == 0
    assert all(np.isfinite(v) for v in flatten_dict(snapshots[3]["agent_0"]).values())
    assert again["__all_modules__"]["num_non_finite_minibatches"] == 0
    warnings = [r.getMessage() for r in caplog.records if "not finite" in r.getMessage()]
    assert len(warnings) == 1 and "'agent_0'" in warnings[0] and "1 of 8" in warnings[0]


def test_the_skipped_step_leaves_weights_and_moments_to_the_bit(monkeypatch):
    config = tiny_config(num_epochs=1)
    learner, batch = make_learner(config), batch_for(config)
    update(learner, batch)
    before, moments = parameters(learner), optimizer_states(learner)
    poison(monkeypatch, "agent_1", 1)
    result = update(learner, batch)
    assert result["__all_modules__"]["num_minibatch_steps"] == 0
    assert result["__all_modules__"]["num_non_finite_minibatches"] == 1
    assert largest_difference(before, parameters(learner)) == 0.0
    assert largest_difference(moments, optimizer_states(learner)) == 0.0
    # No step, no mean: RLlib's logger knows the names from the update before and has no number for them.
    assert np.isnan(result["agent_1"]["policy_loss"]) and np.isnan(result["__all_modules__"]["total_loss"])


def test_a_nan_of_a_coupling_stops_everybody(caplog):
    config = tiny_config(cross_agent_losses={"bad": lambda features, *rest: features["agent_0"].sum() * float("nan")})
    learner = make_learner(config)
    before = parameters(learner)
    result = update(learner, batch_for(config))
    assert result["__all_modules__"]["num_non_finite_minibatches"] == 2
    assert largest_difference(before, parameters(learner)) == 0.0


def test_a_nan_of_a_frozen_module_does_not_stop_the_others(monkeypatch):
    config = tiny_config(trained=["agent_0", "agent_2"])
    learner, batch = make_learner(config), batch_for(config)
    poison(monkeypatch, "agent_1", 1)
    result = update(learner, batch)
    assert result["__all_modules__"]["num_minibatch_steps"] == 2


def test_a_coupling_alone_that_is_not_finite_is_named_in_a_warning(caplog):
    config = tiny_config(cross_agent_losses={"bad": lambda features, *rest: features["agent_0"].sum() * float("nan")})
    with caplog.at_level(logging.WARNING, logger="thrust_rllib"):
        trained(config)
    told = [r.getMessage() for r in caplog.records if "not finite" in r.getMessage()]
    assert len(told) == 1 and told[0].startswith("cross-agent losses ['bad']")


class NaNFeatures(MLPModule):
    """Its features, and with them everything it says, become NaN in the second minibatch of its life."""

    calls = 0

    def _forward_train(self, batch, **kwargs):
        outputs = super()._forward_train(batch, **kwargs)
        NaNFeatures.calls += 1
        if NaNFeatures.calls != 2 + 1:  # the first call is the check of the features at construction
            return outputs
        return {key: value * float("nan") for key, value in outputs.items()}


def test_a_nan_that_spreads_through_a_coupling_is_blamed_on_its_source(caplog):
    NaNFeatures.calls = 0
    config = tiny_config(iterate_all_minibatches=True, cross_agent_losses={"redundancy": RedundancyPenalty()}, lr=1e-3)
    model = {"fcnet_hiddens": [8]}
    kinds = {"agent_0": MLPModule, "agent_1": NaNFeatures, "agent_2": MLPModule}
    specs = {m: RLModuleSpec(module_class=kind, model_config=model) for m, kind in kinds.items()}
    config.rl_module(rl_module_spec=MultiRLModuleSpec(rl_module_specs=specs))
    with caplog.at_level(logging.WARNING, logger="thrust_rllib"):
        learner, (result,) = trained(config)
    assert result["__all_modules__"]["num_non_finite_minibatches"] == 1
    told = [r.getMessage() for r in caplog.records if "not finite" in r.getMessage()]
    assert len(told) == 1 and told[0].startswith("module 'agent_1'")
    assert all(np.isfinite(p).all() for named in parameters(learner).values() for p in named.values())


# --------------------------------------------------------------------------------------------- state


@pytest.mark.parametrize("critic_lr", [None, 1e-2])
def test_a_restored_learner_goes_on_to_the_same_weights(critic_lr):
    config = tiny_config(
        critic_lr=critic_lr,
        entropy_coeff=[[0, 0.1], [1000, 0.0]],
        cross_agent_losses={"redundancy": RedundancyPenalty()},
        cross_agent_coeffs={"redundancy": [[0, 0.0], [1000, 1.0]]},
        lr=[[0, 1e-3], [1000, 1e-4]],
    )
    learner, batch = make_learner(config), batch_for(config)
    update(learner, batch, steps=400)
    state = learner.get_state()
    restored = make_learner(config)
    restored.set_state(state)
    assert largest_difference(parameters(learner), parameters(restored)) == 0.0
    results = [update(each, batch, steps=800) for each in (learner, restored)]
    assert largest_difference(parameters(learner), parameters(restored)) == 0.0
    assert largest_difference(optimizer_states(learner), optimizer_states(restored)) == 0.0
    for name in ("cross_agent_coeff", "cross_agent_loss", "total_loss"):
        assert results[0]["__all_modules__"][name] == results[1]["__all_modules__"][name]
    assert results[0]["agent_0"]["value_target_std"] == results[1]["agent_0"]["value_target_std"]


def test_a_state_is_a_copy():
    config = tiny_config()
    learner, batch = make_learner(config), batch_for(config)
    update(learner, batch)
    state = learner.get_state()
    before = {m: v["mean"].copy() for m, v in state["joint"]["value_normalizers"].items()}
    generator = state["joint"]["generator"].copy()
    update(learner, batch)
    assert all((state["joint"]["value_normalizers"][m]["mean"] == before[m]).all() for m in before)
    assert (state["joint"]["generator"] == generator).all()


def test_weights_alone_can_be_restored():
    config = tiny_config()
    learner, _ = trained(config)
    other = make_learner(tiny_config(seed=9))
    other.set_state({"rl_module": learner.get_state(components="rl_module")["rl_module"]})
    assert largest_difference(parameters(learner), parameters(other)) == 0.0


def test_without_a_seed_two_learners_draw_differently():
    draws = []
    for _ in range(2):
        learner = make_learner(tiny_config(seed=None))
        draws.append(torch.randperm(1000, generator=learner._generator))
    assert not torch.equal(*draws)


# --------------------------------------------------------------------------------------------- what it refuses


def test_an_empty_rollout_is_an_error():
    with pytest.raises(ValueError, match="no rollout"):
        update(make_learner(tiny_config()), [])


def test_something_else_than_a_rollout_is_an_error():
    with pytest.raises(ValueError, match="SampleBatch.*JointBatch|dict.*JointBatch"):
        make_learner(tiny_config()).update(episodes=[{}])


def test_batches_of_different_teams_are_an_error():
    config = tiny_config()
    batch, other = batch_for(config), batch_for(config)
    del other.modules["agent_2"]
    with pytest.raises(ValueError, match="agent_2"):
        update(make_learner(config), [batch, other])


def test_values_that_are_not_finite_are_an_error_before_anything_moves():
    config = tiny_config()
    learner, batch = make_learner(config), batch_for(config)
    with torch.no_grad():
        next(learner.module["agent_1"].parameters())[0, 0] = float("nan")
    before = parameters(learner)
    with pytest.raises(ValueError, match="'agent_1'.*not finite"):
        update(learner, batch)
    assert largest_difference(before["agent_0"], parameters(learner)["agent_0"]) == 0.0


def test_the_loss_of_one_module_cannot_be_asked_for():
    with pytest.raises(TypeError, match="together"):
        make_learner(tiny_config()).compute_loss_for_module(module_id="agent_0", config=None, batch={}, fwd_out={})


def test_two_agents_without_a_module_of_their_own_space():
    config = declared_config([box(3), box(4)], [discrete(), gym.spaces.Discrete(3)], policies="shared")
    with pytest.raises(ValueError, match="'a0' and 'a1' share module 'shared'"):
        config.validate()


def test_going_back_takes_the_older_weights_too():
    config = tiny_config()
    learner, runner = make_learner(config), make_runner(config)
    batches = runner.sample(num_timesteps=64)
    update(learner, batches)
    older, then = copy.deepcopy(learner.get_state()), parameters(learner)
    update(learner, batches)
    after = parameters(learner)
    assert largest_difference(then, after) > 0.0
    learner.set_state(older)
    assert largest_difference(parameters(learner), then) == 0.0 and learner._weights_seq_no == 1
    update(learner, batches)
    assert largest_difference(parameters(learner), after) == 0.0
    learner.set_state({"rl_module": older["rl_module"]})  # weights alone have no number
    assert learner._weights_seq_no == 2


class Scaled(MLPModule):
    """Has a parameter and a buffer without axes."""

    def setup(self):
        super().setup()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))


def test_parameters_without_axes_are_restored(monkeypatch):
    monkeypatch.setattr("thrust_rllib.config.module_class_for", lambda model_config: Scaled)
    learner = make_learner(tiny_config())
    state = copy.deepcopy(learner.get_state())
    with torch.no_grad():
        learner.module["agent_0"].unwrapped().scale += 1.0
    learner.set_state(state)
    assert learner.module["agent_0"].unwrapped().scale.item() == 1.0
