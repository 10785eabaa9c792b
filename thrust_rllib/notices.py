"""What the learner says in the log, once each."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from thrust_rllib import metrics
from thrust_rllib.joint_batch import ModuleID
from thrust_rllib.minibatches import Units, rows_per_epoch

logger = logging.getLogger(__name__)

MIXING = nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd


class Notices:
    """Remembers what was said.

    Args:
        quiet: says nothing: of several learners the first one speaks.
    """

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._said: set[str] = set()

    def _is_new(self, what: str) -> bool:
        if self._quiet or what in self._said:
            return False
        self._said.add(what)
        return True

    def minibatches(
        self,
        units: Units,
        minibatch_size: int | None,
        iterate_all_minibatches: bool,
        max_minibatches_per_epoch: int | None,
    ) -> None:
        """How much of a rollout an epoch reads; see `joint_epochs` for the arguments."""
        if not self._is_new("minibatches"):
            return
        used = rows_per_epoch(units, minibatch_size, iterate_all_minibatches, max_minibatches_per_epoch)
        advice = "" if iterate_all_minibatches else "; iterate_all_minibatches=True reads all of it"
        logger.info(
            "an epoch reads %d of the %d joint rows of a rollout (%.0f %%)%s",
            used,
            units.num_rows,
            100 * used / units.num_rows,
            advice,
        )

    def mixed_rows(self, modules: Mapping[ModuleID, Any]) -> None:
        """Layers of several learners' modules whose outputs depend on the learner: by its other rows, or by chance."""
        for module_id, module in modules.items():
            found = {type(layer).__name__ for layer in module.modules() if isinstance(layer, MIXING) and layer.training}
            if found and self._is_new(f"mixed rows of {module_id}"):
                logger.warning(
                    "module %r has %s: each learner runs it on its own slice of a minibatch, with statistics or noise "
                    "of that slice, so that several learners do not give the numbers of one. LayerNorm does.",
                    module_id,
                    ", ".join(sorted(found)),
                )

    def other_scale(self, module_ids: Sequence[ModuleID]) -> None:
        """Values that come from a run in which they were normalised otherwise."""
        if module_ids and self._is_new(f"other scale of {module_ids}"):
            logger.warning(
                "the values of modules %s come from a run with another value_normalization or critic: they are on "
                "another scale, until they have been trained",
                list(module_ids),
            )

    def non_finite(self, summary: metrics.UpdateSummary) -> None:
        """Minibatches on which nobody stepped, and whose number was not finite."""
        for name, count in summary.non_finite.items():
            if self._is_new(name):
                logger.warning(
                    "%s: a loss or gradient was not finite in %d of %d minibatches; nobody stepped on these. Lower the "
                    "learning rate, or look at observations and rewards. (Told once; see the metric %s.)",
                    name,
                    count,
                    summary.num_minibatches,
                    metrics.NUM_NON_FINITE_MINIBATCHES,
                )
