"""A folder with everything about one training run.

| in the folder | what |
|---|---|
| `config.json` | command, seed, versions and every option |
| `progress.csv`, `result.json`, `events.out.tfevents…` | results by iteration: a table, JSON, TensorBoard |
| `checkpoints/iteration_000100` | for `JointPPO.from_checkpoint` |
| `report/` | learning curves and final numbers, see `thrust_rllib.report` |
| `train.log` | warnings and notes of this package, Ray and RLlib |
| `set_aside/1/` | what lay behind an older checkpoint from which the run went on |
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import re
import shutil
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from thrust_rllib.command_line.event_log import EVENTS
from thrust_rllib.command_line.result_log import PROGRESS_FILE, RESULT_FILE, ResultLog

ALGORITHM_FILE = "rllib_checkpoint.json"  # RLlib's: in the folder of a checkpoint of a whole algorithm
CONFIG_FILE = "config.json"
LOG_FILE = "train.log"
CHECKPOINTS = "checkpoints"
SET_ASIDE = "set_aside"
KEPT_CHECKPOINTS = 3
RAY_LOGGERS = ("ray", "ray.rllib", "ray.data")  # those with a handler of their own, which pass nothing on


def choose_folder(output: Path | None, env: str) -> Path:
    """The folder of a new run: `output`, or runs/<env>-<time>.

    Raises:
        ValueError: `output` is a file, or has something in it.
    """
    if output is None:
        start = Path("runs") / f"{_file_name(env)}-{datetime.now():%Y%m%d-%H%M%S}"
        candidates = itertools.chain([start], (start.with_name(f"{start.name}-{i}") for i in itertools.count(2)))
        return next(path for path in candidates if not path.exists())
    if output.exists() and not output.is_dir():
        raise ValueError(f"--output {output} is a file; give a folder that does not exist yet, or an empty one")
    if output.is_dir() and any(output.iterdir()):
        raise ValueError(
            f"--output {output} exists and is not empty; nothing is overwritten. Give another folder, remove it first "
            f"(rm -r {output}), or leave --output out: the run then goes to runs/{_file_name(env)}-<time>"
        )
    return output


def _file_name(env: str) -> str:
    return re.sub(r"\W+", "_", env).strip("_")


def numbered_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in a folder, the oldest first."""
    found = {p: p.name.removeprefix("iteration_") for p in folder.glob("iteration_*") if (p / ALGORITHM_FILE).is_file()}
    return sorted((p for p, number in found.items() if number.isdigit()), key=lambda p: int(found[p]))


def iteration_of_checkpoint(path: Path) -> int:
    """As its name says."""
    return int(path.name.removeprefix("iteration_"))


class RunFolder:
    """Creates the folder at `path`, or opens it, and writes what belongs into it.

    Raises:
        ValueError: another process writes into it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.path.mkdir(parents=True, exist_ok=True)
        self._log_handler = _LogFile(self.path / LOG_FILE, encoding="utf-8")
        assert self._log_handler.stream is not None
        try:
            fcntl.flock(self._log_handler.stream.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._log_handler.close()
            raise ValueError(f"{self.shown} is in use: another process trains into it. End that one first") from None
        except OSError as error:  # a disk that knows no locks
            logging.getLogger(__name__).info("the run folder is not locked: %s", error)
        self._log_handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        for name in ("thrust_rllib", *RAY_LOGGERS):
            logging.getLogger(name).addHandler(self._log_handler)
        self._log = ResultLog(self.path)

    @property
    def shown(self) -> str:
        """The path as a person would type it here."""
        relative = os.path.relpath(self.path)
        return str(self.path) if relative.startswith("..") else relative

    def log(self, result: Mapping[str, Any]) -> None:
        """Writes a result of `JointPPO.train()`; see `ResultLog.write` for a disk that is full."""
        self._log.write(result)

    def save_checkpoint(self, algo: Any, iteration: int) -> Path:
        """Saves the algorithm, then removes all but the latest checkpoints.

        Raises:
            OSError: it could not be written; the earlier ones are still there.
        """
        target = self.path / CHECKPOINTS / f"iteration_{iteration:06}"
        if target in self.checkpoints():
            return target
        algo.save_to_path(str(target))
        for old in self.checkpoints()[:-KEPT_CHECKPOINTS]:
            shutil.rmtree(old, ignore_errors=True)
        return target

    def checkpoints(self) -> list[Path]:
        """All complete checkpoints, oldest first."""
        return numbered_checkpoints(self.path / CHECKPOINTS)

    def go_on_from(self, checkpoint: Path) -> Path | None:
        """Leaves out of the results what came after a checkpoint: it is going to be done again.

        Later checkpoints, which there are only where somebody has chosen an older one, are moved away, and all results
        are copied there.

        Returns:
            Where to; None if there are none.
        """
        iteration = iteration_of_checkpoint(checkpoint)
        later = [path for path in self.checkpoints() if iteration_of_checkpoint(path) > iteration]
        aside = None
        if later:
            numbers = (self.path / SET_ASIDE / str(n) for n in itertools.count(1))
            aside = next(path for path in numbers if not path.exists())
            (aside / CHECKPOINTS).mkdir(parents=True)
            for path in [self.path / PROGRESS_FILE, self.path / RESULT_FILE, *self.path.glob(f"{EVENTS}*")]:
                with contextlib.suppress(FileNotFoundError):
                    shutil.copy2(path, aside)
            for path in later:
                path.rename(aside / CHECKPOINTS / path.name)
        self._log.cut_behind(iteration)
        return aside

    def close(self) -> None:
        """Writes what a full disk has refused, if there is room now, and closes the log; the folder stays."""
        try:
            self._log.flush()
        except OSError as error:
            logging.getLogger(__name__).warning("the last results could not be written: %s", error)
        for name in ("thrust_rllib", *RAY_LOGGERS):
            logging.getLogger(name).removeHandler(self._log_handler)
        self._log_handler.close()


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """A full disk is told of elsewhere."""
