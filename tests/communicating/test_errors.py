"""What a team that exchanges messages needs, told where it is missing: before anything is sampled or changed."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from tests.communicating.world import CELLS, MODEL, NORMALIZED, Meadow, Swarm, team_config
from tests.support import declared_config, discrete, make_learner, make_runner, tiny_config
from thrust_rllib import JointPPO
from thrust_rllib.evaluation import play_episodes
from thrust_rllib.team_features import fresh_features

SEEN = gym.spaces.Box(-1, 1, (3,))


def with_links(links=None, **more):
    links = gym.spaces.Box(0, 1, (3,)) if links is None else links
    return gym.spaces.Dict({"links": links, "observations": SEEN, **more})


def speaking(spaces, **options):
    return declared_config(spaces, [discrete(2)] * 3, model=MODEL, **options)


@pytest.mark.parametrize("door", ["arrays", "episodes"])
@pytest.mark.parametrize(
    "spaces, said",
    [
        ([SEEN] * 3, r"module 'a0' exchanges messages, and its agents see no 'links'.*Box\(0, 1, \(3,\)\)"),
        ([with_links(), SEEN, with_links()], r"module 'a1' exchanges messages, and its agents see no 'links'"),
        ([with_links(gym.spaces.Box(0, 1, (2,)))] * 3, r"see 2 links.*one number for each agent"),
        ([with_links(gym.spaces.Box(0, 1, (4,)))] * 3, r"see 4 links.*\(3,\)"),
        ([with_links(gym.spaces.Box(0, 1, (3, 1)))] * 3, r"'links' in Box\(0.0, 1.0, \(3, 1\).*needed: Box"),
        ([with_links(gym.spaces.Box(-1, 1, (3,)))] * 3, r"'links' in Box\(-1.0, 1.0.*needed: Box\(0, 1"),
        ([with_links(gym.spaces.MultiBinary(3))] * 3, r"'links' in MultiBinary\(3\); needed: Box"),
        ([gym.spaces.Dict({"links": gym.spaces.Box(0, 1, (3,))})] * 3, "'links' and nothing to encode"),
    ],
)
def test_observations_without_fitting_links(spaces, said, door):
    with pytest.raises(ValueError, match=said):
        speaking(spaces, runners={"sampling": door}).validate()


def test_links_without_messages_are_numbers_as_others():
    config = declared_config([with_links(gym.spaces.Box(0, 1, (2,)))] * 3, [discrete(2)] * 3)
    assert make_runner(config).sample(num_timesteps=8)[0].stream("a0").obs.shape[-1] == 5


def test_a_compiled_learner():
    config = team_config().framework(torch_compile_learner=True)
    with pytest.raises(ValueError, match=r"torch_compile_learner=True with module 'left'.*exchange messages"):
        config.validate()


@pytest.mark.parametrize(
    "key, nearest",
    [("mesage_size", "message_size"), ("agregation", "aggregation"), ("encoder_hidden", "encoder_hiddens")],
)
def test_a_misspelt_key(key, nearest):
    with pytest.raises(ValueError, match=f"'{key}'.*did you mean '{nearest}'"):
        make_runner(team_config(model={key: 2}))


def test_misspelt_rounds():
    config = tiny_config(Meadow, model={"mesage_rounds": 2})
    with pytest.raises(ValueError, match="'mesage_rounds'.*did you mean 'message_rounds'"):
        make_runner(config)


@pytest.mark.parametrize(
    "model, said",
    [
        ({"cell": "messagegru"}, "cell='messagegru'.*did you mean 'message_gru'"),
        ({"vf_share_layers": False}, "vf_share_layers is False.*use a team critic"),
        ({"message_rounds": -1}, "message_rounds is -1"),
        ({"cell": "message_gru", "message_rounds": 0}, "message_rounds is 0 with cell='message_gru'"),
        ({"aggregation": "sum"}, "aggregation is 'sum'; needed: one of max, mean, attention"),
    ],
)
def test_settings_that_cannot_be(model, said):
    with pytest.raises(ValueError, match=said):
        make_runner(team_config(model=model))


def test_a_memory_in_messages_without_messages():
    with pytest.raises(ValueError, match="needs message_rounds"):
        tiny_config(Meadow, model={"cell": "message_gru"}).validate()


def unlike(door, **left):
    specs = {"left": RLModuleSpec(model_config=MODEL | left), "right": RLModuleSpec(model_config=MODEL)}
    config = team_config(runners={"sampling": door})
    return config.rl_module(rl_module_spec=MultiRLModuleSpec(rl_module_specs=specs), model_config={})


@pytest.mark.parametrize("door", ["arrays", "episodes"])
@pytest.mark.parametrize(
    "left, said",
    [
        ({"message_size": 4}, r"message_size differs.*\{'left': 4, 'right': 8\}"),
        ({"message_rounds": 1}, r"message_rounds differs"),
        ({"aggregation": "mean"}, r"aggregation differs"),
        ({"message_content": "both"}, r"message_content differs"),
        ({"cell": "message_gru"}, r"cell='message_gru' differs"),
    ],
)
def test_modules_that_do_not_understand_each_other(door, left, said):
    """The learner tells: runners of other processes, or of the general door, would only when they act."""
    config = unlike(door, **left)
    config.validate()
    with pytest.raises(ValueError, match=said):
        make_learner(config, config.module_spaces())


def test_modules_may_differ_in_what_they_keep_for_themselves():
    config = unlike("arrays", encoder_hiddens=[5, 6], fcnet_hiddens=[7], cell="gru", cell_size=3, max_seq_len=4)
    config.validate()
    learner = make_learner(config, config.module_spaces())
    assert len({getattr(learner.module[m], "cell_size", None) for m in learner.module.keys()}) == 2


class Plays:
    """ "bee" is played by another module."""

    def __init__(self, bee):
        self.bee = bee

    def __call__(self, agent_id, episode=None, **kwargs):
        return self.bee if agent_id == "bee" else "left" if agent_id == "cat" else "right"


@pytest.mark.parametrize("door", ["arrays", "episodes"])
@pytest.mark.parametrize("cell", ["none", "message_gru"])
def test_a_module_that_joins_must_understand_the_others(build, tmp_path, door, cell):
    """Who does not is refused before anything has changed; who does speaks from the next rollout on."""
    algo = build(team_config(cell, runners={**NORMALIZED, "sampling": door}, iterate_all_minibatches=True))
    algo.train()
    for other in ({"message_size": 4}, {"message_rounds": 1}, {"cell": "message_gru" if cell == "none" else "gru"}):
        with pytest.raises(ValueError, match=f"{next(iter(other))}.* differs"):
            algo.add_module(
                "new", module_spec=RLModuleSpec(model_config=other), new_agent_to_module_mapping_fn=Plays("new")
            )
        assert sorted(algo.config.policies) == ["left", "right"]
    algo.add_module("idle", module_spec=RLModuleSpec(model_config={"message_size": 4}))  # it plays nobody
    algo.train()
    algo.add_module("new", new_agent_to_module_mapping_fn=Plays("new"))
    results = algo.train()
    assert results["learners"]["__all_modules__"]["num_non_finite_minibatches"] == 0
    with pytest.raises(ValueError, match="message_size differs"):
        algo.remove_module("new", new_agent_to_module_mapping_fn=Plays("idle"))
    restored = JointPPO.from_checkpoint(algo.save_to_path(tmp_path / "saved"))
    assert sorted(restored.config.policies) == ["idle", "left", "new", "right"]
    restored.train()
    restored.stop()
    algo.remove_module("new", new_agent_to_module_mapping_fn=Plays("left"))
    algo.train()


class Whispers(Swarm):
    """Links point at absent agents, and it does not say who they are."""

    def acts_next(self):
        return None


def test_links_at_absent_agents_of_an_environment_that_does_not_say_who_acts():
    runner = make_runner(team_config(env=Whispers, env_config={"tells": True}))
    with pytest.raises(ValueError, match=r"hears agent '\w+', which does not act, .*say who acts next"):
        runner.sample(num_timesteps=40)


@pytest.mark.parametrize("cell", CELLS)
def test_features_and_episodes_of_agents_that_come_and_go(build, cell):
    """What asks runners and learners beside the training loop knows of messages, too."""
    algo = build(team_config(cell, diversity_interval=1, minibatch_size=None))
    algo.train()
    features = fresh_features(algo, 8)
    assert sorted(features) == sorted(Meadow().possible_agents)
    assert all(np.isfinite(x).all() and x.shape[0] == 8 for x in features.values())
    assert play_episodes(algo, 3, seed=1).lengths.min() >= 1
