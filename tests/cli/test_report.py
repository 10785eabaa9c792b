"""Whole reports: files, the page, and the command."""

import base64
import json
import math
import os
import re
import struct
from html.parser import HTMLParser

import numpy as np
import pytest

from tests.cli.helpers import read_json, thrust_rllib
from tests.cli.run_folders import write_config, write_correlation, write_progress
from thrust_rllib.report import compare_runs, write_report
from thrust_rllib.reporting.correlation_figures import colour_scale, correlation_matrices, mean_correlation
from thrust_rllib.reporting.final_numbers import agent_table, final_table, summary
from thrust_rllib.reporting.groups import group_runs
from thrust_rllib.reporting.run_curves import read_curves
from thrust_rllib.reporting.runs import read_run


class Page(HTMLParser):
    """Tags that are open, addresses, and texts of a page."""

    def __init__(self, path):
        super().__init__()
        self.open, self.addresses, self.texts = [], [], []
        self.feed(path.read_text("utf-8"))
        self.close()

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "img"):
            self.open.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data.strip())


def check_page(path):
    """Well-formed, with images inside and nothing outside; its texts."""
    page = Page(path)
    assert page.open == []
    for address in page.addresses:
        assert address.startswith("data:image/png;base64,")
        image = base64.b64decode(address.partition(",")[2], validate=True)
        width, height = struct.unpack(">II", image[16:24])
        assert image.startswith(b"\x89PNG") and width > 400 and height > 300
    source = path.read_text("utf-8")
    assert not any(outside in source for outside in ("http:", "https:", "url(", "@import", "<script"))
    return page


def test_the_check_of_a_page_sees_what_is_outside(tmp_path):
    file = tmp_path / "page.html"
    for source in ('<img src="plot.png">', "<p><b></p>", "<style>@import x;</style>"):
        file.write_text(source)
        with pytest.raises(AssertionError):
            check_page(file)


def test_a_runs_own_report(tmp_path):
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
    assert read["evaluation"]["sampled"] is True
    page = check_page(folder / "report" / "report.html")
    assert len(page.addresses) == 1 and {"run", "70", "1,920", "0:15", str(folder)} <= set(page.texts)
    assert any("These runs have none" in text for text in page.texts)
    # Written again from the folder alone, the report still has the evaluation.
    compare_runs([folder])
    assert read_json(folder / "report" / "summary.json") == read


def test_a_run_without_an_episode_has_a_report_too(tmp_path):
    folder = write_progress(tmp_path / "run", first_return=99, couplings=())
    assert write_report(folder).stat().st_size > 10_000
    read = read_json(folder / "report" / "summary.json")
    assert read["return_mean"] is None and read["best_iteration"] is None


def test_summary_of_one_iteration(tmp_path):
    curves = read_curves(write_progress(tmp_path / "run", iterations=1, first_return=1) / "progress.csv")
    assert summary(curves)["return_mean"] == 12


def seeds(tmp_path, offsets=(0.0, 1.0, 5.0), **options):
    return [
        write_progress(write_config(tmp_path / f"run_{seed}", seed=seed), offset=offset, **options)
        for seed, offset in enumerate(offsets)
    ]


def test_final_numbers_against_numpy(tmp_path):
    folders = seeds(tmp_path, iterations=4)
    groups, _ = group_runs([read_run(folder) for folder in folders])
    row = dict(zip(final_table(groups).columns, final_table(groups).rows[0], strict=True))
    returns = np.array([18, 20, 28.0])  # agents: 4 and 14, each plus 0, 1 or 5
    assert row["return, all agents"] == f"{returns.mean():.4g} ± {returns.std(ddof=1) / math.sqrt(3):.4g}"
    assert (row["group"], row["runs"], row["environment steps"], row["wall time"]) == ("climbing", "3", "256", "0:02")
    assert row["entropy"] == "0.25 ± 0" and "evaluation" not in row and "feature correlation" not in row
    assert agent_table(groups).rows == [["climbing", "6 ± 1.528", "16 ± 1.528"]]


def test_missing_numbers_are_told(tmp_path):
    folders = seeds(tmp_path, (0.0, 0.0), iterations=4)
    write_progress(folders[1], iterations=4, first_return=99)
    groups, _ = group_runs([read_run(folder) for folder in folders])
    assert "18 (1 of 2 runs)" in final_table(groups).rows[0]


def test_correlation_is_the_mean_over_runs(tmp_path):
    folders = seeds(tmp_path, iterations=2)
    matrices = [write_correlation(folder, seed=k) for k, folder in enumerate(folders[:2])]
    group = group_runs([read_run(folder) for folder in folders])[0][0]
    agents, mean, count = mean_correlation(group)
    assert agents == ["agent_0", "agent_1"] and count == 2
    np.testing.assert_allclose(mean, (matrices[0] + matrices[1]) / 2, atol=1e-12)
    assert group.runs[0].correlation.mean_of_pairs == pytest.approx(matrices[0][0, 1])
    np.testing.assert_allclose(np.abs(group.runs[0].correlation.signed).max(), 1, atol=0.2)
    write_correlation(folders[0], agents=["other", "names"])
    group = group_runs([read_run(folder) for folder in folders])[0][0]
    assert mean_correlation(group)[0] == ["other", "names"] and mean_correlation(group)[2] == 1


