"""The loggers of Tune, W&B and MLflow get every number of every result."""

from __future__ import annotations

import csv
import json
import math
import sys
from pathlib import Path

import pytest
from ray import tune
from ray.tune.utils import flatten_dict

from tests.cli.helpers import events
from tests.logging import standins
from tests.support import tiny_config
from tests.test_docs import PAGES, blocks, flatten
from thrust_rllib import JointPPO, RedundancyPenalty

RETURNS = "env_runners/episode_return_mean"


def coupled_config(length=5):
    config = tiny_config(
        "debug/random_observations", {"episode_length": length}, runners={"normalize_observations": True}
    )
    return config.training(cross_agent_losses={"redundancy": RedundancyPenalty()})


def number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def json_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.timeout(120)
def test_tune_writes_json_csv_and_tensorboard(ray_session, tmp_path):
    run = tune.RunConfig(stop={"training_iteration": 3}, storage_path=str(tmp_path), verbose=0)
    (result,) = tune.Tuner(JointPPO, param_space=coupled_config(), run_config=run).fit()
    folder = Path(result.path)
    lines = [flatten_dict(found, delimiter="/") for found in json_lines(folder / "result.json")]
    assert len(lines) == 3 and result.error is None
    final = {k: v for k, v in flatten_dict(result.metrics, delimiter="/").items() if not k.startswith("config/")}
    numbers = {name: value for name, value in final.items() if number(value)}
    assert len(numbers) > 80 and numbers[RETURNS] > 0
    for name, value in numbers.items():
        assert lines[-1][name] == pytest.approx(value, nan_ok=True), name
    # The columns of Tune's table are those of the first result.
    with (folder / "progress.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == 3
    for name, value in numbers.items():
        if name in lines[0]:
            assert float(table[-1][name]) == pytest.approx(value, nan_ok=True), name
    assert numbers.keys() - table[0].keys() <= {"env_runners/time_between_sampling"} | {
        name for name in numbers if name.startswith(("timers/", "perf/"))
    }
    (path,) = folder.glob("events.out.tfevents*")
    written = {}
    for event in events(path):
        for value in event.summary.value:
            written.setdefault(value.tag.removeprefix("ray/tune/"), []).append((event.step, value.simple_value))
    assert written[RETURNS] == [(line["training_iteration"], pytest.approx(line[RETURNS])) for line in lines]
    elsewhere = {"training_iteration", "time_total_s", "timestamp", "pid"}  # the axis, and what is no curve
    assert {name for name, value in numbers.items() if math.isfinite(value)} <= written.keys() | elsewhere


@pytest.mark.timeout(120)
def test_a_table_without_returns_is_tunes_own_limit(ray_session, tmp_path):
    """docs/logging.md warns of it: no episode ends in the first iteration."""
    run = tune.RunConfig(stop={"training_iteration": 2}, storage_path=str(tmp_path), verbose=0)
    (result,) = tune.Tuner(JointPPO, param_space=coupled_config(length=50), run_config=run).fit()
    header = (Path(result.path) / "progress.csv").read_text().splitlines()[0]
    assert "env_runners/num_episodes" in header and RETURNS not in header
    last = json_lines(Path(result.path) / "result.json")[-1]
    assert last["env_runners"]["episode_return_mean"] > 0


@pytest.fixture
def mlflow(monkeypatch):
    """The stand-ins in this process; Ray's integration looks for W&B when it is imported."""
    integration = "ray.air.integrations.wandb"
    before = {name: sys.modules.pop(name, None) for name in (*standins.NAMES, integration)}
    yield standins.install()
    for name, module in before.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


@pytest.mark.timeout(120)
def test_the_page_logs_to_wandb_and_mlflow(ray_session, tmp_path, monkeypatch, mlflow):
    from ray.air.integrations.wandb import WandbLoggerCallback

    monkeypatch.setattr(WandbLoggerCallback, "_logger_actor_cls", standins.LoggingProcess)
    patched = WandbLoggerCallback.__init__
    monkeypatch.setattr(
        WandbLoggerCallback, "__init__", lambda self, **kwargs: patched(self, upload_timeout=30, **kwargs)
    )
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.chdir(tmp_path)
    (block,) = blocks(PAGES["logging.md"], "py")
    names = {}
    exec(compile(block, "logging.md", "exec"), names)
    (result,) = names["results"]
    assert result.error is None
    returns = [result.metrics_dataframe[RETURNS].iloc[i] for i in range(2)]

    (file,) = (tmp_path / "tune").glob("wandb-*.jsonl")
    head, *lines, tail = json_lines(file)
    assert head["project"] == "climbing"
    assert [line["step"] for line in lines] == [1, 2] and [line[RETURNS] for line in lines] == pytest.approx(returns)
    assert tail["config"]["minibatch_size"] == 64 and tail["config"]["pid"] > 0
    expected = {path for path in flatten(result.metrics) if path.startswith(("env_runners/", "learners/"))}
    assert len(expected) > 60 and expected <= lines[-1].keys()

    (run,) = mlflow.runs
    assert run["status"] == "FINISHED" and mlflow.experiments == ["climbing"] and mlflow.uri.startswith("sqlite:///")
    assert run["params"]["minibatch_size"] == "64"
    assert run["metrics"][RETURNS] == [(1, pytest.approx(returns[0])), (2, pytest.approx(returns[1]))]
    assert expected <= run["metrics"].keys()


def test_the_stand_ins_refuse_what_the_packages_refuse(mlflow, tmp_path):
    client = mlflow.tracking.MlflowClient(None, None)
    run = client.create_run("name", None, {}).info.run_id
    with pytest.raises(mlflow.exceptions.MlflowException, match="invalid name"):
        client.log_metric(run, "agent?", 1.0, 1)
    wandb = sys.modules["wandb"]
    wandb.init(id="x", name="", group="", project="", config={}, dir=tmp_path)
    wandb.log({"a": 1.0}, step=1)
    with pytest.raises(AssertionError, match="steps go on"):
        wandb.log({"a": 1.0}, step=1)
    wandb.finish()
