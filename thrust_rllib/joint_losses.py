"""The losses of one joint minibatch: every agent's PPO terms at once, and the terms that couple agents.

Agents stand side by side on the first axis of every tensor, [N, B], so that the number of operations does not grow
with the number of agents; only the forward passes go module by module.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thrust_rllib import functional as F
from thrust_rllib.cross_agent_losses import CrossAgentLoss, reads_features
from thrust_rllib.joint_batch import AgentID, ModuleID
from thrust_rllib.joint_rows import JointRows
from thrust_rllib.module_forward import forward_module
from thrust_rllib.rl_modules.distributions import mask_logits, runs_alike


class ModuleAxis:
    """The agent axis [N, …] cut into modules [m, …]: sums and statistics over each module's own rows.

    Args:
        sizes: number of agents of each module.
        device: of the tensors.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device | str) -> None:
        self.sizes = list(sizes)
        self._equal = len(set(self.sizes)) == 1
        self._index = torch.arange(len(sizes)).repeat_interleave(torch.tensor(self.sizes)).to(device)
        self._device = device
        self.num_agents = self.per_module(self.sizes)

    def per_agent(self, numbers: Sequence[float]) -> Tensor:
        """One number per module to a column [N, 1]."""
        return self.per_module(numbers)[self._index][:, None]

    def per_module(self, numbers: Sequence[float]) -> Tensor:
        """One number per module as a tensor [m]."""
        return torch.tensor(numbers, dtype=torch.float32, device=self._device)

    def sum(self, x: Tensor) -> Tensor:
        """[…, N, B] to […, m]: the sum over each module's agents and rows."""
        per_agent = x.sum(-1)
        if self._equal:
            return per_agent.view(*per_agent.shape[:-1], len(self.sizes), -1).sum(-1)
        result = per_agent.new_zeros(*per_agent.shape[:-1], len(self.sizes))
        return result.index_add(-1, self._index, per_agent)

    def any(self, x: Tensor) -> Tensor:
        """[N, B] bool to [m, B]: whether it holds for any of the module's agents."""
        return torch.stack([mine.any(0) for mine in x.split(self.sizes)])

    def explained_variance(self, values: Tensor, targets: Tensor, present: Tensor | None) -> Tensor:
        """[m] over each module's rows of [N, B] tensors."""
        if self._equal:
            rows = (len(self.sizes), -1)
            mask = None if present is None else present.reshape(rows)
            return F.explained_variance(values.reshape(rows), targets.reshape(rows), mask, dim=1)
        parts = [x.split(self.sizes) for x in (values, targets)]
        masks = [None] * len(self.sizes) if present is None else present.split(self.sizes)
        return torch.stack([F.explained_variance(v, t, m) for v, t, m in zip(*parts, masks, strict=True)])


@dataclass(frozen=True)
class Coefficients:
    """Numbers that may differ between modules, as tensors made once per update.

    clip_param, value_clip_range, vf_clip_param act on single rows: columns [N, 1], the last two None where they are
    infinite for every module. vf_loss_coeff and entropy_coeff act on means: [m].
    """

    clip_param: Tensor
    value_clip_range: Tensor | None
    vf_clip_param: Tensor | None
    vf_loss_coeff: Tensor
    entropy_coeff: Tensor

    @classmethod
    def of(cls, axis: ModuleAxis, configs: Sequence[Any], entropy_coeffs: Sequence[float]) -> Coefficients:
        """From the configuration of each module and its scheduled entropy coefficient."""

        def limit(numbers: list[float]) -> Tensor | None:
            return axis.per_agent(numbers) if min(numbers) < math.inf else None

        return cls(
            clip_param=axis.per_agent([c.clip_param for c in configs]),
            value_clip_range=limit([c.value_clip_range for c in configs]),
            vf_clip_param=limit([c.vf_clip_param for c in configs]),
            vf_loss_coeff=axis.per_module([c.vf_loss_coeff for c in configs]),
            entropy_coeff=axis.per_module(entropy_coeffs),
        )


