"""Real processes: a signal, and a checkpoint that another process reads."""

import contextlib
import errno
import fcntl
import io
import os
import pty
import shlex
import signal
import subprocess
import sys
import termios
import threading
import time

import pytest
from rich.console import Console

from tests.cli.helpers import TINY, checkpoints, read_json, rows
from thrust_rllib.command_line.lasting_output import lasting_output
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


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_stops(first, second):
    before, messages = [signal.getsignal(number) for number in (first, second)], Messages()
    with pytest.raises(KeyboardInterrupt), StopSignal(messages) as stop:
        os.kill(os.getpid(), first)
        assert stop.requested and len(messages) == 1
        os.kill(os.getpid(), signal.SIGHUP)  # a terminal that is closed says so more than once
        os.kill(os.getpid(), second)
        time.sleep(1)
    assert [signal.getsignal(number) for number in (first, second)] == before


def test_nohup_is_heeded(monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignal(Messages()) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [errno.EPIPE, errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_output_that_nobody_reads(monkeypatch, tmp_path, name, number):
    class Refusing(io.FileIO):
        def write(self, data):
            if refused:
                raise OSError(number, os.strerror(number))
            return super().write(data)

    refused, path = [], tmp_path / "out"
    raw = Refusing(path, "w")
    stream = io.TextIOWrapper(io.BufferedWriter(raw))
    monkeypatch.setattr(sys, name, stream)
    with contextlib.closing(stream), lasting_output():
        console = Console(stderr=name == "stderr")
        console.print("first")
        refused.append(number)
        console.print("second")
        refused.clear()
        console.print("third")
    assert getattr(sys, name) is stream
    # A disk may have room again; a reader that has gone does not come back.
    assert path.read_text().split() == (["first", "second", "third"] if number == errno.ENOSPC else ["first"])


@pytest.mark.timeout(120)
@pytest.mark.slow_checkpoints
def test_a_pipe_that_ends_ends_no_run(tmp_path):
    folder = tmp_path / "run"
    command = shlex.join(
        [sys.executable, "-m", "thrust_rllib", "train", "debug/match_observation", *TINY, "--iterations", "9",
         "--output", str(folder)]
    )  # fmt: skip
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} | head -n 2"], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0 and "iteration 1/9" in done.stdout and "Broken" not in done.stderr, done.stderr
    assert len(rows(folder)) == 9 and checkpoints(folder) == ["iteration_000009"]


@pytest.mark.timeout(120)
@pytest.mark.slow_checkpoints
@pytest.mark.parametrize("live", ["--live", "--no-live"])
def test_a_terminal_that_is_closed(tmp_path, live):
    folder = tmp_path / "run"
    here, there = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "thrust_rllib", "train", "debug/match_observation", *TINY, "--minutes", "4",
         live, "--output", str(folder)],
        stdin=there, stdout=there, stderr=there, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(there)
    threading.Thread(target=read_all, args=(here,), daemon=True).start()
    while not (folder / "progress.csv").exists() or len(rows(folder)) < 3:
        assert process.poll() is None
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGSTOP)  # so that the thread reads no more
    os.close(here)
    os.kill(process.pid, signal.SIGHUP)
    os.kill(process.pid, signal.SIGCONT)
    assert process.wait(60) == 130
    last = len(rows(folder))
    assert last >= 3 and checkpoints(folder) == [f"iteration_{last:06}"] and (folder / "report").exists()
    assert not (folder / "error.txt").exists()


def read_all(descriptor):
    with contextlib.suppress(OSError):
        while os.read(descriptor, 4096):
            pass


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


RESTARTS = """
import os, subprocess, sys
from thrust_rllib.command_line.backend_lines import without_lines_of_restarts
with without_lines_of_restarts():
    os.write(2, b"E core.cc:1] Actor has constructor arguments in the object store and max_restarts > 0. And so on.\\n")
    os.write(2, b"E core.cc:2] another\\n")
    print("from Python", file=sys.stderr)
os.write(2, b"behind: has constructor arguments in the object store and max_restarts > 0\\n")
"""


def test_what_ray_says_of_runners_that_may_be_restarted_is_left_out():
    done = subprocess.run([sys.executable, "-c", RESTARTS], capture_output=True, text=True, timeout=60)
    lines = done.stderr.splitlines()
    assert lines[:2] == ["E core.cc:2] another", "from Python"] and lines[2].startswith("behind: ") and len(lines) == 3


@pytest.mark.timeout(120)
def test_a_run_with_remote_runners_says_nothing_of_rays(tmp_path):
    command = [
        sys.executable,
        "-m",
        "thrust_rllib",
        "train",
        "bucket_brigade",
        *TINY,
        "--runners",
        "2",
        "--iterations",
        "1",
    ]
    done = subprocess.run([*command, "--output", str(tmp_path / "run")], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == ""
    assert not [line for line in done.stdout.splitlines() if ".cc:" in line or "raylet" in line]
