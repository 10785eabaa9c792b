"""Modules come and go beside a critic of the team, and with their heads of auxiliary targets."""

from __future__ import annotations

import pytest
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from tests.centralized.algorithms import GRU, TARGETS, spread
from tests.checkpoints.outcomes import assert_alike, outcome, state_of
from tests.heads.worlds import SKILLS, World
from tests.support import largest_difference, parameters, tiny_config
from thrust_rllib import GRUModule, MLPModule
from thrust_rllib.rl_modules.mlp import ENCODER_FEATURES

AGENTS = ["agent_0", "agent_1", "agent_2"]


def plays(**others):
    """A mapping function: agents play themselves, but for some."""
    return lambda agent, *args, **kwargs: others.get(agent, agent)


def runner_modules(algo):
    return [sorted(names) for names in algo.env_runner_group.foreach_env_runner(lambda r: list(r.module.keys()))]


def of_learner(algo):
    return state_of(algo)["parameters"]


def league(algo):
    """A snapshot comes, takes an agent over, and goes again; the critic trains all the while."""
    algo.train()
    critic = of_learner(algo)["team_critic"]
    algo.add_module("snapshot", RLModuleSpec(), new_agent_to_module_mapping_fn=plays(agent_1="snapshot"),
                    new_should_module_be_updated=["agent_0", "agent_2"])  # fmt: skip
    assert sorted(algo.config.policies) == [*AGENTS, "snapshot"]
    assert all(names == [*AGENTS, "snapshot"] for names in runner_modules(algo))
    assert largest_difference(of_learner(algo)["team_critic"], critic) == 0.0
    algo.copy_module("agent_0", "snapshot")
    before = of_learner(algo)
    assert largest_difference(before["snapshot"], before["agent_0"]) == 0.0
    results = algo.train()["learners"]
    after = of_learner(algo)
    moved = sorted(m for m in after if largest_difference(before[m], after[m]) > 0)
    own = ["auxiliary_heads"] if algo.config.auxiliary_targets else []
    assert moved == ["agent_0", "agent_2", *own, "team_critic"]
    assert results["team_critic"]["vf_loss"] > 0 and "vf_loss" not in results["snapshot"]
    algo.remove_module("snapshot", new_agent_to_module_mapping_fn=plays(), new_should_module_be_updated=AGENTS)
    assert sorted(of_learner(algo)) == [*AGENTS, *own, "team_critic"] and all(x == AGENTS for x in runner_modules(algo))
    before = of_learner(algo)
    algo.train()
    assert all(largest_difference(before[m], x) > 0 for m, x in of_learner(algo).items())


@pytest.mark.parametrize("credit", ["own", "agent"])
@pytest.mark.parametrize("cell", [False, True], ids=["plain", "gru"])
def test_a_league_with_a_critic_of_the_team(build, cell, credit):
    league(build(spread(cell, credit=credit, auxiliary_targets=())))


@pytest.mark.parametrize("targets", [(), TARGETS], ids=["no heads", "heads"])
def test_a_changed_team_goes_on_from_a_checkpoint(build, tmp_path, targets):
    algo = build(spread(auxiliary_targets=targets))
    algo.add_module("snapshot", new_agent_to_module_mapping_fn=plays(agent_1="snapshot"))
    algo.train()
    path = algo.save_to_path(tmp_path / "saved")
    needed = outcome(algo.train())
    algo.restore_from_path(path)
    assert_alike(outcome(algo.train()), needed)
    again = type(algo).from_checkpoint(path)
    assert_alike(outcome(again.train()), needed)
    own = ["auxiliary_heads"] if targets else []
    assert sorted(of_learner(again)) == [*AGENTS, *own, "snapshot", "team_critic"]
    again.stop()


@pytest.mark.parametrize("name", ["team_critic", "auxiliary_heads"])
def test_a_policy_cannot_take_the_name_of_the_learners_own_module(build, name):
    algo = build(spread(auxiliary_targets=()))
    with pytest.raises(ValueError, match=f"a policy cannot be called '{name}'"):
        algo.add_module(name)
    with pytest.raises(ValueError, match="there is no module 'team_critic'"):
        algo.remove_module("team_critic")
    with pytest.raises(ValueError, match="copy_module got 'team_critic'"):
        algo.copy_module("agent_0", "team_critic")


