"""`config.json`: what a run was started with, so that it can be repeated."""

from __future__ import annotations

import json
import math
import platform
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from thrust_rllib import __version__

RECORDED_PACKAGES = ("ray", "torch", "numpy", "gymnasium", "pettingzoo")
# Filled in by validation from other options.
DERIVED = ("env_runner_cls", "policies", "policy_mapping_fn", "simple_optimizer")


def run_record(config: Any, **more: Any) -> dict[str, Any]:
    """Command, versions, and all options of a `JointPPOConfig`; `changed` are those that differ from its defaults.

    Args:
        config: a `JointPPOConfig`.
        **more: entries to add after the versions.
    """
    options = _options(config)
    defaults = _options(type(config)())
    return {
        **origin(),
        **{name: jsonable(value) for name, value in more.items()},
        "seed": config.seed,
        "environment": {"name": jsonable(config.env), "env_config": jsonable(config.env_config)},
        "changed": {
            name: value for name, value in options.items() if value != defaults.get(name) and name not in DERIVED
        },
        "options": options,
    }


def origin() -> dict[str, Any]:
    """Command, time and versions."""
    return {
        "command": shlex.join(["thrust-rllib", *sys.argv[1:]]),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "versions": {"thrust_rllib": __version__, "python": platform.python_version(), **installed_versions()},
    }


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Options of two records that differ, with their new values."""
    return {name: value for name, value in now.items() if value != before.get(name) and name not in DERIVED}


def write_json(path: Path, content: Any) -> None:
    """Writes readable JSON, numbers that JSON lacks as null or "inf"; what stands at `path` is replaced at once."""
    text = json.dumps(jsonable(content), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    unfinished = path.with_name(f".unfinished-{path.name}")
    try:
        unfinished.write_text(text, "utf-8")
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def jsonable(value: Any) -> Any:
    """`value` with only JSON's types: classes by path, numpy as Python, other objects by their repr."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, np.generic):
        return jsonable(value.item())
    if isinstance(value, float):
        if math.isnan(value):
            return None
        return value if math.isfinite(value) else str(value)
    if is_dataclass(value) and not isinstance(value, type):
        from thrust_rllib import AuxiliaryTarget, Constraint  # torch: whoever has such an object has it already

        if isinstance(value, (AuxiliaryTarget, Constraint)):
            value = {name: given for name, given in asdict(value).items() if given is not None}
    if isinstance(value, Mapping):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted((jsonable(v) for v in value), key=str)
    if isinstance(value, (list, tuple)):
        return [jsonable(v) for v in value]
    if isinstance(value, np.ndarray):
        return jsonable(value.tolist())
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return f"{value.__module__}.{value.__qualname__}"
    return repr(value)


def _options(config: Any) -> dict[str, Any]:
    options = {_public_name(config, name): value for name, value in jsonable(config.to_dict()).items()}
    return {name: options[name] for name in sorted(options)}


def _public_name(config: Any, name: str) -> str:
    """RLlib keeps some options, such as train_batch_size_per_learner, behind a property of that name."""
    return name[1:] if isinstance(getattr(type(config), name[1:], None), property) else name


def installed_versions() -> dict[str, str]:
    """Of the packages on which a run depends."""
    found = {}
    for package in RECORDED_PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
