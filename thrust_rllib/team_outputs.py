"""The forward pass of a joint minibatch: messages, then every module once on the rows of all its agents.

Outputs stand side by side on the first axis, [N, B], agents module after module; values on an axis of their own,
[V, B]: the agents' again, or those of the team.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thrust_rllib import functional as F
from thrust_rllib.auxiliary_losses import auxiliary_predictions
from thrust_rllib.exchanged_rows import exchanged_rows
from thrust_rllib.joint_batch import AgentID, ModuleID
from thrust_rllib.joint_rows import JointRows
from thrust_rllib.module_forward import forward_module, module_values
from thrust_rllib.rl_modules.distributions import mask_logits, runs_alike
from thrust_rllib.rl_modules.learner_modules import AUXILIARY_HEADS, TEAM_CRITIC
from thrust_rllib.team_credit import mean_over_agents


@dataclass(frozen=True)
class TeamOutputs:
    """What all modules say about one joint minibatch.

    logp, entropy: [N, B]. values: [V, B]. features, logits: {agent: [B, …]} for the couplings; features is empty where
    a module gives none. head_logp, head_entropy: [H, N, B] head by head, or None. predictions: [K, N, B] of auxiliary
    targets, or None.
    """

    logp: Tensor
    entropy: Tensor
    values: Tensor
    features: dict[AgentID, Tensor]
    logits: dict[AgentID, Tensor]
    head_logp: Tensor | None = None
    head_entropy: Tensor | None = None
    predictions: Tensor | None = None


def forward_team(
    module: Any, rows: JointRows, trained: Mapping[ModuleID, bool], critic: str = "independent"
) -> TeamOutputs:
    """Lets the agents exchange messages, then runs every module once on the rows of all its agents.

    Args:
        module: the MultiRLModule.
        rows: a joint minibatch.
        trained: {module: bool}; a frozen module runs without a graph, its tensors reach the couplings detached.
        critic: as `CriticPlan` names them.
    """
    classes, inputs, values = [], [], []
    features: dict[AgentID, Tensor] = {}
    logits: dict[AgentID, Tensor] = {}
    sequences = rows.module_sequences()
    view = rows.critic.view
    heard = exchanged_rows(module, rows)
    for module_id, mine in rows.modules.items():
        shape = mine.obs.shape[:2]
        rl_module = module[module_id].unwrapped()
        inputs_of_rows = heard.get(module_id, mine.obs).flatten(0, 1)
        with nullcontext() if trained[module_id] else torch.no_grad():
            outputs = forward_module(rl_module, inputs_of_rows, sequences.get(module_id), with_values=view is None)
            own_logits = outputs.logits
            if mine.action_mask is not None:
                mask = mine.action_mask.flatten(0, 1)
                own_logits = mask_logits(own_logits, mask, rl_module.get_train_action_dist_cls())
        if outputs.values is not None:
            values.append(outputs.values.view(shape))
        classes.append(rl_module.get_train_action_dist_cls())
        inputs.append(own_logits)
        logits.update(zip(mine.agents, own_logits.view(*shape, -1), strict=True))
        if outputs.features is not None:
            features.update(zip(mine.agents, outputs.features.reshape(*shape, -1), strict=True))
    logp, entropy, heads = [], [], []
    sampled = [mine.actions.flatten(0, 1) for mine in rows.modules.values()]
    for run in runs_alike(classes, inputs):
        distribution = classes[run.start].from_logits(torch.cat(inputs[run]))
        actions = torch.cat(sampled[run])
        if rows.head_logp is None:
            logp.append(distribution.logp(actions).view(-1, len(rows)))
            entropy.append(distribution.entropy().view(-1, len(rows)))
            continue
        own = torch.stack([distribution.head_logp(actions), distribution.head_entropy(actions)])
        heads.append(own.unflatten(1, (-1, len(rows))))  # [2, n, B, h]
        logp.append(heads[-1][0].sum(-1))
        entropy.append(heads[-1][1].sum(-1))
    head_logp, head_entropy = (F.stack_heads([part[k] for part in heads]) for k in (0, 1)) if heads else (None, None)
    if view is not None:
        team_critic = module[TEAM_CRITIC].unwrapped()
        team_values = module_values(team_critic, view.obs.flatten(0, 1), sequences.get(TEAM_CRITIC)).T
        if rows.critic.order is not None:
            team_values = team_values.index_select(0, rows.critic.order)
    else:
        team_values = torch.cat(values)
        if critic == "mean":
            team_values = mean_over_agents(team_values, rows.present, dim=0)
    predictions = None
    if rows.auxiliary is not None:
        predictions = auxiliary_predictions(module[AUXILIARY_HEADS].unwrapped(), features, rows.modules)
    return TeamOutputs(
        torch.cat(logp), torch.cat(entropy), team_values, features, logits, head_logp, head_entropy, predictions
    )
