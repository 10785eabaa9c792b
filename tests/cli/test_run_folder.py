import json
import math
from pathlib import Path

import numpy as np
import pytest

from tests.cli.helpers import checkpoints, rows
from thrust_rllib.command_line.result_log import ResultLog
from thrust_rllib.command_line.run_folder import RunFolder, choose_folder
from thrust_rllib.command_line.run_record import write_json


def test_default_folders_are_named_after_the_environment_and_never_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = choose_folder(None, "pettingzoo:mpe2.simple_spread_v3")
    assert first.parent == Path("runs") and first.name.startswith("pettingzoo_mpe2_simple_spread_v3-")
    first.mkdir(parents=True)
    assert choose_folder(None, "pettingzoo:mpe2.simple_spread_v3") != first


def test_an_empty_folder_is_fine_and_a_file_is_not(tmp_path):
    assert choose_folder(tmp_path, "climbing") == tmp_path
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ValueError, match="is a file"):
        choose_folder(file, "climbing")


def result(iteration, **more):
    return {
        "training_iteration": iteration,
        "config": {"lr": 1},
        "num_env_steps_sampled_lifetime": iteration * 64,
        **more,
    }


def test_a_column_that_appears_late_gets_empty_cells_above(tmp_path):
    log = ResultLog(tmp_path)
    log.write(result(1))
    log.write(result(2, env_runners={"episode_return_mean": 3.5}))
    log.write(result(3))
    log.write(result(4, env_runners={"episode_return_mean": 4.5}, learners={"a/b": 1}))
    table = rows(tmp_path)
    assert [row["env_runners/episode_return_mean"] for row in table] == ["", "3.5", "", "4.5"]
    assert [row["training_iteration"] for row in table] == ["1", "2", "3", "4"]
    assert [row["learners/a/b"] for row in table] == ["", "", "", "1"]
    assert not any(name.startswith("config") for name in table[0])
    assert sorted(path.suffix for path in tmp_path.iterdir() if path.name.startswith("progress")) == [".csv"]


class FakeAlgo:
    def save_to_path(self, path):
        Path(path).mkdir(parents=True)
        (Path(path) / "rllib_checkpoint.json").touch()


class FailingAlgo:
    def save_to_path(self, path):
        Path(path).mkdir(parents=True)
        raise OSError("disk full")


def test_the_latest_three_checkpoints_stay(tmp_path):
    folder = RunFolder(tmp_path / "run")
    for iteration in (1, 2, 9, 10):
        path = folder.save_checkpoint(FakeAlgo(), iteration)
    folder.close()
    assert checkpoints(folder.path) == ["iteration_000002", "iteration_000009", "iteration_000010"]
    assert path == folder.checkpoints()[-1]


def test_a_checkpoint_that_failed_is_not_taken_for_one(tmp_path):
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(OSError, match="disk full"):
        folder.save_checkpoint(FailingAlgo(), 1)
    assert folder.checkpoints() == []
    (folder.path / "checkpoints" / "iteration_000001").rmdir()  # as `save_to_path` itself does
    folder.save_checkpoint(FakeAlgo(), 1)
    folder.close()
    assert checkpoints(folder.path) == ["iteration_000001"]


def test_json_has_only_what_json_knows(tmp_path):
    content = {
        "inf": math.inf,
        "nan": math.nan,
        3: np.float32(1.5),
        "array": np.arange(2),
        "set": {2, 1},
        "class": Path,
    }
    write_json(tmp_path / "x.json", content)

    def refuse(name):
        raise AssertionError(name)

    read = json.loads((tmp_path / "x.json").read_text(), parse_constant=refuse)
    assert read["inf"] == "inf" and read["nan"] is None and read["3"] == 1.5
    assert read["array"] == [0, 1] and read["set"] == [1, 2] and read["class"].endswith("Path")
