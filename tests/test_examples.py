"""Every example runs: its `--smoke` form, in this process."""

import re
import runpy
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name, capsys):
    runpy.run_path(str(EXAMPLES / name))["main"](["--smoke"])
    return capsys.readouterr().out


def numbers(label, text):
    return [float(number) for number in re.findall(rf"\b{label} +(-?[\d.]+)", text)]


def test_this_file_runs_all_examples():
    tested = set(re.findall(r'run\("(\w+\.py)"', Path(__file__).read_text()))
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested


def test_nothing_takes_it_for_granted_that_an_episode_has_ended():
    for path in [*EXAMPLES.glob("*.py"), EXAMPLES.parent / "README.md"]:
        assert not re.search(r"\[.(agent_)?episode_returns?_mean.\]", path.read_text()), path.name


def test_minimal_prints_each_agents_return(ray_session, capsys):
    out = run("minimal.py", capsys)
    assert numbers("iteration", out) == [1, 2]
    agents = [numbers(f"agent_{i}", out) for i in range(4)]
    for team, *each in zip(numbers("team", out), *agents, strict=True):
        assert abs(team - sum(each)) < 0.3  # both rounded to a tenth


def test_own_coupling_acts(ray_session, capsys):
    out = run("own_coupling.py", capsys)
    before, without, same, with_coupling = numbers("crowding", out)
    assert abs(before - 0.1) < 0.01 and abs(same - 0.1) < 0.01  # untrained: ten houses chosen evenly
    assert with_coupling < without - 0.005


def test_pettingzoo_env_prints_each_agents_return(ray_session, capsys):
    out = run("pettingzoo_env.py", capsys)
    assert len(numbers("team", out)) == 2
    assert all(numbers(f"agent_{i}", out)[0] < 0 for i in range(3))  # the task pays negative distances
