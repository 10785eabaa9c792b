"""Stand-ins for W&B and MLflow: what Ray's callbacks use of them, writing to files or keeping what they get.

They refuse what the real packages refuse: steps that go back, names with characters outside MLflow's set, values that
are no numbers.
"""

from __future__ import annotations

import json
import numbers
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

NAMES = (
    "wandb", "wandb.sdk", "wandb.sdk.data_types", "wandb.sdk.data_types.base_types",
    "wandb.sdk.data_types.base_types.wb_value", "wandb.sdk.data_types.image", "wandb.sdk.data_types.video",
    "wandb.util", "wandb.wandb_run", "mlflow", "mlflow.exceptions", "mlflow.tracking",
    "mlflow.utils", "mlflow.utils.mlflow_tags",
)  # fmt: skip


def install():
    """Puts all modules into `sys.modules`; returns the one of MLflow, whose `runs` are [{"params", "metrics", …}]."""
    modules = {name: ModuleType(name) for name in NAMES}
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    _fill_wandb(modules)
    _fill_mlflow(modules)
    sys.modules.update(modules)
    return modules["mlflow"]


class Config(dict):
    """`wandb.config`."""

    def update(self, given, allow_val_change=False):
        super().update(given)

    def __setattr__(self, name, value):
        self[name] = value


def _fill_wandb(modules):
    wandb, state = modules["wandb"], SimpleNamespace()

    def init(*, id, name, group, project, config, dir, **rest):
        json.dumps(config, default=str)
        state.file = Path(dir, f"wandb-{id}.jsonl").open("w")
        state.step, wandb.config = 0, Config(config)
        state.file.write(json.dumps({"name": name, "group": group, "project": project}) + "\n")
        return SimpleNamespace(config=wandb.config)

    def log(numbers_by_name, step):
        assert step > state.step, "steps go on"
        assert all(isinstance(value, numbers.Number) for value in numbers_by_name.values())
        state.step = step
        state.file.write(json.dumps({"step": step, **{k: float(v) for k, v in numbers_by_name.items()}}) + "\n")

    def finish():
        state.file.write(json.dumps({"config": dict(wandb.config)}, default=str) + "\n")
        state.file.close()

    wandb.init, wandb.log, wandb.finish = init, log, finish
    modules["wandb.sdk.data_types.base_types.wb_value"].WBValue = type("WBValue", (), {})
    modules["wandb.sdk.data_types.image"].Image = type("Image", (), {})
    modules["wandb.sdk.data_types.video"].Video = type("Video", (), {})
    modules["wandb.util"].json_dumps_safer = json.dumps
    modules["wandb.wandb_run"].Run = type("Run", (), {})


def _fill_mlflow(modules):
    mlflow = modules["mlflow"]
    mlflow.__version__, mlflow.runs, mlflow.uri, mlflow.experiments = "3.0.0", [], None, []
    modules["mlflow.exceptions"].MlflowException = type("MlflowException", (Exception,), {})

    def check(name):
        if not re.fullmatch(r"[/\w.\- :]+", name):
            raise modules["mlflow.exceptions"].MlflowException(f"invalid name {name!r}")

    class MlflowClient:
        """One of many that all write to the same runs."""

        def __init__(self, tracking_uri, registry_uri):
            assert tracking_uri == mlflow.uri

        def create_run(self, run_name, experiment_id, tags):
            mlflow.runs.append({"name": run_name, "params": {}, "metrics": {}, "status": "RUNNING"})
            return SimpleNamespace(info=SimpleNamespace(run_id=str(len(mlflow.runs) - 1)))

        def log_param(self, run_id, key, value):
            check(key)
            mlflow.runs[int(run_id)]["params"][key] = str(value)

        def log_metric(self, run_id, key, value, step):
            check(key)
            mlflow.runs[int(run_id)]["metrics"].setdefault(key, []).append((step, float(value)))

        def set_terminated(self, run_id, status):
            mlflow.runs[int(run_id)]["status"] = status

    modules["mlflow.tracking"].MlflowClient = MlflowClient
    modules["mlflow.utils.mlflow_tags"].MLFLOW_RUN_NAME = "mlflow.runName"
    mlflow.set_tracking_uri = lambda uri: setattr(mlflow, "uri", uri)
    mlflow.get_tracking_uri = lambda: mlflow.uri
    mlflow.set_registry_uri, mlflow.get_registry_uri = lambda uri: None, lambda: None
    mlflow.get_experiment_by_name = lambda name: None
    mlflow.create_experiment = lambda name, artifact_location: mlflow.experiments.append(name)
    mlflow.get_run = lambda run_id: mlflow.runs[int(run_id)]
    mlflow.active_run = lambda: None


class LoggingProcess:
    """What Ray starts for W&B in a process of its own: its actor, with the stand-in in place of the package."""

    def __init__(self, **kwargs):
        install()
        from ray.air.integrations.wandb import _WandbLoggingActor

        self.actor = _WandbLoggingActor(**kwargs)

    def run(self):
        self.actor.run()