def test_compared_runs_of_all_kinds(tmp_path, monkeypatch):
    """12 runs: other agents, one iteration, no episode, interrupted, with and without correlation."""
    monkeypatch.chdir(tmp_path)
    kinds = [
        {"agents": 3}, {"agents": ["left", "right"]}, {"iterations": 1}, {"first_return": 99}, {"steps": 50},
        {"modules": ["shared"], "couplings": ()}, {"gradients": ("redundancy",)}, {},
    ]  # fmt: skip
    folders = [write_progress(write_config(tmp_path / f"k{k}", lr=k), **kind) for k, kind in enumerate(kinds)]
    folders += [write_progress(write_config(tmp_path / f"s{k}", k), iterations=9 - k) for k in range(4)]
    write_correlation(folders[0], ["agent_0", "agent_1", "agent_2"])
    write_correlation(folders[7])
    report = compare_runs([folder.relative_to(tmp_path) for folder in folders])
    assert report.folder.name.startswith("report-") and len(report.tables["climbing"].rows) == 9
    names = {path.name for path in report.folder.iterdir()}
    pngs = {"learning_curves.png", "agent_returns.png", "feature_correlation.png", "feature_heat_map.png"}
    assert names == {"report.html", "summary.json", *pngs}
    page = check_page(report.page)
    assert len(page.addresses) == 4 and "climbing: 12 runs in 9 groups" in page.texts
    read = read_json(report.folder / "summary.json")
    assert [len(group["runs"]) for group in read["groups"]] == [1] * 8 + [4]
    assert any("between 384 and 576 environment steps" in note for note in report.notes)
    assert compare_runs([folder.relative_to(tmp_path) for folder in folders[:2]]).folder != report.folder


def test_a_run_of_twenty_agents(tmp_path):
    folder = write_progress(tmp_path / "run", agents=20)
    write_correlation(folder, [f"agent_{k}" for k in range(20)])
    report = compare_runs([folder])
    page = check_page(report.page)
    assert len(page.addresses) == 3 and {"agent_0", "agent_19"} <= set(page.texts)


def test_environments_have_sections_and_files_of_their_own(tmp_path):
    configs = {"penalty": {"lr": 1}, "penalty again": {"env": "penalty", "lr": 2}, "a:B/c": {}, "a:B_c": {}}
    folders = [
        write_progress(write_config(tmp_path / f"run_{k}", **{"env": name, **config}), iterations=3, scale=10.0**k)
        for k, (name, config) in enumerate(configs.items())
    ]
    report = compare_runs([*folders[2:], *folders[:2]], tmp_path / "report")
    suffixes = ["_a_B_c", "_a_B_c_2", "_penalty"]
    assert [path.name for path in report.plots] == [f"learning_curves{suffix}.png" for suffix in suffixes]
    names = {path.name for path in report.folder.iterdir()}
    assert names == {"report.html", "summary.json", "agent_returns_penalty.png", *(p.name for p in report.plots)}
    assert {env: len(table.rows) for env, table in report.tables.items()} == {"a:B/c": 1, "a:B_c": 1, "penalty": 2}
    page = check_page(report.page)
    order = [page.texts.index(heading) for heading in ("a:B/c", "a:B_c", "penalty", "All runs")]
    assert order == sorted(order)
    assert page.texts.count("Final numbers") == 3 and page.texts.count("Learning curves") == 3
    assert page.texts.count("What differs") == 1 and "environment" in page.texts
    read = read_json(report.folder / "summary.json")
    found = [(group["environment"], group["label"]) for group in read["groups"]]
    assert found == [("a:B/c", "a:B/c"), ("a:B_c", "a:B_c"), ("penalty", "lr=1"), ("penalty", "lr=2")]


def write_evaluation(folder, **entries):
    (folder / "report").mkdir()
    evaluation = {"episodes": 2, "return_mean": 7.0, "agent_returns": {}, "episode_length_mean": 1.0, **entries}
    (folder / "report" / "summary.json").write_text(json.dumps({"evaluation": evaluation}))


@pytest.mark.parametrize(
    ("entries", "how"),
    [
        ([{}, {}], "sampled"), ([{"sampled": True}, {}], "sampled"), ([{"sampled": False}] * 2, "greedy"),
        ([{"sampled": False}, {}], "greedy or sampled"), ([{"sampled": False}, None], "greedy"),
    ],
)  # fmt: skip
def test_the_column_of_the_evaluation_says_how_actions_were_chosen(tmp_path, entries, how):
    folders = seeds(tmp_path, (0.0, 0.0), iterations=2)
    for folder, each in zip(folders, entries, strict=True):
        if each is not None:
            write_evaluation(folder, **each)
    groups, _ = group_runs([read_run(folder) for folder in folders])
    assert [name for name in final_table(groups).columns if "evaluation" in name] == [f"evaluation, {how}"]


