"""Numbers of curves: reading, smoothing, means and bands over runs; and what is in which panel."""

import math

import numpy as np
import pytest

from tests.cli.run_folders import write_config, write_progress
from thrust_rllib.reporting.curve_figures import agent_returns, learning_curves, lines_caption
from thrust_rllib.reporting.groups import group_runs
from thrust_rllib.reporting.run_curves import read_curves
from thrust_rllib.reporting.runs import read_run
from thrust_rllib.reporting.seed_curves import MAX_POINTS, common_steps, moving_average, seed_curve


def groups_of(*folders):
    return group_runs([read_run(folder) for folder in folders])[0]


def test_curves_are_read_with_gaps_and_agents_in_order(tmp_path):
    curves = read_curves(write_progress(tmp_path / "run", agents=12, gradients=("redundancy",)) / "progress.csv")
    assert list(curves.agent_returns) == [f"agent_{k}" for k in range(12)]
    assert np.isnan(curves.total_return[:2]).all() and curves.agent_returns["agent_3"][2] == 33
    assert list(curves.couplings) == ["redundancy"]
    assert curves.modules["entropy"]["agent_0"][3] == 0.25
    assert curves.gradients["redundancy", "cosine"]["agent_11"][0] == -0.1 and curves.note is None
    assert set(curves.modules) == {"entropy", "vf_explained_var", "approx_kl"}


def test_a_missing_count_of_steps_is_interpolated(tmp_path):
    file = tmp_path / "progress.csv"
    file.write_text("env_runners/num_env_steps_sampled_lifetime,time_total_s\n10,1\n,nan\n30,what\n")
    curves = read_curves(file)
    assert curves.env_steps.tolist() == [10, 20, 30]
    assert np.isnan(curves.seconds[1:]).all() and np.isnan(curves.total_return).all()


def test_a_report_needs_an_iteration(tmp_path):
    file = tmp_path / "progress.csv"
    with pytest.raises(ValueError, match="there is no"):
        read_curves(file)
    file.write_text("training_iteration\n")
    with pytest.raises(ValueError, match="no iteration"):
        read_curves(file)
    file.write_text("training_iteration\n1\n")
    with pytest.raises(ValueError, match="no number in its column env_runners/num_env_steps_sampled_lifetime"):
        read_curves(file)


FIRST = "env_runners/num_env_steps_sampled_lifetime,b,c\r\n"


@pytest.mark.parametrize(
    ("last", "why"),
    [
        ("20", "cut off"), ("204", "cut off"), ("20480,1", "cut off"), ("20480,1,2", "cut off"),
        ("20480,1\r\n", "cut off"),
        ("10240,1,2\r\n", "environment steps, 10240, are no more"), ("9,1,2\r\n", "environment steps, 9, are no more"),
    ],
)  # fmt: skip
def test_a_last_row_that_is_not_complete_is_left_out_and_told(tmp_path, last, why):
    file = tmp_path / "progress.csv"
    file.write_text(f"{FIRST}5120,1,2\r\n10240,1,2\r\n{last}", newline="")
    curves = read_curves(file)
    assert curves.env_steps.tolist() == [5120, 10240]
    assert curves.note.startswith("the last row of progress.csv is left out: ") and why in curves.note
    file.write_text(f"{FIRST}{last}", newline="")
    if "cut" in why:
        with pytest.raises(ValueError, match="no iteration"):
            read_curves(file)
    else:
        assert read_curves(file).note is None


def test_every_cut_of_a_file_gives_increasing_steps(tmp_path):
    whole = (write_progress(tmp_path / "run", iterations=4) / "progress.csv").read_bytes()
    file = tmp_path / "progress.csv"
    for end in range(len(whole) - 1, whole.index(b"\r\n") + 2, -1):
        file.write_bytes(whole[:end])
        complete = whole[:end].count(b"\n") - 1
        if complete == 0:
            break
        curves = read_curves(file)
        assert curves.env_steps.tolist() == [64.0 * (i + 1) for i in range(complete)]
        assert (curves.note is None) == (whole[end - 1 : end] == b"\n")


