"""No order of a set reaches the numbers: two learners train to the same ones whatever PYTHONHASHSEED is."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from tests.learners.hash_seeds import NAMES, UPDATES, config
from tests.learners.ray_learners import rollouts_of, trained_alone
from tests.learners.test_cluster import end_all
from tests.support import largest_difference

ROOT = Path(__file__).parents[2]
LIMIT_S = 120
pytestmark = [pytest.mark.slow_learners, pytest.mark.timeout(3 * LIMIT_S + 30)]


@functools.cache
def run(hash_seed):
    """What `hash_seeds.py` found, and the parameters.

    Args:
        hash_seed: PYTHONHASHSEED, of the script and of the learners; None leaves it unset.
    """
    folder = Path(tempfile.mkdtemp(prefix="hash-", dir="/tmp"))  # short: Ray's sockets lie below it
    environment = {key: value for key, value in os.environ.items() if key not in ("RAY_ADDRESS", "PYTHONHASHSEED")}
    environment |= {"RAY_TMPDIR": str(folder), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    environment["PYTHONPATH"] = str(ROOT)
    if hash_seed is not None:
        environment["PYTHONHASHSEED"] = hash_seed
    log = folder / "log.txt"
    try:
        with log.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.learners.hash_seeds", str(folder)],
                cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                code = f"none within {LIMIT_S} s"
            finally:
                end_all(process)
        assert code == 0, f"exit code {code}: {log.read_text()[-3000:]}"
        with np.load(folder / "parameters.npz") as parameters:
            return json.loads((folder / "found.json").read_text()), dict(parameters)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_two_learners_train_a_team_from_sets_as_one_does():
    """The hash seeds of the script, its learners and this process are three unknown ones."""
    found, parameters = run(None)
    assert sorted(found["order"]) == sorted(NAMES)
    assert found["learners"][0] == found["learners"][1]
    rollouts, spaces = rollouts_of(config(0), UPDATES)
    before, after, _ = trained_alone(config(0), spaces, rollouts)
    alone, start = ({f"{m}/{name}": x for m, module in side["parameters"].items() for name, x in module.items()}
                    for side in (after, before))  # fmt: skip
    assert largest_difference(parameters, alone) < 1e-5
    assert largest_difference(start, alone) > 1e-3


def test_every_hash_seed_gives_the_same_numbers_to_the_bit():
    (zero, at_zero), (one, at_one), (unset, at_unset) = (run(hash_seed) for hash_seed in ("0", "1", None))
    assert zero["order"] != one["order"], "these hash seeds order the names alike; nothing was tested"
    for other, parameters in ((one, at_one), (unset, at_unset)):
        assert other["learners"] == zero["learners"] and other["metrics"] == zero["metrics"]
        assert largest_difference(parameters, at_zero) == 0.0