def test_small_correlations_have_the_colours_of_small_ones():
    diagonal = np.eye(3)
    assert colour_scale([diagonal + 0.028, diagonal + 0.036]) == 0.1
    assert colour_scale([diagonal, diagonal + 0.15]) == 0.2 and colour_scale([diagonal + 0.9]) == 1
    assert colour_scale([np.full((2, 2), np.nan)]) == 0.1


def test_the_scale_of_the_colours_is_said(tmp_path):
    folders = seeds(tmp_path, (0.0,), iterations=2)
    write_correlation(folders[0])
    figure = correlation_matrices(group_runs([read_run(folders[0])])[0], "title")
    bar = figure.axes[-1]
    assert re.search(r"colours from 0 to 0\.[125]$", bar.get_ylabel())
    assert bar.get_ylim() == (0, float(bar.get_ylabel().split()[-1]))


def test_texts_are_escaped(tmp_path):
    name = "<b>&\"'x"
    folders = [write_progress(write_config(tmp_path / f"{name}{k}", env=name, lr=f"<i>{k}")) for k in range(2)]
    page = check_page(compare_runs(folders, tmp_path / "report", ["<script>1</script>", "b"]).page)
    assert "<script>1</script>" in page.texts and f"{name}: 2 runs in 2 groups" in page.texts
    assert "<i>0" in page.texts and str(folders[0]) in page.texts


def test_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [write_progress(write_config(tmp_path / f"run_{k}", lr=k), iterations=3) for k in range(2)]
    code, out, err = thrust_rllib("report", *folders, folders[0], "--output", "out", "--label", "a", "--label", "b")
    assert code == 0 and f"note: {folders[0]} was given more than once" in err
    assert os.path.join("out", "report.html") in out and (tmp_path / "out" / "report.html").exists()
    assert out.splitlines()[0].split() == ["group", "runs", "return,", "all", "agents"]
    assert thrust_rllib("report", *folders, "--output", "out")[0] == 0  # an earlier report may be replaced
    write_evaluation(folders[0], sampled=False)
    code, out, err = thrust_rllib("report", folders[0])
    assert code == 0 and "evaluation, greedy" in out and os.path.join("run_0", "report", "report.html") in out


def test_command_with_runs_that_are_not_whole(tmp_path):
    good, cut = (write_progress(tmp_path / name, iterations=3) for name in ("good", "cut"))
    file = cut / "progress.csv"
    file.write_bytes(file.read_bytes()[:-10])
    aborted = write_config(tmp_path / "aborted")
    code, out, err = thrust_rllib("report", good, cut, aborted, "--output", tmp_path / "out")
    told = " ".join(err.split())
    assert code == 0 and f"note: {cut}: the last row of progress.csv is left out" in told
    assert f"note: skipped: {aborted} is not the folder of a run: it has no progress.csv" in told
    texts = check_page(tmp_path / "out" / "report.html").texts
    assert any("is left out" in text for text in texts) and any("skipped" in text for text in texts)
    steps = [run["env_steps"] for run in read_json(tmp_path / "out" / "summary.json")["groups"][0]["runs"]]
    assert sorted(steps) == [128, 192]
    assert thrust_rllib("report", aborted)[0] == 2 and thrust_rllib("report", aborted, tmp_path)[0] == 2
    assert write_report(cut).exists() and "is left out" in (cut / "report" / "report.html").read_text("utf-8")


def test_command_with_several_environments(tmp_path):
    folders = [write_progress(write_config(tmp_path / env, env=env), iterations=3) for env in ("one", "two")]
    code, out, _ = thrust_rllib("report", *folders, "--output", tmp_path / "out")
    assert code == 0 and "learning_curves_one.png" in out and "learning_curves_two.png" in out
    lines = [line.strip() for line in out.splitlines()]
    assert lines.index("one") < lines.index("two") and out.count("return, all agents") == 2


def test_wrong_usage(tmp_path):
    folder = write_progress(tmp_path / "run", iterations=2)
    for arguments, message in [
        ([tmp_path], "it has no config.json and no progress.csv"),
        ([folder, tmp_path / "nowhere"], "there is no folder"),
        ([folder, "--label", "a", "--label", "b"], "--label was given 2 times"),
        ([folder, "--output", folder / "progress.csv"], "is a file"),
        ([folder, "--output", folder], "something else than a report"),
        ([], "Missing argument 'RUN'"),
    ]:
        code, out, err = thrust_rllib("report", *arguments)
        assert code == 2 and message in " ".join(err.split()), (arguments, err)
        assert not (folder / "report").exists()
