"""Settings that come from RLlib and are honoured: each test sees the effect. `docs/settings.md` names them."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.rllib.utils.actor_manager import FaultAwareApply
from ray.rllib.utils.framework import get_device
from ray.rllib.utils.metrics.stats import MeanStats

from tests.support import largest_difference, make_learner, make_runner, parameters, runner_metrics, tiny_config, update
from thrust_rllib import JointEnvRunner, JointPPO, JointPPOConfig, JointPPOLearner
from thrust_rllib import algorithm as algorithm_module
from thrust_rllib.audit import AlignmentError

# ------------------------------------------------------------------------------------------ runners


@pytest.mark.parametrize("length, steps", [(8, 8), (32, 32), ("auto", 32)])
def test_a_rollout_has_the_asked_length(length, steps):
    (batch,) = make_runner(tiny_config(runners={"rollout_fragment_length": length})).sample()
    assert batch.valid.shape == (steps, 2)
    assert batch.env_steps() == 2 * steps


def test_a_rollout_length_that_misses_the_batch_is_an_early_error():
    with pytest.raises(ValueError, match="rollout_fragment_length"):
        tiny_config(runners={"rollout_fragment_length": 24}).validate()


def test_a_runner_class_of_ones_own_is_kept():
    own = type("Own", (JointEnvRunner,), {})
    config = tiny_config(runners={"env_runner_cls": own})
    config.validate()
    assert config.env_runner_cls is own
    config = tiny_config()
    config.validate()
    assert config.env_runner_cls is JointEnvRunner


def test_the_audit_is_on_where_it_is_asked_for(monkeypatch):
    assert JointPPOConfig().audit  # conftest.py sets THRUST_RLLIB_AUDIT=1
    for value, wanted in [("1", True), ("0", False), ("", False)]:
        monkeypatch.setenv("THRUST_RLLIB_AUDIT", value)
        assert JointPPOConfig().audit == wanted
    runs = []
    for audit in (True, False):
        config = tiny_config(audit=audit)
        (batch,) = make_runner(config).sample(num_timesteps=64)
        assert all((streams.origin is not None) == audit for streams in batch.modules.values())
        learner = make_learner(config)
        update(learner, batch)
        runs.append(parameters(learner))
        if audit:  # one agent's rows of another step
            batch.modules["agent_1"].origin = batch.modules["agent_1"].origin + 1
            with pytest.raises(AlignmentError, match="joins different steps"):
                update(learner, batch)
    assert largest_difference(*runs) == 0.0
    with pytest.raises(ValueError, match="audit=1; needed: one of True, False"):
        tiny_config(audit=1).validate()


@pytest.mark.parametrize("wanted", [False, True])
def test_the_local_runner_has_an_environment_where_it_is_asked_for(wanted):
    config = tiny_config(runners={"num_env_runners": 1, "create_env_on_local_worker": wanted})
    spaces = make_runner(config, worker_index=1).get_spaces()
    assert (make_runner(config, worker_index=0, spaces=spaces).env is not None) == wanted


def test_a_group_of_runners_is_made_as_asked(ray_session):
    config = tiny_config(
        runners={
            "num_cpus_per_env_runner": 2,
            "num_gpus_per_env_runner": 0.5,
            "custom_resources_per_env_runner": {"tpu": 1},
            "max_requests_in_flight_per_env_runner": 7,
        }
    )
    config.validate()
    for restart, ignore, restarts, ignored in [
        (True, False, 5, True),
        (False, False, 0, False),
        (False, True, 0, True),
    ]:
        config.fault_tolerance(
            restart_failed_env_runners=restart, ignore_env_runner_failures=ignore, max_num_env_runner_restarts=5
        )
        group = EnvRunnerGroup(config=config, _setup=False)
        assert group._remote_args == {"num_cpus": 2, "num_gpus": 0.5, "resources": {"tpu": 1}, "max_restarts": restarts}
        assert group._ignore_ray_errors_on_env_runners == ignored
        assert group._worker_manager._max_remote_requests_in_flight_per_actor == 7


@pytest.mark.parametrize(
    "option, reader",
    [
        ("validate_env_runners_after_construction", EnvRunnerGroup._setup),
        ("sync_filters_on_rollout_workers_timeout_s", EnvRunnerGroup._merge_env_runner_connector_states),
        ("env_runner_health_probe_timeout_s", EnvRunnerGroup.probe_unhealthy_env_runners),
        ("env_runner_restore_timeout_s", Algorithm.restore_env_runners),  # which ours calls
        ("delay_between_env_runner_restarts_s", FaultAwareApply.apply),
        ("evaluation_sample_timeout_s", JointPPO._evaluate_with_fixed_duration),
        ("evaluation_unhealthy_workers_timeout_s", JointPPO._maybe_wait_for_eval_env_runner_recovery),
        ("evaluation_error_after_n_consecutive_skips", JointPPO.evaluate),
        ("evaluation_auto_duration_min_env_steps_per_sample", JointPPO._evaluate_with_auto_duration),
        ("evaluation_auto_duration_max_env_steps_per_sample", JointPPO._evaluate_with_auto_duration),
    ],
)
def test_rllib_reads_its_timeouts_and_limits_itself(option, reader):
    assert option in vars(JointPPOConfig())
    assert f"config.{option}" in inspect.getsource(reader)
    assert getattr(Algorithm, reader.__name__, reader) is reader  # RLlib's own, not an override of ours


class Group:
    """A group of two remote runners that never answer."""

    local_env_runner = None

    def __init__(self, healthy=2):
        self.healthy, self.timeouts = healthy, []

    def num_remote_workers(self):
        return 2

    def num_healthy_remote_workers(self):
        return self.healthy

    def foreach_env_runner(self, function, *, timeout_seconds, **kwargs):
        self.timeouts.append(timeout_seconds)
        return []


def bare(config, group):
    """An algorithm without its construction, for one method."""
    algo = object.__new__(JointPPO)
    algo.config, algo.env_runner_group = config, group
    return algo


def test_runners_are_waited_for_as_long_as_asked():
    group = Group()
    assert bare(tiny_config(runners={"sample_timeout_s": 12.5}), group)._sample() == []
    assert group.timeouts == [12.5]


def test_dead_runners_are_waited_for_as_often_as_asked(monkeypatch, caplog):
    pauses = []
    monkeypatch.setattr(algorithm_module.time, "sleep", pauses.append)
    config = tiny_config().fault_tolerance(num_consecutive_env_runner_failures_tolerance=4)
    algo = bare(config, Group(healthy=0))
    with caplog.at_level("WARNING", logger="thrust_rllib"):
        for _ in range(4):
            algo._tell_nothing_came("no runner answered")
    assert len(pauses) == 4 and "none of the 2 runners is alive" in caplog.text
    with pytest.raises(RuntimeError, match="5 iterations running, num_consecutive_env_runner_failures_tolerance=4"):
        algo._tell_nothing_came("no runner answered")
    # Nobody will come back.
    algo = bare(tiny_config().fault_tolerance(restart_failed_env_runners=False), Group(healthy=0))
    with pytest.raises(RuntimeError, match="restart_failed_env_runners=False"):
        algo._tell_nothing_came("no runner answered")


@pytest.mark.parametrize("options", [{"merge_env_runner_states": False}, {"broadcast_env_runner_states": False}])
def test_moments_of_observations_need_to_be_shared(options):
    # Nothing is shared where nothing is normalised, or where there is one runner.
    tiny_config(runners={"num_env_runners": 2, **options}).validate()
    tiny_config(runners={"normalize_observations": True, **options}).validate()
    config = tiny_config(runners={"num_env_runners": 2, "normalize_observations": True, **options})
    (name,) = options
    with pytest.raises(ValueError, match=f"{name}.*normalize_observations=True.*Set 'training_only' and True"):
        config.validate()


@pytest.fixture(scope="module")
def remote(ray_session):
    """One remote runner and no local one, one evaluation runner beside the training."""
    recreated = []
    config = tiny_config("debug/constant_reward", {"episode_length": 5})
    config.env_runners(num_env_runners=1, create_local_env_runner=False)
    config.callbacks(on_env_runners_recreated=lambda *, env_runner_indices, **kw: recreated.append(env_runner_indices))
    config.evaluation(
        evaluation_interval=1,
        evaluation_duration="auto",
        evaluation_duration_unit="timesteps",
        evaluation_num_env_runners=1,
        evaluation_parallel_to_training=True,
        evaluation_auto_duration_min_env_steps_per_sample=20,
        evaluation_auto_duration_max_env_steps_per_sample=20,
    )
    algo = config.build_algo()
    yield algo, recreated
    algo.stop()


def test_evaluation_beside_the_training_lasts_as_long_as_that(remote, monkeypatch):
    algo, _ = remote
    assert algo.env_runner is None
    # So long that rounds of the evaluation come back before the end.
    update_from_rollouts = algo.learner_group.update_from_rollouts

    def slow(*args, **kwargs):
        algorithm_module.time.sleep(0.5)
        return update_from_rollouts(*args, **kwargs)

    monkeypatch.setattr(algo.learner_group, "update_from_rollouts", slow)
    result = algo.train()
    evaluated = result["evaluation"]["env_runners"]
    assert evaluated["num_env_steps_sampled"] >= 40 and evaluated["num_env_steps_sampled"] % 20 == 0
    assert evaluated["episode_len_mean"] == 5.0
    assert result["env_runners"]["num_env_steps_sampled"] == 64


def test_a_killed_runner_comes_back_and_the_run_goes_on(remote):
    algo, recreated = remote
    (pid,) = algo.env_runner_group.foreach_env_runner(lambda runner: os.getpid(), local_env_runner=False)
    os.kill(pid, signal.SIGKILL)
    for _ in range(60):
        algo.train()
        if recreated:
            break
    assert recreated == [[1]] and algo.env_runner_group.num_healthy_remote_workers() == 1
    trained = algo.learner_group.get_weights()
    (acting,) = algo.env_runner_group.foreach_env_runner(lambda r: r.module.get_state(), local_env_runner=False)
    for module_id, state in acting.items():
        for name, value in state.items():
            np.testing.assert_array_equal(np.asarray(value), trained[module_id][name])


# ------------------------------------------------------------------------------------------ learners and resources


def test_resources_reach_ray():
    config = tiny_config("climbing")
    config.resources(
        num_cpus_for_main_process=3, custom_resources_for_main_process={"disk": 1}, placement_strategy="SPREAD"
    )
    config.env_runners(
        num_env_runners=2,
        num_cpus_per_env_runner=2,
        num_gpus_per_env_runner=0.25,
        custom_resources_per_env_runner={"a": 1},
    )
    config.learners(
        num_learners=1, num_cpus_per_learner=5, num_gpus_per_learner=1, custom_resources_per_learner={"b": 2}
    )
    request = JointPPO.default_resource_request(config.to_dict())
    assert request.strategy == "SPREAD"
    bundles = [{k: v for k, v in bundle.items() if v} for bundle in request.bundles]
    runner = {"CPU": 2, "GPU": 0.25, "a": 1}
    assert bundles == [{"CPU": 3, "disk": 1}, runner, runner, {"CPU": 5, "GPU": 1, "b": 2}]


def test_the_devices_are_those_asked_for(monkeypatch):
    config = tiny_config().learners(num_gpus_per_learner=1, local_gpu_idx=3)
    monkeypatch.setattr("ray.air._internal.torch_utils.get_devices", lambda: [torch.device("cpu")] * 3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(AssertionError, match="local_gpu_idx 3 is not a valid GPU ID"):
        make_learner(config)
    config = tiny_config(runners={"num_env_runners": 1, "num_gpus_per_env_runner": 1}).learners(local_gpu_idx=4)
    with pytest.raises(AssertionError, match="local_gpu_idx 4 is not a valid GPU ID"):
        make_runner(config, worker_index=1)
    assert get_device(config, 0) == torch.device("cpu")


def test_a_learner_reads_its_own_settings():
    seen = []

    class Own(JointPPOLearner):
        def build(self):
            super().build()
            seen.append(self.config.learner_config_dict["my_setting"])

    config = tiny_config().learners(learner_class=Own, learner_config_dict={"my_setting": 5})
    assert type(make_learner(config)) is Own and seen == [5]


def trained_in_order(shuffle, seed):
    config = tiny_config(seed=seed, shuffle_batch_per_epoch=shuffle, iterate_all_minibatches=True)
    learner = make_learner(config)
    learner.set_state(make_learner(tiny_config(seed=1)).get_state(components="rl_module"))
    (batch,) = make_runner(tiny_config(seed=1)).sample(num_timesteps=64)
    update(learner, batch)
    return parameters(learner)


@pytest.mark.parametrize("shuffle", [True, False])
def test_rows_are_shuffled_where_it_is_asked_for(shuffle):
    difference = largest_difference(trained_in_order(shuffle, 1), trained_in_order(shuffle, 2))
    assert (difference > 0.0) == shuffle


def test_every_epoch_takes_its_gradient_steps():
    (batch,) = make_runner(tiny_config()).sample(num_timesteps=64)
    steps = [update(make_learner(tiny_config(num_epochs=n)), batch)["__all_modules__"] for n in (1, 3)]
    assert [result["num_minibatch_steps"] for result in steps] == [1, 3]


def test_the_squared_error_of_values_is_clamped_for_the_module_that_asks_for_it():
    config = tiny_config("debug/constant_reward", overrides={"agent_0": {"vf_clip_param": 1e-3}})
    (batch,) = make_runner(config).sample(num_timesteps=64)
    result = update(make_learner(config), batch)
    assert 0.0 < result["agent_0"]["vf_loss"] <= 1e-3 < result["agent_1"]["vf_loss"]


@pytest.mark.parametrize("asked", [True, False])
def test_norms_of_gradients_are_always_logged(asked):
    config = tiny_config(grad_clip=None).reporting(log_gradients=asked)
    (batch,) = make_runner(config).sample(num_timesteps=64)
    result = update(make_learner(config), batch)
    assert all(result[f"agent_{i}"]["gradients_default_optimizer_global_norm"] > 0.0 for i in range(3))


# ------------------------------------------------------------------------------------------ evaluation


def test_evaluation_has_its_own_interval_and_settings(build):
    config = tiny_config("debug/constant_reward", {"episode_length": 5})
    settings = {"explore": False, "env_config": {"episode_length": 3}, "num_envs_per_env_runner": 1}
    config.evaluation(evaluation_interval=2, evaluation_duration=4, evaluation_config=settings)
    iterations = []
    config.callbacks(on_evaluate_start=lambda *, algorithm, **kwargs: iterations.append(algorithm.iteration + 1))
    algo = build(config)
    results = [algo.train() for _ in range(4)]
    assert iterations == [2, 4]
    evaluated = results[1]["evaluation"]["env_runners"]
    assert (evaluated["num_episodes"], evaluated["episode_len_mean"]) == (4, 3.0)
    assert results[1]["env_runners"]["episode_len_mean"] == 5.0
    runner = algo.eval_env_runner
    assert (runner.config.explore, runner.num_envs) == (False, 1) and algo.env_runner.config.explore


@pytest.mark.parametrize("afresh, episodes", [(True, [0, 0]), (False, [0, 1])])
def test_evaluation_by_timesteps_starts_afresh_or_goes_on(build, afresh, episodes):
    config = tiny_config("debug/constant_reward", {"episode_length": 50}, num_envs=1)
    config.evaluation(
        evaluation_interval=1,
        evaluation_duration=30,
        evaluation_duration_unit="timesteps",
        evaluation_force_reset_envs_before_iteration=afresh,
    )
    algo = build(config)
    assert [algo.train()["evaluation"]["env_runners"]["num_episodes"] for _ in range(2)] == episodes


def test_an_evaluation_function_of_ones_own_is_called(build):
    calls = []

    def evaluate(algo, group):
        calls.append((algo, group))
        return {"my_number": 1.0}, 10, 20

    config = tiny_config("climbing").evaluation(evaluation_interval=1, custom_evaluation_function=evaluate)
    algo = build(config)
    algo.train()
    assert calls == [(algo, algo.eval_env_runner_group)]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"evaluation_config": {"explore": False}}, "no evaluation runner would read it: set evaluation_interval"),
        (
            {"evaluation_interval": 1, "evaluation_config": {"num_env_runners": 2}},
            "num_env_runners=2, which RLlib replaces by evaluation_num_env_runners=0",
        ),
        ({"evaluation_interval": 1, "evaluation_parallel_to_training": True}, "evaluation_num_env_runners` > 0"),
        ({"evaluation_interval": 1, "evaluation_duration": "auto"}, "evaluation_duration=auto"),
        ({"evaluation_duration": 0}, "evaluation_duration"),
        ({"evaluation_duration_unit": "episode"}, "evaluation_duration_unit='episode'.*did you mean 'episodes'"),
    ],
    ids=str,
)
def test_an_evaluation_that_would_not_be_as_asked_is_an_early_error(options, message):
    with pytest.raises(ValueError, match=message):
        tiny_config().evaluation(**options).validate()


# ------------------------------------------------------------------------------------------ iterations and reports


@pytest.mark.parametrize(
    "option, value, calls",
    [
        ("min_sample_timesteps_per_iteration", 150, 3),  # of 64 steps each
        ("min_train_timesteps_per_iteration", 100, 4),  # of 32 rows each
        ("min_time_s_per_iteration", 0.3, None),
    ],
)
def test_an_iteration_lasts_as_long_as_asked(build, option, value, calls):
    result = build(tiny_config("climbing").reporting(**{option: value})).train()
    found = result["num_training_step_calls_per_iteration"]
    assert found == calls if calls else found > 1 and result["time_this_iter_s"] >= value


@pytest.mark.parametrize(
    "option, value, message",
    [
        ("min_train_timesteps_per_iteration", 10, "wait forever.*min_sample_timesteps_per_iteration"),
        ("num_consecutive_env_runner_failures_tolerance", 0, "needed: 1 or more"),
    ],
)
def test_settings_with_which_rllib_would_hang_or_stop_at_once_are_early_errors(option, value, message):
    config = tiny_config().multi_agent(count_steps_by="agent_steps")
    config.update_from_dict({option: value})
    with pytest.raises(ValueError, match=message):
        config.validate()


def test_statistics_of_ones_own_can_be_logged():
    own = type("Own", (MeanStats,), {"stats_cls_identifier": "own"})
    config = tiny_config().reporting(custom_stats_cls_lookup={**JointPPOConfig().stats_cls_lookup, "own": own})
    runner = make_runner(config)
    runner.sample()
    runner.metrics.log_value("mine", 3.0, reduce="own")
    assert runner_metrics(runner)["mine"] == 3.0


def test_the_log_level_is_that_of_rllibs_logger(build):
    logger = logging.getLogger("ray.rllib")
    before = logger.level
    try:
        build(tiny_config("climbing").debugging(log_level="ERROR"))
        assert logger.level == logging.ERROR
    finally:
        logger.setLevel(before)


def test_our_checks_run_where_rllibs_are_switched_off():
    config = tiny_config().experimental(_validate_config=False)
    config.validate()
    with pytest.raises(ValueError, match="use_kl_loss=True is not served"):
        config.training(use_kl_loss=True).validate()
    # Only RLlib checks this one.
    config = tiny_config(entropy_coeff=-0.5).experimental(_validate_config=False)
    config.validate()
    with pytest.raises(ValueError, match="entropy_coeff"):
        config.experimental(_validate_config=True).validate()


# ------------------------------------------------------------------------------------------ callbacks

CALLED = [
    "on_algorithm_init", "on_environment_created", "on_sample_end", "on_train_result", "on_evaluate_start",
    "on_evaluate_end", "on_checkpoint_loaded",
]  # fmt: skip


SEEN: list[tuple[str, dict]] = []


class Recorder:
    """A callback that notes down that it was called; a checkpoint holds its name, not what it has seen."""

    def __init__(self, name):
        self.name = name

    def __call__(self, **kwargs):
        SEEN.append((self.name, kwargs))


@pytest.mark.parametrize("kind", ["class", "partial of a class", "functions"])
def test_callbacks_are_called(build, tmp_path, kind):
    SEEN.clear()
    callbacks = {name: Recorder(name) for name in CALLED}
    config = tiny_config("climbing").evaluation(evaluation_interval=1, evaluation_duration=1)
    if kind == "functions":
        config.callbacks(**callbacks)
    else:
        own = type("Own", (RLlibCallback,), callbacks)
        config.callbacks(own if kind == "class" else functools.partial(own))
    algo = build(config)
    algo.train()
    algo.load_checkpoint(algo.save_to_path(tmp_path))
    names = [name for name, _ in SEEN]
    assert set(names) == set(CALLED)
    training, evaluation = (kwargs["samples"] for name, kwargs in SEEN if name == "on_sample_end")
    assert training[0].env_steps() == 64 and evaluation[0].num_env_steps > 0
    (result,) = (kwargs["result"] for name, kwargs in SEEN if name == "on_train_result")
    assert result["env_runners"]["num_env_steps_sampled"] == 64


@pytest.mark.parametrize("name", ["on_create_policy", "on_learn_on_batch", "on_evaluate_offline_start"])
def test_a_callback_that_is_never_called_is_an_early_error(name):
    own = type("Own", (RLlibCallback,), {name: lambda self, **kwargs: None})
    for given in (own, [RLlibCallback, functools.partial(own)]):
        with pytest.raises(ValueError, match=f"overrides {name}, which is never called"):
            tiny_config().callbacks(given).validate()


def test_a_function_that_makes_callbacks_is_an_early_error():
    with pytest.raises(ValueError, match="callbacks_class=.*needed: classes, or functools.partial of a class"):
        tiny_config().callbacks(lambda: RLlibCallback()).validate()


def test_callbacks_are_those_that_this_version_knows():
    from thrust_rllib.unserved_options import NEVER_CALLED, ON_EPISODE

    known = {*CALLED, *NEVER_CALLED, *ON_EPISODE, "on_env_runners_recreated"}
    assert {name for name in dir(RLlibCallback) if name.startswith("on_")} == known


# ------------------------------------------------------------------------------------------ old names


@pytest.mark.parametrize(
    "section, old, new",
    [
        ("resources", "custom_resources_per_worker", "custom_resources_per_env_runner"),
        ("resources", "num_cpus_for_local_worker", "num_cpus_for_main_process"),
        ("resources", "num_cpus_per_learner_worker", "num_cpus_per_learner"),
        ("resources", "num_cpus_per_worker", "num_cpus_per_env_runner"),
        ("resources", "num_gpus_per_learner_worker", "num_gpus_per_learner"),
        ("resources", "num_gpus_per_worker", "num_gpus_per_env_runner"),
        ("resources", "num_learner_workers", "num_learners"),
        ("training", "max_requests_in_flight_per_sampler_worker", "max_requests_in_flight_per_env_runner"),
        ("training", "num_sgd_iter", "num_epochs"),
        ("evaluation", "evaluation_num_workers", "evaluation_num_env_runners"),
        ("rl_module", "model_config_dict", "_model_config"),
    ],
)
def test_an_old_name_is_passed_on(section, old, new):
    value = SimpleNamespace()
    config = getattr(JointPPOConfig(), section)(**{old: value})
    assert getattr(config, new) is value
