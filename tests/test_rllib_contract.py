"""What the package leans on in Ray RLlib 2.60 (and torch), one behaviour per test.

A failure after an upgrade names what has changed; the docstring of each test says who relies on it.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re

import numpy as np
import pytest
import ray
import torch
import tree
from ray._private.utils import set_omp_num_threads_if_unset
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.ppo import PPO, PPOConfig
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.connectors.env_to_module import EnvToModulePipeline
from ray.rllib.connectors.learner import AddOneTsToEpisodesAndTruncate
from ray.rllib.core.distribution.torch.torch_distribution import TorchDeterministic
from ray.rllib.core.learner.learner import Learner
from ray.rllib.core.learner.learner_group import LearnerGroup
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger
from ray.rllib.utils.schedules.scheduler import Scheduler
from ray.train._internal.backend_executor import BackendExecutor
from ray.train._internal.worker_group import WorkerGroup
from ray.train.torch.config import TorchConfig, _TorchBackend

from tests.recurrent.test_slow_acting_agent import Hierarchy
from tests.support import make_learner, make_runner, tiny_config, update
from thrust_rllib import JointEnvRunner, JointLearnerGroup
from thrust_rllib.episode_runner import JointEpisodeRunner
from thrust_rllib.joint_episode import JointEpisode
from thrust_rllib.unserved_options import NOT_SERVED, ON_EPISODE


def source(thing) -> str:
    return inspect.getsource(thing)


def keywords(function) -> set[str]:
    return set(inspect.signature(function).parameters)


def test_the_version_is_2_60():
    assert ray.__version__.startswith("2.60.")


# ------------------------------------------------------------------------------------------ data


def test_dm_tree_takes_a_dataclass_for_a_leaf():
    """JointBatch travels through RLlib's nested structures in one piece."""

    @dataclasses.dataclass
    class Leaf:
        x: np.ndarray

    leaf = Leaf(np.zeros(3))
    assert tree.flatten({"a": [leaf]}) == [leaf]


def test_training_data_carries_any_episodes():
    """JointLearnerGroup hands rollouts over as `episodes` or `episodes_refs`."""
    data = TrainingData(episodes=["anything"])
    assert data.episodes == ["anything"] and data.episodes_refs is None
    data.validate()


# ------------------------------------------------------------------------------------------ torch


def adam(**kwargs):
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(5))
    return p, torch.optim.Adam([p], lr=0.1, **kwargs)


def test_fused_adam_skips_a_step_by_a_tensor_and_leaves_its_state():
    """OptimizerPass.step: `found_inf` = 1 moves nothing, the step count included; 0 is an ordinary step."""
    p, optimizer = adam(fused=True)
    p.grad = torch.ones(5)
    optimizer.found_inf = torch.zeros(())
    optimizer.step()
    before = [p.detach().clone(), *(x.clone() for x in optimizer.state[p].values())]
    p.grad = torch.full((5,), float("nan"))
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    for old, new in zip(before, [p.detach(), *optimizer.state[p].values()], strict=True):
        assert torch.equal(old, new)
    assert set(optimizer.state_dict()) == {"state", "param_groups"}  # found_inf is no part of a checkpoint


def test_fused_adam_computes_what_plain_adam_does():
    (p, fused), (q, plain) = adam(fused=True), adam()
    for k in range(5):
        for x, optimizer in ((p, fused), (q, plain)):
            x.grad = torch.linspace(-1, 1, 5) * (k + 1)
            if optimizer is fused:
                optimizer.found_inf = torch.zeros(())
            optimizer.step()
    torch.testing.assert_close(p, q)


# ------------------------------------------------------------------------------------------ runner