def test_what_is_no_text_is_named(tmp_path):
    file = write_progress(tmp_path / "run") / "progress.csv"
    file.write_bytes(file.read_bytes() + b"\xff\xfe")
    with pytest.raises(ValueError, match=r"run/progress\.csv is no UTF-8 text"):
        read_curves(file)


def test_repeated_gradients_are_no_measurements(tmp_path):
    folder = write_progress(tmp_path / "run", iterations=25, gradients=("redundancy",))
    curves = read_curves(folder / "progress.csv")
    measured = np.isfinite(curves.gradients["redundancy", "cosine"]["agent_1"])
    assert np.flatnonzero(measured).tolist() == [0, 10, 20]
    figure = learning_curves(groups_of(folder), "title")
    cosine, size = (
        next(a for a in figure.axes if a.get_title(loc="left") == f"Gradient of redundancy: {what}")
        for what in ("direction", "size")
    )
    assert cosine.get_ylim() == (-1.05, 1.05) and size.get_ylim() != (-1.05, 1.05)
    drawn = [line for line in size.lines if not line.get_label().startswith("_")]
    assert len(drawn) == 2 and all(line.get_marker() == "o" for line in drawn)
    assert drawn[0].get_xdata().tolist() == [64, 64 * 11, 64 * 21]
    np.testing.assert_allclose(drawn[0].get_ydata(), [0.5, 0.6, 0.7])  # no average over iterations
    assert size.get_xlim()[1] >= 64 * 25 and figure.axes[2].lines[-1].get_marker() == "None"
    assert "dots are the updates that measured" in figure._supxlabel.get_text()


def test_no_axis_has_a_factor_above_it(tmp_path):
    folder = write_progress(tmp_path / "run", iterations=12, scale=1e-7)
    figure = learning_curves(groups_of(folder), "title")
    figure.canvas.draw()
    assert [a.yaxis.get_offset_text().get_text() for a in figure.axes] == [""] * len(figure.axes)
    ticks = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert any("e\N{MINUS SIGN}0" in tick for tick in ticks) and len(set(ticks)) == len(ticks)


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


def test_mean_and_band_of_runs_with_the_same_steps(tmp_path):
    folders = [write_progress(tmp_path / f"run_{k}", iterations=5, offset=k**2) for k in range(3)]
    curves = [read_curves(folder / "progress.csv") for folder in folders]
    table = np.stack([c.total_return for c in curves])[:, 2:]
    found = seed_curve([(c.env_steps, c.total_return) for c in curves])
    assert found.steps.tolist() == [192, 256, 320]
    np.testing.assert_allclose(found.mean, table.mean(axis=0), atol=1e-10)
    np.testing.assert_allclose(found.standard_error, table.std(axis=0, ddof=1) / math.sqrt(3), atol=1e-10)
    np.testing.assert_array_equal(found.low, table.min(axis=0))
    np.testing.assert_array_equal(found.high, table.max(axis=0))


def test_other_steps_and_gaps_are_interpolated_and_the_mean_ends_where_half_of_the_runs_do():
    long = (np.array([10.0, 20, 30, 40]), np.array([1.0, math.nan, 3, 4]))
    short = (np.array([15.0, 25]), np.array([10.0, 20]))
    shortest = (np.array([15.0]), np.array([5.0]))
    nothing = (np.array([10.0, 20]), np.array([math.nan, math.nan]))
    found = seed_curve([long, short, shortest, nothing])
    # 10: one of three; 30 and 40 likewise. 20: 2.0 and 15.0.
    assert found.steps.tolist() == [15, 25]
    np.testing.assert_allclose(found.mean, [(1.5 + 10 + 5) / 3, (2.5 + 20) / 2], atol=1e-12)
    np.testing.assert_allclose(found.standard_error, [np.std([1.5, 10, 5], ddof=1) / 3**0.5, 17.5 / 2], atol=1e-12)
    pair = seed_curve([long, short])
    assert pair.steps.tolist() == [10, 15, 25, 30, 40] and np.isnan(pair.standard_error[[0, -1]]).all()
    assert len(seed_curve([nothing]).steps) == 0