def test_a_policy_with_a_memory_of_another_length_than_the_critics_is_an_error_that_changes_nothing(build):
    algo = build(spread(True, auxiliary_targets=()))
    before = state_of(algo)
    with pytest.raises(ValueError, match="max_seq_len differs between modules"):
        algo.add_module("late", RLModuleSpec(model_config={**GRU, "max_seq_len": 4}))
    assert_alike(state_of(algo), before)
    algo.add_module("late", RLModuleSpec(model_config=GRU))
    algo.train()


def heads_of(parameters, module_id):
    return [p for name, p in parameters["auxiliary_heads"].items() if f".of_{module_id}." in name]


def alike(left, right):
    return all(largest_difference(*pair) == 0.0 for pair in zip(left, right, strict=True))


def test_heads_of_auxiliary_targets_come_and_go_with_their_policies(build):
    algo = build(spread())
    algo.train()
    learner = algo.learner_group._learner
    before = of_learner(algo)
    specs = algo.add_module("late", RLModuleSpec(model_config={"fcnet_hiddens": [5]}), config_overrides={"lr": 5e-4},
                            new_agent_to_module_mapping_fn=plays(agent_1="late"))  # fmt: skip
    now = of_learner(algo)
    assert all(alike(heads_of(before, m), heads_of(now, m)) for m in AGENTS)
    assert [p.shape for p in heads_of(now, "late")] == [(1, 5), (1,)] * 2
    assert specs.rl_module_specs["auxiliary_heads"].model_config["widths"]["late"] == 5
    assert learner.get_optimizer("auxiliary_heads", "auxiliary_heads_late").param_groups[0]["lr"] == 5e-4
    results = algo.train()["learners"]
    after = of_learner(algo)
    assert set(results["late"]["auxiliary_loss"]) == {"covered", "collisions"}
    assert results["auxiliary_heads"]["late_learning_rate"] == 5e-4
    assert [m for m in [*AGENTS, "late"] if not alike(heads_of(now, m), heads_of(after, m))] == [
        "agent_0", "agent_2", "late",
    ]  # fmt: skip
    specs = algo.remove_module("late", new_agent_to_module_mapping_fn=plays())
    now = of_learner(algo)
    assert all(alike(heads_of(now, m), heads_of(after, m)) for m in AGENTS) and not any(
        "late" in name for name in now["auxiliary_heads"]
    )
    assert set(specs.rl_module_specs["auxiliary_heads"].model_config["widths"]) == set(AGENTS)
    assert not any("late" in name for name in [*learner._named_optimizers, *outcome(algo.train())])
    assert not any(alike(heads_of(now, m), heads_of(of_learner(algo), m)) for m in AGENTS)
    algo.add_module("late", new_agent_to_module_mapping_fn=plays(agent_1="late"))  # a name may be used again
    assert algo.train()["learners"]["auxiliary_heads"]["late_learning_rate"] == 1e-3


def test_a_checkpoint_of_a_smaller_team_leaves_later_policies_and_their_heads_as_they_are(build, tmp_path):
    algo = build(spread())
    algo.train()
    path = algo.save_to_path(tmp_path / "small")
    saved = of_learner(algo)
    algo.add_module("late", new_agent_to_module_mapping_fn=plays(agent_1="late"))
    algo.train()
    grown = of_learner(algo)
    algo.restore_from_path(path)
    now = of_learner(algo)
    assert largest_difference(now["late"], grown["late"]) == 0.0 and alike(
        heads_of(now, "late"), heads_of(grown, "late")
    )
    assert all(alike(heads_of(now, m), heads_of(saved, m)) for m in AGENTS)
    assert not alike(heads_of(now, "agent_0"), heads_of(grown, "agent_0"))
    algo.train()
    larger = algo.save_to_path(tmp_path / "large")
    other = build(spread())
    with pytest.raises(ValueError, match=r"the checkpoint has modules \['late'\], which this algorithm has not"):
        other.restore_from_path(larger)
    other.train()


class WithoutFeatures(MLPModule):
    def _forward_train(self, batch, **kwargs):
        outputs = super()._forward_train(batch, **kwargs)
        return {name: x for name, x in outputs.items() if name != ENCODER_FEATURES}


