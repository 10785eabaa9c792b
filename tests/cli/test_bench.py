"""`thrust-rllib bench`, and that the benchmarks of speed run and write what they say."""

import csv
import hashlib
import logging
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.cli.helpers import thrust_rllib
from thrust_rllib.command_line import bench
from thrust_rllib.functional import generalized_advantages

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PHASES = ("sampling", "learner", "iteration")

# --- the command ------------------------------------------------------------------------------------------------------

ECHO = '''"""Says what it was given.

Takes about
no time (less than that).
"""
import sys
print(sys.argv[1:])
sys.exit(7)
'''
KILLED = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"
SLEEPS = """
import os, subprocess, sys, time
subprocess.Popen(["sleep", "100"])
try:
    print("ready", os.getpid(), flush=True)
    time.sleep(100)
except KeyboardInterrupt:
    print("tidied up", flush=True)
    sys.exit(130)
"""
BENCH = """
import pathlib, sys
from thrust_rllib.cli import app
from thrust_rllib.command_line import bench
bench.ROOT = pathlib.Path(sys.argv[1])
app(["bench", "sleeps"])
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "benchmarks").mkdir()
    for name, text in (("echo", ECHO), ("killed", KILLED), ("sleeps", SLEEPS)):
        (tmp_path / "benchmarks" / f"{name}.py").write_text(text)
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    return tmp_path


def test_without_a_name_all_scripts_are_listed_with_their_first_line_and_duration(checkout):
    code, out, _ = thrust_rllib("bench")
    assert code == 0
    lines = {line.split()[0]: line for line in out.splitlines() if line}
    assert {"echo", "killed", "sleeps"} <= set(lines)
    assert "Says what it was given." in lines["echo"] and "about no time" in lines["echo"]
    assert "less than" not in out


def test_every_benchmark_says_what_it_measures_and_how_long_it_takes():
    found = bench.find_benchmarks()
    assert {path.stem for path in BENCHMARKS.glob("*.py")} == set(found)
    for name in found:
        assert found[name].title and found[name].takes.startswith("about "), name


@pytest.mark.parametrize("dashes", [[], ["--"]])
def test_options_go_to_the_script_and_its_output_and_exit_code_come_back(checkout, capfd, dashes):
    code, _, _ = thrust_rllib("bench", "echo", *dashes, "--rounds", "3", "-h", "--", "--help", "x")
    assert code == 7
    assert capfd.readouterr().out == "['--rounds', '3', '-h', '--', '--help', 'x']\n"


def test_a_script_that_a_signal_ended_has_the_exit_code_of_a_shell(checkout):
    assert thrust_rllib("bench", "killed")[0] == 128 + signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_the_script_and_what_it_started(checkout, number):
    process = subprocess.Popen(
        [sys.executable, "-c", BENCH, str(checkout)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        script = int(process.stdout.readline().split()[1])
        assert len(running(group=script)) == 2
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert out == ("tidied up\n" if number == signal.SIGINT else "") and "Traceback" not in err
    assert running(group=script) == []


def running(group):
    """States of the processes in a group, those left out that have ended and that nobody has asked about yet."""
    states = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, process_group, *_ = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(process_group) == group and state != "Z":
            states.append(state)
    return states


def test_a_wrong_name_is_an_error_with_the_nearest(checkout):
    code, out, err = thrust_rllib("bench", "ecko", "--rounds", "3")
    assert code == 2 and out == "" and "no benchmark 'ecko'; did you mean 'echo'?" in err


@pytest.mark.parametrize("arguments", [[], ["echo"]])
@pytest.mark.parametrize("missing", ["pyproject.toml", "benchmarks"])
def test_without_a_checkout_it_says_where_the_benchmarks_are(checkout, arguments, missing):
    (checkout / missing).rename(checkout / "elsewhere")
    code, _, err = thrust_rllib("bench", *arguments)
    assert code == 2 and "scripts of the repository" in err and "git clone" in err and "make setup" in err


# --- the benchmarks ---------------------------------------------------------------------------------------------------


@pytest.fixture
def script(ray_session, monkeypatch):
    """Names of a benchmark in this process, by its name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    loggers = [logging.getLogger(name) for name in ("ray", "ray.rllib")]
    levels = [logger.level for logger in loggers]
    yield lambda name: runpy.run_path(str(BENCHMARKS / f"{name}.py"))
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def rows_of(path):
    with path.open(newline="") as file:
        return [r | {key: float(r[key]) for key in ("median", "min", "max")} for r in csv.DictReader(file)]


