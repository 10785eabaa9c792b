"""Modules come and go while training: `JointPPO.add_module`, `JointPPO.remove_module`."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
import ray
import torch
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner

from tests.general.doors import assert_same_batches
from tests.support import (
    box,
    declared_config,
    discrete,
    largest_difference,
    make_learner,
    make_runner,
    optimizer_states,
    parameters,
    tiny_config,
)
from thrust_rllib import JointPPO, RedundancyPenalty
from thrust_rllib.evaluation import play_episodes
from thrust_rllib.rl_modules.mlp import MLPModule
from thrust_rllib.rl_modules.recurrent import LSTMModule
from thrust_rllib.team_changes import specs_in, with_module, without_module
from thrust_rllib.trained_team import load_team

DOORS = ("arrays", "episodes")
MODELS = {
    "mlp": {"fcnet_hiddens": [12]},
    "lstm": {"cell": "lstm", "cell_size": 8, "fcnet_hiddens": [12], "max_seq_len": 8},
}
DEADLINE_S = 60


class Plays:
    """A mapping function: agents play themselves, but for some."""

    def __init__(self, **others):
        self.others = others

    def __call__(self, agent_id, episode=None, **kwargs):
        return self.others.get(agent_id, agent_id)


class Lives(TorchRLModule):
    """A module without values."""

    def setup(self):
        self.layer = torch.nn.Linear(5, 3)

    def _forward(self, batch, **kwargs):
        return {"action_dist_inputs": self.layer(batch["obs"])}


class OwnMLP(MLPModule):
    """A class that a user names."""


def team(door="arrays", model="mlp", **options):
    """Three agents in environments of random observations, a coupling, an evaluation runner."""
    runners = {"sampling": door, "normalize_observations": True, **options.pop("runners", {})}
    options = {"cross_agent_losses": {"redundancy": RedundancyPenalty()}, "model": MODELS[model], **options}
    config = tiny_config("debug/random_observations", {"episode_length": 5}, runners=runners, **options)
    return config.evaluation(evaluation_interval=1, evaluation_duration=2)


def everywhere(algo, ask):
    """`ask(runner)` of all runners, those of the evaluation too."""
    groups = algo.env_runner_group, algo.eval_env_runner_group
    return [answer for group in groups if group is not None for answer in group.foreach_env_runner(ask)]


def check_weights(algo):
    """Every runner acts by the learner's weights, and has its modules, and no others."""
    learner = algo.learner_group.get_weights()
    for runner in everywhere(algo, lambda runner: {m: runner.module[m].get_state() for m in runner.module.keys()}):
        assert sorted(runner) == sorted(learner) == sorted(algo.config.policies)
        for module_id, state in runner.items():
            assert state
            for name, value in state.items():
                np.testing.assert_array_equal(value, learner[module_id][name], err_msg=f"{module_id} {name}")


def moments(algo):
    """{module: count} of the training runner's moments of observations."""
    return {m: float(x.count) for m, x in algo.env_runner.normalizer.moments.items()}


def own_parameters(algo):
    return parameters(algo.learner_group._learner)


def moved(before, after):
    return [m for m in after if m in before and largest_difference(before[m], after[m]) > 0.0]


def paths(results, path=()):
    for key, value in results.items():
        if isinstance(value, dict):
            yield from paths(value, (*path, key))
        else:
            yield (*path, key)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("door", DOORS)
