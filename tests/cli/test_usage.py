"""What needs no training: help, version, environments, and errors before a run starts."""

import subprocess
import sys

import pytest

from tests.cli.helpers import thrust_rllib
from thrust_rllib import __version__
from thrust_rllib.envs import list_envs


def test_version():
    assert thrust_rllib("--version") == (0, f"thrust_rllib {__version__}\n", "")


def test_help_names_the_commands_and_the_options_of_train():
    code, out, _ = thrust_rllib("--help")
    assert code == 0 and "train" in out and "envs" in out
    code, out, _ = thrust_rllib("train", "--help")
    assert code == 0
    for text in (
        "--env-config",
        "--iterations",
        "--redundancy",
        "--set",
        "--cell",
        "--model",
        "--freeze",
        "Ctrl-C",
        "130",
    ):
        assert text in out


def test_envs_lists_every_built_in_and_how_to_name_others():
    code, out, _ = thrust_rllib("envs")
    assert code == 0
    for name in [*list_envs(), "pettingzoo:<module>", "gymnasium:<id>", "<module>:<callable>"]:
        assert name in out


def test_help_and_envs_import_neither_ray_nor_torch():
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom thrust_rllib.cli import app\n"
        "assert [CliRunner().invoke(app, a).exit_code for a in (['envs'], ['train', '--help'])] == [0, 0]\n"
        "print([name for name in ('ray', 'torch', 'matplotlib') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bucket_brigad"], "did you mean 'bucket_brigade'?"),
        (["bucket_brigade", "-e", "scenari=default"], "did you mean 'scenario'?"),
        (["climbing", "--set", "entropy_coef=1"], "did you mean 'entropy_coeff'?"),
        (["climbing", "--set", "lr"], "needed: NAME=VALUE"),
        (["climbing", "--set", "lr=1", "--set", "lr=2"], "sets 'lr' twice"),
        (["climbing", "--iterations", "1", "--steps", "9"], "--iterations and --steps exclude each other"),
        (["climbing", "--minutes", "0"], "needed: more than 0"),
        (["climbing", "--freeze", "agent_7"], "The agents are ['agent_0', 'agent_1']"),
        (["climbing", "--freeze", "agent_0", "--freeze", "agent_1"], "nothing would be trained"),
        (["climbing", "--freeze", "agent_0", "--policies", "shared"], "would also freeze ['agent_1']"),
        (["climbing", "--batch", "32"], "minibatch_size=256 is larger than the batch"),
        (["climbing", "--model", "cell_size"], "--model 'cell_size'; needed: NAME=VALUE"),
        (["climbing", "--model", "cell=lstmm"], "cell='lstmm' in the model_config; needed: one of lstm, gru"),
        (["climbing", "--model", "cell=gru", "--cell", "gru"], "--cell gru and --model cell=gru: give one of them"),
    ],
)
def test_mistakes_end_with_one_line_and_write_nothing(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = thrust_rllib("train", *arguments)
    assert code == 2
    assert err.startswith("error: ") and message in err and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--cell", "lstm", "--model", "cell_sise=8"],
            "LSTMModule knows no model_config key 'cell_sise'; did you",
        ),
        (["--model", "fcnet_hidens=[8]"], "MLPModule knows no model_config key 'fcnet_hidens'; did you mean"),
        (["--model", "max_seq_len=8"], "MLPModule does not read the model_config {'max_seq_len': 8}"),
        (["--cell", "gru", "--model", "cell_size=0"], "cell_size is 0; needed: a whole number ≥ 1"),
        (
            ["--cell", "gru", "--envs-per-runner", "4"],
            "minibatch_size=256 is smaller than one training sequence of",
        ),
        (["--cell", "lstm", "--model", "max_seq_len=500"], "max_seq_len=500 is longer than what is sampled at a time"),
    ],
)
def test_networks_that_cannot_be_built_end_with_one_line_and_write_nothing(
    arguments, message, ray_session, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    code, _, err = thrust_rllib("train", "climbing", *arguments)
    assert code == 2
    assert err.startswith("error: ") and message in err and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_a_cell_that_there_is_not_is_named_by_the_command_line():
    code, _, err = thrust_rllib("train", "climbing", "--cell", "rnn")
    assert code == 2 and "'rnn' is not one of 'lstm', 'gru'" in " ".join(err.replace("│", " ").split())


def test_unknown_options_are_named_by_the_command_line():
    code, _, err = thrust_rllib("train", "climbing", "--lrr", "3")
    assert code == 2 and "--lr" in err


def test_a_folder_with_something_in_it_is_not_touched(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    code, _, err = thrust_rllib("train", "climbing", "--output", tmp_path)
    assert code == 2 and "is not empty" in err and "leave --output out" in err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_traceback_on_request(tmp_path):
    code, _, err = thrust_rllib("train", "climbin", "--traceback", "--output", tmp_path / "run")
    assert code == 2 and "Traceback" in err and "did you mean 'climbing'?" in err