def test_the_order_of_the_runners_construction():
    """JointEnvRunner.make_env sets what the connectors are built from, and they what make_module needs."""
    calls = re.findall(
        r"self\.(make_env|make_module)\(\)|self\.config\.(build_env_to_module_connector|build_module_to_env_connector)",
        source(MultiAgentEnvRunner.__init__),
    )
    assert ["".join(call) for call in calls] == [
        "make_env",
        "build_env_to_module_connector",
        "make_module",
        "build_module_to_env_connector",
    ]
    seen = []

    class Watched(JointEnvRunner):
        def make_env(self):
            seen.append(("env", hasattr(self, "_env_to_module"), self._seed))
            super().make_env()

        def make_module(self):
            seen.append(("module", hasattr(self, "_env_to_module"), hasattr(self, "_callbacks")))
            super().make_module()

    config = tiny_config()
    config.validate()
    Watched(config=config, worker_index=2)
    assert seen == [("env", False, 5), ("module", True, True)]  # seed 3 + worker 2


def test_sample_calls_our_loop_with_these_arguments():
    """JointEnvRunner overrides `_sample` only."""
    ours = keywords(JointEnvRunner._sample) - {"_ray_trace_ctx"}  # Ray adds it to classes that were actors
    assert keywords(MultiAgentEnvRunner._sample) - {"_ray_trace_ctx"} == ours
    text = source(MultiAgentEnvRunner.sample)
    assert "self._sample(" in text and "get_rollout_fragment_length" in text


def test_a_rollout_is_as_long_as_the_configuration_says():
    """The default of num_timesteps: rollout_fragment_length per environment."""
    config = tiny_config(runners={"rollout_fragment_length": 8}, num_envs=4)
    (batch,) = make_runner(config).sample()
    assert batch.valid.shape == (8, 4)


def test_local_evaluation_samples_episodes_and_counts_their_steps():
    """SampledSteps has the two methods that RLlib calls on what an evaluation returns."""
    text = source(Algorithm._evaluate_on_local_env_runner)
    assert "num_episodes=duration" in text
    assert "e.agent_steps()" in text and "e.env_steps()" in text
    assert "num_episodes" in source(Algorithm._evaluate_with_fixed_duration)


def test_every_update_of_weights_and_connectors_of_a_runner_is_set_state():
    """`JointPPO._before_evaluate`: both travel under one tag, so the second is dropped while the first is under way."""
    for method in (EnvRunnerGroup.sync_weights, EnvRunnerGroup.sync_env_runner_states):
        text = source(method)
        assert "foreach_env_runner_async_fetch_ready(" in text and 'tag="set_state"' in text
    assert tiny_config().max_requests_in_flight_per_env_runner == 1


def test_sync_weights_takes_a_list_of_modules():
    """JointPPO.training_step."""
    assert {"policies", "from_worker_or_learner_group", "inference_only"} <= keywords(EnvRunnerGroup.sync_weights)


def test_the_runners_connectors_are_made_and_kept_by_these_methods():
    """ObservationNormalizer is a connector for the sake of this machinery."""
    for name in ("get_state", "set_state", "merge_states", "reset_state", "get_ctor_args_and_kwargs"):
        assert hasattr(ConnectorV2, name)
    pipeline = EnvToModulePipeline(None, None, connectors=[])
    assert pipeline[ConnectorV2] == []  # a class as key: the pieces of that class


def test_every_runner_gets_a_seed_of_its_own():
    config = tiny_config(seed=10)
    assert [make_runner(config, worker_index=k)._seed for k in (0, 1, 2)] == [10, 11, 12]


# ------------------------------------------------------------------------------------------ learner


def test_update_has_these_arguments():
    """JointPPOLearner.update replaces it with the same ones."""
    ours = keywords(make_learner(tiny_config()).update)
    not_ours = {"self", "num_total_minibatches", "_no_metrics_reduce"}  # nobody gives them; **kwargs would take them
    assert keywords(Learner.update) - not_ours <= ours


def test_the_learner_logs_into_a_metrics_logger_that_update_reduces():
    logger = MetricsLogger(root=False)
    logger.log_dict({"a": 1.0}, key="m", window=1)
    logger.log_value(("m", "n"), 2, reduce="sum")
    assert MetricsLogger.peek_results(logger.reduce()) == {"m": {"a": 1.0, "n": 2}}


