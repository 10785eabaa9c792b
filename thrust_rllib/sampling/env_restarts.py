"""Environments that fail are made anew, a bounded number of times."""

from __future__ import annotations

from collections import deque

MAX_ENV_RESTARTS = 3
CALLS_REMEMBERED = 10


class EnvironmentFailed(RuntimeError):
    """What an environment's own code raised, with its name, the moment and the runner."""


class EnvRestarts:
    """Counts a runner's last calls to its environments: they may fail `MAX_ENV_RESTARTS` times in `CALLS_REMEMBERED`.

    So an environment that fails in every rollout, or in every second one, ends the training, and one that fails now
    and then does not.

    Args:
        allowed: False: the first failure is the last one.
    """

    def __init__(self, allowed: bool) -> None:
        self._most = MAX_ENV_RESTARTS if allowed else 0
        self._failed: deque[bool] = deque(maxlen=CALLS_REMEMBERED)
        self._told: list[str] = []

    def succeeded(self) -> None:
        """A call to sample went well."""
        self._failed.append(False)

    def failed(self, error: EnvironmentFailed) -> None:
        """A call did not.

        Raises:
            EnvironmentFailed: too many did not.
        """
        self._failed.append(True)
        count = sum(self._failed)
        if count > self._most:
            if self._most:
                raise EnvironmentFailed(
                    f"{error} (it was made anew {self._most} times before, and failed {count} times in the last "
                    f"{len(self._failed)} calls to sample)"
                ) from error
            raise error
        self._told.append(f"{error}; it is made anew ({count} of {self._most} failures in {CALLS_REMEMBERED} rollouts)")

    def pop_told(self) -> list[str]:
        """Messages about what failed since the last call."""
        told, self._told = self._told, []
        return told
