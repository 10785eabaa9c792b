"""RLlib's options that the joint trainer does not serve: each is an early error that says why. `docs/settings.md`.

An option missing in these tables is honoured, by our code or by RLlib's. RLlib itself ignores an option that its chosen
code path does not read.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from ray._common.deprecation import DEPRECATED_VALUE
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.utils import force_list

if TYPE_CHECKING:
    from thrust_rllib.config import JointPPOConfig

NOT_SERVED: dict[str, tuple[Any, str]] = {
    # option: (the value that is served, why the others are not)
    "use_critic": (True, "the joint trainer always trains a critic"),
    "use_gae": (True, "advantages are always GAE's; lambda_=1 gives the returns minus the values"),
    "use_kl_loss": (False, "the loss has no KL term in this version; clip_param bounds the step"),
    "torch_skip_nan_gradients": (False, "a minibatch with a non-finite loss or gradient is always skipped by everyone"),
    "restart_failed_sub_environments": (
        False,
        "restart_failed_env_runners=True makes all environments of a runner anew when one has failed",
    ),
    "framework_str": ("torch", "the learner is a torch learner"),
    "enable_rl_module_and_learner": (True, "only RLlib's new API stack is served"),
    "enable_env_runner_and_connector_v2": (True, "only RLlib's new API stack is served"),
    "clip_rewards": (None, "rewards reach the learner as the environment pays them; clip them in the environment"),
    "_is_atari": (None, "frames are not preprocessed; wrap the environment (is_atari)"),
    "_use_msgpack_checkpoints": (False, "checkpoints are pickled; or call save_to_path(path, use_msgpack=True)"),
}

_OLD_STACK = "only RLlib's old API stack reads it"
_EPISODES = "arrays are sampled, not episodes; set .env_runners(sampling='episodes')"
_OWN_PROCESS = "environments are stepped in the runner's process; raise num_env_runners"
_LAST_PIECES = "the last pieces of each pipeline are this package's; put yours in front of them"
_NO_KL = "the loss has no KL term in this version"
_NO_DDP = "the learners sum their gradients themselves, without torch's DDP wrapper"
_NO_TF = "the learner is a torch learner"

UNREAD: dict[str, str] = {
    # Options that nothing here reads: another value than RLlib's default is an error. What to do instead:
    "train_batch_size": "set train_batch_size_per_learner",
    "model": "set .rl_module(model_config={...})",
    "optimizer": "override configure_optimizers_for_module in a subclass of JointPPOLearner",
    "lr_schedule": "set lr=[[0, first value], [steps, next value], ...]",
    "entropy_coeff_schedule": "set entropy_coeff=[[0, first value], [steps, next value], ...]",
    "_torch_lr_scheduler_classes": "set lr=[[0, first value], [steps, next value], ...]",
    "_torch_grad_scaler_class": "losses and gradients are not scaled",
    "kl_coeff": _NO_KL,
    "kl_target": _NO_KL,
    "num_gpus": "set num_gpus_per_learner and num_gpus_per_env_runner",
    "_fake_gpus": "set num_gpus_per_learner=0",
    "extra_python_environs_for_driver": "set them before Python starts",
    "extra_python_environs_for_worker": 'set ray.init(runtime_env={"env_vars": {...}})',
    **dict.fromkeys(("eager_tracing", "eager_max_retraces", "tf_session_args", "local_tf_session_args"), _NO_TF),
    "enable_tf1_exec_eagerly": _NO_TF,
    "_tf_policy_handles_more_than_one_loss": _NO_TF,
    "torch_compile_learner_what_to_compile": "torch_compile_learner compiles forward pass and losses together",
    "torch_compile_worker": "runners are not compiled",
    "torch_compile_worker_dynamo_backend": "runners are not compiled",
    "torch_compile_worker_dynamo_mode": "runners are not compiled",
    "torch_ddp_kwargs": _NO_DDP,
    "num_aggregator_actors_per_learner": "rollouts go straight to the learner",
    "max_requests_in_flight_per_aggregator_actor": "rollouts go straight to the learner",
    "max_requests_in_flight_per_learner": "the learner is asked for one update at a time",
    "observation_space": "the environment declares its spaces",
    "action_space": "the environment declares its spaces",
    "render_env": "render the environment yourself, or use thrust_rllib.evaluation",
    "action_mask_key": "the mask's key is 'action_mask'",
    "observation_filter": "set .env_runners(normalize_observations=True)",
    "use_worker_filter_stats": "set merge_env_runner_states",
    "update_worker_filter_stats": "set broadcast_env_runner_states",
    "compress_observations": "arrays are sent as they are",
    "gym_env_vectorize_mode": _OWN_PROCESS,
    "remote_worker_envs": _OWN_PROCESS,
    "remote_env_batch_wait_ms": _OWN_PROCESS,
    "sample_collector": _OLD_STACK,
    "preprocessor_pref": "the encoders of thrust_rllib.connectors take every space; wrap the environment for another",
    "exploration_config": "override forward_exploration in the RLModule, or set explore=False",
    "use_env_runner_state_server": "weights are synced after each update",
    "env_runner_state_server_max_concurrency": "weights are synced after each update",
    "add_default_connectors_to_env_to_module_pipeline": _LAST_PIECES,
    "add_default_connectors_to_module_to_env_pipeline": _LAST_PIECES,
    "add_default_connectors_to_learner_pipeline": _LAST_PIECES,
    "dataset_num_iters_per_eval_runner": "dataset_num_iters_per_offline_eval_runner is for data sets: none is read",
    "observation_fn": "change what agents see in the environment",
    "log_sys_usage": "nothing in RLlib reads it",
    **dict.fromkeys(
        (
            "sampler_perf_stats_ema_coef", "policy_map_capacity", "policy_states_are_swappable", "fake_sampler",
            "keep_per_episode_custom_metrics", "metrics_episode_collection_timeout_s", "export_native_model_files",
            "checkpoint_trainable_policies_only", "replay_sequence_length", "_disable_preprocessor_api",
            "_disable_action_flattening", "_disable_initialize_loss_from_dummy_batch",
        ),
        _OLD_STACK,
    ),
}  # fmt: skip

UNREAD_BY_ARRAYS: dict[str, str] = {"episode_lookback_horizon": _EPISODES, "episodes_to_numpy": _EPISODES}
"""Options that only sampling by episodes reads."""

OFFLINE = (
    "input_", "offline_data_class", "input_read_method", "input_read_method_kwargs", "input_read_schema",
    "input_read_episodes", "input_read_sample_batches", "input_read_batch_size", "input_filesystem",
    "input_filesystem_kwargs", "input_compress_columns", "input_spaces_jsonable", "materialize_data",
    "materialize_mapped_data", "map_batches_kwargs", "iter_batches_kwargs", "ignore_final_observation",
    "prelearner_class", "prelearner_buffer_class", "prelearner_buffer_kwargs", "prelearner_module_synch_period",
    "prelearner_use_recorded_module_states", "dataset_num_iters_per_learner", "input_config",
    "actions_in_input_normalized", "postprocess_inputs", "shuffle_buffer_size", "output", "output_config",
    "output_compress_columns", "output_max_file_size", "output_max_rows_per_file", "output_write_remaining_data",
    "output_write_method", "output_write_method_kwargs", "output_filesystem", "output_filesystem_kwargs",
    "output_write_episodes", "offline_sampling", "off_policy_estimation_methods", "ope_split_batch_by_episode",
    "offline_evaluation_interval", "offline_evaluation_type", "offline_evaluation_duration",
    "offline_evaluation_parallel_to_training", "offline_evaluation_timeout_s", "offline_eval_runner_class",
    "offline_loss_for_module_fn", "offline_eval_batch_size_per_runner", "offline_eval_rl_module_inference_only",
    "offline_eval_runner_restore_timeout_s", "offline_eval_runner_health_probe_timeout_s", "num_offline_eval_runners",
    "num_cpus_per_offline_eval_runner", "num_gpus_per_offline_eval_runner", "custom_resources_per_offline_eval_runner",
    "restart_failed_offline_eval_runners", "ignore_offline_eval_runner_failures",
    "max_num_offline_eval_runner_restarts", "max_requests_in_flight_per_offline_eval_runner",
    "validate_offline_eval_runners_after_construction", "broadcast_offline_eval_runner_states",
    "callbacks_on_evaluate_offline_start", "callbacks_on_evaluate_offline_end",
    "callbacks_on_offline_eval_runners_recreated",
)  # fmt: skip
"""RLlib's options for data sets: unread, too."""