@dataclass(frozen=True)
class TeamOutputs:
    """What all modules say about one joint minibatch.

    logp, entropy, values: [N, B]. features, logits: {agent: [B, …]} for the couplings; features is empty where a module
    gives none.
    """

    logp: Tensor
    entropy: Tensor
    values: Tensor
    features: dict[AgentID, Tensor]
    logits: dict[AgentID, Tensor]


@dataclass(frozen=True)
class Decisive:
    """The numbers of a minibatch by which an update goes on, skips or stops: [m], [ ] and [m], without gradient."""

    total: Tensor
    coupling: Tensor
    approx_kl: Tensor

    def flat(self) -> Tensor:
        """[2m + 1]."""
        return torch.cat([self.total, self.coupling.view(1), self.approx_kl])

    @classmethod
    def of_flat(cls, numbers: Tensor) -> Decisive:
        """Back from `flat`."""
        m = len(numbers) // 2
        return cls(numbers[:m], numbers[m], numbers[m + 1 :])


@dataclass(frozen=True)
class JointLosses:
    """Losses of one joint minibatch.

    | field      | shape | meaning                                                          |
    |------------|-------|------------------------------------------------------------------|
    | actor      | [m]   | policy loss − entropy_coeff · entropy                            |
    | critic     | [m]   | vf_loss_coeff · value loss                                       |
    | weighted   | c × [ ] | coefficient · coupling, of each                                |
    | couplings  | [c]   | each coupling before its coefficient, without gradient           |
    | statistics | [S, m]| rows named by `STATISTICS`, without gradient                     |
    | counts     | [m]   | rows in which an agent of the module acted                       |
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

    @torch.no_grad()
    def decisive(self) -> Decisive:
        """What an update decides by."""
        return Decisive(self.actor + self.critic, self.coupling, self.statistics[_APPROX_KL])


STATISTICS = (
    "policy_loss",
    "vf_loss",
    "vf_loss_unclipped",
    "entropy",
    "clip_fraction",
    "approx_kl",
    "vf_explained_var",
)
"""Rows of `JointLosses.statistics`. approx_kl is the k1 estimator mean(logp_old − logp), which can be negative."""
_APPROX_KL = STATISTICS.index("approx_kl")


def forward_team(module: Any, rows: JointRows, trained: Mapping[ModuleID, bool]) -> TeamOutputs:
    """Runs every module once on the rows of all its agents.

    Args:
        module: the MultiRLModule.
        rows: a joint minibatch.
        trained: {module: bool}; a frozen module runs without a graph, its tensors reach the couplings detached.
    """
    classes, inputs, values = [], [], []
    features: dict[AgentID, Tensor] = {}
    logits: dict[AgentID, Tensor] = {}
    sequences = rows.module_sequences()
    for module_id, mine in rows.modules.items():
        shape = mine.obs.shape[:2]
        rl_module = module[module_id].unwrapped()
        with nullcontext() if trained[module_id] else torch.no_grad():
            outputs = forward_module(rl_module, mine.obs.flatten(0, 1), sequences.get(module_id))
            own_logits = outputs.logits
            if mine.action_mask is not None:
                own_logits = mask_logits(own_logits, mine.action_mask.flatten(0, 1))
        values.append(outputs.values.view(shape))
        classes.append(rl_module.get_train_action_dist_cls())
        inputs.append(own_logits)
        logits.update(zip(mine.agents, own_logits.view(*shape, -1), strict=True))
        if outputs.features is not None:
            features.update(zip(mine.agents, outputs.features.reshape(*shape, -1), strict=True))
    logp, entropy = [], []
    sampled = [mine.actions.flatten(0, 1) for mine in rows.modules.values()]
    for run in runs_alike(classes, inputs):
        distribution = classes[run.start].from_logits(torch.cat(inputs[run]))
        logp.append(distribution.logp(torch.cat(sampled[run])).view(-1, len(rows)))
        entropy.append(distribution.entropy().view(-1, len(rows)))
    return TeamOutputs(torch.cat(logp), torch.cat(entropy), torch.cat(values), features, logits)


def compute_joint_losses(
    outputs: TeamOutputs,
    rows: JointRows,
    *,
    axis: ModuleAxis,
    coefficients: Coefficients,
    standardize_advantages: str | bool,
    all_present: bool,
    cross_agent_losses: Mapping[str, CrossAgentLoss],
    cross_agent_coeffs: Mapping[str, Any],
) -> JointLosses:
    """Every agent's losses and the couplings of one joint minibatch.

    Per module m with rows (i, b) of its agents, each a mean over the rows where the agent acted:
    policy_m = −mean min(A r, A clip(r, 1±ε)), value_m = mean min(max((v−R)², (v_c−R)²), vf_clip_param),
    entropy_m = mean H;
    the joint loss is Σ_m (policy_m + c_v value_m − c_H entropy_m) + Σ_k λ_k coupling_k.

    Args:
        outputs: of `forward_team`.
        rows: the same minibatch; what networks read is not needed.
        axis: modules on the agent axis.
        coefficients: per module.
        standardize_advantages: "minibatch" and "team" act here, "rollout" and False do not.
        all_present: every agent acted in every row (then nothing is masked). Else what stands at absent rows of
            `rows.columns` and `outputs` never matters, NaN and infinity included; their gradient is exactly 0.
        cross_agent_losses: {name: coupling}.
        cross_agent_coeffs: {name: number or scalar tensor}.
    """
    present = None if all_present else rows.present
    logp, values, entropies, columns = outputs.logp, outputs.values, outputs.entropy, rows.columns
    if present is not None:
        # What goes in is masked, not what comes out: 0 times an infinite derivative is NaN. All terms are 0 there.
        logp, values, entropies, columns = (x.where(present, 0.0) for x in (logp, values, entropies, columns))
    logp_old, values_old, advantages, targets = columns
    if standardize_advantages == "minibatch":
        advantages = F.standardize(advantages, present, dim=1, floor="add")
    elif standardize_advantages == "team":
        advantages = F.standardize(advantages, present, dim=None, floor="add")
    clip = coefficients.clip_param
    surrogate = F.clipped_surrogate(logp, logp_old, advantages, clip)
    unclipped = (values - targets).square()
    value_loss = unclipped
    if coefficients.value_clip_range is not None:
        value_loss = F.value_loss_change_clipped(values, values_old, targets, coefficients.value_clip_range)
    if coefficients.vf_clip_param is not None:
        value_loss = torch.minimum(value_loss, coefficients.vf_clip_param)

    if present is None:
        counts = axis.num_agents * len(rows)
    else:
        counts = axis.sum(present.float())

    def mean(x: Tensor) -> Tensor:
        """[…, N, B] to […, m], the mean over each module's own present rows."""
        return axis.sum(x) / counts.clamp(min=1.0)

    policy, value, entropy = mean(torch.stack([-surrogate, value_loss, entropies]))
    with torch.no_grad():
        others = mean(
            torch.stack([unclipped, F.clip_indicator(logp, logp_old, clip), F.approximate_kl(logp, logp_old)])
        )
        explained = axis.explained_variance(values, targets, present)
        statistics = torch.stack(
            [policy.detach(), value.detach(), others[0], entropy.detach(), others[1], others[2], explained]
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
    return JointLosses(
        actor=policy - coefficients.entropy_coeff * entropy,
        critic=coefficients.vf_loss_coeff * value,
        weighted=weighted,
        couplings=torch.stack(couplings) if couplings else policy.new_zeros(0),
        statistics=statistics,
        counts=counts,
    )
