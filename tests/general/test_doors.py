"""Which way environments are sampled: what was set, what the environment needs, and what is said about it."""

from __future__ import annotations

import pytest

from tests.envs.lives import Turns
from tests.support import largest_difference, make_learner, parameters, tiny_config, update
from thrust_rllib import JointEnvRunner, RedundancyPenalty
from thrust_rllib.episode_runner import JointEpisodeRunner


class OwnEpisodes(JointEpisodeRunner):
    pass


class OwnArrays(JointEnvRunner):
    pass


class TakesTurns(Turns):
    """Says that its agents wait."""

    takes_turns = True


@pytest.mark.parametrize("given", [JointEpisodeRunner, OwnEpisodes])
def test_the_users_runner_class_of_episodes_decides(given):
    config = tiny_config(runners={"env_runner_cls": given})
    config.validate()
    assert config.samples_episodes and config.env_runner_cls is given
    assert config.door == f"sampling by episodes ({given.__name__}): env_runner_cls={given.__name__}"


@pytest.mark.parametrize("given", [JointEnvRunner, OwnArrays])
def test_the_users_runner_class_of_arrays_cannot_sample_episodes(given):
    config = tiny_config(runners={"env_runner_cls": given, "sampling": "episodes"})
    with pytest.raises(ValueError, match=f"env_runner_cls={given.__name__} samples arrays, but .*sampling='episodes'"):
        config.validate()


@pytest.mark.parametrize("given", [None, OwnEpisodes, OwnArrays, JointEpisodeRunner, JointEnvRunner])
def test_a_second_validation_chooses_the_same(given):
    config = tiny_config(runners={} if given is None else {"env_runner_cls": given})
    config.validate()
    chosen, door = config.env_runner_cls, config.door
    config.validate()
    assert (config.env_runner_cls, config.door) == (chosen, door) and chosen is (given or JointEnvRunner)


def test_sampling_may_change_between_two_validations():
    config, chosen = tiny_config(), []
    for sampling in ("auto", "episodes", "arrays", "episodes", "auto"):
        config.env_runners(sampling=sampling).validate()
        chosen.append(config.env_runner_cls)
    assert chosen == [JointEnvRunner, JointEpisodeRunner, JointEnvRunner, JointEpisodeRunner, JointEnvRunner]


def test_an_environment_that_takes_turns_is_sampled_by_episodes():
    config = tiny_config(TakesTurns)
    config.validate()
    assert config.env_runner_cls is JointEpisodeRunner and "take turns" in config.door
    runner = JointEpisodeRunner(config=config, worker_index=0)
    learner = make_learner(config, runner.get_spaces())
    before = parameters(learner)
    update(learner, runner.sample())
    assert all(largest_difference(before[agent], parameters(learner)[agent]) > 0.0 for agent in ("a0", "a1"))


@pytest.mark.parametrize(
    "env, warns", [("pettingzoo:tictactoe_v3", True), (TakesTurns, True), ("debug/random_observations", False)]
)
def test_couplings_of_agents_that_take_turns_are_warned_of(env, warns, caplog):
    config = tiny_config(env, cross_agent_losses={"redundancy": RedundancyPenalty()})
    with caplog.at_level("WARNING", logger="thrust_rllib"):
        config.validate()
    told = [r.getMessage() for r in caplog.records if "couple nobody" in r.getMessage()]
    assert len(told) == warns and all("['redundancy']" in message for message in told)


@pytest.mark.parametrize(
    "sampling, line",
    [
        ("auto", "sampling by arrays (JointEnvRunner): nothing in the configuration or the environment needs episodes"),
        ("episodes", "sampling by episodes (JointEpisodeRunner): sampling='episodes'"),
    ],
)
def test_an_algorithm_says_which_way_it_samples(build, sampling, line):
    assert build(tiny_config(runners={"sampling": sampling})).config.door == line
