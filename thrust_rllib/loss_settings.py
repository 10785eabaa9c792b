"""What all joint minibatches of one update share, and the names of the numbers that each of them reports."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thrust_rllib.cross_agent_losses import CrossAgentLoss
from thrust_rllib.functional.heads import HEAD_STATISTICS
from thrust_rllib.joint_batch import ModuleID
from thrust_rllib.module_axis import Coefficients, ModuleAxis

POLICY_STATISTICS = ("policy_loss", "entropy", "clip_fraction", "approx_kl")
VALUE_STATISTICS = ("vf_loss", "vf_loss_unclipped", "vf_explained_var")
STATISTICS = (*POLICY_STATISTICS, *VALUE_STATISTICS)
"""First rows of `JointLosses.statistics`; approx_kl is the k1 estimator mean(logp_old − logp), below 0 at times."""
AUXILIARY_LOSS, AUXILIARY_ACCURACY = "auxiliary_loss", "auxiliary_accuracy"


@dataclass(frozen=True)
class AuxiliarySettings:
    """Of the K auxiliary targets: their names, kinds of loss, and weights [K]."""

    names: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    weights: Tensor = field(default_factory=lambda: torch.zeros(0))


NO_TARGETS = AuxiliarySettings()


@dataclass(frozen=True)
class LossSettings:
    """How the losses of a joint minibatch are computed.

    | field                  | meaning                                                                               |
    |------------------------|---------------------------------------------------------------------------------------|
    | axis                   | modules on the agent axis                                                             |
    | critic_axis            | critics on the axis of values; `axis` itself where each module has its own             |
    | coefficients           | per module and critic                                                                 |
    | standardize_advantages | "minibatch" and "team" act on a minibatch, "rollout" and False do not                 |
    | all_present            | every agent acted in every row of the update: nothing is masked                       |
    | cross_agent_losses     | {name: coupling}                                                                      |
    | cross_agent_coeffs     | {name: number or scalar tensor}                                                       |
    | critic                 | as `CriticPlan` names them                                                            |
    | heads                  | bool [H, N, 1], which agents have which heads; None: all have all, or ratios are joint |
    | auxiliary              | the targets' losses and weights                                                       |
    """

    axis: ModuleAxis
    critic_axis: ModuleAxis
    coefficients: Coefficients
    standardize_advantages: str | bool
    all_present: bool
    cross_agent_losses: Mapping[str, CrossAgentLoss]
    cross_agent_coeffs: Mapping[str, Any]
    critic: str = "independent"
    heads: Tensor | None = None
    auxiliary: AuxiliarySettings = NO_TARGETS


def statistics_of(
    head_names: Mapping[ModuleID, Sequence[str]], critics: Collection[ModuleID], auxiliary: Sequence[str] = ()
) -> dict[ModuleID, list[str | None]]:
    """{module, or the team's critic: names of the rows of `JointLosses.statistics`}, None for one that it has not.

    Args:
        head_names: {module: names of its heads where each has its own ratio, else none}.
        critics: who answers for values.
        auxiliary: names of the targets.
    """
    most = max(map(len, head_names.values()))
    found: dict[ModuleID, list[str | None]] = {}
    for m, heads in head_names.items():
        of_values = [name if m in critics else None for name in VALUE_STATISTICS]
        padded = [*heads, *[None] * (most - len(heads))]
        of_heads = [head and f"heads/{head}/{name}" for name in HEAD_STATISTICS for head in padded]
        of_targets = [f"{name}/{target}" for name in (AUXILIARY_LOSS, AUXILIARY_ACCURACY) for target in auxiliary]
        found[m] = [*POLICY_STATISTICS, *of_values, *of_heads, *of_targets]
    num_rows = len(next(iter(found.values())))
    for critic in critics:
        own = [*[None] * len(POLICY_STATISTICS), *VALUE_STATISTICS]
        found.setdefault(critic, [*own, *[None] * (num_rows - len(own))])
    return found
