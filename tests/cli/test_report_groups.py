"""Which runs belong together, and how groups are called."""

import pytest

from tests.cli.run_folders import write_config, write_progress
from thrust_rllib import AuxiliaryTarget, Constraint
from thrust_rllib.command_line.run_record import jsonable
from thrust_rllib.reporting.groups import by_environment, group_runs
from thrust_rllib.reporting.labels import LABEL_WIDTH, short_labels
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
    assert labels_of(tmp_path, COUPLED, {}) == ["r=0.1", "r=none"]
    stronger = {**COUPLED, "cross_agent_coeffs": {"r": 0.5}}
    assert labels_of(tmp_path / "b", COUPLED, stronger) == ["r=0.1", "r=0.5"]
    # An option that one run leaves alone has its default, and the environment's settings their own names.
    assert labels_of(tmp_path / "c", {"lr": 1e-3}, {}) == ["lr=0.001", "lr=0.0003"]
    scenarios = [{"env_config": {"scenario": name}} for name in ("easy", "hard")]
    assert labels_of(tmp_path / "d", *scenarios) == ["scenario=easy", "scenario=hard"]


def test_labels_of_constraints_targets_and_the_teams_critic(tmp_path):
    limits = [{"constraints": jsonable((Constraint("collisions", x, "pid", kp=1.0, ki=x),))} for x in (0.1, 0.2)]
    assert labels_of(tmp_path, *limits) == ["limit=0.1, ki=0.1", "limit=0.2, ki=0.2"]
    weights = [{"auxiliary_targets": jsonable((AuxiliaryTarget("covered", weight=x),))} for x in (0.1, 0.2)]
    assert labels_of(tmp_path / "b", *weights) == ["weight=0.1", "weight=0.2"]
    cells = [{"critic": "central", "critic_config": {"cell": name}} for name in ("lstm", "gru")]
    assert labels_of(tmp_path / "c", *cells) == ["critic_config.cell=lstm", "critic_config.cell=gru"]


def test_another_loss_of_the_same_name_is_not_hidden(tmp_path):
    pairs = {**COUPLED, "cross_agent_losses": {"r": "RedundancyPenalty('pairs')"}}
    found = labels_of(tmp_path, COUPLED, pairs)
    assert found == ["r=RedundancyPenalty()", "r=RedundancyPenalty('pairs')"]
    both = [{"cross_agent_coeffs": {"r": k}, "cross_agent_losses": {"r": f"L({k})"}} for k in range(2)]
    found = labels_of(tmp_path / "b", *both)
    assert found[1] == "cross_agent_coeffs.r=1, cross_agent_losses.r=L(1)"


def test_one_group_is_called_like_its_environment(tmp_path):
    assert labels_of(tmp_path, {"seed": 0}, {"seed": 1}) == ["climbing"]


def test_settings_of_other_environments_are_not_in_labels(tmp_path):
    scenario = {"env": "bucket_brigade", "env_config": {"scenario": "minimal_specialization"}}
    configs = [{**scenario, **COUPLED}, {"env": "CartPole-v1"}, scenario, {"env": "spread", "team": "shared"}]
    groups, notes = group_runs(runs_of(tmp_path, *configs))
    assert [group.label for group in groups] == ["r=0.1", "r=none", "CartPole-v1", "spread"]
    assert [len(of_env) for of_env in by_environment(groups).values()] == [2, 1, 1] and notes == []
    assert groups[0].differences == {"cross_agent_coeffs.r": "0.1"} and groups[2].differences == {}
    # The same label may stand in each environment.
    assert len(group_runs(runs_of(tmp_path, *configs), ["a", "b", "a", "a"])[0]) == 4
    with pytest.raises(ValueError, match="same name twice"):
        group_runs(runs_of(tmp_path, *configs), ["a", "a", "b", "c"])


def test_a_setting_of_the_environment_that_one_group_lacks_is_not_set(tmp_path):
    assert labels_of(tmp_path, {"env_config": {"k": 1}}, {}) == ["k=1", "k=not set"]


def test_the_short_setting_that_tells_groups_apart_is_in_the_label():
    long = {
        "env": "a:bucket_brigade_with_a_long_name_of_sixty_characters_or_more",
        "scenario": "minimal_specialization",
        "k": "of_all",
    }
    differences = [{**long, "cross_agent_coeffs.redundancy": value} for value in ("0.1", "none")]
    assert short_labels(differences) == [
        f"scenario=minimal_specialization, k=of_all, redundancy={r}" for r in ("0.1", "none")
    ]
    longer = [{**each, "scenario": "s" * 60, "k": "k" * 60} for each in differences]
    assert short_labels(longer) == ["redundancy=0.1", "redundancy=none"]
    # Both fit: neither is dropped.
    assert short_labels([{"lr": str(k), "gamma": str(k)} for k in range(2)]) == ["lr=0, gamma=0", "lr=1, gamma=1"]