def test_a_policy_that_gives_no_features_to_a_head_is_an_error_that_changes_nothing(build):
    algo = build(spread())
    before = state_of(algo)
    with pytest.raises(ValueError, match="auxiliary_targets: module 'late'.*gives no features to predict from"):
        algo.add_module("late", RLModuleSpec(module_class=WithoutFeatures))
    assert_alike(state_of(algo), before)
    learner = algo.learner_group._learner  # which may be asked directly, as by RLlib's own group
    spec = RLModuleSpec.from_module(learner.module["agent_0"])
    spec.module_class = WithoutFeatures
    with pytest.raises(ValueError, match="auxiliary_targets: module 'late'.*gives no features to predict from"):
        learner.add_module(module_id="late", module_spec=spec)
    assert_alike(state_of(algo), before)
    algo.train()


def test_a_policy_that_a_learner_cannot_train_leaves_no_head_behind(build):
    algo = build(spread(True))
    learner = algo.learner_group._learner
    before, optimizers = state_of(algo), set(learner._named_optimizers)
    spec = RLModuleSpec.from_module(learner.module["agent_0"])
    spec.module_class, spec.model_config = GRUModule, {**GRU, "max_seq_len": 4}
    with pytest.raises(ValueError, match="max_seq_len differs between modules"):
        learner.add_module(module_id="late", module_spec=spec)
    assert_alike(state_of(algo), before)
    assert set(learner._named_optimizers) == optimizers
    algo.train()


def test_a_copy_takes_its_head_along(build):
    algo = build(spread())
    algo.add_module("late")
    algo.train()
    algo.copy_module("agent_0", "late")
    now = parameters(algo.learner_group._learner)
    assert alike(heads_of(now, "late"), heads_of(now, "agent_0"))
    assert not alike(heads_of(now, "agent_1"), heads_of(now, "agent_0"))
    algo.train()


def test_diversity_of_a_team_that_is_no_more_is_not_reported(build):
    algo = build(spread(diversity_interval=3))

    def reported():
        return sorted(algo.train()["learners"]["__all_modules__"].get("diversity", {}))

    assert reported() == ["agent_0_and_2_more"]
    algo.add_module("a_late")  # it plays nobody, and is not measured
    assert reported() == ["agent_0_and_2_more"]
    algo.add_module("b_late", new_agent_to_module_mapping_fn=plays(agent_0="b_late"))
    assert [reported(), reported()] == [[], ["agent_1_and_2_more"]]


def test_a_module_that_plays_no_agent_waits_beside_ratios_of_heads(build):
    algo = build(tiny_config(World, {"action_spaces": [SKILLS, SKILLS]}, ratio="per_head"))
    algo.add_module("late")
    before = of_learner(algo)
    results = algo.train()["learners"]
    assert set(results["a1"]["heads"]) == {"0", "1"} and "heads" not in results.get("late", {})
    assert largest_difference(before["late"], of_learner(algo)["late"]) == 0.0
    algo.add_module("other", new_agent_to_module_mapping_fn=plays(a0="late"))
    assert set(algo.train()["learners"]["late"]["heads"]) == {"0", "1"}


@pytest.mark.slow_ctde
@pytest.mark.timeout(240)
def test_a_league_of_two_learners(build):
    algo = build(spread(learners=2, runners=1))
    league(algo)
    states = algo.learner_group._get_results(algo.learner_group.foreach_learner(parameters))
    assert len(states) == 2 and largest_difference(*states) == 0.0


@pytest.mark.slow_ctde
@pytest.mark.timeout(240)
@pytest.mark.parametrize("cell", [False, True], ids=["plain", "gru"])
def test_remote_runners_never_build_what_only_learners_have(build, tmp_path, cell):
    algo = build(spread(cell, runners=2).evaluation(evaluation_interval=1, evaluation_num_env_runners=1))
    for _ in range(2):
        algo.train()
    path = algo.save_to_path(tmp_path / "saved")
    assert runner_modules(algo) == [AGENTS] * (len(runner_modules(algo))) and len(runner_modules(algo)) >= 2
    (found,) = algo.eval_env_runner_group.foreach_env_runner(
        lambda runner: sorted(runner.module.keys()), local_env_runner=False
    )
    assert found == AGENTS
    needed = outcome(algo.train())
    algo.restore_from_path(path)
    assert_alike(outcome(algo.train()), needed)
    weights = algo.learner_group.get_weights()
    for runner in algo.env_runner_group.foreach_env_runner(lambda r: {m: r.module[m].get_state() for m in AGENTS}):
        mine = {m: {name: weights[m][name] for name in named} for m, named in runner.items()}
        assert largest_difference(runner, mine) == 0.0 and "value_head.weight" not in runner["agent_0"]