def test_a_league_of_self_play(build, door, model):
    algo = build(team(door, model, trained=["agent_0", "agent_1"]))
    algo.train()
    counts = moments(algo)
    algo.add_module(
        "snapshot_1",
        RLModuleSpec(),
        config_overrides={"lr": 0.01},
        new_agent_to_module_mapping_fn=Plays(agent_1="snapshot_1"),
        new_should_module_be_updated={"agent_0"},
    )
    check_weights(algo)
    assert moments(algo) == {**counts, "snapshot_1": 0.0} and counts["agent_0"] > 0
    algo.copy_module("agent_0", "snapshot_1")
    check_weights(algo)
    assert moments(algo)["snapshot_1"] == counts["agent_0"]
    before = own_parameters(algo)
    assert largest_difference(before["snapshot_1"], before["agent_0"]) == 0.0
    result = algo.train()
    check_weights(algo)
    assert moved(before, own_parameters(algo)) == ["agent_0"]
    steps = result["env_runners"]["num_module_steps_sampled"]
    assert steps["snapshot_1"] == steps["agent_0"] == 64
    assert "snapshot_1" in result["evaluation"]["env_runners"]["module_episode_returns_mean"]

    # One more, which learns by its own rate; the first one waits.
    algo.add_module(
        "snapshot_2",
        new_agent_to_module_mapping_fn=Plays(agent_1="snapshot_2"),
        new_should_module_be_updated=["snapshot_2", "agent_0"],
        config_overrides={"lr": 0.0},
    )
    before = own_parameters(algo)
    algo.train()
    check_weights(algo)
    assert moved(before, own_parameters(algo)) == ["agent_0"], "a rate of 0 moves nobody"

    kept = moments(algo)["agent_1"]
    algo.remove_module("snapshot_2", new_agent_to_module_mapping_fn=Plays())
    algo.remove_module("snapshot_1")
    check_weights(algo)
    assert algo.config.policies_to_train == ["agent_0"]
    assert moments(algo)["agent_1"] == kept == counts["agent_1"]
    result = algo.train()
    assert sorted(algo.config.policies) == ["agent_0", "agent_1", "agent_2"]
    assert [path for path in paths(result) if any("snapshot" in str(key) for key in path)] == []
    assert not any("snapshot" in name for name in optimizer_states(algo.learner_group._learner))
    assert play_episodes(algo, 2).returns.shape == (2, 3)


def test_a_module_that_is_added_has_its_gradient_from_the_coupling_after_the_next_look(build):
    """Until then the report is the last look's, of the modules that were there."""
    algo = build(team(coupling_gradient_interval=2))
    reported = []
    for update in range(3):
        found = algo.train()["learners"]
        reported.append("redundancy" in found.get("new", {}).get("coupling_gradient", {}))
        if update == 0:
            algo.add_module("new", new_agent_to_module_mapping_fn=Plays(agent_1="new"))
    assert reported == [False, False, True] and "redundancy" in found["agent_0"]["coupling_gradient"]


def test_both_ways_of_sampling_give_the_same_batch_after_a_change(build):
    """Environments begin anew, memories too; a module that waits, recurrent or not, is in no batch."""
    batches = {}
    for door in DOORS:
        algo = build(team(door, "mlp"))
        runner, learner = algo.env_runner, algo.learner_group._learner
        runner.sample(num_timesteps=7, explore=False)  # in the middle of an episode
        algo.add_module("waits", RLModuleSpec(model_config=MODELS["lstm"]))
        learner._batches(runner.sample(num_timesteps=7, explore=False))
        algo.add_module(
            "new", RLModuleSpec(model_config=MODELS["lstm"]), new_agent_to_module_mapping_fn=Plays(agent_1="new")
        )
        for module_id in ("agent_0", "agent_2", "new"):
            generator = torch.Generator().manual_seed(4)
            for p in learner.module[module_id].parameters():
                with torch.no_grad():
                    p.copy_(torch.randn(p.shape, generator=generator))
        algo._hand_out_weights()
        (batches[door],) = learner._batches(runner.sample(num_timesteps=22, explore=False))
    arrays, episodes = batches["arrays"], batches["episodes"]
    assert list(arrays.modules) == ["agent_0", "agent_2", "new"] and arrays.agents == episodes.agents
    assert arrays.episode_start[0].all() and not arrays.modules["new"].state_in[:, :2].any()
    assert arrays.modules["new"].state_in[:, 2:].any()
    assert arrays.modules["agent_0"].state_in is None and episodes.modules["agent_0"].state_in is None
    assert_same_batches(arrays, episodes)
    np.testing.assert_allclose(arrays.modules["new"].state_in, episodes.modules["new"].state_in, atol=1e-5)


# --------------------------------------------------------------------------------------- what a spec leaves out


def changed(config, spec=None, mapping=None, overrides=None, trained=None, module_id="new"):
    """`with_module` of a configuration."""
    learner = make_learner(config)
    return with_module(learner.config, specs_in(learner), module_id, spec, overrides, mapping, trained)


