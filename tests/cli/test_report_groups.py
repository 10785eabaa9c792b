"""Which runs belong together, and how groups are called."""

import pytest

from tests.cli.run_folders import write_config, write_progress
from thrust_rllib.reporting.groups import LABEL_WIDTH, group_runs, short_labels
from thrust_rllib.reporting.runs import read_run, read_runs

COUPLED = {"cross_agent_coeffs": {"r": 0.1}, "cross_agent_losses": {"r": "RedundancyPenalty()"}}


def runs_of(tmp_path, *configs):
    folders = [
        write_progress(write_config(tmp_path / f"run_{k}", **config), iterations=2) for k, config in enumerate(configs)
    ]
    return [read_run(folder) for folder in folders]


def labels_of(tmp_path, *configs):
    return [group.label for group in group_runs(runs_of(tmp_path, *configs))[0]]


def test_seeds_of_one_configuration_are_a_group_in_the_order_of_seeds(tmp_path):
    runs = runs_of(tmp_path, {"seed": 2}, {"seed": 0, **COUPLED}, {"seed": 1}, {"seed": 10, **COUPLED})
    groups, notes = group_runs(runs)
    assert [[run.seed for run in group.runs] for group in groups] == [[1, 2], [0, 10]]
    assert notes == []


@pytest.mark.parametrize(
    "other", [{"lr": 1e-3}, {"env": "penalty"}, {"env_config": {"k": 1}}, {"cross_agent_coeffs": {"r": 0.2}}]
)
def test_any_other_difference_makes_another_group(tmp_path, other):
    assert len(group_runs(runs_of(tmp_path, {"seed": 0}, {"seed": 1, **other}))[0]) == 2


def test_the_address_of_an_object_is_no_difference(tmp_path):
    losses = [{"cross_agent_losses": {"mine": f"<my.Loss object at 0x7f{k}>"}} for k in range(2)]
    assert len(group_runs(runs_of(tmp_path, *losses))[0]) == 1
    other = {"cross_agent_losses": {"mine": "<my.Other object at 0x7f0>"}}
    assert len(group_runs(runs_of(tmp_path / "b", losses[0], other))[0]) == 2


def test_labels_say_what_differs(tmp_path):
    assert labels_of(tmp_path, COUPLED, {}) == ["cross_agent_coeffs.r=0.1", "cross_agent_coeffs.r=none"]
    stronger = {**COUPLED, "cross_agent_coeffs": {"r": 0.5}}
    assert labels_of(tmp_path / "b", COUPLED, stronger) == ["cross_agent_coeffs.r=0.1", "cross_agent_coeffs.r=0.5"]
    # An option that one run leaves alone has its default, and the environment's settings their own names.
    assert labels_of(tmp_path / "c", {"lr": 1e-3}, {}) == ["lr=0.001", "lr=0.0003"]
    scenarios = [{"env_config": {"scenario": name}} for name in ("easy", "hard")]
    assert labels_of(tmp_path / "d", *scenarios) == ["scenario=easy", "scenario=hard"]


def test_another_loss_of_the_same_name_is_not_hidden(tmp_path):
    pairs = {**COUPLED, "cross_agent_losses": {"r": "RedundancyPenalty('pairs')"}}
    found = labels_of(tmp_path, COUPLED, pairs)
    assert found == ["cross_agent_losses.r=RedundancyPenalty()", "cross_agent_losses.r=RedundancyPenalty('pairs')"]


def test_one_group_is_called_like_its_environment(tmp_path):
    assert labels_of(tmp_path, {"seed": 0}, {"seed": 1}) == ["climbing"]


def test_long_labels_are_cut_and_stay_different():
    differences = [{"a" * 30: "b" * 40, "end": str(k)} for k in range(2)]
    labels = short_labels(differences)
    assert len(set(labels)) == 2 and all(len(label) <= LABEL_WIDTH + len(" (group 1)") for label in labels)


def test_labels_of_ones_own(tmp_path):
    runs = runs_of(tmp_path, {}, {"lr": 1})
    assert [group.label for group in group_runs(runs, ["x", "y"])[0]] == ["x", "y"]
    with pytest.raises(ValueError, match="given 1 times; needed: one for each of the groups 1: .*run_0; 2: .*run_1"):
        group_runs(runs, ["x"])
    with pytest.raises(ValueError, match="same name twice"):
        group_runs(runs, ["x", "x"])


def test_a_reader_is_told_about_equal_seeds_and_different_ends(tmp_path):
    folders = [write_config(tmp_path / f"run_{k}", seed=3) for k in range(2)]
    runs = [read_run(write_progress(folder, iterations=2 + k)) for k, folder in enumerate(folders)]
    notes = group_runs(runs)[1]
    assert len(notes) == 2
    assert "same seed (3)" in notes[0] and "between 128 and 192 environment steps" in notes[1]


def test_a_folder_given_twice_counts_once_and_is_told(tmp_path):
    folder, other = (write_progress(tmp_path / name, iterations=1) for name in ("run", "other"))
    runs, notes = read_runs([folder, other, tmp_path / "other" / ".." / "run"])
    assert [run.folder for run in runs] == [folder, other]
    assert notes == [f"{folder} was given more than once and counts once"]
    assert read_runs([folder, other])[1] == []


def test_what_is_no_run_says_what_is_missing(tmp_path):
    with pytest.raises(ValueError, match="there is no folder .*nowhere"):
        read_run(tmp_path / "nowhere")
    folder = write_progress(tmp_path / "runs" / "run")
    with pytest.raises(ValueError, match=r"no config.json and no progress.csv.* 1 runs in it, such as .*runs/run"):
        read_run(tmp_path / "runs")
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is not JSON"):
        read_run(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="holds list"):
        read_run(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match="it has no config.json; needed"):
        read_run(folder)
    write_config(folder)
    (folder / "report").mkdir()
    (folder / "report" / "feature_correlation.npz").write_text("x")
    with pytest.raises(ValueError, match="feature_correlation.npz cannot be read"):
        read_run(folder)
