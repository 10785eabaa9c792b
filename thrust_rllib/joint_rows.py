"""What the learner reads: the valid joint rows of all batches as tensors, with advantages and targets.

Letters: N agents (module after module, the order of the agent axis), n agents of one module, M joint rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from thrust_rllib.functional import RunningMoments, generalized_advantages, standardize
from thrust_rllib.joint_batch import AgentID, JointBatch, ModuleID, ModuleStreams


@dataclass(frozen=True)
class ModuleRows:
    """Rows of the agents that one module plays: obs [n, M, …], actions [n, M, …], action_mask [n, M, A] or None.

    origin: [n, M, 2] episode and step of each row, as `ModuleStreams` has them, or None.
    """

    agents: tuple[AgentID, ...]
    obs: Tensor
    actions: Tensor
    action_mask: Tensor | None
    origin: Tensor | None = None

    def select(self, rows: Tensor) -> ModuleRows:
        """The given rows [B] of every agent."""
        mask, origin = self.action_mask, self.origin
        return ModuleRows(
            self.agents,
            self.obs.index_select(1, rows),
            self.actions.index_select(1, rows),
            None if mask is None else mask.index_select(1, rows),
            None if origin is None else origin.index_select(1, rows),
        )


@dataclass(frozen=True)
class JointRows:
    """Joint rows of all agents; a joint minibatch is the same type with B rows.

    | field         | shape        | meaning                                               |
    |---------------|--------------|-------------------------------------------------------|
    | modules       |              | {module id: `ModuleRows`}                             |
    | columns       | [4, N, M]    | the four float fields below in one tensor             |
    | action_logp   | [N, M]       | log-probability at sampling time                      |
    | values        | [N, M]       | the network's value before the update, in its units   |
    | advantages    | [N, M]       |                                                       |
    | value_targets | [N, M]       | in the network's units                                |
    | present       | [N, M] bool  | the agent acted                                       |
    """

    modules: dict[ModuleID, ModuleRows]
    columns: Tensor
    present: Tensor

    @property
    def action_logp(self) -> Tensor:
        """[N, M]."""
        return self.columns[0]

    @property
    def values(self) -> Tensor:
        """[N, M]."""
        return self.columns[1]

    @property
    def advantages(self) -> Tensor:
        """[N, M]."""
        return self.columns[2]

    @property
    def value_targets(self) -> Tensor:
        """[N, M]."""
        return self.columns[3]

    def __len__(self) -> int:
        return self.present.shape[1]

    def select(self, rows: Tensor) -> JointRows:
        """A joint minibatch: the given rows [B], the same for every agent."""
        return JointRows(
            {module_id: module.select(rows) for module_id, module in self.modules.items()},
            self.columns.index_select(2, rows),
            self.present.index_select(1, rows),
        )


def joint_rows(
    batches: Sequence[JointBatch],
    *,
    values_of: Callable[[ModuleID, Tensor], Tensor],
    normalizers: Mapping[ModuleID, RunningMoments],
    gamma: Mapping[ModuleID, float],
    lambda_: Mapping[ModuleID, float],
    bootstrap: bool,
    standardize_rollout: bool,
    device: torch.device | str,
) -> JointRows:
    """Turns batches into joint rows.

    In this order:

    1. values of all observations and of what follows truncated and last rows, one forward per module;
    2. advantages and value targets per batch, along time, in the units of the rewards;
    3. rows of all batches behind each other, padding left out;
    4. value targets into the network's units (where values are normalised, the moments take them in first);
    5. advantages standardised per agent over the whole rollout, if so configured.

    Args:
        batches: rollouts of the same modules and agents; T and E may differ.
        values_of: (module id, obs [R, …]) to values [R], without gradient, in the network's units.
        normalizers: {module: running moments of its value targets}; a module without one trains on raw targets.
        gamma: discount per module.
        lambda_: GAE's λ per module.
        bootstrap: False takes the value after a truncated or last row as 0 (the seed).
        standardize_rollout: step 5.
        device: of the result.

    Raises:
        ValueError: no batch, batches of different teams, or values that are not finite.
    """
    modules = _check_same_team(batches)
    values = {m: _values(batches, m, values_of) for m in modules}
    sizes = [len(modules[m]) for m in modules]

    def per_agent(numbers: Sequence[float]) -> Tensor:
        """One number per module to a column [N, 1]."""
        return torch.tensor(numbers, dtype=torch.float32).repeat_interleave(torch.tensor(sizes))[:, None]

    normalized = [normalizers.get(m) for m in modules]
    mean = per_agent([0.0 if moments is None else float(moments.mean) for moments in normalized])
    std = per_agent([1.0 if moments is None else float(moments.std) for moments in normalized])

    parts: list[tuple[Tensor, ...]] = []
    for index, batch in enumerate(batches):
        raw, following = (torch.cat([values[m][index][part] for m in modules], dim=1) for part in (0, 1))
        advantages, targets = generalized_advantages(
            _gather(batch, "rewards", modules),
            raw * std + mean,
            _gather(batch, "terminated", modules),
            _gather(batch, "truncated", modules),
            following * std + mean if bootstrap else torch.zeros_like(following),
            per_agent([gamma[m] for m in modules]),
            per_agent([lambda_[m] for m in modules]),
            _gather(batch, "present", modules),
        )
        logp, present = (_gather(batch, name, modules) for name in ("action_logp", "present"))
        valid = torch.tensor(batch.valid.ravel())
        parts.append(tuple(_rows(x, valid) for x in (logp, raw, advantages, targets, present)))
    logp, raw, advantages, targets, present = (torch.cat(x, dim=1) for x in zip(*parts, strict=True))

    start = 0
    for moments, size in zip(normalized, sizes, strict=True):
        if moments is not None:
            mine = slice(start, start + size)
            moments.update(targets[mine].numpy(), present[mine].numpy())
        start += size
    mean = per_agent([0.0 if moments is None else float(moments.mean) for moments in normalized])
    std = per_agent([1.0 if moments is None else float(moments.std) for moments in normalized])
    targets = (targets - mean) / std
    if standardize_rollout:
        advantages = standardize(advantages, present, dim=1, floor="max")
    return JointRows(
        modules={
            m: _module_rows(batches, m, agents, mine, device)
            for (m, agents), mine in zip(modules.items(), present.split(sizes), strict=True)
        },
        columns=torch.stack([logp, raw, advantages, targets]).to(device),
        present=present.to(device),
    )


def _check_same_team(batches: Sequence[JointBatch]) -> dict[ModuleID, tuple[AgentID, ...]]:
    if not batches:
        raise ValueError("the rollout is empty: no batch came from the runners")
    teams = [{m: streams.agents for m, streams in batch.modules.items()} for batch in batches]
    for team in teams[1:]:
        if team != teams[0]:
            raise ValueError(f"batches of different teams in one update: {teams[0]} and {team}")
    return teams[0]


def _values(
    batches: Sequence[JointBatch], module_id: ModuleID, values_of: Callable[[ModuleID, Tensor], Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Per batch: values [T, n, E] of its observations, and [T, n, E] of what follows (0 where nothing is needed)."""
    streams = [batch.modules[module_id] for batch in batches]
    flat = [s.obs.reshape(-1, *s.obs.shape[3:]) for s in streams]
    flat += [s.bootstrap_obs.reshape(-1, *s.obs.shape[3:]) for s in streams]
    values = values_of(module_id, torch.from_numpy(np.concatenate(flat))).float().cpu()
    if not torch.isfinite(values).all():
        raise ValueError(
            f"module {module_id!r} gives values that are not finite ({int((~torch.isfinite(values)).sum())} of "
            f"{values.numel()}); its weights or its observations have diverged. Lower lr or critic_lr, or normalise "
            "the observations with .env_runners(normalize_observations=True)."
        )
    chunks = values.split([len(f) for f in flat])
    result = []
    for batch, s, own, after in zip(batches, streams, chunks, chunks[len(streams) :], strict=False):
        steps, n, envs = s.rewards.shape
        following = torch.zeros(steps, envs, n)
        rows = torch.tensor(batch.bootstrap_rows)  # a copy: arrays out of Ray's object store are read-only
        following.view(steps * envs, n)[rows] = after.view(n, -1).T
        result.append((own.view(steps, n, envs), following.transpose(1, 2)))
    return result