def check_seconds_and_picture(path, command):
    """Rows of a smoke run: every number positive, phases inside the iteration, the command recorded, a picture."""
    rows = rows_of(path)
    for row in rows:
        assert row["median"] > 0 and row["min"] <= row["median"] <= row["max"], row
        assert row["command"] == f"python benchmarks/{command}" and row["rounds"] == "1"
    with Image.open(path.with_suffix(".png")) as picture:
        assert len(set(picture.convert("RGB").resize((200, 100)).get_flattened_data())) > 20
    return rows


def results():
    return {path.name: hashlib.sha256(path.read_bytes()).digest() for path in (BENCHMARKS / "results").iterdir()}


def test_floor(script, tmp_path):
    options = ["--smoke", "--output", str(tmp_path)]
    assert script("floor")["main"](options) == 0
    rows = check_seconds_and_picture(tmp_path / "floor.csv", f"floor.py {' '.join(options)}")
    found = {(r["environment"], r["side"], r["quantity"], r["unit"]): r["median"] for r in rows}
    for kind in ("vector", "scalar"):
        for side in ("hand", "joint"):
            sampling, learner, iteration = (found[kind, side, phase, "s"] for phase in PHASES)
            assert 0.5 * iteration < sampling + learner <= 1.001 * iteration
        for phase in PHASES:
            ratio = found[kind, "hand", phase, "s"] / found[kind, "joint", phase, "s"]
            assert found[kind, "hand", phase, "of JointPPO's seconds"] == pytest.approx(ratio, rel=2e-3)
        for side in ("hand", "joint"):
            assert 0.15 < found[kind, side, "first mean reward", "per step"] < 0.3  # 0.2: at random


def test_floor_refuses_sides_that_do_not_do_the_same_work(script):
    names = script("floor")
    work = {"gradient steps": 32, "rows sampled": 2048, "rows trained": 8192, "parameters": 100}
    side = names["Side"](None, None, None)
    other = names["Side"](None, None, None)
    side.works, other.works = [work, work], [work]
    args = type("Args", (), {"envs": 16})
    names["check_work"]({("vector", "hand"): side, ("vector", "joint"): other}, args)
    for key in work:
        other.works = [work, work | {key: work[key] + 1}]
        with pytest.raises(AssertionError, match="joint"):
            names["check_work"]({("vector", "hand"): side, ("vector", "joint"): other}, args)


def test_the_loop_by_hand_computes_what_the_package_computes(script):
    loop = script("floor")["HandLoop"](script("floor")["DriftingTeamVector"](16, 2), agents=2, envs=16, seed=0)
    for _ in range(2):
        loop.iteration()
    following = loop.rollout()
    mean, std = (x[..., None] for x in loop.scale())
    with torch.no_grad():
        values = torch.stack(
            [net.value(net.trunk(o)).squeeze(-1) for net, o in zip(loop.networks, loop.obs, strict=True)]
        )
        after = torch.zeros_like(values)
        for t, envs, shown in following:
            for agent, network in enumerate(loop.networks):
                after[agent, t, envs] = network.value(network.trunk(torch.from_numpy(shown[agent]))).squeeze(-1)
    truncated = torch.from_numpy(loop.truncated).expand(2, -1, -1)
    assert 0 < truncated.sum() < truncated.numel() / 50
    streams = [
        torch.from_numpy(loop.rewards), values * std + mean, torch.zeros_like(truncated), truncated, after * std + mean
    ]  # fmt: skip
    expected, _ = generalized_advantages(*(x.transpose(0, 1) for x in streams), 0.99, 0.95)
    expected = expected.transpose(0, 1).flatten(1)
    expected = (expected - expected.mean(1, keepdim=True)) / expected.std(1, correction=0, keepdim=True)
    torch.testing.assert_close(loop.prepare(following)[4], expected, rtol=1e-4, atol=1e-4)


