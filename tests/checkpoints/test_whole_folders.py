"""A checkpoint is written whole or not at all."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pyarrow import fs

from tests.support import largest_difference, parameters, tiny_config
from thrust_rllib import JointPPO, checkpoints
from thrust_rllib.checkpoints import local_path, whole_folder

OWN = {"a.txt", "b.txt"}


def write(path, text, own=OWN):
    with whole_folder(path, own) as folder:
        folder.mkdir()
        for name in ("a.txt", "b.txt"):
            (folder / name).write_text(text)


def read(path):
    return {p.name: p.read_text() for p in path.iterdir()}


def test_a_new_folder_and_one_that_is_replaced(tmp_path):
    path = tmp_path / "deep" / "inside"
    for text in ("first", "second"):
        write(path, text)
        assert read(path) == {"a.txt": text, "b.txt": text}
        assert [p.name for p in path.parent.iterdir()] == ["inside"]


@pytest.mark.parametrize("can_exchange", [True, False])
def test_what_is_not_of_a_checkpoint_stays(tmp_path, monkeypatch, can_exchange):
    if not can_exchange:
        monkeypatch.setattr(checkpoints, "_exchange", lambda one, other: False)
    path = tmp_path / "saved"
    write(path, "first")
    path.chmod(0o750)
    (path / "notes.txt").write_text("mine")
    with whole_folder(path, OWN) as folder:
        folder.mkdir()
        (folder / "a.txt").write_text("second")
    assert read(path) == {"a.txt": "second", "notes.txt": "mine"} and list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("no"), KeyboardInterrupt()]
)
def test_an_error_on_the_way_leaves_what_was_there(tmp_path, error):
    path = tmp_path / "saved"
    write(path, "first")
    with pytest.raises(type(error)) as caught, whole_folder(path, OWN) as folder:
        folder.mkdir()
        (folder / "a.txt").write_text("half")
        raise error
    if isinstance(error, OSError):
        assert caught.value.errno == errno.ENOSPC and "what stood there before is kept" in str(caught.value)
    assert read(path) == {"a.txt": "first", "b.txt": "first"} and list(tmp_path.iterdir()) == [path]


def test_a_rename_that_fails_half_way_is_taken_back(tmp_path, monkeypatch):
    path = tmp_path / "saved"
    write(path, "first")
    monkeypatch.setattr(checkpoints, "_exchange", lambda one, other: False)
    rename, calls = Path.rename, []

    def fails_at_the_last(self, target):
        calls.append(target)
        if len(calls) == 4:
            raise OSError(errno.EIO, "broken")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails_at_the_last)
    with pytest.raises(OSError, match="broken"):
        write(path, "second")
    assert read(path)["a.txt"] == "first" and [p.name for p in tmp_path.iterdir()] == ["saved"]


def dead_process():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_leftovers_of_killed_saves_are_removed_and_others_are_not(tmp_path):
    dead, path = dead_process(), tmp_path / "saved"
    old = time.time() - 2 * checkpoints.OLD_ENOUGH_S
    kept = [
        f".unfinished-saved-{os.getppid()}",
        f".unfinished-other-{dead}",
        ".unfinished-saved-x",
        "unfinished-saved-1",
    ]
    gone = [f".unfinished-saved-{dead}", f".unfinished-long_ago-{dead}"]
    for name in kept + gone:
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("half")
    os.utime(tmp_path / gone[1], (old, old))
    write(path, "first")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*kept, "saved"])


def test_a_process_that_ended_between_two_renames_has_lost_nothing(tmp_path):
    path = tmp_path / "saved"
    replaced = tmp_path / f".replaced-saved-{dead_process()}"
    write(path, "first")
    path.rename(replaced)
    with pytest.raises(RuntimeError), whole_folder(path, OWN):
        raise RuntimeError
    assert read(path)["a.txt"] == "first" and not replaced.exists()

    path.rename(replaced)  # the other moment: the new one is there, what is not of a checkpoint not yet
    (replaced / "notes.txt").write_text("mine")
    path.mkdir()
    (path / "a.txt").write_text("second")
    write(path, "third")
    assert read(path) == {"a.txt": "third", "b.txt": "third", "notes.txt": "mine"} and not replaced.exists()


def test_folders_that_cannot_be_replaced(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ValueError, match="is a file"):
        write(file, "x")
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path, tmp_path.parent):
        with pytest.raises(ValueError, match=r"working directory.*give a folder in it"):
            write(path, "x")
    with pytest.raises(ValueError, match="a mount point"):
        write(Path("/proc"), "x")
    write(Path("new"), "x")
    assert read(tmp_path / "new")["a.txt"] == "x"


def test_a_link_goes_on_pointing_where_it_did(tmp_path):
    write(tmp_path / "target", "first")
    (tmp_path / "latest").symlink_to("target")
    write(tmp_path / "latest", "second")
    assert (tmp_path / "latest").is_symlink() and read(tmp_path / "target")["a.txt"] == "second"


def test_which_paths_are_local(tmp_path):
    assert local_path("runs/x") == Path.cwd() / "runs" / "x"
    assert local_path(f"file://{tmp_path}") == tmp_path
    assert local_path(str(tmp_path), fs.LocalFileSystem()) == tmp_path
    assert local_path(str(tmp_path), fs.SubTreeFileSystem("/", fs.LocalFileSystem())) is None


# --- the same for algorithms ------------------------------------------------------------------------------------------


def weights(algo):
    return parameters(algo.learner_group._learner)


def test_a_component_that_cannot_be_saved(build, tmp_path, monkeypatch):
    algo, path = build(tiny_config()), tmp_path / "saved"
    algo.save_to_path(path)
    before = weights(algo)
    algo.train()

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(algo.env_runner, "save_to_path", full)
    with pytest.raises(OSError, match=r"saved: .*No space left.* is kept"):
        algo.save_to_path(path)
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]
    algo.restore_from_path(path)
    assert largest_difference(weights(algo), before) == 0.0


@pytest.mark.timeout(120)
def test_a_learner_in_another_process_that_cannot_be_saved(build, tmp_path):
    algo = build(tiny_config().learners(num_learners=1))
    path = Path(algo.save_to_path(tmp_path / "saved"))
    (written,) = (path / "learner_group" / "learner").glob("state.pkl")
    before = written.read_bytes()
    algo.train()
    algo.learner_group.foreach_learner(break_saving)
    with pytest.raises(OSError, match=r"No space left.* is kept"):
        algo.save_to_path(path)
    assert written.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["saved"]
    algo.restore_from_path(path)
    algo.train()  # the learner lives


def break_saving(learner):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    learner.save_to_path = full


def test_any_name_of_a_folder_and_none(build, tmp_path, monkeypatch):
    algo = build(tiny_config("climbing"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "empty").mkdir()
    for path in ("relative", f"file://{tmp_path}/uri", tmp_path / "empty", None):
        saved = algo.save_to_path(path)
        assert Path(saved).is_absolute() and Path(saved, JointPPO.METADATA_FILE_NAME).is_file()
        algo.restore_from_path(saved)
    algo.restore_from_path("relative")
    JointPPO.from_checkpoint("relative").stop()
    subtree = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())  # stands for a store elsewhere
    algo.save_to_path("elsewhere", filesystem=subtree)
    assert Path(tmp_path, "elsewhere", JointPPO.METADATA_FILE_NAME).is_file()


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.support import tiny_config
from thrust_rllib.checkpoints import whole_folder

with whole_folder(Path(sys.argv[1]), {"a.txt"}) as folder:
    folder.mkdir()
    (folder / "a.txt").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_killed_while_it_saves(build, tmp_path):
    algo, path = build(tiny_config("climbing")), tmp_path / "saved"
    algo.save_to_path(path)
    killed = subprocess.run([sys.executable, "-c", KILLED, str(path)], cwd=Path(__file__).parents[2])
    assert killed.returncode == -signal.SIGKILL
    names = [p.name for p in tmp_path.iterdir()]
    assert len(names) == 2 and any(name.startswith(".unfinished-saved-") for name in names)
    algo.restore_from_path(path)
    algo.save_to_path(path)
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]
