"""Modules come and go beside a critic of the team; heads of auxiliary targets are built once."""

from __future__ import annotations

import pytest
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from tests.centralized.algorithms import GRU, spread
from tests.checkpoints.outcomes import assert_alike, outcome, state_of
from tests.heads.worlds import SKILLS, World
from tests.support import largest_difference, parameters, tiny_config

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
    assert moved == ["agent_0", "agent_2", "team_critic"]
    assert results["team_critic"]["vf_loss"] > 0 and "vf_loss" not in results["snapshot"]
    algo.remove_module("snapshot", new_agent_to_module_mapping_fn=plays(), new_should_module_be_updated=AGENTS)
    assert sorted(of_learner(algo)) == [*AGENTS, "team_critic"] and all(x == AGENTS for x in runner_modules(algo))
    before = of_learner(algo)
    algo.train()
    assert all(largest_difference(before[m], x) > 0 for m, x in of_learner(algo).items())


@pytest.mark.parametrize("credit", ["own", "agent"])
@pytest.mark.parametrize("cell", [False, True], ids=["plain", "gru"])
def test_a_league_with_a_critic_of_the_team(build, cell, credit):
    league(build(spread(cell, credit=credit, auxiliary_targets=())))


def test_a_changed_team_goes_on_from_a_checkpoint(build, tmp_path):
    algo = build(spread(auxiliary_targets=()))
    algo.add_module("snapshot", new_agent_to_module_mapping_fn=plays(agent_1="snapshot"))
    algo.train()
    path = algo.save_to_path(tmp_path / "saved")
    needed = outcome(algo.train())
    algo.restore_from_path(path)
    assert_alike(outcome(algo.train()), needed)
    again = type(algo).from_checkpoint(path)
    assert_alike(outcome(again.train()), needed)
    assert sorted(of_learner(again)) == [*AGENTS, "snapshot", "team_critic"]
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


def test_with_auxiliary_targets_modules_stay_and_a_copy_takes_its_head_along(build):
    algo = build(spread())
    algo.train()
    before = state_of(algo)
    for change in (lambda: algo.add_module("late"), lambda: algo.remove_module("agent_0")):
        with pytest.raises(ValueError, match=r"modules cannot come or go while auxiliary_targets \['covered', 'coll"):
            change()
    assert_alike(state_of(algo), before)
    algo.copy_module("agent_0", "agent_2")
    now = parameters(algo.learner_group._learner)["auxiliary_heads"]
    for part in ("weight", "bias"):
        assert largest_difference(now[f"heads.of_agent_2.{part}"], now[f"heads.of_agent_0.{part}"]) == 0.0
        assert largest_difference(now[f"heads.of_agent_1.{part}"], now[f"heads.of_agent_0.{part}"]) > 0.0
    algo.train()


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
    algo = build(spread(learners=2, auxiliary_targets=(), runners=1))
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