def test_optimizers_are_named_by_module():
    """JointPPOLearner._passes finds them as `<module>_<name>`."""
    learner = make_learner(tiny_config(critic_lr=1e-3))
    assert isinstance(learner, TorchLearner)
    assert set(learner._named_optimizers) == {
        f"agent_{i}_{name}" for i in range(3) for name in ("default_optimizer", "critic_optimizer")
    }
    # Schedules are kept by optimizer.
    assert set(learner._optimizer_lr_schedules) == set(learner._named_optimizers.values())


def test_should_module_be_updated_follows_the_configuration():
    learner = make_learner(tiny_config(trained=["agent_1"]))
    assert [learner.should_module_be_updated(f"agent_{i}", None) for i in range(3)] == [False, True, False]


def test_the_learner_counts_its_updates():
    """Runners take weights with a higher `weights_seq_no` only."""
    config = tiny_config()
    learner = make_learner(config)
    before = learner._weights_seq_no
    update(learner, make_runner(config).sample(num_timesteps=64))
    assert learner._weights_seq_no == before + 1
    assert learner.get_state()["weights_seq_no"] == before + 1


def test_a_scheduler_interpolates_and_keeps_fixed_values():
    schedule = Scheduler(fixed_value_or_schedule=[[0, 1.0], [10, 0.0]], framework="torch", device="cpu")
    assert float(schedule.get_current_value()) == 1.0
    assert schedule.update(timestep=5) == pytest.approx(0.5)
    assert float(schedule.get_current_value()) == pytest.approx(0.5)
    assert schedule.update(timestep=99) == 0.0
    fixed = Scheduler(fixed_value_or_schedule=0.3, framework="torch", device="cpu")
    fixed.update(timestep=5)
    assert float(fixed.get_current_value()) == pytest.approx(0.3)


def test_the_learner_group_is_built_by_the_configuration():
    """JointPPOConfig.build_learner_group: RLlib has no option for the class."""
    assert "self.config.build_learner_group(" in source(Algorithm.setup)
    assert {"config", "module_spec", "placement_group"} <= keywords(LearnerGroup.__init__)
    config = tiny_config()
    runner = make_runner(config)
    group = config.build_learner_group(spaces=runner.get_spaces())
    assert type(group) is JointLearnerGroup and group.is_local
    assert {"is_local", "is_remote"} <= set(dir(LearnerGroup))
    for name in ("_get_results", "get_state", "set_state", "get_weights"):
        assert hasattr(LearnerGroup, name)


def test_a_state_is_taken_and_set_by_components():
    """JointPPOLearner.get_state adds a component of its own."""
    learner = make_learner(tiny_config())
    assert {"rl_module", "optimizer", "joint"} <= set(learner.get_state())
    assert "joint" not in learner.get_state(components="rl_module")
    assert "optimizer" not in learner.get_state(not_components="optimizer")


# ------------------------------------------------------------------------------------------ configuration


def test_an_unknown_key_of_a_dict_is_set_silently_by_rllib():
    """Why JointPPOConfig.update_from_dict looks first."""
    assert PPOConfig().update_from_dict({"clip_parm": 1}).clip_parm == 1


@pytest.mark.parametrize("name", sorted(NOT_SERVED))
def test_every_setting_that_is_refused_exists(name):
    assert hasattr(AlgorithmConfig(), name) or hasattr(PPOConfig(), name)


@pytest.mark.parametrize("name", ON_EPISODE)
def test_the_callbacks_on_episodes_exist(name):
    assert hasattr(RLlibCallback, name)
    assert hasattr(AlgorithmConfig(), f"callbacks_{name}")


def test_there_are_no_other_callbacks_on_episodes():
    assert {name for name in dir(RLlibCallback) if name.startswith("on_episode")} == set(ON_EPISODE)


def test_a_copied_configuration_can_be_changed_again():
    config = tiny_config()
    config.freeze()
    copy = config.copy(copy_frozen=False)
    copy.lr = 0.5
    assert config.lr != 0.5 and not copy._is_frozen


