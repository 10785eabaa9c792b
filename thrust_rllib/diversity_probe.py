"""How differently the modules of a team would act: all of them asked about the same observations.

What each agent does with its own observations differs already where the observations do. Here every module gets the
same ones, so that only the policies are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from ray.rllib.core.columns import Columns
from ray.rllib.core.distribution.torch.torch_distribution import (
    TorchCategorical,
    TorchDiagGaussian,
    TorchMultiCategorical,
)
from torch import Tensor

from thrust_rllib import functional as F
from thrust_rllib.envs.spaces import head_sizes
from thrust_rllib.joint_batch import ModuleID
from thrust_rllib.joint_rows import ModuleRows
from thrust_rllib.rl_modules.categorical import FactorizedCategorical
from thrust_rllib.rl_modules.distributions import DiagonalGaussian, mask_logits
from thrust_rllib.rl_modules.heads import has_conditional_heads
from thrust_rllib.rl_modules.memory import in_first_state

DIVERSITY = "diversity"
"""Name of the metrics."""

MAX_ROWS = 256
CATEGORICAL = FactorizedCategorical, TorchCategorical, TorchMultiCategorical
NORMAL = DiagonalGaussian, TorchDiagGaussian
_SEED = 0  # of the rows that are picked: the same ones in each update of the same size


@torch.no_grad()
def probe_diversity(
    modules: Mapping[ModuleID, Any], rows: Mapping[ModuleID, ModuleRows], present: Tensor
) -> dict[str, dict[str, float]]:
    """Diversity of the current policies on observations of an update, without gradient.

    Modules are compared where they have the same observation and action space. At most 256 joint rows are picked, the
    same in each update; of each of them the observation of one agent that acted, in turn, with its action mask, is
    shown to all modules of the group as it was encoded (and normalised) for that agent. Modules with a memory see it as
    the first step of an episode.

    | action space            | statistics                                                                   |
    |-------------------------|------------------------------------------------------------------------------|
    | Discrete, MultiDiscrete | `total_variation`, `total_variation_time_averaged`, `jensen_shannon`         |
    | Box, normal policies    | `system_neural_diversity`, in units of the unscaled actions                  |

    Formulas: `functional.diversity`, `functional.jensen_shannon`. Nothing here depends on how many learners there are.

    Args:
        modules: {module: RLModule}, the policies.
        rows: `JointRows.modules` of all M rows of the update; their order is that of the agents.
        present: [N, M] bool, who acted.

    Returns:
        {group: {statistic: number}}. A group is called by its first module and the number of the others, e.g.
        "agent_0_and_3_more". Modules without another of their kind, groups in which nobody acted, and policies for
        which no statistic is defined (other distributions, heads that depend on another) are left out.
    """
    found: dict[str, dict[str, float]] = {}
    acted = dict(zip(rows, present.cpu().split([len(mine.agents) for mine in rows.values()]), strict=True))
    with torch.random.fork_rng(devices=[]):  # a module with dropout must not change what is sampled later
        for group in alike_modules({module_id: modules[module_id] for module_id in rows}):
            logits = _logits(group, modules, rows, acted)
            statistics = {} if logits is None else _statistics(modules[group[0]].action_space, logits)
            if statistics:
                numbers = torch.stack(list(statistics.values())).tolist()
                found[f"{group[0]}_and_{len(group) - 1}_more"] = dict(zip(statistics, numbers, strict=True))
    return found


def alike_modules(modules: Mapping[ModuleID, Any]) -> list[list[ModuleID]]:
    """Groups of two modules or more that have equal spaces, of those for which there is a statistic."""
    groups: list[list[ModuleID]] = []
    for module_id, module in modules.items():
        if not _is_measured(module):
            continue
        spaces = module.observation_space, module.action_space
        for group in groups:
            if (modules[group[0]].observation_space, modules[group[0]].action_space) == spaces:
                group.append(module_id)
                break
        else:
            groups.append([module_id])
    return [group for group in groups if len(group) > 1]


def _is_measured(module: Any) -> bool:
    kinds = NORMAL if head_sizes(module.action_space) is None else CATEGORICAL
    return issubclass(module.get_train_action_dist_cls(), kinds) and not has_conditional_heads(module)


@contextmanager
def _buffers_kept(module: Any) -> Iterator[None]:
    """A forward pass in training mode may count what it sees (batch statistics), which is not the module's own."""
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    yield
    for buffer, own in before:
        buffer.copy_(own)


def _logits(
    group: Sequence[ModuleID],
    modules: Mapping[ModuleID, Any],
    rows: Mapping[ModuleID, ModuleRows],
    acted: Mapping[ModuleID, Tensor],
) -> list[Tensor] | None:
    """What every module of the group makes of the same observations, [R, A] each; None where nobody acted."""
    mine = [rows[module_id] for module_id in group]
    agent, row = _pick(torch.cat([acted[module_id] for module_id in group]).numpy())
    if not len(row):
        return None
    obs = _gather([module.obs for module in mine], agent, row)
    mask = _mask(mine, agent, row)
    logits = []
    for module_id in group:
        module = modules[module_id]
        with _buffers_kept(module):
            outputs = module.forward_train(in_first_state(module, obs))[Columns.ACTION_DIST_INPUTS]
        logits.append(mask_logits(outputs.reshape(len(row), -1), mask))
    return logits


def _pick(present: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Joint rows in which one of n agents acted, and the agent whose observation is taken, in turn: [R] each.

    Args:
        present: bool [n, M].
    """
    usable = np.flatnonzero(present.any(axis=0))
    # At random: rows at equal distances would be those of a few environments.
    row = np.sort(np.random.default_rng(_SEED).permutation(usable)[:MAX_ROWS])
    acting = present[:, row]
    turn = np.arange(len(row)) % np.maximum(acting.sum(axis=0), 1)
    agent = (acting & (acting.cumsum(axis=0) - 1 == turn)).argmax(axis=0)
    return agent, row


def _gather(parts: Sequence[Tensor], agent: np.ndarray, row: np.ndarray) -> Tensor:
    """[R, …] of tensors [n_i, M, …], whose agents stand behind each other."""
    picked = parts[0].new_empty(len(row), *parts[0].shape[2:])
    first = 0
    for part in parts:
        own = np.flatnonzero((first <= agent) & (agent < first + len(part)))
        index = [torch.from_numpy(x).to(part.device) for x in (own, agent[own] - first, row[own])]
        picked[index[0]] = part[index[1], index[2]]
        first += len(part)
    return picked


def _mask(modules: Sequence[ModuleRows], agent: np.ndarray, row: np.ndarray) -> Tensor | None:
    masks = [module.action_mask for module in modules]
    given = next((mask for mask in masks if mask is not None), None)
    if given is None:
        return None
    everything = [
        given.new_ones(*module.obs.shape[:2], given.shape[-1]) if mask is None else mask
        for module, mask in zip(modules, masks, strict=True)
    ]
    return _gather(everything, agent, row).bool()


def _statistics(space: gym.Space, logits: Sequence[Tensor]) -> dict[str, Tensor]:
    sizes = head_sizes(space)
    if sizes is None:
        parts = [x.chunk(2, dim=-1) for x in logits]
        means, stds = [mean for mean, _ in parts], [log_std.exp() for _, log_std in parts]
        return {"system_neural_diversity": F.system_neural_diversity(means, stds)}
    return {
        "total_variation": F.total_variation(logits, head_sizes=sizes),
        "total_variation_time_averaged": F.time_averaged_total_variation(logits, head_sizes=sizes),
        "jensen_shannon": F.jensen_shannon(logits, head_sizes=sizes),
    }
