"""From a path that a user typed to a checkpoint."""

from __future__ import annotations

from pathlib import Path

from thrust_rllib.command_line.result_log import PROGRESS_FILE
from thrust_rllib.command_line.run_folder import ALGORITHM_FILE, CHECKPOINTS, CONFIG_FILE, numbered_checkpoints
from thrust_rllib.envs.names import nearest

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
    found = numbered_checkpoints(path / CHECKPOINTS)
    if found:
        return found[-1]
    if found := numbered_checkpoints(path):
        raise ValueError(f"{path} is a folder of checkpoints; give one of them, e.g. {found[-1]}")
    if any((path / name).is_file() for name in (CONFIG_FILE, PROGRESS_FILE)):
        raise ValueError(
            f"{path} is the folder of a run without a checkpoint: it ended before the first one was written. Train "
            "with --checkpoint-every, or longer"
        )
    raise ValueError(f"{path} has no checkpoint in it; {NEEDED}")