SWALLOWED: dict[str, dict[str, str]] = {
    # section: {keyword that RLlib takes and forgets: what to do instead}
    "training": {"vf_share_layers": 'set .rl_module(model_config={"vf_share_layers": ...})'},
    "env_runners": {"enable_connectors": "connectors are always there in RLlib's new API stack"},
}

ON_EPISODE = ("on_episode_created", "on_episode_start", "on_episode_step", "on_episode_end")

NEVER_CALLED = (
    "on_evaluate_offline_start", "on_evaluate_offline_end", "on_offline_eval_runners_recreated",
    "on_sub_environment_created", "on_postprocess_trajectory", "on_create_policy", "on_learn_on_batch",
    "on_workers_recreated",
)  # fmt: skip
"""Callbacks of offline data and of RLlib's old API stack."""


def refuse_swallowed(section: str, given: Collection[str]) -> None:
    """Raises where RLlib would take a keyword and forget it.

    Raises:
        ValueError: the keyword, and what to do instead.
    """
    for name, instead in SWALLOWED[section].items():
        if name in given:
            raise ValueError(f"{name} would be ignored: {instead}")


def check_served(config: JointPPOConfig) -> None:
    """Checks that nothing was set that would be ignored.

    Raises:
        ValueError: the option, why it is not served, and what to do instead.
    """
    for name, (served, why) in NOT_SERVED.items():
        value = getattr(config, name)
        if value != served and not (served is None and value is False):
            raise ValueError(f"{name}={value!r} is not served: {why}. Set {name}={served!r}.")
    defaults = PPOConfig()
    unread = UNREAD | dict.fromkeys(OFFLINE, "the joint trainer learns from its own rollouts; it reads and writes none")
    unread |= dict.fromkeys(deprecated_options(defaults), "RLlib has dropped it")
    for name, instead in unread.items():
        if getattr(config, name) != getattr(defaults, name):
            raise ValueError(f"{name}={getattr(config, name)!r} would be ignored: {instead}")
    _check_callbacks(config)


