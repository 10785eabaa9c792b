"""The losses of one joint minibatch: every agent's PPO terms at once, and the terms that couple agents.

Agents stand side by side on the first axis of every tensor, [N, B], so that the number of operations does not grow
with the number of agents; only the forward passes go module by module (`team_outputs`). Values stand on an axis of
their own, [V, B]: the agents' again, or those of the team.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as nn

from thrust_rllib import functional as F
from thrust_rllib.auxiliary import auxiliary_losses
from thrust_rllib.cross_agent_losses import CrossAgentLoss, reads_features
from thrust_rllib.functional.heads import HEAD_STATISTICS
from thrust_rllib.joint_batch import ModuleID
from thrust_rllib.joint_rows import JointRows
from thrust_rllib.module_axis import Coefficients, ModuleAxis
from thrust_rllib.team_outputs import TeamOutputs


@dataclass(frozen=True)
class Decisive:
    """The numbers of a minibatch by which an update goes on, skips or stops: [p], [ ] and [p], without gradient.

    Of the p participants: the m modules, and behind them the team's critic where there is one.
    """

    total: Tensor
    coupling: Tensor
    approx_kl: Tensor

    def flat(self) -> Tensor:
        """[2p + 1]."""
        return torch.cat([self.total, self.coupling.view(1), self.approx_kl])

    @classmethod
    def of_flat(cls, numbers: Tensor) -> Decisive:
        """Back from `flat`."""
        p = len(numbers) // 2
        return cls(numbers[:p], numbers[p], numbers[p + 1 :])


@dataclass(frozen=True)
class JointLosses:
    """Losses of one joint minibatch.

    | field      | shape | meaning                                                          |
    |------------|-------|------------------------------------------------------------------|
    | actor      | [m]   | policy loss − entropy_coeff · entropy                            |
    | critic     | [v]   | vf_loss_coeff · value loss; v is m, or 1 for a critic of the team |
    | weighted   | c × [ ] | coefficient · coupling, of each                                |
    | couplings  | [c]   | each coupling before its coefficient, without gradient           |
    | statistics | [S, p]| rows named by `STATISTICS`, without gradient                     |
    | counts     | [p]   | rows in which an agent of the module acted                       |

    p is m with critics of the modules, m + 1 with one of the team: its column is the last one. What a column has
    nothing to say about is 0.
    """

    actor: Tensor
    critic: Tensor
    weighted: list[Tensor]
    couplings: Tensor
    statistics: Tensor
    counts: Tensor

    @functools.cached_property
    def coupling(self) -> Tensor:
        """[ ] the sum over the weighted couplings."""
        return sum(self.weighted, start=self.actor.new_zeros(()))

    @property
    def total(self) -> Tensor:
        """[p] actor and critic of each."""
        if len(self.counts) == len(self.actor):
            return self.actor + self.critic
        return torch.cat([self.actor, self.critic])

    @torch.no_grad()
    def decisive(self) -> Decisive:
        """What an update decides by."""
        return Decisive(self.total, self.coupling, self.statistics[_APPROX_KL])


POLICY_STATISTICS = ("policy_loss", "entropy", "clip_fraction", "approx_kl")
VALUE_STATISTICS = ("vf_loss", "vf_loss_unclipped", "vf_explained_var")
STATISTICS = (*POLICY_STATISTICS, *VALUE_STATISTICS)
"""Rows of `JointLosses.statistics`. approx_kl is the k1 estimator mean(logp_old − logp), which can be negative."""
_APPROX_KL = STATISTICS.index("approx_kl")
AUXILIARY_LOSS, AUXILIARY_ACCURACY = "auxiliary_loss", "auxiliary_accuracy"


@dataclass(frozen=True)
class AuxiliarySettings:
    """Of the K auxiliary targets: their names, kinds of loss, and weights [K]."""

    names: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    weights: Tensor = field(default_factory=lambda: torch.zeros(0))


NO_TARGETS = AuxiliarySettings()


def statistics_of(
    head_names: Mapping[ModuleID, Sequence[str]] | Collection[ModuleID],
    critics: Collection[ModuleID],
    auxiliary: Sequence[str] = (),
) -> dict[ModuleID, list[str | None]]:
    """{module, or the team's critic: names of the rows of `JointLosses.statistics`}, None for one that it has not.

    Args:
        head_names: {module: names of its heads} where each head has its own ratio; else the modules.
        critics: who answers for values.
        auxiliary: names of the targets.
    """
    names = head_names if isinstance(head_names, Mapping) else {}
    most = max((len(own) for own in names.values()), default=0)
    found: dict[ModuleID, list[str | None]] = {}
    for m in head_names:
        of_values = [name if m in critics else None for name in VALUE_STATISTICS]
        own = [*names.get(m, ()), *[None] * (most - len(names.get(m, ())))]
        of_heads = [head and f"heads/{head}/{name}" for name in HEAD_STATISTICS for head in own]
        of_targets = [f"{name}/{target}" for name in (AUXILIARY_LOSS, AUXILIARY_ACCURACY) for target in auxiliary]
        found[m] = [*POLICY_STATISTICS, *of_values, *of_heads, *of_targets]
    for critic in critics:
        if critic not in found:
            found[critic] = [*[None] * len(POLICY_STATISTICS), *VALUE_STATISTICS]
            found[critic] += [None] * (len(HEAD_STATISTICS) * most + 2 * len(auxiliary))
    return found


def compute_joint_losses(
    outputs: TeamOutputs,
    rows: JointRows,
    *,
    axis: ModuleAxis,
    critic_axis: ModuleAxis,
    coefficients: Coefficients,
    standardize_advantages: str | bool,
    all_present: bool,
    cross_agent_losses: Mapping[str, CrossAgentLoss],
    cross_agent_coeffs: Mapping[str, Any],
    heads: Tensor | None = None,
    auxiliary: AuxiliarySettings = NO_TARGETS,
) -> JointLosses:
    """Every agent's losses and the couplings of one joint minibatch.

    Per module m with rows (i, b) of its agents, each a mean over the rows where the agent acted:
    policy_m = −mean min(A r, A clip(r, 1±ε)), value_m = mean min(max((v−R)², (v_c−R)²), vf_clip_param),
    entropy_m = mean H;
    the joint loss is Σ_m (policy_m + c_v value_m − c_H entropy_m) + Σ_k λ_k coupling_k. With a critic of the team its
    value loss stands once in the place of the modules'. Where the rows have log-probabilities head by head each head
    has its own ratio; auxiliary losses are added to the policies'.

    Args:
        outputs: of `forward_team`.
        rows: the same minibatch; what networks read is not needed.
        axis: modules on the agent axis.
        critic_axis: critics on the axis of values; `axis` itself where each module has its own.
        coefficients: per module.
        standardize_advantages: "minibatch" and "team" act here, "rollout" and False do not.
        all_present: every agent acted in every row (then nothing is masked). Else what stands at absent rows of
            `rows.columns` and `outputs` never matters, NaN and infinity included; their gradient is exactly 0.
        cross_agent_losses: {name: coupling}.
        cross_agent_coeffs: {name: number or scalar tensor}.
        heads: bool [H, N, 1], which agents have which heads; None: all have all, or ratios are joint.
        auxiliary: the targets' losses and weights.
    """
    present = None if all_present else rows.present
    logp, entropies, columns = outputs.logp, outputs.entropy, rows.columns
    if present is not None:
        # What goes in is masked, not what comes out: 0 times an infinite derivative is NaN. All terms are 0 there.
        logp, entropies, columns = (x.where(present, 0.0) for x in (logp, entropies, columns))
    logp_old, advantages = columns
    if standardize_advantages == "minibatch":
        advantages = F.standardize(advantages, present, dim=1, floor="add")
    elif standardize_advantages == "team":
        advantages = F.standardize(advantages, present, dim=None, floor="add")
    clip = coefficients.clip_param
    counts = _counts(axis, len(rows), present)
    by_head = None
    if rows.head_logp is None:
        surrogate = F.clipped_surrogate(logp, logp_old, advantages, clip)
    else:
        assert outputs.head_logp is not None and outputs.head_entropy is not None
        by_head = [outputs.head_logp, rows.head_logp, outputs.head_entropy]
        if present is not None:
            by_head = [x.where(present, 0.0) for x in by_head]
        surrogate = F.per_head_surrogate(by_head[0], by_head[1], advantages, clip, heads)
    policy, entropy = _means(axis, torch.stack([-surrogate, entropies]), counts)
    with torch.no_grad():
        moved = torch.stack([F.clip_indicator(logp, logp_old, clip), F.approximate_kl(logp, logp_old)])
        policy_statistics = torch.cat([torch.stack([policy, entropy]), _means(axis, moved, counts)])
    more = []
    if by_head is not None:
        with torch.no_grad():
            more.append(
                _means(axis, F.head_statistics(by_head[0], by_head[1], by_head[2], clip, heads), counts).flatten(0, 1)
            )
    actor = policy - coefficients.entropy_coeff * entropy
    if rows.auxiliary is not None:
        assert outputs.predictions is not None
        found = auxiliary_losses(
            outputs.predictions, rows.auxiliary, present, kinds=auxiliary.kinds, weights=auxiliary.weights, axis=axis
        )
        actor = actor + found.weighted
        more += [found.losses, found.accuracy]

    value_present = present if rows.critic.present is rows.present else rows.critic.present
    value_counts = counts if critic_axis is axis else _counts(critic_axis, len(rows), value_present)
    value, value_statistics = _value_losses(
        outputs.values, rows, critic_axis, coefficients, value_present, value_counts
    )

    weighted, couplings = [], []
    agents = [agent for module in rows.modules.values() for agent in module.agents]
    actions = dict(zip(agents, (own for module in rows.modules.values() for own in module.actions), strict=True))
    by_agent = None if present is None else dict(zip(agents, present, strict=True))
    for name, loss in cross_agent_losses.items():
        term = loss(outputs.features if reads_features(loss) else {}, outputs.logits, actions, by_agent)
        if term is None or isinstance(term, (int, float)):
            term = policy.new_tensor(term or 0.0)
        if not isinstance(term, Tensor) or term.ndim:
            given = f"a tensor of shape {tuple(term.shape)}" if isinstance(term, Tensor) else repr(term)
            raise ValueError(
                f"cross-agent loss {name!r} returned {given}; needed: a scalar tensor, e.g. the mean over the rows, or "
                "None"
            )
        couplings.append(term.detach())
        weighted.append(cross_agent_coeffs[name] * term)
    if critic_axis is axis:
        statistics = torch.cat([policy_statistics, value_statistics])
    else:
        statistics, counts = torch.block_diag(policy_statistics, value_statistics), torch.cat([counts, value_counts])
    if more:
        extra = torch.cat(more)
        statistics = torch.cat([statistics, nn.pad(extra, (0, statistics.shape[1] - extra.shape[1]))])
    return JointLosses(
        actor=actor,
        critic=coefficients.vf_loss_coeff * value,
        weighted=weighted,
        couplings=torch.stack(couplings) if couplings else policy.new_zeros(0),
        statistics=statistics,
        counts=counts,
    )


def _value_losses(
    values: Tensor,
    rows: JointRows,
    axis: ModuleAxis,
    coefficients: Coefficients,
    present: Tensor | None,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Value loss [v] of each critic, and the rows `VALUE_STATISTICS` [3, v]."""
    columns = rows.critic.columns
    if present is not None:
        values, columns = values.where(present, 0.0), columns.where(present, 0.0)
    values_old, targets = columns
    unclipped = (values - targets).square()
    loss = unclipped
    if coefficients.value_clip_range is not None:
        loss = F.value_loss_change_clipped(values, values_old, targets, coefficients.value_clip_range)
    if coefficients.vf_clip_param is not None:
        loss = torch.minimum(loss, coefficients.vf_clip_param)
    mean, mean_unclipped = _means(axis, torch.stack([loss, unclipped]), counts)
    with torch.no_grad():
        explained = axis.explained_variance(values, targets, present)
        return mean, torch.stack([mean.detach(), mean_unclipped.detach(), explained])


def _counts(axis: ModuleAxis, num_rows: int, present: Tensor | None) -> Tensor:
    """[m] rows of each module's agents."""
    return axis.num_agents * num_rows if present is None else axis.sum(present.float())


def _means(axis: ModuleAxis, x: Tensor, counts: Tensor) -> Tensor:
    """[…, N, B] to […, m], the mean over each module's own present rows; absent ones are 0."""
    return axis.sum(x) / counts.clamp(min=1.0)
