"""Folders that are written whole or not at all, on local disks."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import shutil
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from pyarrow import fs

LEFTOVER = re.compile(r"\.(unfinished|replaced)-(.+)-(\d+)")
OLD_ENOUGH_S = 3600.0
"""Leftovers of other checkpoints are removed later: the process that writes one may run on another machine."""

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of linux/fcntl.h and linux/fs.h


def local_path(path: Any, filesystem: fs.FileSystem | None = None) -> Path | None:
    """Where a path lies on a local disk; None on any other file system."""
    if filesystem is None:
        if "://" not in str(path):
            return Path(path).absolute()
        filesystem, path = fs.FileSystem.from_uri(str(path))
    return Path(path).absolute() if isinstance(filesystem, fs.LocalFileSystem) else None


def check_is_checkpoint(path: Path, metadata_file: str) -> None:
    """Raises ValueError unless `path` is a folder with this file, which every checkpoint has; names one inside it."""
    if (path / metadata_file).is_file():
        return
    if not path.exists():
        raise ValueError(f"{path} does not exist; needed: a folder that save_to_path, or Tune, wrote")
    # Of `thrust-rllib train` and the folder of its checkpoints; of a trial of Tune and a folder of trials.
    for inside in ("checkpoints/iteration_*", "iteration_*", "checkpoint_*", "*/checkpoint_*"):
        if found := sorted(path.glob(f"{inside}/{metadata_file}")):
            raise ValueError(f"{path} is no checkpoint, but has {len(found)} inside; give one: {found[-1].parent}")
    raise ValueError(
        f"{path} is no checkpoint of an algorithm: it has no {metadata_file}; needed: a folder that save_to_path, or "
        "Tune, wrote"
    )


@contextlib.contextmanager
def whole_folder(path: Path, own: Collection[str]) -> Iterator[Path]:
    """Gives the name of a folder to write; where that goes well, it stands at `path` afterwards.

    It is written beside (`.unfinished-<name>-<process>`) and renamed. A folder at `path` stays as it is until then;
    what else lies in it moves along. What saves that were killed have left is removed first.

    Args:
        path: of the folder, a link to one counts as that one.
        own: names that may be in the folder from an earlier time, and are replaced.

    Raises:
        ValueError: `path` is a file, a mount point, or the working directory lies in it: it cannot be replaced.
        OSError: it could not be written; nothing has changed at `path` then.
    """
    path = Path(path).resolve()
    _check_replaceable(path)
    unfinished = _beside(path, "unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(path, own)
        yield unfinished
        if path.exists():
            shutil.copymode(path, unfinished)
        _put_in_place(unfinished, path, own)
    except OSError as error:
        kept = "; what stood there before is kept" if path.exists() else ""
        raise OSError(error.errno or errno.EIO, f"{path} could not be saved: {error}{kept}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _check_replaceable(path: Path) -> None:
    if not path.exists():
        return
    if not path.is_dir():
        raise ValueError(f"{path} is a file; needed: a folder, or a name that is free")
    if os.path.ismount(path) or path in (Path.cwd(), *Path.cwd().parents):
        what = "a mount point" if os.path.ismount(path) else "the working directory, or above it"
        raise ValueError(
            f"{path} is {what}, and a checkpoint replaces its folder as a whole; give a folder in it: "
            f"{path / 'checkpoint'}"
        )


def _beside(path: Path, what: str) -> Path:
    return path.with_name(f".{what}-{path.name}-{os.getpid()}")


def _put_in_place(new: Path, path: Path, own: Collection[str]) -> None:
    if not path.exists() or not any(path.iterdir()):
        new.rename(path)  # in one step, an empty folder is replaced
        return
    old = _beside(path, "replaced")
    shutil.rmtree(old, ignore_errors=True)
    # Under this name nobody takes what the exchange leaves there for a save that was not finished.
    new.rename(old)
    if not _exchange(old, path):
        old.rename(new)
        path.rename(old)
        try:
            new.rename(path)
        except OSError:
            old.rename(path)
            raise
    _move_others(old, path, own)
    shutil.rmtree(old, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two names in one step; False where the system cannot."""
    if sys.platform != "linux" or (rename := getattr(ctypes.CDLL(None), "renameat2", None)) is None:
        return False
    return rename(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0


def _move_others(old: Path, path: Path, own: Collection[str]) -> None:
    """Moves what is not of a checkpoint into the new folder."""
    for entry in old.iterdir():
        if entry.name not in own and not (path / entry.name).exists():
            entry.rename(path / entry.name)


def _remove_leftovers(path: Path, own: Collection[str]) -> None:
    for folder in path.parent.iterdir():
        if (found := LEFTOVER.fullmatch(folder.name)) is None or not folder.is_dir():
            continue
        kind, name, process = found[1], found[2], int(found[3])
        mine = name == path.name
        if process != os.getpid() and _runs(process):
            continue
        if not mine and time.time() - folder.stat().st_mtime < OLD_ENOUGH_S:
            continue
        target = path.with_name(name)
        if kind == "replaced" and not target.exists():  # ended between two renames
            folder.rename(target)
            continue
        if kind == "replaced":
            _move_others(folder, target, own)
        shutil.rmtree(folder, ignore_errors=True)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True