def check_read_by_arrays(config: JointPPOConfig) -> None:
    """Checks that nothing was set that sampling by arrays would ignore.

    Raises:
        ValueError: the option, and what to do instead.
    """
    defaults = PPOConfig()
    for name, instead in UNREAD_BY_ARRAYS.items():
        if getattr(config, name) != getattr(defaults, name):
            raise ValueError(f"{name}={getattr(config, name)!r} would be ignored: {instead}")


def deprecated_options(defaults: PPOConfig) -> set[str]:
    """RLlib's options that only tell who still sets them that they are gone; one of them RLlib itself still writes."""
    gone = {name for name, value in vars(defaults).items() if isinstance(value, int) and value == DEPRECATED_VALUE}
    return gone - {"simple_optimizer"}


def _check_callbacks(config: JointPPOConfig) -> None:
    for cls in force_list(config.callbacks_class):
        if not isinstance(callback_class(cls), type):
            raise ValueError(
                f"callbacks_class={cls!r}; needed: classes, or functools.partial of a class, so that it can be seen "
                "which callbacks they override"
            )
        for name in overridden(cls, NEVER_CALLED):
            raise ValueError(f"{cls!r} overrides {name}, which is never called on RLlib's new API stack")


def callback_class(cls: Any) -> Any:
    """The class behind a `functools.partial`."""
    while isinstance(cls, functools.partial):
        cls = cls.func
    return cls


def overridden(cls: Any, names: Collection[str]) -> list[str]:
    """Those of RLlib's callbacks `names` that the class has its own version of."""
    return [name for name in names if getattr(callback_class(cls), name, None) is not getattr(RLlibCallback, name)]