def test_usual_values_are_dropped_where_all_settings_are_needed():
    names = [f"a_setting_with_a_long_name_{k}" for k in range(4)]
    differences = [
        {name: "changed" if k == changed else "usual" for k, name in enumerate(names)} for changed in range(5)
    ]
    labels = short_labels(differences)
    assert labels[:4] == [f"{name}=changed" for name in names]
    assert len(set(labels)) == 5 and all(len(label) <= LABEL_WIDTH for label in labels)


def test_values_are_cut_last_and_at_the_start_that_they_share():
    start = "[" + "[0, 0.001], " * 6
    labels = short_labels([{"lr": f"{start}[{k}, 0.0]]"} for k in (20000, 40000)])
    assert labels == ["lr=…20000, 0.0]]", "lr=…40000, 0.0]]"]
    labels = short_labels([{"a": letter * 80, "b": str(k)} for k, letter in enumerate("xyx")] + [{"a": "z", "b": "0"}])
    assert len(set(labels)) == 4 and all(len(label) <= LABEL_WIDTH for label in labels)
    assert labels[0] == f"a={'x' * 52}…, b=0"


def test_only_equal_labels_have_a_number():
    assert short_labels([{"n" * 70: str(k)} for k in range(2)]) == ["n" * 59 + "… (group 1)", "n" * 59 + "… (group 2)"]


@pytest.mark.parametrize(
    "changed",
    [
        {"evaluation_duration": 20}, {"evaluation_config": {"explore": False}}, {"num_cpus_per_env_runner": 2},
        {"num_gpus_per_learner": 1}, {"log_level": "INFO"}, {"checkpoint_trainable_policies_only": True},
        {"metrics_num_episodes_for_smoothing": 10}, {"output": "/somewhere"}, {"coupling_gradient_interval": 1},
        {"diversity_interval": 1},
        {"restart_failed_env_runners": False}, {"sample_timeout_s": 5}, {"callbacks_on_evaluate_end": "f"},
    ],
)  # fmt: skip
def test_settings_that_change_no_training_make_no_other_group(tmp_path, changed):
    (group,), _ = group_runs(runs_of(tmp_path, {"seed": 0}, {"seed": 1, **changed}))
    assert [run.seed for run in group.runs] == [0, 1]
    # Beside a difference that counts, they are in no label either.
    assert labels_of(tmp_path / "b", {"lr": 1}, {"lr": 2, **changed}) == ["lr=1", "lr=2"]


@pytest.mark.parametrize("option", ["num_env_runners", "num_learners", "minibatch_size", "callbacks", "kl_coeff"])
def test_settings_that_change_training_are_compared(tmp_path, option):
    assert len(group_runs(runs_of(tmp_path, {"seed": 0}, {"seed": 1, option: 7}))[0]) == 2


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


def test_of_several_folders_those_without_an_iteration_are_skipped(tmp_path):
    good = write_progress(tmp_path / "good", iterations=2)
    aborted, other, file = write_config(tmp_path / "aborted"), tmp_path / "other", tmp_path / "notes.txt"
    empty = write_progress(tmp_path / "empty", iterations=2)
    (empty / "progress.csv").write_text("training_iteration\n")
    other.mkdir()
    file.write_text("x")
    runs, notes = read_runs([aborted, good, other, file, empty])
    assert [run.folder for run in runs] == [good] and len(notes) == 4
    for folder, note in zip((aborted, other, file, empty), notes, strict=True):
        assert note.startswith("skipped: ") and str(folder) in note
    with pytest.raises(ValueError, match="none of the 2 folders is a run with an iteration: .*aborted.*; .*other"):
        read_runs([aborted, other])
    for alone in (aborted, other, file, empty):
        with pytest.raises(ValueError, match=str(alone)):
            read_runs([alone, alone])
    with pytest.raises(ValueError, match="there is no folder"):
        read_runs([good, tmp_path / "nowhere"])
    (other / "config.json").write_text("{")
    write_progress(other)
    with pytest.raises(ValueError, match=r"other/config.json is not JSON"):
        read_runs([good, other])


def test_what_is_no_run_says_what_is_missing(tmp_path):
    with pytest.raises(ValueError, match="there is no folder .*nowhere"):
        read_run(tmp_path / "nowhere")
    folder = write_progress(tmp_path / "runs" / "run")
    with pytest.raises(ValueError, match=r"no config.json and no progress.csv.*Runs in it, such as .*runs/run: 1;"):
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
