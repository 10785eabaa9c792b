"""Teams that begin and stop to exchange messages, and settings at the edge of what communicating modules read."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner

from tests.communicating.world import AGENTS, MODEL, WIDTH, Meadow, team_config
from tests.support import declared_config, make_learner, make_runner, tiny_config, update
from thrust_rllib.connectors.observation_normalizer import ObservationNormalizer
from thrust_rllib.connectors.team_exchange import TeamExchange
from thrust_rllib.teams import AgentToModule

SEEN = gym.spaces.Box(-1, 1, (3,))
LINKS = gym.spaces.Box(0, 1, (2,))


def played_by(**agents):
    return AgentToModule({agent: module for module, mine in agents.items() for agent in mine.split()})


@pytest.mark.parametrize("door", ["arrays", "episodes"])
def test_a_running_team_begins_to_talk_and_stops(door):
    """The exchange comes into the runners' pipeline and leaves it; moments of observations stay with their modules."""
    runners = {"normalize_observations": True, "sampling": door}
    config = tiny_config(Meadow, {"stays": True}, policies={"a": ["cat", "ant", "bee"], "b": ["dog"]}, runners=runners)
    algo = config.build_algo()
    try:
        algo.train()
        mean = algo.env_runner.normalizer.moments["b"].mean.copy()
        assert np.abs(mean).max() > 0.1
        algo.add_module("t", RLModuleSpec(model_config=MODEL))
        np.testing.assert_array_equal(algo.env_runner.normalizer.moments["b"].mean, mean)
        mapping = played_by(t="cat bee", u="ant", b="dog")
        algo.add_module("u", RLModuleSpec(model_config=MODEL), new_agent_to_module_mapping_fn=mapping)
        assert len(algo.env_runner._env_to_module[TeamExchange]) == (door == "episodes")
        algo.train()
        algo.copy_module("t", "u")
        everybody = played_by(a=" ".join(AGENTS))
        algo.remove_module("u", new_agent_to_module_mapping_fn=everybody)
        before = algo.env_runner.normalizer.moments["b"].mean.copy()
        algo.remove_module("t", new_agent_to_module_mapping_fn=everybody)
        assert not algo.env_runner._env_to_module[TeamExchange]
        np.testing.assert_array_equal(algo.env_runner.normalizer.moments["b"].mean, before)
        algo.train()
    finally:
        algo.stop()


def test_links_of_a_module_that_plays_nobody_have_no_moments():
    """It may be given the moments of another one, or agents that another one plays."""
    runners = {"normalize_observations": True}
    config = tiny_config(Meadow, {"stays": True}, policies={"a": ["cat", "ant", "bee"], "b": ["dog"]}, runners=runners)
    algo = config.build_algo()
    try:
        algo.train()
        algo.add_module("c")
        assert algo.env_runner.normalizer.links == dict.fromkeys("abc", len(AGENTS))
        algo.copy_module("a", "c")
        moments = algo.env_runner.normalizer.moments
        assert moments["c"].mean.shape == (WIDTH,)
        np.testing.assert_array_equal(moments["c"].mean, moments["a"].mean)
        algo.add_module("d", new_agent_to_module_mapping_fn=played_by(a="cat", c="ant bee", b="dog"))
        algo.train()
    finally:
        algo.stop()


def test_rllibs_own_runner_would_hear_old_messages():
    config = team_config().env_runners(env_runner_cls=MultiAgentEnvRunner)
    with pytest.raises(ValueError, match=r"MultiAgentEnvRunner with modules.*\['left', 'right'\].*JointEpisodeRunner"):
        config.validate()


def test_an_input_shape_of_ones_own():
    """A flat observation that holds a grid."""
    space = gym.spaces.Dict({"links": LINKS, "observations": gym.spaces.Box(-1, 1, (75,))})
    model = {**MODEL, "input_shape": [3, 5, 5]}
    config = declared_config([space] * 2, [gym.spaces.Discrete(2)] * 2, policies="shared", model=model)
    settings = make_runner(config).module["shared"].settings
    assert settings.input_shape == (3, 5, 5) and settings.encoder == "conv" and settings.num_links == 2


@pytest.mark.parametrize(
    "parts, width",
    [
        ({"links": gym.spaces.MultiBinary(2), "seen": SEEN}, 5),
        ({"links": gym.spaces.Box(-1, 1, (2,)), "seen": SEEN}, 5),
        ({"links": gym.spaces.Box(0, 1, (2, 2)), "seen": SEEN}, 7),
        ({"links": LINKS}, 2),
    ],
)
def test_links_of_any_kind_without_messages(parts, width):
    """Who exchanges no messages may call anything by this name; it is normalised as everything else."""
    runners = {"normalize_observations": True}
    config = declared_config([gym.spaces.Dict(parts)] * 2, [gym.spaces.Discrete(2)] * 2, runners=runners)
    runner = make_runner(config)
    assert runner.sample(num_timesteps=8)[0].stream("a0").obs.shape[-1] == width
    (normalizer,) = runner._env_to_module[ObservationNormalizer]
    assert normalizer.links == {"a0": 0, "a1": 0}


@pytest.mark.parametrize("aggregation", ["max", "mean", "attention"])
@pytest.mark.parametrize("cell", ["none", "gru", "message_gru"])
def test_one_agent_alone(cell, aggregation):
    space = gym.spaces.Dict({"links": gym.spaces.Box(0, 1, (1,)), "observations": SEEN})
    memory = {} if cell == "none" else {"cell": cell, "max_seq_len": 4}
    model = {**MODEL, "aggregation": aggregation, **memory}
    config = declared_config([space], [gym.spaces.Discrete(2)], model=model)
    learner = make_learner(config)
    results = update(learner, make_runner(config).sample(num_timesteps=64))
    assert np.isfinite(results["a0"]["policy_loss"])


@pytest.mark.parametrize("links, said", [(2, "see 2 links"), (4, "see 4 links")])
def test_who_begins_to_talk_has_a_link_for_each_agent(links, said):
    """Without messages any number is right; with it the added module would read other agents' links, or none."""
    space = gym.spaces.Dict({"links": gym.spaces.Box(0, 1, (links,)), "observations": SEEN})
    algo = declared_config([space] * 3, [gym.spaces.Discrete(2)] * 3, policies="shared").build_algo()
    try:
        with pytest.raises(ValueError, match=f"module 't' exchanges messages.*{said}"):
            algo.add_module(
                "t", RLModuleSpec(model_config=MODEL), new_agent_to_module_mapping_fn=played_by(t="a0 a1 a2")
            )
        algo.train()
    finally:
        algo.stop()


def test_who_begins_to_talk_is_told_whom_it_hears():
    """As wide as what the others see, and without links: its first numbers would be read as links."""
    linked = gym.spaces.Dict({"links": gym.spaces.Box(0, 1, (3,)), "observations": SEEN})
    spaces = [linked, linked, gym.spaces.Box(-1, 1, (6,))]
    policies = {"pair": ["a0", "a1"], "other": ["a2"]}
    algo = declared_config(spaces, [gym.spaces.Discrete(2)] * 3, policies=policies).build_algo()
    try:
        mapping = played_by(pair="a0 a1", t="a2")
        with pytest.raises(ValueError, match="module 't' exchanges messages, and its agents see no 'links'"):
            algo.add_module("t", RLModuleSpec(model_config=MODEL), new_agent_to_module_mapping_fn=mapping)
    finally:
        algo.stop()