def test_rllibs_recurrent_ppo_fails_where_an_agents_step_is_open_at_a_cut(build):
    """ray#60205: why the general door's memory lies in the episode (`JointEpisode.memory`, `TeamMemory`)."""
    config = PPOConfig().environment(Hierarchy).env_runners(num_env_runners=0, rollout_fragment_length=10)
    config.training(train_batch_size_per_learner=10, minibatch_size=10, num_epochs=1)
    config.multi_agent(policies=["high", "low"], policy_mapping_fn=lambda agent, *args, **kwargs: agent)
    config.rl_module(model_config=DefaultModelConfig(use_lstm=True, max_seq_len=5, vf_share_layers=True))
    algo = build(config)
    algo.train()
    with pytest.raises(IndexError, match="out of bounds"):
        algo.train()


def test_options_per_module_make_a_configuration_per_module():
    config = tiny_config(overrides={"agent_0": {"lr": 0.5}})
    assert config.get_config_for_module("agent_0").lr == 0.5
    assert config.get_config_for_module("agent_1") is config


def test_the_module_spec_is_made_for_the_policies_from_spaces():
    config = tiny_config()
    spec = config.get_multi_rl_module_spec(spaces=make_runner(config).get_spaces())
    assert isinstance(spec, MultiRLModuleSpec)
    assert sorted(spec.rl_module_specs) == ["agent_0", "agent_1", "agent_2"]
    assert spec.rl_module_specs["agent_0"].model_config["fcnet_hiddens"] == [16, 12]


def test_the_algorithm_asks_these_hooks():
    """What JointPPO overrides."""
    assert "_before_evaluate()" in source(Algorithm.evaluate)
    assert "_get_env_id_and_creator(" in source(Algorithm.setup) + source(Algorithm.__init__)
    assert keywords(PPO.training_step) == {"self"}


def test_the_mode_of_a_distribution_is_a_distribution():
    """TeamActor samples from `to_deterministic()`."""
    x = torch.tensor([1, 2])
    assert torch.equal(TorchDeterministic(loc=x).sample(), x)


# ------------------------------------------------------------------------------------------ episodes (general door)


def stock(first, *steps):
    """A MultiAgentEpisode after these steps: (observed, acting, rewards, terminated, truncated, over)."""
    episode = MultiAgentEpisode()
    episode.add_env_reset(observations={a: 0 for a in first})
    for arguments in steps:
        add_step(episode, *arguments)
    return episode


def add_step(episode, observed, acting, rewards, terminated=(), truncated=(), over=False):
    t = episode.env_t
    episode.add_env_step(
        {a: t + 1 for a in observed},
        {a: 10 * t for a in acting},
        rewards,
        terminateds={**dict.fromkeys(terminated, True), "__all__": over},
        truncateds={**dict.fromkeys(truncated, True), "__all__": False},
        extra_model_outputs={a: {"action_logp": -float(t)} for a in acting},
    )


def test_n1_an_unobserved_termination_has_two_entries_in_the_index():
    """One fault that JointEpisode.add_env_step is there for; `_step_times` reads such an index."""
    episode = stock(
        ["a", "b"],
        (["a", "b"], ["a", "b"], {"a": 1, "b": 1}),
        (["b"], ["a", "b"], {"a": 1, "b": 1}, ["a"]),
        (["b"], ["b"], {"b": 1}),
    )
    assert episode.env_t_to_agent_t["a"].data == [0, 1, "S", 2, "S"]  # right: [0, 1, 2, "S"]
    assert episode.env_t_to_agent_t["b"].data == [0, 1, 2, 3]


def test_n2_an_agent_truncated_while_the_others_terminate_counts_as_terminated():
    """Another one: its value would be taken as 0."""
    episode = stock(["a", "b"], (["a", "b"], ["a", "b"], {"a": 1, "b": 1}, ["a"], ["b"]))
    assert episode.agent_episodes["b"].is_terminated and episode.is_terminated


def test_n3_an_episode_is_over_when_all_seen_so_far_have_ended():
    """Another one: whoever comes later would be in an episode of its own."""
    episode = stock(["a"], (["a"], ["a"], {"a": 1}, ["a"]))
    assert episode.is_terminated


