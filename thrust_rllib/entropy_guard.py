"""The entropy guard: a policy that has stopped exploring ends the training, instead of wasting the rest of it."""

from __future__ import annotations

from collections.abc import Mapping

from thrust_rllib.joint_batch import ModuleID

STOP_REASON = "stop_reason"
"""In the result of an iteration after which the training does not go on: why."""


class EntropyGuard:
    """Counts, per module, the updates running in which the mean entropy was below `min_entropy`.

    Args:
        limits: {module: `min_entropy`, or None for no limit}.
        num_updates: `min_entropy_updates`, the count that ends the training.
    """

    def __init__(self, limits: Mapping[ModuleID, float | None], num_updates: int) -> None:
        self._limits = dict(limits)
        self._num_updates = num_updates
        self.low_updates = dict.fromkeys(limits, 0)
        """{module: updates running that were below its limit}."""

    def count(self, entropies: Mapping[ModuleID, float | None], trained: Mapping[ModuleID, bool]) -> None:
        """Takes in an update.

        Args:
            entropies: {module: mean entropy in nats over the update's gradient steps; None where it took none}. None
                leaves the module's count as it is.
            trained: {module: bool}; the count of a frozen module is 0.
        """
        for module_id, entropy in entropies.items():
            limit = self._limits[module_id]
            if limit is None or not trained[module_id]:
                self.low_updates[module_id] = 0
            elif entropy is not None:
                self.low_updates[module_id] = self.low_updates[module_id] + 1 if entropy < limit else 0

    def for_modules(self, limits: Mapping[ModuleID, float | None]) -> EntropyGuard:
        """A guard of these modules, with the counts that this one has of them."""
        guard = EntropyGuard(limits, self._num_updates)
        guard.low_updates |= {m: count for m, count in self.low_updates.items() if m in limits}
        return guard

    def restore(self, low_updates: Mapping[ModuleID, int]) -> None:
        """Takes the counts of a checkpoint.

        A count that has ended a training starts again at 0: whoever goes on from there has as many updates to mend the
        policy as it had to fail.
        """
        for module_id in self.low_updates:
            count = low_updates.get(module_id, 0)
            self.low_updates[module_id] = 0 if count >= self._num_updates else count


def stop_reason(
    low_updates: Mapping[ModuleID, float],
    entropies: Mapping[ModuleID, float],
    limits: Mapping[ModuleID, float | None],
    num_updates: int,
) -> str | None:
    """Why the training ends, or None where it goes on.

    Args:
        low_updates: {module: `EntropyGuard.low_updates`} after an update.
        entropies: {module: mean entropy of that update}.
        limits: {module: `min_entropy`}.
        num_updates: `min_entropy_updates`.
    """
    modules = [m for m, count in low_updates.items() if limits[m] is not None and count >= num_updates]
    if not modules:
        return None
    found = ", ".join(
        f"module {m!r} (entropy {entropies[m]:.4g}, min_entropy={limits[m]:g}, {low_updates[m]:.0f} updates running)"
        for m in modules
    )
    return (
        f"the entropy guard ended the training: the policy of {found} hardly explores any more "
        f"(min_entropy_updates={num_updates}). Raise entropy_coeff or lower lr; for a policy that may be this certain "
        "lower min_entropy, or set min_entropy=None. The algorithm can be saved; to go on, build one with changed "
        "settings and restore a checkpoint into it."
    )