def test_what_a_spec_leaves_out_is_as_for_the_others():
    config = tiny_config(model={"fcnet_hiddens": [7], "fcnet_activation": "relu"})
    change, spec = changed(config)
    assert spec.module_class is MLPModule and not spec.inference_only
    assert spec.model_config["fcnet_hiddens"] == [7] and spec.observation_space.shape == (5,)
    assert list(change.policies) == ["agent_0", "agent_1", "agent_2", "new"]
    assert change.policies["new"].observation_space == spec.observation_space
    assert change.policies["agent_0"].observation_space is None  # found with the environment
    _, spec = changed(config, RLModuleSpec(model_config={"cell": "lstm", "cell_size": 3, "max_seq_len": 4}))
    assert spec.module_class is LSTMModule and spec.build().model_config["fcnet_activation"] == "relu"
    own = tiny_config().rl_module(rl_module_spec=RLModuleSpec(OwnMLP), model_config={"fcnet_hiddens": [7]})
    assert changed(own)[1].module_class is OwnMLP
    assert changed(own, RLModuleSpec(LSTMModule))[1].module_class is LSTMModule
    specs = {m: RLModuleSpec(OwnMLP if m == "agent_0" else MLPModule) for m in ("agent_0", "agent_1", "agent_2")}
    mixed = tiny_config(policies=list(specs)).multi_agent(policy_mapping_fn=Plays())
    mixed.rl_module(rl_module_spec=MultiRLModuleSpec(rl_module_specs=specs))
    assert changed(mixed)[1].module_class is MLPModule


def test_who_is_trained_has_the_same_order_in_every_process():
    change, _ = changed(tiny_config(trained=["agent_2"]), trained={"new", "agent_1", "agent_0"})
    assert change.policies_to_train == ["agent_0", "agent_1", "new"]
    change, _ = changed(tiny_config(trained=["agent_2"]))
    assert change.policies_to_train == ["agent_2"]
    learner = make_learner(tiny_config(trained=["agent_2", "agent_1"], overrides={"agent_1": {"lr": 0.1}}))
    change = without_module(learner.config, specs_in(learner), "agent_1", Plays(agent_1="agent_0"), None)
    assert change.policies_to_train == ["agent_2"] and change.overrides == {}


def test_agents_with_other_spaces_need_other_modules():
    config = declared_config([box(3), box(4), box(3)], [discrete(2)] * 3)
    with pytest.raises(ValueError, match="plays no agent, and the modules differ in their spaces"):
        changed(config)
    _, spec = changed(config, mapping=lambda agent, *_, **__: "new" if agent == "a1" else agent)
    assert spec.observation_space.shape == (4,)
    _, spec = changed(config, RLModuleSpec(observation_space=box(6), action_space=discrete(3)))
    assert spec.observation_space == box(6) and spec.action_space == discrete(3)
    with pytest.raises(ValueError, match="agents 'a0' and 'a1' share module 'new'"):
        changed(config, mapping=lambda *_, **__: "new")
    with pytest.raises(ValueError, match="'a0' has the observation space .* 'a1', which it would play"):
        changed(config, mapping=lambda agent, *_, **__: {"a0": "a1", "a1": "a0", "a2": "new"}[agent])
    change, _ = changed(config, mapping=lambda agent, *_, **__: {"a0": "a2", "a1": "a1", "a2": "new"}[agent])
    assert change.policies["a0"].observation_space.shape == (3,)  # waits


def test_a_runner_that_cannot_change_its_team_is_told():
    config = tiny_config(runners={"sampling": "episodes", "env_runner_cls": MultiAgentEnvRunner})
    learner = make_learner(config, make_runner(tiny_config()).get_spaces())
    with pytest.raises(ValueError, match="env_runner_cls=MultiAgentEnvRunner cannot change its team"):
        with_module(learner.config, specs_in(learner), "new", None, None, None, None)