def test_a_common_grid_is_bounded():
    grids = [np.arange(0.0, 5000, 7), np.arange(3.0, 6000, 11)]
    steps = common_steps(grids)
    assert len(steps) == MAX_POINTS and (steps[0], steps[-1]) == (0, grids[1][-1])
    assert np.array_equal(common_steps([np.array([1.0, 3]), np.array([2.0, 3])]), [1, 2, 3])


@pytest.mark.parametrize(
    ("agents", "modules", "couplings", "gradients", "panels"),
    [
        (1, None, (), (), 5), (4, None, ("redundancy",), (), 6), (16, None, ("a", "b"), (), 7),
        (3, ["shared"], (), (), 5), (2, None, ("a",), ("a",), 8), (30, None, (), (), 5),
    ],
)  # fmt: skip
def test_panels_of_one_run(tmp_path, agents, modules, couplings, gradients, panels):
    folder = write_progress(tmp_path / "run", agents, 30, modules, couplings, gradients=gradients)
    figure = learning_curves(groups_of(folder), "a title")
    axes = figure.axes
    assert len(axes) == panels
    assert all(a.get_xlabel() == "environment steps" and a.get_ylabel() and a.get_title(loc="left") for a in axes)
    shown = [text.get_text() for a in axes if a.get_legend() for text in a.get_legend().get_texts()]
    assert [name for name in shown if name.startswith("agent")] == (
        [f"agent_{k}" for k in range(agents)] if 1 < agents <= 24 else []
    )
    assert ("shared" in shown) == (modules is not None)
    assert "moving average over 2 iterations" in figure._supxlabel.get_text()
    assert axes[3].get_ylim()[0] > -2  # explained variance: the -50 of the first iteration is out of view


def test_groups_have_a_colour_and_a_legend(tmp_path):
    folders = [
        write_progress(write_config(tmp_path / f"run_{lr}_{seed}", seed=seed, lr=lr), iterations=3 + seed, offset=seed)
        for lr in (1, 2)
        for seed in (0, 1)
    ]
    groups = groups_of(*folders)
    figure = learning_curves(groups, "title")
    (legend,) = [a.get_legend() for a in figure.axes if a.get_legend()]
    assert [text.get_text() for text in legend.get_texts()] == ["lr=1 (2 runs)", "lr=2 (2 runs)"]
    mean, again = [line for line in figure.axes[0].lines if not line.get_label().startswith("_")]
    assert mean.get_color() != again.get_color() and len(figure.axes[0].collections) == 2
    # Iteration 3, agents 3 and 13, both with an offset of 0 or 1.
    np.testing.assert_allclose(mean.get_ydata()[0], 16 + 1)
    assert "± 1 standard error" in lines_caption(groups) and "interpolated" in lines_caption(groups)
    assert "standard error" not in lines_caption(groups_of(folders[0]))
    each = agent_returns(groups, "title")
    assert [a.get_title(loc="left") for a in each.axes] == ["", "agent_0", "agent_1"]
    each.canvas.draw()
    legend, first, _ = each.axes
    assert legend.get_legend()._ncols == 2 and legend.bbox.height < 0.15 * first.bbox.height
    shown = legend.get_legend().get_window_extent()
    assert shown.x1 < each.bbox.width and shown.y0 > first.bbox.y1


def test_names_are_drawn_as_they_are(tmp_path):
    folder = write_progress(tmp_path / "run", agents=["_a", "$x_1$"], iterations=4)
    figure = learning_curves(groups_of(folder), "$ a_b $")
    figure.canvas.draw()
    (legend,) = [a.get_legend() for a in figure.axes if a.get_legend()]
    assert [text.get_text().strip() for text in legend.get_texts()] == [r"\$x_1\$", "_a"]
