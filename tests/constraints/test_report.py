"""Costs, limits and multipliers in a report, where a run has constraints."""

import numpy as np

from tests.cli.run_folders import write_config, write_progress
from thrust_rllib.report import compare_runs
from thrust_rllib.reporting.curve_figures import constraint_curves, constraints_caption
from thrust_rllib.reporting.groups import group_runs
from thrust_rllib.reporting.run_curves import read_curves
from thrust_rllib.reporting.runs import read_run

LIMITS = {"risk_10": 0.25, "risk_9": 0.5}


def groups_of(*folders):
    return group_runs([read_run(folder) for folder in folders])[0]


def titles(figure):
    return [axes.get_title(loc="left") for axes in figure.axes]


def lines_of(axes):
    """(those of runs, dotted ones), without the faint ones."""
    drawn = [line for line in axes.lines if not line.get_label().startswith("_")]
    return [line for line in drawn if line.get_linestyle() == "-"], [x for x in drawn if x.get_linestyle() == ":"]


def test_curves_are_read(tmp_path):
    curves = read_curves(write_progress(tmp_path / "run", 2, 4, constraints=LIMITS) / "progress.csv").constraints
    assert list(curves) == ["risk_9", "risk_10"] and set(curves["risk_9"]) == {
        "cost",
        "limit",
        "multiplier",
        "violation",
    }
    np.testing.assert_array_equal(curves["risk_10"]["cost"], [1, np.nan, 1 / 3, 1 / 4])
    np.testing.assert_array_equal(curves["risk_10"]["limit"], [0.25] * 4)
    np.testing.assert_array_equal(curves["risk_9"]["multiplier"], [1, 2, 3, 4])
    assert read_curves(write_progress(tmp_path / "plain") / "progress.csv").constraints == {}


def test_one_run_has_two_panels_for_each_constraint(tmp_path):
    groups = groups_of(write_progress(tmp_path / "run", iterations=10, constraints=LIMITS))
    figure = constraint_curves(groups, "title")
    assert titles(figure) == ["Cost: risk_9", "Multiplier: risk_9", "Cost: risk_10", "Multiplier: risk_10"]
    assert figure.axes[0].get_ylabel() == "mean per step"
    for axes, limit in zip(figure.axes[::2], (0.5, 0.25), strict=True):
        ((cost,), (dotted,)) = lines_of(axes)
        assert cost.get_ydata()[0] == 1.0 and set(dotted.get_ydata()) == {limit}
    ((multiplier,), nothing) = lines_of(figure.axes[1])
    assert multiplier.get_ydata().tolist() == list(range(1, 11)) and not nothing
    caption = constraints_caption(groups)
    assert "dotted: its limit" in caption and "every iteration" in caption and "Returns" not in caption


def test_a_limit_from_below_is_told(tmp_path):
    folder = write_progress(tmp_path / "run", iterations=10, constraints=LIMITS, at_most=False)
    labels = [axes.get_ylabel() for axes in constraint_curves(groups_of(folder), "title").axes]
    assert labels[::2] == ["mean per step, at least the limit"] * 2


def test_groups_are_compared_each_with_its_limit(tmp_path):
    folders = [
        write_progress(
            write_config(tmp_path / f"run_{lr}_{seed}", seed=seed, lr=lr), offset=seed, constraints={"risk": lr / 4}
        )
        for lr in (1, 2)
        for seed in (0, 2)
    ]
    figure = constraint_curves(groups_of(*folders), "title")
    assert titles(figure)[1:] == ["Cost: risk", "Multiplier: risk"]
    (costs, limits), (multipliers, _) = map(lines_of, figure.axes[1:])
    assert [set(line.get_ydata()) for line in limits] == [{0.25}, {0.5}]
    assert [x.get_color() for x in limits] == [x.get_color() for x in costs] == [x.get_color() for x in multipliers]
    assert len({x.get_color() for x in costs}) == 2 and multipliers[0].get_ydata()[0] > 1.9  # mean of two runs


def test_a_report_has_the_figure_only_where_a_run_has_constraints(tmp_path):
    plain, bound = write_progress(tmp_path / "plain"), write_progress(tmp_path / "bound", constraints=LIMITS)
    report = compare_runs([plain], tmp_path / "first")
    assert not (report.folder / "constraints.png").exists() and "<h2>Constraints" not in report.page.read_text()
    assert constraint_curves(groups_of(plain), "title") is None
    report = compare_runs([plain, bound], tmp_path / "second")
    assert (report.folder / "constraints.png").stat().st_size > 10_000
    assert "<h2>Constraints</h2>" in report.page.read_text()
