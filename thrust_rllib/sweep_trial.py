"""The algorithm as a trial of a sweep."""

from __future__ import annotations

import functools
import math
import zlib
from pathlib import Path
from typing import Any

from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.utils.annotations import override
from ray.rllib.utils.metrics import ENV_RUNNER_RESULTS, EPISODE_RETURN_MEAN
from ray.rllib.utils.typing import ResultDict
from ray.tune.result import TRIAL_INFO
from ray.tune.trainable import Trainable

from thrust_rllib.algorithm import JointPPO
from thrust_rllib.sampling.team_runner import TeamRunner

SCORE = f"{ENV_RUNNER_RESULTS}/{EPISODE_RETURN_MEAN}"


class SweepTrial(JointPPO):
    """`JointPPO` whose process goes from one trial to the next, and whose score is in every result.

    Tune's schedulers and searches fail without it; before the first episode has ended it is NaN. A trial that takes
    over another one's checkpoint samples with random numbers of its own: the two would stay the same otherwise.
    """

    @override(Algorithm)
    def step(self) -> ResultDict:
        results = super().step()
        results.setdefault(ENV_RUNNER_RESULTS, {}).setdefault(EPISODE_RETURN_MEAN, math.nan)
        return results

    @override(Algorithm)
    def load_checkpoint(self, checkpoint_dir: str) -> None:
        super().load_checkpoint(checkpoint_dir)
        own = None if self._storage is None else self._storage.trial_dir_name
        if own is not None and Path(checkpoint_dir).parent.name != own:
            reseed = functools.partial(_reseed, numbers=(self.iteration, zlib.crc32(own.encode())))
            for group in self._runner_groups():
                group.foreach_env_runner(reseed)

    @override(Trainable)
    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Becomes another trial, built from scratch: nothing of the earlier one stays."""
        storage, info = self._storage, self._trial_info
        self.stop()
        self.__dict__.clear()
        Algorithm.__init__(self, {**new_config, TRIAL_INFO: info}, storage=storage)
        return True


def _reseed(runner: Any, numbers: tuple[int, ...]) -> None:
    """Runs in a runner."""
    if isinstance(runner, TeamRunner):
        runner.reseed(*numbers)