def test_n4_what_is_paid_before_the_first_observation_is_dropped():
    """Another one."""
    episode = stock(
        ["a"],
        (["a"], ["a"], {"a": 1, "b": 5.0}),
        (["a", "b"], ["a"], {"a": 1}),
        (["a", "b"], ["a", "b"], {"a": 1, "b": 2.0}),
    )
    assert episode.agent_episodes["b"].get_rewards() == [2.0]  # right: [7.0]


def test_what_is_paid_before_the_first_observation_is_dropped_at_a_cut_too():
    """One fault that JointEpisode.cut is there for."""
    successor = stock(["a"], (["a"], ["a"], {"a": 1, "b": 5.0})).cut(len_lookback_buffer=1)
    assert successor.get_return(include_hanging_rewards=True) == 0.0  # right: 5.0


def test_a_step_open_at_a_cut_is_lost_without_a_lookback():
    """Another one: only an `episode_lookback_horizon` of 1 or more keeps it."""
    for lookback, rewards in ((0, []), (1, [7.0])):
        episode = stock(["a", "b"], (["a"], ["a", "b"], {"a": 1, "b": 5.0}))
        successor = episode.cut(len_lookback_buffer=lookback)
        add_step(successor, ["a", "b"], ["a"], {"a": 1, "b": 2.0})
        assert successor.agent_episodes["b"].get_rewards() == rewards


def test_a_fragment_cut_while_everybody_waits_is_over_at_once():
    """Another one, without a lookback."""
    episode = stock(["a"], ([], ["a"], {"a": 1}))
    add_step(episode, [], [], {})
    successor = episode.cut()
    add_step(successor, [], [], {})
    assert successor.is_done


def test_the_step_of_an_agent_that_terminates_unobserved_is_lost_after_a_cut():
    """Another one."""
    successor = stock(["a", "b"], (["a", "b"], ["a", "b"], {"a": 1, "b": 1})).cut(len_lookback_buffer=1)
    add_step(successor, ["a"], ["a", "b"], {"a": 1, "b": 2.0}, ["b"])
    assert len(successor.agent_episodes["b"]) == 0  # right: 1


def test_an_agent_born_after_a_cut_counts_from_the_episodes_beginning():
    """Another one; EpisodesToJointBatch (`_step_times`) knows it."""
    successor = stock(["a"], *[(["a"], ["a"], {"a": 1})] * 3).cut(len_lookback_buffer=1)
    add_step(successor, ["a", "b"], ["a"], {"a": 1})
    assert successor.env_t_to_agent_t["a"].data == [2, 3, 4]
    assert successor.env_t_to_agent_t["b"].data == ["S"] * 4 + [0]  # right: ["S", "S", 0]
    assert successor.env_t_to_agent_t["b"].lookback == 1


def test_reading_one_environment_step_of_a_fragment_loses_values_but_the_list_form_does_not():
    """The tests of JointEpisode read fragments in the list form: the other takes an agent's absolute step number for a
    place in this fragment's buffer."""
    episode = stock(["a"], (["a"], ["a"], {"a": 1.0})).cut()
    add_step(episode, ["a"], ["a"], {"a": 7.0})
    assert episode.get_rewards([0], return_list=True) == [{"a": 7.0}]
    assert episode.get_rewards(0) == {}  # right: {"a": 7.0}


def test_numpyized_episodes_keep_the_index_and_pruned_ones_the_rest():
    """EpisodesToJointBatch reads both; JointEpisodeRunner returns them so."""
    episode = stock(["a", "b"], (["a"], ["a", "b"], {"a": 1, "b": 5.0}))
    MultiAgentEnvRunner._prune_zero_len_sa_episodes(episode)
    assert set(episode.agent_episodes) == {"a"} and set(episode.env_t_to_agent_t) == {"a", "b"}
    index = episode.env_t_to_agent_t
    assert episode.to_numpy() is episode and episode.env_t_to_agent_t is index
    assert index["a"].data == [0, 1] and index["b"].data == [0, "S"]
    assert isinstance(episode.agent_episodes["a"].observations.data, np.ndarray)


