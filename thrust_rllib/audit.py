"""The audit: does every joint row hold all its agents' data of the same step of the same episode?"""

from __future__ import annotations

import torch
from torch import Tensor

from thrust_rllib.joint_batch import AlignmentError
from thrust_rllib.joint_rows import JointRows


class Audit:
    """Looks at every joint minibatch of one update before it reaches a loss.

    Each module's rows carry, beside their observations and selected together with them, the (episode, step) that each
    agent's own stream says (`ModuleStreams.origin`).

    Args:
        rows: all joint rows of the update.
        num_epochs: how often a row may be read.

    Raises:
        ValueError: a batch without `origin`.
    """

    def __init__(self, rows: JointRows, num_epochs: int) -> None:
        for module_id, module in rows.modules.items():
            if module.origin is None:
                raise ValueError(
                    f"audit=True, but the rows of module {module_id!r} do not say where they come from; fill "
                    "ModuleStreams.origin with (episode, step), or set audit=False"
                )
        self._limit = num_epochs
        self._uses = torch.zeros(len(rows), dtype=torch.long)

    def check(self, minibatch: JointRows, indices: Tensor) -> None:
        """Checks one joint minibatch.

        Args:
            minibatch: B rows.
            indices: [B], which of all rows these are.

        Raises:
            AlignmentError: see the class.
        """
        self._uses.index_add_(0, indices, torch.ones_like(indices))
        if (often := self._uses > self._limit).any():
            row = int(often.nonzero()[0])
            raise AlignmentError(f"joint row {row} is read {int(self._uses[row])} times in {self._limit} epochs")
        check_alignment(minibatch)


def check_alignment(minibatch: JointRows) -> None:
    """Raises `AlignmentError` at the first row whose present agents name different episodes or steps."""
    parts = [module.origin for module in minibatch.modules.values() if module.origin is not None]
    origin = torch.cat(parts)  # [N, B, 2]
    present = minibatch.present[..., None]
    limits = torch.iinfo(origin.dtype)
    highest, lowest = origin.where(present, limits.min).amax(0), origin.where(present, limits.max).amin(0)
    wrong = (highest != lowest).any(-1) & minibatch.present.any(0)
    if not wrong.any():
        return
    row = int(wrong.nonzero()[0])
    agents = [agent for module in minibatch.modules.values() for agent in module.agents]
    said = {agent: tuple(origin[i, row].tolist()) for i, agent in enumerate(agents) if bool(minibatch.present[i, row])}
    raise AlignmentError(
        f"row {row} of a joint minibatch of {len(minibatch)} joins different steps, as (episode, step) by agent: {said}"
    )
