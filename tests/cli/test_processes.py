"""Real processes: a signal, and a checkpoint that another process reads."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.cli.helpers import TINY, checkpoints, read_json, rows
from thrust_rllib.command_line.stop_signal import StopSignal

EVALUATE = """
import sys
import ray
from thrust_rllib import JointPPO
ray.init(num_cpus=1, include_dashboard=False)
algo = JointPPO.from_checkpoint(sys.argv[1])
results = algo.evaluate()["env_runners"]
print("RESULT", algo.iteration, results["num_episodes"], sorted(results["agent_episode_returns_mean"]))
algo.stop()
"""


class Messages(list):
    message = list.append


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_stops(number):
    before, messages = signal.getsignal(number), Messages()
    with pytest.raises(KeyboardInterrupt), StopSignal(messages) as stop:
        os.kill(os.getpid(), number)
        assert stop.requested and len(messages) == 1
        os.kill(os.getpid(), number)
        time.sleep(1)
    assert signal.getsignal(number) is before


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A run of a process that got one SIGINT, and all that it printed."""
    folder = tmp_path_factory.mktemp("interrupted") / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "thrust_rllib", "train", "debug/match_observation", *TINY, "--minutes", "4",
         "--output", str(folder)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    with process:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("iteration 3"):
                process.send_signal(signal.SIGINT)
                break
        lines += process.stdout.readlines()
    return folder, process.wait(timeout=60), "".join(lines)


def test_ctrl_c_ends_the_run_with_a_checkpoint_and_a_report(interrupted):
    folder, code, out = interrupted
    assert code == 130, out
    assert "stopping after this iteration" in out and "stopped: " in out and "Traceback" not in out
    last = int(rows(folder)[-1]["training_iteration"])
    assert last >= 3 and checkpoints(folder) == [f"iteration_{last:06}"]
    assert (folder / "report" / "learning_curves.png").exists()
    assert read_json(folder / "report" / "summary.json")["evaluation"] is None


def test_nothing_of_ray_or_rllib_is_printed(interrupted):
    out = interrupted[2]
    for noise in ("API stack", "Deprecat", "WARNING", "ray.init", "Started a local Ray"):
        assert noise not in out


def test_a_fresh_process_evaluates_the_checkpoint(interrupted):
    folder = interrupted[0]
    (path,) = (folder / "checkpoints").iterdir()
    done = subprocess.run([sys.executable, "-c", EVALUATE, str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert line == f"RESULT {int(path.name[-6:])} 4 ['agent_0', 'agent_1']"