def _gather(batch: JointBatch, name: str, modules: Mapping[ModuleID, tuple[AgentID, ...]]) -> Tensor:
    """A field [T, N, E] of all agents."""
    return torch.from_numpy(np.concatenate([getattr(batch.modules[m], name) for m in modules], axis=1))


def _rows(x: Tensor, valid: Tensor) -> Tensor:
    """[T, N, E] to the valid joint rows [N, M]."""
    rows = x.transpose(0, 1).reshape(x.shape[1], -1)
    return rows if valid.all() else rows[:, valid]


def _module_rows(
    batches: Sequence[JointBatch],
    module_id: ModuleID,
    agents: tuple[AgentID, ...],
    present: Tensor,
    device: torch.device | str,
) -> ModuleRows:
    everywhere = bool(present.all())

    def field(name: str, absent: int = 0) -> Tensor:
        parts = []
        for batch in batches:
            array = np.swapaxes(getattr(batch.modules[module_id], name), 0, 1)  # [n, T, E, …]
            rows = array.reshape(array.shape[0], -1, *array.shape[3:])
            parts.append(rows if batch.valid.all() else rows[:, batch.valid.ravel()])
        joined = torch.from_numpy(np.ascontiguousarray(np.concatenate(parts, axis=1)))
        if not everywhere:  # numbers without meaning would reach gradients as 0 times infinity
            joined[~present] = absent
        return joined.to(device)

    streams: ModuleStreams = batches[0].modules[module_id]
    return ModuleRows(
        agents=agents,
        obs=field("obs"),
        actions=field("actions"),
        action_mask=None if streams.action_mask is None else field("action_mask", absent=1),
        origin=None if streams.origin is None else field("origin"),
    )
