"""Nothing grows in a long run: memory of driver, learner and runners, the number of metrics; 4 minutes on two cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from thrust_rllib import load_team

pytestmark = [pytest.mark.slow_checkpoints, pytest.mark.timeout(900)]

ITERATIONS, FITTED = 300, 200
MB_PER_ITERATION = 0.05  # at most 0.014 was measured


def slope(values):
    """Of the straight line through the values, per value."""
    return float(np.polyfit(np.arange(len(values)), values, 1)[0])


@pytest.mark.parametrize("door", ["arrays", "episodes"])
def test_nothing_grows(door, tmp_path):
    command = [sys.executable, "-m", "tests.slow.soak_run", door, str(ITERATIONS), str(tmp_path)]
    # oneDNN keeps what it has compiled for each shape of a padded sequence: bounded, so that it does not hide a leak.
    bounded = {"OMP_NUM_THREADS": "1", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
    env = {**os.environ, **bounded, "PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.run(command, env=env, capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr[-5000:]
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert [line["iteration"] for line in lines] == list(range(1, ITERATIONS + 1))
    assert lines[-1]["episodes"] > 1000 and lines[-1]["restarts"] == 0
    named = [line["visitors"] for line in lines]  # agents that had never been there before
    assert len(named[-1]) == 2 and all(after > before for before, after in zip(named[0], named[-1], strict=True))
    assert sum(named[-1]) > 2 * lines[-1]["episodes"]
    last = lines[-FITTED:]
    slopes = {name: slope([line["memory"][name][1] for line in last]) for name in last[0]["memory"]}
    for name, per_iteration in slopes.items():
        begin, end = last[0]["memory"][name][1], last[-1]["memory"][name][1]
        print(f"{door}, {name}: {per_iteration:+.4f} MB per iteration, {begin:.0f} to {end:.0f} MB")
    assert len(slopes) == 4
    assert max(slopes.values()) < MB_PER_ITERATION, slopes
    # From the second iteration on: some of RLlib's timers measure between two of them.
    assert not any("visitor" in name for name in lines[-1]["metrics"])
    assert all(line["metrics"] == lines[1]["metrics"] for line in lines[1:])
    assert load_team(tmp_path / "checkpoint").iteration == ITERATIONS


def test_a_leak_is_noticed():
    flat = 500 + np.random.default_rng(0).normal(0, 2, FITTED)
    assert slope(flat) < MB_PER_ITERATION < slope(flat + 0.1 * np.arange(FITTED))
