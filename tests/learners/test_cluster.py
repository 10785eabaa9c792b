"""The same program on one machine and on a cluster of three nodes gives the same parameters."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from tests.learners.cluster_run import ITERATIONS, ROWS, config, train
from tests.support import largest_difference, make_learner, make_runner, parameters, update

SCRIPT = Path(__file__).with_name("cluster_run.py")
LIMIT_S = 120
pytestmark = pytest.mark.slow_learners


@pytest.fixture(scope="module")
def on_cluster():
    """(parameters, places) of the run over three nodes."""
    folder = Path(tempfile.mkdtemp(prefix="nodes-", dir="/tmp"))  # short: Ray's sockets lie below it
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    environment |= {"RAY_TMPDIR": str(folder), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    log = folder / "log.txt"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(folder)],
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_all(process)
    said = log.read_text()[-3000:]
    try:
        assert code == 0, said
        with np.load(folder / "parameters.npz") as found:
            trained = dict(found)
        yield trained, json.loads((folder / "places.json").read_text())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def end_all(process):
    """Ends the script and all of Ray's processes: groups of their own, but of the script's session."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            session = int(path.read_text().rpartition(")")[2].split()[3])
            if session == process.pid:
                os.kill(int(path.parent.name), signal.SIGKILL)
        except (OSError, ValueError):  # it has ended meanwhile
            continue
    process.wait()


def test_runners_and_learners_are_on_other_nodes_than_the_driver(on_cluster):
    _, places = on_cluster
    assert len(set(places["nodes"])) == 3
    others = set(places["nodes"]) - {places["driver"]}
    assert set(places["runners"]) == set(places["learners"]) == others
    assert len(places["runners"]) == len(places["learners"]) == 2
    assert places["backends"] == ["gloo", "gloo"]  # the learners are connected with each other
    assert places["env_steps"] == ITERATIONS * ROWS


def in_one_process():
    """What the run over the cluster does, with one learner and without Ray: the parameters after each iteration."""
    settings = config(num_learners=0)
    *runners, driver = (make_runner(settings, worker_index=index) for index in (1, 2, 3))  # the third never samples
    learner = make_learner(settings, driver.get_spaces())
    found = []
    for iteration in range(ITERATIONS):
        for runner in runners:
            runner.set_state(
                {**learner.get_state(components="rl_module", inference_only=True), "weights_seq_no": iteration}
            )
        batches = [batch for runner in runners for batch in runner.sample()]
        update(learner, batches, steps=(iteration + 1) * ROWS)
        merged = driver._env_to_module.merge_states([runner._env_to_module.get_state() for runner in runners])
        for runner in (driver, *runners):
            runner._env_to_module.set_state(merged)
        found.append({f"{m}/{name}": x for m, module in parameters(learner).items() for name, x in module.items()})
    return found


def test_a_cluster_gives_the_parameters_of_one_learner(on_cluster):
    found, _ = on_cluster
    *_, before, alone = in_one_process()
    assert largest_difference(found, alone) < 1e-5
    assert largest_difference(found, before) > 1e-3  # one iteration less is another team


@pytest.mark.parametrize(("num_learners", "bound"), [(2, 0.0), (0, 1e-5)])
def test_a_cluster_gives_the_parameters_of_one_machine(on_cluster, build, num_learners, bound):
    found, _ = on_cluster
    *_, before, same = train(build(config(num_learners)))
    assert largest_difference(found, same) <= bound
    assert largest_difference(found, before) > 1e-3
