"""The losses of one joint minibatch: every agent's PPO terms at once, and the terms that couple agents.

Agents stand side by side on the first axis of every tensor, [N, B], so that the number of operations does not grow
with the number of agents; only the forward passes go module by module (`team_outputs`). Values stand on an axis of
their own, [V, B]: the agents' again, or those of the team.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as nn

from thrust_rllib import functional as F
from thrust_rllib.auxiliary_losses import auxiliary_losses
from thrust_rllib.cross_agent_losses import reads_features
from thrust_rllib.joint_rows import JointRows
from thrust_rllib.loss_settings import STATISTICS, LossSettings
from thrust_rllib.module_axis import ModuleAxis
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


_APPROX_KL = STATISTICS.index("approx_kl")


def compute_joint_losses(outputs: TeamOutputs, rows: JointRows, settings: LossSettings) -> JointLosses:
    """Every agent's losses and the couplings of one joint minibatch.

    Per module m with rows (i, b) of its agents, each a mean over the rows where the agent acted:
    policy_m = −mean min(A r, A clip(r, 1±ε)), value_m = mean min(max((v−R)², (v_c−R)²), vf_clip_param),
    entropy_m = mean H;
    the joint loss is Σ_m (policy_m + c_v value_m − c_H entropy_m) + Σ_k λ_k coupling_k. With a critic of the team its
    value loss stands once in the place of the modules'. Where the rows have log-probabilities head by head each head
    has its own ratio; auxiliary losses are added to the policies'.

    Where agents are absent, what stands at their rows in `rows.columns` and `outputs` never matters, NaN and infinity
    included; its gradient is exactly 0.

    Args:
        outputs: of `forward_team`.
        rows: the same minibatch; what networks read is not needed.
        settings: of the update.
    """
    axis, critic_axis = settings.axis, settings.critic_axis
    present = None if settings.all_present else rows.present
    counts = _counts(axis, len(rows), present)
    actor, policy_statistics, more = _actor_losses(outputs, rows, settings, present, counts)

    value_present = present if rows.critic.present is rows.present else rows.critic.present
    value_counts = counts if critic_axis is axis else _counts(critic_axis, len(rows), value_present)
    value, value_statistics = _value_losses(outputs.values, rows, settings, value_present, value_counts)

    weighted, couplings = _couplings(outputs, rows, settings, present)
    if critic_axis is axis:
        statistics = torch.cat([policy_statistics, value_statistics])
    else:
        statistics, counts = torch.block_diag(policy_statistics, value_statistics), torch.cat([counts, value_counts])
    if more:
        extra = torch.cat(more)
        statistics = torch.cat([statistics, nn.pad(extra, (0, statistics.shape[1] - extra.shape[1]))])
    return JointLosses(
        actor=actor,
        critic=settings.coefficients.vf_loss_coeff * value,
        weighted=weighted,
        couplings=torch.stack(couplings) if couplings else actor.new_zeros(0),
        statistics=statistics,
        counts=counts,
    )


def _actor_losses(
    outputs: TeamOutputs, rows: JointRows, settings: LossSettings, present: Tensor | None, counts: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Loss [m] of each policy, the rows `POLICY_STATISTICS` [4, m], and rows of heads and auxiliary targets."""
    axis, coefficients = settings.axis, settings.coefficients
    logp, entropies, columns = outputs.logp, outputs.entropy, rows.columns
    if present is not None:
        # What goes in is masked, not what comes out: 0 times an infinite derivative is NaN. All terms are 0 there.
        logp, entropies, columns = (x.where(present, 0.0) for x in (logp, entropies, columns))
    logp_old, advantages = columns
    if settings.standardize_advantages == "minibatch":
        advantages = F.standardize(advantages, present, dim=1, floor="add")
    elif settings.standardize_advantages == "team":
        advantages = F.standardize(advantages, present, dim=None, floor="add")
    clip = coefficients.clip_param
    more = []
    if rows.head_logp is None:
        surrogate = F.clipped_surrogate(logp, logp_old, advantages, clip)
    else:
        assert outputs.head_logp is not None and outputs.head_entropy is not None
        by_head = [outputs.head_logp, rows.head_logp, outputs.head_entropy]
        if present is not None:
            by_head = [x.where(present, 0.0) for x in by_head]
        surrogate = F.per_head_surrogate(by_head[0], by_head[1], advantages, clip, settings.heads)
        with torch.no_grad():
            of_heads = F.head_statistics(by_head[0], by_head[1], by_head[2], clip, settings.heads)
            more.append(_means(axis, of_heads, counts).flatten(0, 1))
    policy, entropy = _means(axis, torch.stack([-surrogate, entropies]), counts)
    with torch.no_grad():
        moved = torch.stack([F.clip_indicator(logp, logp_old, clip), F.approximate_kl(logp, logp_old)])
        statistics = torch.cat([torch.stack([policy, entropy]), _means(axis, moved, counts)])
    actor = policy - coefficients.entropy_coeff * entropy
    if rows.auxiliary is not None:
        assert outputs.predictions is not None
        kinds, weights = settings.auxiliary.kinds, settings.auxiliary.weights
        found = auxiliary_losses(outputs.predictions, rows.auxiliary, present, kinds=kinds, weights=weights, axis=axis)
        actor = actor + found.weighted
        more += [found.losses, found.accuracy]
    return actor, statistics, more


def _value_losses(
    values: Tensor, rows: JointRows, settings: LossSettings, present: Tensor | None, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """Value loss [v] of each critic, and the rows `VALUE_STATISTICS` [3, v]."""
    axis, coefficients = settings.critic_axis, settings.coefficients
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


def _couplings(
    outputs: TeamOutputs, rows: JointRows, settings: LossSettings, present: Tensor | None
) -> tuple[list[Tensor], list[Tensor]]:
    """Of each coupling coefficient · value, and the value without gradient."""
    weighted, plain = [], []
    agents = [agent for module in rows.modules.values() for agent in module.agents]
    actions = dict(zip(agents, (own for module in rows.modules.values() for own in module.actions), strict=True))
    by_agent = None if present is None else dict(zip(agents, present, strict=True))
    for name, loss in settings.cross_agent_losses.items():
        term = loss(outputs.features if reads_features(loss) else {}, outputs.logits, actions, by_agent)
        if term is None or isinstance(term, (int, float)):
            term = outputs.logp.new_tensor(term or 0.0)
        if not isinstance(term, Tensor) or term.ndim:
            given = f"a tensor of shape {tuple(term.shape)}" if isinstance(term, Tensor) else repr(term)
            raise ValueError(
                f"cross-agent loss {name!r} returned {given}; needed: a scalar tensor, e.g. the mean over the rows, or "
                "None"
            )
        plain.append(term.detach())
        weighted.append(settings.cross_agent_coeffs[name] * term)
    return weighted, plain


def _counts(axis: ModuleAxis, num_rows: int, present: Tensor | None) -> Tensor:
    """[m] rows of each module's agents."""
    return axis.num_agents * num_rows if present is None else axis.sum(present.float())


def _means(axis: ModuleAxis, x: Tensor, counts: Tensor) -> Tensor:
    """[…, N, B] to […, m], the mean over each module's own present rows; absent ones are 0."""
    return axis.sum(x) / counts.clamp(min=1.0)
