"""Diversity and auxiliary targets in a report, where a run has them."""

import numpy as np
import pytest

from tests.cli.run_folders import write_config, write_progress
from thrust_rllib.report import compare_runs
from thrust_rllib.reporting.curve_figures import diversity_caption, diversity_curves, learning_curves
from thrust_rllib.reporting.groups import group_runs
from thrust_rllib.reporting.run_curves import read_curves
from thrust_rllib.reporting.runs import read_run

DISCRETE = ("total_variation", "total_variation_time_averaged", "jensen_shannon")


def groups_of(*folders):
    return group_runs([read_run(folder) for folder in folders])[0]


def titles(figure):
    return [axes.get_title(loc="left") for axes in figure.axes]


def test_curves_are_read(tmp_path):
    folder = write_progress(
        tmp_path / "run",
        diversity={"a_0_and_1_more": DISCRETE, "agent_0_and_3_more": ["system_neural_diversity"]},
        targets=("lambda2", "x"),
    )
    curves = read_curves(folder / "progress.csv")
    assert set(curves.diversity) == {*DISCRETE, "system_neural_diversity"}
    values = curves.diversity["jensen_shannon"]["a_0_and_1_more"]
    assert np.flatnonzero(np.isfinite(values)).tolist() == [0, 5, 10, 15, 20, 25] and values[5] == 0.06
    assert list(curves.auxiliary_accuracy) == ["lambda2", "x"]
    assert curves.auxiliary_accuracy["x"]["agent_1"][1] == 0.5
    # Names of targets are not taken for statistics of modules, whatever they are.
    folder = write_progress(tmp_path / "other", targets=("entropy",))
    assert set(read_curves(folder / "progress.csv").modules["entropy"]) == {"agent_0", "agent_1"}


def test_one_run_has_a_panel_for_each_statistic_and_target(tmp_path):
    folder = write_progress(
        tmp_path / "run",
        4,
        diversity={"agent_0_and_1_more": DISCRETE, "agent_2_and_1_more": DISCRETE},
        targets=("lambda2",),
    )
    figure = diversity_curves(groups_of(folder), "title")
    assert titles(figure) == [
        "Total variation of policies", "Total variation, time-averaged", "Jensen-Shannon divergence",
        "Accuracy: lambda2",
    ]  # fmt: skip
    first, *_, accuracy = figure.axes
    assert [text.get_text() for text in first.get_legend().get_texts()] == ["agent_0_and_1_more", "agent_2_and_1_more"]
    drawn = [line for line in first.lines if not line.get_label().startswith("_")]
    assert len(drawn) == 2 and drawn[0].get_marker() == "o"
    assert drawn[0].get_xdata().tolist() == [64, 64 * 6, 64 * 11, 64 * 16, 64 * 21, 64 * 26]
    np.testing.assert_allclose(drawn[0].get_ydata(), [0.01, 0.06, 0.11, 0.16, 0.21, 0.26])
    assert len([line for line in accuracy.lines if not line.get_label().startswith("_")]) == 4
    assert accuracy.get_ylim()[1] == pytest.approx(1.05)
    caption = diversity_caption(groups_of(folder))
    assert "on the same observations" in caption and "median relative error" in caption
    assert "moving average over 2 iterations" in caption and "Returns" not in caption


def test_groups_are_compared(tmp_path):
    folders = [
        write_progress(
            write_config(tmp_path / f"run_{lr}_{seed}", seed=seed, lr=lr),
            offset=lr + seed,
            diversity={"agent_0_and_1_more": DISCRETE},
        )
        for lr in (1, 2)
        for seed in (0, 1)
    ]
    groups = groups_of(*folders)
    figure = diversity_curves(groups, "title")
    assert titles(figure)[1:] == [
        "Total variation of policies",
        "Total variation, time-averaged",
        "Jensen-Shannon divergence",
    ]
    (legend,) = [axes.get_legend() for axes in figure.axes if axes.get_legend()]
    assert [text.get_text() for text in legend.get_texts()] == ["lr=1 (2 runs)", "lr=2 (2 runs)"]
    mean = next(line for line in figure.axes[1].lines if not line.get_label().startswith("_"))
    assert mean.get_ydata()[0] == pytest.approx((2 + 3) / 200)
    caption = diversity_caption(groups)
    assert "bands" in caption and "moving average" not in caption and "Accuracy" not in caption


def test_a_report_has_the_figure_only_where_a_run_has_the_numbers(tmp_path):
    plain = write_progress(tmp_path / "plain")
    assert diversity_curves(groups_of(plain), "title") is None
    report = compare_runs([plain], tmp_path / "first")
    assert not (report.folder / "diversity.png").exists() and "Diversity" not in report.page.read_text()
    measured = write_progress(tmp_path / "measured", diversity={"agent_0_and_1_more": DISCRETE})
    before = titles(learning_curves(groups_of(plain), "title"))
    assert titles(learning_curves(groups_of(measured), "title")) == before
    both = write_progress(tmp_path / "both", diversity={"agent_0_and_1_more": DISCRETE}, targets=("x",))
    report = compare_runs([both, plain], tmp_path / "second")
    assert (report.folder / "diversity.png").stat().st_size > 10_000
    assert "<h2>Diversity and auxiliary targets</h2>" in report.page.read_text()
