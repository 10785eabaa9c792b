"""Critics of a team on what runners sample, through both doors."""

from __future__ import annotations

import numpy as np
import pytest

from tests.general.doors import Doors
from tests.support import largest_difference, make_learner, make_runner, parameters, tiny_config, update
from thrust_rllib.envs.difference import WithDifferenceRewards
from thrust_rllib.team_lives import TeamEnds

PAIRS = [("independent", "shared"), ("mean", "agent"), ("central", "shared"), ("central", "own"), ("set", "own")]
MEMORY = {"cell": "gru", "cell_size": 5, "max_seq_len": 8}


def critic_options(critic, credit, **net):
    network = {"fcnet_hiddens": [8], **net} if critic in ("central", "set") else {}
    return {"critic": critic, "credit": credit, "critic_config": network, "audit": True}


@pytest.mark.parametrize("net", [{}, MEMORY], ids=["plain", "memory"])
@pytest.mark.parametrize("critic, credit", PAIRS)
def test_both_doors_train_alike(critic, credit, net):
    if net and critic not in ("central", "set"):
        net = {}
    both = Doors("spread", {"max_cycles": 7}, **critic_options(critic, credit, **net))
    config = both.learners["arrays"].config
    assert config.records_state == (critic == "central")  # the state is there, and this critic's default
    for _ in range(2):
        fast, episodes = both.sample(16)
        general = both.joint_batch(episodes)
        assert (fast.global_state is not None) == config.records_state
        if (view := config.critic_plan.view) is not None:
            np.testing.assert_allclose(view.of_rows(fast), view.of_rows(general), rtol=0, atol=1e-6)
            np.testing.assert_allclose(view.of_following(fast), view.of_following(general), rtol=0, atol=1e-6)
        ends = TeamEnds.of(fast)
        assert np.flatnonzero(ends.truncated[:, 0])[-1] == 15 and ends.truncated.sum() >= 4
        for name in ("present", "terminated", "truncated"):
            np.testing.assert_array_equal(getattr(ends, name), getattr(TeamEnds.of(general), name))
        update(both.learners["arrays"], fast)
        update(both.learners["episodes"], episodes)
    mine, theirs = (parameters(both.learners[door]) for door in ("arrays", "episodes"))
    assert largest_difference(mine, theirs) < 1e-5


def test_a_view_holds_the_state_of_each_row():
    config = tiny_config("spread", {"max_cycles": 7}, **critic_options("central", "shared"))
    batch = make_runner(config).sample(num_timesteps=32)[0]
    view = config.critic_plan.view
    np.testing.assert_array_equal(view.of_rows(batch), batch.global_state)
    np.testing.assert_array_equal(view.of_following(batch), batch.bootstrap_state)
    assert make_learner(config).module["team_critic"].observation_space.shape == batch.global_state.shape[-1:]


def copied_spread():
    return WithDifferenceRewards("spread", {"max_cycles": 7}, default_actions={f"agent_{i}": 0 for i in range(3)})


@pytest.mark.parametrize("sampling", ["arrays", "episodes"])
@pytest.mark.parametrize("critic", ["independent", "mean", "central"])
def test_difference_rewards_of_an_environment_that_can_be_copied(critic, sampling):
    config = tiny_config(copied_spread, runners={"sampling": sampling}, **critic_options(critic, "difference"))
    config.validate()
    runner = config.env_runner_cls(config=config, worker_index=0)
    results = update(make_learner(config, runner.get_spaces()), runner.sample(num_timesteps=64))
    assert results["__all_modules__"]["num_minibatch_steps"] == 2


@pytest.mark.parametrize("critic, credit", PAIRS)
def test_a_game_in_turns(critic, credit):
    config = tiny_config("pettingzoo:tictactoe_v3", **critic_options(critic, credit))
    config.validate()
    runner = config.env_runner_cls(config=config, worker_index=0)
    learner = make_learner(config, runner.get_spaces())
    before, over, cut = parameters(learner), 0, 0
    for _ in range(3):
        episodes = runner.sample(num_timesteps=25)
        batch = learner._batches(episodes)[0]
        ends = TeamEnds.of(batch)
        done = sum(episode.is_done for episode in episodes)
        assert ends.terminated.sum() == done
        assert ends.truncated.sum() <= len(episodes) - done  # not of one whose only steps are open
        assert not (ends.present & ~batch.valid).any() and (ends.present != batch.valid).any()
        for e, acts in enumerate(ends.present.T):
            assert (ends.terminated | ends.truncated)[np.flatnonzero(acts)[-1], e]
        over, cut = over + done, cut + ends.truncated.sum()
        results = update(learner, episodes)
        assert results["__all_modules__"]["num_non_finite_minibatches"] == 0
    assert over > 3 and cut > 3
    assert all(largest_difference(named, parameters(learner)[m]) > 1e-4 for m, named in before.items())
