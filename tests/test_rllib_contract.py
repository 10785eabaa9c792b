"""What the package leans on in Ray RLlib 2.60 (and torch), one behaviour per test.

A failure after an upgrade names what has changed; the docstring of each test says who relies on it.
"""

from __future__ import annotations

import dataclasses
import inspect
import re

import numpy as np
import pytest
import ray
import torch
import tree
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.ppo import PPO, PPOConfig
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.connectors.env_to_module import EnvToModulePipeline
from ray.rllib.core.distribution.torch.torch_distribution import TorchDeterministic
from ray.rllib.core.learner.learner import Learner
from ray.rllib.core.learner.learner_group import LearnerGroup
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger
from ray.rllib.utils.schedules.scheduler import Scheduler

from tests.support import make_learner, make_runner, tiny_config, update
from thrust_rllib import JointEnvRunner, JointLearnerGroup
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
