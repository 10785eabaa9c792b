"""From a path that a user typed to a checkpoint."""

from __future__ import annotations

from pathlib import Path

from thrust_rllib.command_line.run_folder import CHECKPOINTS, CONFIG_FILE, PROGRESS_FILE
from thrust_rllib.envs.names import nearest

ALGORITHM_FILE = "rllib_checkpoint.json"  # RLlib's: in the folder of a checkpoint of a whole algorithm
NEEDED = (
    "needed: a run folder of `thrust-rllib train`, or one checkpoint, such as runs/<run>/checkpoints/iteration_000100"
)


def find_checkpoint(path: Path) -> Path:
    """`path` where it is a checkpoint, the latest one of a run folder.

    Raises:
        ValueError: something else.
    """
    if not path.exists():
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ValueError(f"{path} does not exist{nearest(path.name, siblings)} What is {NEEDED}")
    if not path.is_dir():
        raise ValueError(f"{path} is a file; {NEEDED}")
    if (path / ALGORITHM_FILE).is_file():
        return path
    found = _numbered(path / CHECKPOINTS)
    if found:
        return found[-1]
    if _numbered(path):
        raise ValueError(f"{path} is a folder of checkpoints; give one of them, e.g. {_numbered(path)[-1]}")
    if any((path / name).is_file() for name in (CONFIG_FILE, PROGRESS_FILE)):
        raise ValueError(
            f"{path} is the folder of a run without a checkpoint: it ended before the first one was written. Train "
            "with --checkpoint-every, or longer"
        )
    raise ValueError(f"{path} has no checkpoint in it; {NEEDED}")


def _numbered(folder: Path) -> list[Path]:
    """Complete checkpoints, the oldest first."""
    found = {p: p.name.removeprefix("iteration_") for p in folder.glob("iteration_*") if (p / ALGORITHM_FILE).is_file()}
    return sorted((p for p, number in found.items() if number.isdigit()), key=lambda p: int(found[p]))