def test_scaling_from_the_command_line(tmp_path):
    """In a process of its own, as users run it."""
    before = results()
    options = ["--smoke", "--policies", "shared", "--output", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "thrust_rllib", "bench", "scaling", *options], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "µs per agent-step" in done.stdout and str(tmp_path / "scaling.csv") in done.stdout
    rows = check_seconds_and_picture(tmp_path / "scaling.csv", f"scaling.py {' '.join(options)}")
    found = {(int(r["agents"]), r["quantity"], r["unit"]): r["median"] for r in rows}
    assert {agents for agents, *_ in found} == {2, 4}
    for phase in PHASES:
        small, large = (found[agents, phase, "µs per agent-step"] for agents in (2, 4))
        assert found[4, phase, "times the smallest team"] == pytest.approx(large / small, rel=2e-3)
        # 2048 rows of 2 agents: an iteration of at least 4 ms and at most 40 s.
        assert 1 < found[2, "iteration", "µs per agent-step"] < 10_000
    assert results() == before


def test_compare_rllib(script, tmp_path):
    path = tmp_path / "named.csv"
    options = ["--smoke", "--vectorized", "--output", str(path)]
    assert script("compare_rllib")["main"](options) == 0
    rows = check_seconds_and_picture(path, f"compare_rllib.py {' '.join(options)}")
    found = {(r["side"], r["quantity"], r["unit"]): r["median"] for r in rows}
    for side in ("joint", "vectorized"):
        for phase in PHASES:
            ratio = found["stock", phase, "s"] / found[side, phase, "s"]
            assert found[side, phase, "times faster than stock"] == pytest.approx(ratio, rel=2e-3)
    # The columns of the table that is kept in the repository.
    with (BENCHMARKS / "results" / "compare_rllib.csv").open(newline="") as kept:
        assert next(csv.reader(kept)) == list(rows[0])


def test_compare_rllib_with_a_memory(script, tmp_path):
    """Both sides train the network that is named, in about as many gradient steps."""
    names = script("compare_rllib")
    assert names["main"](["--smoke", "--cell", "lstm", "--output", str(tmp_path)]) == 0
    rows = rows_of(tmp_path / "compare_rllib.csv")
    assert {row["cell"] for row in rows} == {"lstm"}
    steps = {row["side"]: row["median"] for row in rows if row["quantity"] == "gradient steps"}
    assert steps["joint"] == 36 and abs(steps["stock"] - 36) <= 2


def test_recurrent_update(script, tmp_path):
    options = ["--smoke", "--output", str(tmp_path)]
    assert script("recurrent_update")["main"](options) == 0
    rows = check_seconds_and_picture(tmp_path / "recurrent_update.csv", f"recurrent_update.py {' '.join(options)}")
    found = {(r["cell"], r["max_seq_len"], r["unit"]): r["median"] for r in rows}
    for cell in ("lstm", "gru"):
        for length, steps in (("20", 36), ("whole rollout", 32)):
            ratio = found[cell, length, "s"] / found["mlp", "", "s"]
            assert found[cell, length, "times the MLP's"] == pytest.approx(ratio, rel=2e-3)
            assert found[cell, length, "per update"] == steps


def test_new_rows_replace_those_of_the_same_case_and_a_smoke_run_without_output_saves_nothing(script, tmp_path):
    names = script("scaling")
    options = names["parser"]("", rounds=2, warmup=1)
    args = names["parse"](options, ["--output", str(tmp_path)])

    def save(seconds, agents, args=args):
        measured = {("shared", 1, n): [{phase: seconds for phase in PHASES}] * 2 for n in agents}
        names["save"]("scaling", names["rows_of"](measured), args, names["CASE"], names["draw"])

    def saved():
        rows = rows_of(tmp_path / "scaling.csv")
        return {int(r["agents"]): r["median"] for r in rows if r["unit"] == names["MICROSECONDS"]}

    save(1e-6, [2, 4])
    save(3e-6, [4, 8])
    assert saved() == {2: 1.0, 4: 3.0, 8: 3.0}
    save(9e-6, [2], names["parse"](options, ["--output", str(tmp_path), "--clock", "cpu"]))
    assert len(rows_of(tmp_path / "scaling.csv")) == 3 * (1 + 1 + 2 + 1)  # the other clock is another case

    before = results()
    smoke = names["parse"](options, ["--smoke"])
    assert (smoke.rounds, smoke.warmup) == (1, 1)
    save(5e-6, [2], smoke)
    assert results() == before


@pytest.mark.parametrize("rounds", ["0", "-1"])
def test_no_round_is_an_error(script, rounds, capsys):
    with pytest.raises(SystemExit):
        script("scaling")["main"](["--rounds", rounds])
    assert "needed: 1 or more" in capsys.readouterr().err