# ------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(("door", "model"), [("arrays", "mlp"), ("episodes", "lstm")])
def test_a_checkpoint_has_the_team_of_its_time(build, tmp_path, door, model):
    algo = build(team(door, model))
    algo.add_module("new", new_agent_to_module_mapping_fn=Plays(agent_1="new"), config_overrides={"lr": 0.002})
    algo.add_module("waits", RLModuleSpec(model_config={"fcnet_hiddens": [3]}))
    algo.train()
    path = algo.save_to_path(str(tmp_path / "saved"))
    restored = JointPPO.from_checkpoint(path)
    try:
        check_weights(restored)
        mine, theirs = (each.learner_group._learner for each in (algo, restored))
        assert sorted(restored.config.policies) == ["agent_0", "agent_1", "agent_2", "new", "waits"]
        assert restored.config.policy_mapping_fn.table["agent_1"] == "new"
        assert theirs.config.get_config_for_module("new").lr == 0.002
        assert largest_difference(parameters(mine), parameters(theirs)) == 0.0
        assert largest_difference(optimizer_states(mine), optimizer_states(theirs)) == 0.0
        assert moments(restored) == moments(algo) and moments(algo)["new"] > 0
        restored.train()
        restored.copy_module("new", "agent_1")
        restored.remove_module("new", new_agent_to_module_mapping_fn=Plays())
        restored.train()
        check_weights(restored)
        assert largest_difference(parameters(mine)["agent_1"], own_parameters(restored)["agent_1"]) > 0.0
    finally:
        restored.stop()
    loaded = load_team(path)
    assert play_episodes(loaded, 2).returns.shape == (2, 3) and loaded.env_runner.module_of["agent_1"] == "new"


# --------------------------------------------------------------------------------------------------- processes


def test_learners_and_runners_in_other_processes(build):
    config = team(runners={"num_env_runners": 1, "num_cpus_per_env_runner": 0.5}, train_batch_size_per_learner=32)
    config.learners(num_learners=2, num_cpus_per_learner=0.5).evaluation(evaluation_interval=None)
    algo = build(config)
    algo.train()
    algo.add_module("new", new_agent_to_module_mapping_fn=Plays(agent_1="new"))
    check_weights(algo)
    before = algo.learner_group.get_weights()["new"]
    algo.train()
    check_weights(algo)
    assert largest_difference(before, algo.learner_group.get_weights()["new"]) > 0.0
    algo.add_module("small", RLModuleSpec(model_config={"fcnet_hiddens": [3]}))
    with pytest.raises(ValueError, match="have different networks"):
        algo.copy_module("new", "small")
    with pytest.raises(ValueError, match="has no value function"):
        algo.add_module("blind", RLModuleSpec(Lives))
    algo.remove_module("agent_1")
    algo.train()
    check_weights(algo)
    first, second = algo.learner_group._get_results(algo.learner_group.foreach_learner(parameters))
    assert sorted(first) == ["agent_0", "agent_2", "new", "small"] and largest_difference(first, second) == 0.0


@pytest.mark.slow_learners
def test_a_runner_that_comes_back_has_the_team_of_now(build):
    """Ray starts it again as it was before the change."""
    algo = build(team(runners={"num_env_runners": 1}).evaluation(evaluation_interval=None))
    algo.train()
    algo.add_module("new", new_agent_to_module_mapping_fn=Plays(agent_1="new"))
    algo.train()
    group = algo.env_runner_group
    ((pid, *_),) = group.foreach_env_runner(_who_and_what, local_env_runner=False)
    ray.kill(group._worker_manager.actors()[1], no_restart=False)
    algo.remove_module("agent_1")  # while it is away
    deadline = time.monotonic() + DEADLINE_S
    while not group.foreach_env_runner(_who_and_what, local_env_runner=False):
        algo.train()
        assert time.monotonic() < deadline
    (_, _, counts), (other, table, found) = group.foreach_env_runner(_who_and_what)
    assert other != pid and table["agent_1"] == "new"
    assert found == counts and sorted(counts) == ["agent_0", "agent_2", "new"] and counts["new"] > 0
    algo.train()
    check_weights(algo)


def _who_and_what(runner):
    counts = {m: float(x.count) for m, x in runner.normalizer.moments.items()}
    return os.getpid(), runner.config.policy_mapping_fn.table, counts