def test_connectors_go_through_the_agents_that_stepped():
    """JointEpisode.get_agents_that_stepped."""

    class Episode(MultiAgentEpisode):
        def get_agents_that_stepped(self):
            return {"b"}

    episode = Episode()
    episode.add_env_reset(observations={"a": 0, "b": 0, "c": 0})
    through = ConnectorV2.single_agent_episode_iterator
    assert [single.agent_id for single in through([episode])] == ["b"]
    everybody = through([episode], agents_that_stepped_only=False)
    assert sorted(single.agent_id for single in everybody) == ["a", "b", "c"]


def test_the_extra_step_for_users_learner_connectors():
    """EpisodesToJointBatch(with_extra_step=True) leaves it out."""
    going_on = stock(["a"], *[(["a"], ["a"], {"a": 1.0})] * 3).to_numpy()
    over = stock(["a"], (["a"], ["a"], {"a": 1.0}, ["a"], (), True)).to_numpy()
    ids = going_on.id_, over.id_
    AddOneTsToEpisodesAndTruncate()(rl_module=None, batch={}, episodes=[going_on, over], shared_data={})
    assert [len(e.agent_episodes["a"]) for e in (going_on, over)] == [4, 2]
    assert [len(e) for e in (going_on, over)] == [3, 1]
    assert going_on.agent_episodes["a"].get_observations().tolist() == [0, 1, 2, 3, 3]
    assert going_on.agent_episodes["a"].is_truncated and over.agent_episodes["a"].is_terminated
    assert not over.agent_episodes["a"].is_truncated
    assert (going_on.id_, over.id_) == (f"{ids[0]}_0", f"{ids[1]}_1")
    assert going_on.agent_episodes["a"].multi_agent_episode_id == going_on.id_
    assert going_on.env_t_to_agent_t["a"].data == [0, 1, 2, 3]


class Watched(JointEpisodeRunner):
    """Writes down what RLlib's loop calls."""

    def make_env(self):
        self.calls = []
        super().make_env()

    def _new_episode(self, env_index, episodes=None):
        self.calls.append("new")
        super()._new_episode(env_index, episodes)

    def _try_env_reset(self, *, seed=None, options=None):
        self.calls.append("reset")
        return super()._try_env_reset(seed=seed, options=options)

    def _try_env_step(self, actions):
        self.calls.append("step")
        self.played = actions
        return super()._try_env_step(actions)

    def _increase_sampled_metrics(self, num_steps, next_obs, episode):
        self.calls.append("count")
        assert (num_steps, type(episode)) == (1, JointEpisode)
        return super()._increase_sampled_metrics(num_steps, next_obs, episode)

    def _log_env_steps(self, metric, num_steps):
        self.calls.append("log")
        super()._log_env_steps(metric, num_steps)


def watched(**runners):
    """A runner of two environments, episodes of 7 steps."""
    config = tiny_config(
        "debug/alignment", {"agents": 2, "episode_length": 7}, runners={"sampling": "episodes", **runners}
    )
    config.validate()
    return Watched(config=config, worker_index=0)


def test_the_loop_calls_the_hooks_that_the_general_door_overrides():
    runner = watched()
    episodes = runner.sample(num_timesteps=20, explore=True)
    # 10 steps of two environments. Both are over after 7: the next call resets them and is not counted.
    assert {name: runner.calls.count(name) for name in ("reset", "step", "count", "log", "new")} == {
        "reset": 1, "step": 11, "count": 20, "log": 20, "new": 4,
    }  # fmt: skip
    assert [(len(e), e.is_done, e.env_index) for e in episodes] == [
        (7, True, 0), (7, True, 1), (3, False, 0), (3, False, 1),
    ]  # fmt: skip
    assert all(e.is_numpy for e in episodes)
    # An episode that has just begun is not returned.
    assert [len(e) for e in runner.sample(num_timesteps=8, explore=True)] == [4, 4]
    assert [len(e) for e in runner.sample(num_timesteps=2, explore=True)] == [1, 1]


