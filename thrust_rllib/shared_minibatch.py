"""A joint minibatch shared out to several learners: each runs the networks on a slice, all compute the whole loss.

With the loss computed whole, whatever needs all rows at once is a single learner's, without a line of its own here:
couplings, standardised advantages, statistics, `target_kl`. It costs little beside the networks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as nn

from thrust_rllib.cross_agent_losses import CrossAgentLoss, reads_features
from thrust_rllib.joint_rows import JointRows
from thrust_rllib.ranks import Ranks
from thrust_rllib.team_outputs import TeamOutputs


@dataclass(frozen=True)
class SharedMinibatch:
    """B joint rows for the losses, and those of them on which this learner runs the networks.

    | field | meaning                                                                                              |
    |-------|------------------------------------------------------------------------------------------------------|
    | own   | this learner's slice; where that is empty the first row, whose outputs nobody reads                  |
    | whole | all B rows; with several learners without what networks read                                          |
    | sizes | rows of each learner's slice, in the order of the ranks: together B                                  |
    """

    own: JointRows
    whole: JointRows
    sizes: tuple[int, ...]


class MinibatchShares:
    """Selects joint minibatches, each with this learner's share of it.

    Args:
        rows: all joint rows of the update.
        ranks: the learners.
    """

    def __init__(self, rows: JointRows, ranks: Ranks) -> None:
        self._rows = rows
        self._whole = rows if ranks.size == 1 else rows.without_inputs()
        self._ranks = ranks

    def select(self, indices: Tensor) -> SharedMinibatch:
        """The joint minibatch of the given rows [B]."""
        if self._ranks.size == 1:
            rows = self._rows.select(indices)
            return SharedMinibatch(rows, rows, (len(indices),))
        sizes = self._sizes(indices)
        own = indices.split(sizes)[self._ranks.rank]
        if not len(own):  # a learner without rows takes part in everything all the same
            own = indices[:1]
        return SharedMinibatch(self._rows.select(own), self._whole.select(indices), tuple(sizes))

    def _sizes(self, indices: Tensor) -> list[int]:
        """Rows of each learner, as even as whole training sequences allow."""
        ends = np.arange(1, self._ranks.size) * len(indices) / self._ranks.size
        if (sequences := self._rows.sequences) is None:
            bounds = ends.astype(int)
        else:
            unit = sequences.unit[indices.numpy()]
            allowed = np.r_[0, np.flatnonzero(np.diff(unit)) + 1, len(unit)]
            bounds = allowed[np.abs(allowed - ends[:, None]).argmin(1)]
        return np.diff(bounds, prepend=0, append=len(indices)).tolist()


def outputs_of_all(
    outputs: TeamOutputs, sizes: Sequence[int], ranks: Ranks, couplings: Collection[CrossAgentLoss]
) -> TeamOutputs:
    """What the networks say about the whole joint minibatch: this learner's part with its graph, the others' without.

    The gradient of a loss of the whole then reaches this learner's part only, and the sum of these gradients over all
    learners is that of a single learner. (A gather that let gradients through would count it once for each of them.)

    Args:
        outputs: of this learner's rows; those behind the first `sizes[rank]` are left out.
        sizes: rows of each learner.
        ranks: the learners.
        couplings: what none of them reads of features and logits is left out.
    """
    if ranks.size == 1:
        return outputs
    others = [x for x in (outputs.head_logp, outputs.head_entropy, outputs.predictions) if x is not None]
    team = torch.cat([torch.stack([outputs.logp, outputs.entropy]), *others])  # [C, N, b]
    agents = [outputs.features if any(map(reads_features, couplings)) else {}, outputs.logits if couplings else {}]
    parts = [team.flatten(0, 1).T, outputs.values.T, *(x for by_agent in agents for x in by_agent.values())]
    parts = [part[: sizes[ranks.rank]] for part in parts]
    own = torch.cat(parts, dim=1).detach()  # [b, W]
    gathered = ranks.gather(nn.pad(own, (0, 0, 0, max(sizes) - len(own))))
    widths = [part.shape[1] for part in parts]
    slices = [list(rows[:size].split(widths, dim=1)) for rows, size in zip(gathered, sizes, strict=True)]
    slices[ranks.rank] = parts  # one by one: what an objective does not read has no gradient, instead of zeros
    columns = map(torch.cat, zip(*slices, strict=True))
    logp, entropy, *rest = next(columns).T.unflatten(0, team.shape[:2]).split([1, 1, *(len(x) for x in others)])
    values = next(columns).T
    by_name = iter(rest)
    head_logp, head_entropy, predictions = (
        None if x is None else next(by_name) for x in (outputs.head_logp, outputs.head_entropy, outputs.predictions)
    )
    features, logits = (
        {agent: next(columns) if x.requires_grad else next(columns).detach() for agent, x in by_agent.items()}
        for by_agent in agents
    )
    return TeamOutputs(logp[0], entropy[0], values, features, logits, head_logp, head_entropy, predictions)
