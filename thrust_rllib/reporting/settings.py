"""A run's settings as texts, and which of them set configurations apart."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

# Patterns of options that change no training, or say again what stands elsewhere.
NOT_COMPARED = (
    "seed", "env", "env_config", "env_spec",
    # evaluation
    "evaluation_*", "offline_eval*", "always_attach_evaluation_results", "*async_evaluation*", "custom_eval_function",
    "in_evaluation", "num_offline_eval_runners", "*_per_offline_eval_runner", "dataset_num_iters_per_eval_runner",
    "callbacks_on_evaluate_*",
    # checkpoints, what is measured and reported, what is written
    "checkpoint_*", "export_native_model_files", "log_*", "keep_per_episode_custom_metrics", "metrics_*",
    "min_*_per_iteration", "coupling_gradient_interval", "diversity_interval", "render_env", "output", "output_*",
    # resources and speed
    "num_cpus_*", "num_gpus", "num_gpus_*", "custom_resources_*", "placement_strategy", "local_gpu_idx", "_fake_gpus",
    "torch_compile_*", "max_requests_in_flight_*", "sampler_perf_stats_ema_coef", "extra_python_environs_for_*",
    # faults and checks
    "restart_failed_*", "ignore_*_failures", "*_timeout_s", "max_num_*_restarts", "delay_between_env_runner_restarts_s",
    "num_consecutive_env_runner_failures_tolerance", "disable_env_checking", "validate_*_after_construction",
)  # fmt: skip
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_COEFF, _LOSS, _ENV = "cross_agent_coeffs.", "cross_agent_losses.", "env_config."


def settings(record: Mapping[str, Any]) -> dict[str, str]:
    """{name: value as text} of the environment and of every option that is not the default and changes training."""
    environment = record.get("environment", {})
    options = {name: value for name, value in record.get("changed", {}).items() if _is_compared(name)}
    return {
        "env": _text(environment.get("name")),
        **_flat(environment.get("env_config") or {}, _ENV),
        **_flat(options, ""),
    }


def differing_settings(records: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """For each record {setting: value} of those settings that are not the same in all of them.

    An option that a record does not set has its default; a setting of the environment is then "not set". The name of a
    cross-agent loss says nothing beside its coefficient, and is left out there.
    """
    changed = [settings(record) for record in records]
    names = list(dict.fromkeys(name for each in changed for name in each))
    tops = {name.split(".")[0] for name in names}
    defaults = [
        _flat({top: value for top, value in record.get("options", {}).items() if top in tops and _is_compared(top)}, "")
        for record in records
    ]
    values = {
        name: [
            each.get(name, default.get(name, "not set" if name.startswith(_ENV) else "none"))
            for each, default in zip(changed, defaults, strict=True)
        ]
        for name in names
    }
    different = {name: each for name, each in values.items() if len(set(each)) > 1}
    implied = {
        name
        for name, each in different.items()
        if name.startswith(_LOSS) and name.replace(_LOSS, _COEFF) in different and len(set(each) - {"none"}) == 1
    }
    return [
        {name.removeprefix(_ENV): each[k] for name, each in different.items() if name not in implied}
        for k in range(len(records))
    ]


def _is_compared(option: str) -> bool:
    return not any(fnmatchcase(option, pattern) for pattern in NOT_COMPARED)


def _flat(value: Mapping[str, Any], prefix: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, inner in value.items():
        if isinstance(inner, list) and inner and all(isinstance(each, Mapping) and "name" in each for each in inner):
            # Constraints and auxiliary targets.
            inner = {each["name"]: {key: own for key, own in each.items() if key != "name"} for each in inner}
        if isinstance(inner, Mapping):
            found |= _flat(inner, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = _text(inner)
    return found


def _text(value: Any) -> str:
    """A value as a person writes it; objects without their address, which is another one in every run."""
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str):
        return _ADDRESS.sub("", value)
    return _ADDRESS.sub("", json.dumps(value, ensure_ascii=False))