def test_a_number_of_episodes_begins_with_a_reset_and_ends_with_the_last_of_them():
    runner = watched()
    runner.sample(num_timesteps=4, explore=True)
    episodes = runner.sample(num_episodes=3, explore=False)
    assert [(len(e), e.env_t_started, e.is_done) for e in episodes] == [(7, 0, True)] * 3
    assert runner.calls.count("reset") == 2
    runner.sample(num_timesteps=2, explore=True)
    assert runner.calls.count("reset") == 3


def test_finished_episodes_are_kept_for_metrics():
    """JointEpisodeRunner.get_metrics lets go of them: they would pile up."""
    runner = watched()
    runner._tells_ends = True  # as with an on_episode_end callback, for which RLlib keeps them
    episodes = runner.sample(num_timesteps=20, explore=True)
    assert runner._done_episodes_for_metrics == [e for e in episodes if e.is_done]
    ongoing = {id_: chunks for id_, chunks in runner._ongoing_episodes_for_metrics.items() if chunks}
    assert ongoing == {e.id_: [e] for e in episodes if not e.is_done}
    assert "self._done_episodes_for_metrics" in source(MultiAgentEnvRunner.get_metrics)
    runner.get_metrics()
    assert runner._done_episodes_for_metrics == []


def test_what_the_loop_passes_to_the_pipelines():
    """TeamObservations and TeamActions, and users' pieces in front of them."""
    seen = []

    class Spy(ConnectorV2):
        def __init__(self, name):
            super().__init__()
            self.spy_name = name

        def __call__(self, *, rl_module, batch, episodes, explore, shared_data, **kwargs):
            columns = {m: sorted(c) for m, c in batch.items()} if self.spy_name == "out" else dict(batch)
            lengths = [len(e) for e in episodes]
            seen.append((self.spy_name, columns, lengths, [e.is_done for e in episodes], explore, shared_data))
            assert rl_module is not None
            return batch

    runner = watched(
        env_to_module_connector=lambda env, spaces, device: Spy("in"),
        module_to_env_connector=lambda env, spaces: Spy("out"),
    )
    runner.sample(num_timesteps=16, explore=False)
    outputs = {f"agent_{i}": ["action_dist_inputs"] for i in range(2)}
    living, steps = [False, False], []
    for t in range(7):
        steps += [("in", {}, [t, t], living, False), ("out", outputs, [t, t], living, False)]
    # The ended episodes go through the first pipeline once more, then the new ones, in which nobody acts yet.
    steps += [("in", {}, [7, 7], [True, True], False), ("in", {}, [0, 0], living, False)]
    steps += [
        ("in", {}, [0, 0], living, False),
        ("out", outputs, [0, 0], living, False),
        ("in", {}, [1, 1], living, False),
    ]
    assert [x[:5] for x in seen] == steps
    assert len({id(x[5]) for x in seen}) == 1  # one shared_data for both


def test_what_the_loop_does_with_the_columns_of_actions():
    """TeamActions: "actions" are stored, "actions_for_env" are played, all others are stored beside."""
    runner = watched()
    pipeline = runner._module_to_env

    def instead(**kwargs):
        columns = pipeline(**kwargs)
        columns["actions"] = [dict.fromkeys(mine, 1) for mine in columns["actions"]]
        columns["actions_for_env"] = [dict.fromkeys(mine, 0) for mine in columns["actions"]]
        columns["mine"] = [dict.fromkeys(mine, 5) for mine in columns["actions"]]
        return columns

    runner._module_to_env = instead
    episodes = runner.sample(num_timesteps=4, explore=True)
    assert runner.played == [{"agent_0": 0, "agent_1": 0}] * 2
    for episode in episodes:
        for single in episode.agent_episodes.values():
            assert single.get_actions().tolist() == [1, 1]
            assert set(single.extra_model_outputs) == {"acted_at", "action_logp", "mine", "weights_seq_no"}
            assert single.get_extra_model_outputs("mine").tolist() == [5, 5]


