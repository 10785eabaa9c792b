"""A checkpoint holds the critic, the heads and the multipliers; what plays from it needs none of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.centralized.algorithms import GRU, LIMIT, spread
from tests.checkpoints.continued import go_on
from tests.checkpoints.outcomes import assert_alike, outcome, state_of
from tests.cli.helpers import thrust_rllib
from tests.support import largest_difference, parameters
from thrust_rllib import AuxiliaryTarget, Constraint, JointPPO
from thrust_rllib.trained_team import load_team

OWN = ["auxiliary_heads", "team_critic"]
AGENTS = ["agent_0", "agent_1", "agent_2"]


def multipliers(algo):
    return algo.learner_group._learner._multipliers.coefficients()


@pytest.mark.parametrize("cell", [False, True], ids=["plain", "gru"])
def test_the_next_results_are_the_same_to_the_bit(build, tmp_path, cell):
    algo = build(spread(cell))
    paths, states, told = [], [], []
    for k in range(3):
        paths.append(algo.save_to_path(tmp_path / str(k)))
        states.append(state_of(algo))
        told.append(outcome(algo.train()))
    assert set(states[0]["parameters"]) == {*AGENTS, *OWN}
    found = [state["joint"]["multipliers"]["collisions"]["multiplier"] for state in states]
    assert found[0] == LIMIT.initial and len(set(found)) == 3
    assert told[1]["/learners/__all_modules__/constraints/collisions/multiplier"] == found[1]
    for k in (2, 0, 1):  # forward and back
        algo.restore_from_path(paths[k])
        assert_alike(state_of(algo), states[k])
        assert_alike(outcome(algo.train()), told[k])
    fresh = JointPPO.from_checkpoint(paths[1])
    assert multipliers(fresh) == {"collisions": found[1]}
    (results, _), needed = go_on(fresh, 2)[0][0], told[1]
    fresh.stop()
    assert_alike(results, needed)


def test_the_limit_of_a_new_configuration_counts(build, tmp_path):
    donor = build(spread())
    for _ in range(2):
        donor.train()
    path, held = donor.save_to_path(tmp_path / "saved"), multipliers(donor)["collisions"]
    assert held > 0
    algo = build(spread(constraints=(Constraint("collisions", 3.0, "lagrangian", rate=0.01),)))
    algo.restore_from_path(path)
    assert multipliers(algo) == {"collisions": held}
    found = algo.train()["learners"]["__all_modules__"]["constraints"]["collisions"]
    assert found["limit"] == 3.0 and found["multiplier"] == held
    assert multipliers(algo)["collisions"] == pytest.approx(held + 0.01 * (found["cost"] - 3.0)) and found["cost"] < 3.0


@pytest.mark.parametrize("way", ["folder", "state"])
def test_a_critic_that_a_configuration_has_not_is_an_error_that_changes_nothing(build, tmp_path, way):
    algo, donor = build(spread(plain=True)), build(spread())
    algo.train()
    before = state_of(algo)
    with pytest.raises(ValueError, match=r"modules \['auxiliary_heads', 'team_critic'\].*the options critic and auxil"):
        if way == "folder":
            algo.restore_from_path(donor.save_to_path(tmp_path / "saved"))
        else:
            algo.set_state(donor.get_state())
    assert_alike(state_of(algo), before)
    assert algo.iteration == 1


@pytest.mark.parametrize("way", ["folder", "state"])
def test_the_other_way_round_it_is_told_and_they_stay(build, tmp_path, caplog, way):
    algo, donor = build(spread()), build(spread(plain=True))
    algo.train()
    donor.train()
    before, given = parameters(algo.learner_group._learner), parameters(donor.learner_group._learner)
    held = multipliers(algo)
    with caplog.at_level("WARNING", logger="thrust_rllib"):
        if way == "folder":
            algo.restore_from_path(donor.save_to_path(tmp_path / "saved"))
        else:
            algo.set_state(donor.get_state())
    assert f"modules {OWN} are not in the checkpoint: they stay as they are" in caplog.text
    now = parameters(algo.learner_group._learner)
    assert largest_difference({m: now[m] for m in OWN}, {m: before[m] for m in OWN}) == 0.0
    assert largest_difference({m: now[m] for m in AGENTS}, given) == 0.0
    assert multipliers(algo) == held
    assert algo.train()["learners"]["team_critic"]["vf_loss"] > 0


@pytest.mark.parametrize("way", ["folder", "state"])
def test_a_critic_of_other_parts_is_an_error_that_changes_nothing(build, tmp_path, way):
    """The cell is as wide as the layer in front of it: all parameters that both have are of one shape."""
    network = {"fcnet_hiddens": [5]}
    algo = build(spread(cell=True, critic_config={**GRU, **network}))
    donor = build(spread(critic_config=network))
    for one, other, message in (
        (algo, donor, r"cell.weight_ih_l0 is not there, needed \[15, 5\]"),
        (donor, algo, r"cell.weight_ih_l0 is \[15, 5\], needed no such parameter"),
    ):
        before = state_of(one)
        with pytest.raises(ValueError, match=f"module 'team_critic' of the checkpoint has another network.*{message}"):
            if way == "folder":
                one.restore_from_path(other.save_to_path(tmp_path / message[:5]))
            else:
                one.set_state(other.get_state())
        assert_alike(state_of(one), before)


def test_a_checkpoint_knows_its_auxiliary_targets_by_name(build, tmp_path):
    listed = [AuxiliaryTarget(name, weight=0.5) for name in ("covered", "collisions")]
    donor, algo, other = (
        build(spread(auxiliary_targets=tuple(targets)))
        for targets in (listed, listed[::-1], [listed[0], AuxiliaryTarget("touching_agents")])
    )
    donor.train()
    path = donor.save_to_path(tmp_path / "saved")
    algo.restore_from_path(path)
    given, taken = (own.learner_group._learner.module["auxiliary_heads"].unwrapped() for own in (donor, algo))
    features = torch.randn(3, given.widths["agent_0"])
    assert torch.equal(given.predict("agent_0", features), taken.predict("agent_0", features).flip(-1))
    assert given.predict("agent_0", features).std() > 0
    with pytest.raises(ValueError, match="'auxiliary_heads' of the checkpoint has another network"):
        other.restore_from_path(path)


SCALE = "come from a run with another value_normalization or critic: they are on another scale"


def moments_of(algo):
    return {m: own.get_state() for m, own in algo.learner_group._learner._value_normalizers.items()}


@pytest.mark.parametrize("way", ["restore", "warm start"])
@pytest.mark.parametrize(
    "there, here, told",
    [
        ({}, {"critic": "mean", "credit": "shared"}, AGENTS),
        ({"critic": "mean", "credit": "shared"}, {}, []),
        ({"critic": "mean", "credit": "shared"}, {"critic": "mean", "credit": "agent"}, []),
        ({"critic": "mean", "credit": "shared"}, {"value_normalization": False}, AGENTS),
        (
            {"critic": "central"},
            {"critic": "central", "credit": "agent", "value_normalization": False},
            ["team_critic"],
        ),
        ({"critic": "central", "credit": "shared"}, {"critic": "central", "credit": "agent"}, []),
    ],
    ids=str,
)
def test_values_on_another_scale_are_told(build, tmp_path, caplog, there, here, told, way):
    if here.get("critic") == "central":
        there = {"credit": "shared", **there}
    donor, algo = build(spread(plain=True, **there)), build(spread(plain=True, **here))
    donor.train()
    path, given, before = donor.save_to_path(tmp_path / "saved"), moments_of(donor), moments_of(algo)
    with caplog.at_level("WARNING", logger="thrust_rllib"):
        if way == "restore":
            algo.restore_from_path(path)
        else:
            algo.warm_start(path)
            if "team_critic" in algo.config.learner_modules:
                assert SCALE not in caplog.text  # the policies' values are not used
                algo.warm_start(path, {"team_critic": "team_critic"})
    assert (f"the values of modules {told} {SCALE}" in caplog.text) == bool(told) == (SCALE in caplog.text)
    for m, own in moments_of(algo).items():  # the team's where a module has none of its own
        needed = before[m] if told else given.get(m, given.get("team_critic"))
        assert own == needed


def test_what_plays_needs_no_critic(build, tmp_path):
    algo = build(spread().evaluation(evaluation_interval=1, evaluation_duration=2))
    result = algo.train()
    assert result["evaluation"]["env_runners"]["num_episodes"] == 2
    for runner in (algo.env_runner, algo.eval_env_runner):
        assert sorted(runner.module.keys()) == AGENTS
    path = algo.save_to_path(tmp_path / "saved")
    team = load_team(path)
    actions, _ = team.act({agent: np.zeros(18, np.float32) for agent in AGENTS})
    assert sorted(actions) == AGENTS
    code, out, err = thrust_rllib("evaluate", path, "--episodes", 4)
    assert code == 0, err
    assert "4 episodes" in out


def test_a_warm_start_takes_policies_and_a_critic_that_is_named(build, tmp_path):
    donor = build(spread(seed=5))
    donor.train()
    path, given = donor.save_to_path(tmp_path / "saved"), parameters(donor.learner_group._learner)
    moments = donor.learner_group._learner._value_normalizers["team_critic"].get_state()
    algo = build(spread())
    before = parameters(algo.learner_group._learner)
    algo.warm_start(path)
    now = parameters(algo.learner_group._learner)
    assert largest_difference({m: now[m] for m in AGENTS}, {m: given[m] for m in AGENTS}) == 0.0
    assert largest_difference({m: now[m] for m in OWN}, {m: before[m] for m in OWN}) == 0.0
    algo.warm_start(path, modules={"team_critic": "team_critic"})
    learner = algo.learner_group._learner
    assert largest_difference(parameters(learner)["team_critic"], given["team_critic"]) == 0.0
    assert learner._value_normalizers["team_critic"].get_state() == moments
    assert algo.iteration == 0 and algo.train()["training_iteration"] == 1
    plain = build(spread(plain=True))
    plain.warm_start(path)
    assert largest_difference(parameters(plain.learner_group._learner), {m: given[m] for m in AGENTS}) == 0.0
    with pytest.raises(ValueError, match="this algorithm has no module 'team_critic'"):
        plain.warm_start(path, modules={"team_critic": "team_critic"})
