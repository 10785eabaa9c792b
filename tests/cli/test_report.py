import csv
import math

import numpy as np
import pytest

from tests.cli.helpers import read_json
from thrust_rllib.learning_curves import learning_curves, moving_average
from thrust_rllib.report import summary, write_report
from thrust_rllib.run_curves import read_curves


def write_progress(folder, agents=2, iterations=30, modules=None, couplings=("redundancy",), first_return=3):
    """A progress.csv as RLlib writes it; agent k's return in iteration i is 10 k + i."""
    table = []
    for i in range(1, iterations + 1):
        row = {"training_iteration": i, "time_total_s": i / 2, "env_runners/num_env_steps_sampled_lifetime": 64.0 * i}
        if i >= first_return:
            for k in reversed(range(agents)):
                row[f"env_runners/agent_episode_returns_mean/agent_{k}"] = 10 * k + i
            row["env_runners/episode_return_mean"] = sum(10 * k + i for k in range(agents))
        for module in modules or [f"agent_{k}" for k in range(agents)]:
            row[f"learners/{module}/entropy"] = 1 / i
            row[f"learners/{module}/vf_explained_var"] = -50 if i == 1 else 0.5
            row[f"learners/{module}/approx_kl"] = 0.01
        for name in couplings:
            row[f"learners/__all_modules__/cross_agent_loss/{name}"] = 0.3
            row["learners/__all_modules__/cross_agent_loss/total"] = 0.03
        table.append(row)
    folder.mkdir(exist_ok=True)
    with (folder / "progress.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in table for name in row)), restval="")
        writer.writeheader()
        writer.writerows(table)
    return folder


def test_curves_are_read_with_gaps_and_agents_in_order(tmp_path):
    curves = read_curves(write_progress(tmp_path / "run", agents=12) / "progress.csv")
    assert list(curves.agent_returns) == [f"agent_{k}" for k in range(12)]
    assert np.isnan(curves.total_return[:2]).all() and curves.agent_returns["agent_3"][2] == 33
    assert list(curves.couplings) == ["redundancy"]
    assert curves.modules["entropy"]["agent_0"][3] == 0.25


def test_summary_has_the_final_numbers(tmp_path):
    evaluation = {"num_episodes": 5, "episode_return_mean": np.float64(7), "agent_episode_returns_mean": {"agent_0": 7}}
    folder = write_progress(tmp_path / "run")
    plot = write_report(folder, evaluation)
    assert plot == folder / "report" / "learning_curves.png"
    read = read_json(folder / "report" / "summary.json")
    assert (read["iterations"], read["env_steps"], read["seconds"]) == (30, 1920, 15.0)
    assert read["return_mean"] == read["best_return_mean"] == 70 and read["best_iteration"] == 30
    assert read["agent_returns"] == {"agent_0": 30, "agent_1": 40}
    assert read["cross_agent_losses"] == {"redundancy": 0.3}
    assert read["evaluation"]["return_mean"] == 7 and read["evaluation"]["episodes"] == 5


def test_a_run_without_an_episode_has_a_report_too(tmp_path):
    folder = write_progress(tmp_path / "run", first_return=99, couplings=())
    assert write_report(folder).stat().st_size > 10_000
    read = read_json(folder / "report" / "summary.json")
    assert read["return_mean"] is None and read["best_iteration"] is None


@pytest.mark.parametrize(
    ("agents", "modules", "couplings", "panels"),
    [(1, None, (), 5), (4, None, ("redundancy",), 6), (16, None, ("a", "b"), 6), (3, ["shared"], (), 5)],
)
def test_plot(tmp_path, agents, modules, couplings, panels):
    curves = read_curves(write_progress(tmp_path / "run", agents, 30, modules, couplings) / "progress.csv")
    figure = learning_curves(curves, "a title")
    axes = figure.axes
    assert len(axes) == panels
    assert all(a.get_xlabel() == "environment steps" and a.get_ylabel() and a.get_title(loc="left") for a in axes)
    shown = [text.get_text() for a in axes if a.get_legend() for text in a.get_legend().get_texts()]
    assert [name for name in shown if name.startswith("agent")] == (
        [f"agent_{k}" for k in range(agents)] if agents > 1 else []
    )
    assert "moving average over 2 iterations" in figure._supxlabel.get_text()
    assert axes[3].get_ylim()[0] > -2  # explained variance: the -50 of the first iteration is out of view


def test_a_report_needs_an_iteration(tmp_path):
    with pytest.raises(ValueError, match="there is no"):
        read_curves(tmp_path / "progress.csv")
    (tmp_path / "progress.csv").write_text("training_iteration\n")
    with pytest.raises(ValueError, match="no iteration"):
        read_curves(tmp_path / "progress.csv")


@pytest.mark.parametrize("window", [1, 2, 3, 7, 20])
def test_moving_average_against_a_loop(window):
    generator = np.random.default_rng(0)
    values = generator.normal(size=12)
    values[[0, 1, 5]] = math.nan
    before = window // 2
    expected = []
    for i in range(len(values)):
        inside = values[max(0, i - before) : i - before + window]
        inside = inside[np.isfinite(inside)]
        expected.append(inside.mean() if len(inside) and i >= 2 else math.nan)
    np.testing.assert_allclose(moving_average(values, window), expected, atol=1e-12)


def test_summary_of_one_iteration(tmp_path):
    curves = read_curves(write_progress(tmp_path / "run", iterations=1, first_return=1) / "progress.csv")
    assert summary(curves)["return_mean"] == 12