def test_the_loop_asks_an_episode_whether_it_was_reset_and_cuts_it_by_the_configured_horizon():
    """JointEpisode.is_reset, JointEpisode.cut."""
    text = source(MultiAgentEnvRunner._sample)
    assert ".is_reset:" in text and "cut(len_lookback_buffer=self.config.episode_lookback_horizon)" in text
    runner = watched(episode_lookback_horizon=3)
    runner.sample(num_timesteps=10, explore=True)
    assert [e.env_t_to_agent_t["agent_0"].lookback for e in runner._ongoing_episodes] == [3, 3]


# ------------------------------------------------------------------------------------------ several learners


def test_modules_are_wrapped_for_several_learners_in_two_places():
    """JointPPOLearner._make_modules_ddp_if_necessary and JointPPOLearner.distributed: neither wraps."""
    wraps = [
        name
        for name, function in inspect.getmembers(TorchLearner, inspect.isfunction)
        if "TorchDDPRLModule(" in source(function)
    ]
    assert wraps == ["_make_modules_ddp_if_necessary", "add_module"]
    assert "self._make_modules_ddp_if_necessary()" in source(TorchLearner.build)
    (before, _) = source(TorchLearner.add_module).split("TorchDDPRLModule(")
    assert "if self.distributed:" in before
    assert source(Learner.distributed.fget).rstrip().endswith("return self.config.num_learners > 1")


def test_the_process_group_stands_before_the_learners_are_built_and_in_their_order():
    """Ranks.of; JointLearnerGroup: the first worker is rank 0, whose results are returned."""
    text = source(LearnerGroup.__init__)
    steps = ("backend_executor.start(", "w.actor for w in backend_executor.worker_group", "w.build.remote() for w in")
    assert sorted(map(text.index, steps)) == [*map(text.index, steps)]
    text = source(_TorchBackend.on_start)
    assert "execute_single_async(\n                        i,\n" in text and "world_rank=i," in text
    assert "sort_workers" not in text  # they are sorted before
    text = source(BackendExecutor.start)
    assert text.index("sort_workers_by_node_id") < text.index("self._backend.on_start(")


def test_a_learner_that_waits_for_a_dead_one_waits_for_half_an_hour():
    """JointLearnerGroup.GRACE_S: why the others are ended."""
    assert TorchConfig().timeout_s == 1800


def test_a_learner_group_that_is_shut_down_waits_for_its_first_learner_only():
    """JointLearnerGroup.shutdown waits for all before."""
    assert "done, not_done = ray.wait(done_refs, timeout=patience_s)" in source(WorkerGroup.shutdown)


def test_rllibs_update_shares_episodes_out_between_learners():
    """JointLearnerGroup.update, JointLearnerGroup.update_from_rollouts give all of them to each."""
    assert "training_data.shard(" in source(LearnerGroup.update)


def test_a_learner_has_as_many_torch_threads_as_whole_cpus():
    """docs/architecture.md: one thread for each learner, if OMP_NUM_THREADS does not say otherwise."""
    text = source(set_omp_num_threads_if_unset)
    assert "max(math.floor(num_assigned_cpus), 1)" in text
    assert "if num_threads_from_env is not None:" in text


def test_a_restored_optimizer_keeps_the_memory_of_its_state():
    """JointPPOLearner._set_optimizer_state copies: learners of one machine would step in the same moments."""
    learner = make_learner(tiny_config())
    (batch,) = make_runner(learner.config).sample(num_timesteps=64)
    update(learner, batch)
    name = "agent_0_default_optimizer"

    def shares(set_optimizer_state):
        state = copy.deepcopy(learner.get_state(components="optimizer")["optimizer"])
        set_optimizer_state(state)
        kept = learner.get_optimizer("agent_0").state_dict()["state"][0]["exp_avg"]
        return np.shares_memory(state[name]["state"]["state"][0]["exp_avg"], kept.numpy())

    assert shares(lambda state: TorchLearner._set_optimizer_state(learner, state))
    assert not shares(learner._set_optimizer_state)
