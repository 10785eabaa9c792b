"""The exchange of messages on joint rows: of a minibatch, and of whole rollouts for the values before an update.

Behind it a communicating module runs row by row as every other one.
Letters as in `joint_batch`; N' agents that exchange messages, D features, P steps of a `TimeAxis`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thrust_rllib.joint_batch import JointBatch, ModuleID
from thrust_rllib.joint_rows import JointRows
from thrust_rllib.joint_values import VALUE_ROWS
from thrust_rllib.rl_modules.exchange import scan
from thrust_rllib.rl_modules.joint_input import Speakers
from thrust_rllib.rl_modules.memory import MemoryLayout
from thrust_rllib.sequences import RowSequences, SequenceLayout, TimeAxis, is_followed


def exchanged_rows(modules: Mapping[ModuleID, Any], rows: JointRows) -> dict[ModuleID, Tensor]:
    """{communicating module: [n, B, D]} what its agents make of a joint minibatch; empty where nobody speaks.

    Gradients reach all modules: what an agent says is part of what the others answer.
    """
    speakers = rows.speakers
    if speakers is None:
        return {}
    mine = {module_id: rows.modules[module_id] for module_id in speakers.sizes}
    obs = {module_id: module.obs for module_id, module in mine.items()}
    present = _of_speakers(rows, speakers)
    if not speakers.remembering:
        return speakers.exchange(modules, obs, present)[0]
    assert rows.sequences is not None
    memories, states = {}, {}
    for module_id, module in mine.items():
        assert module.memory is not None and module.state_in is not None
        memories[module_id], states[module_id] = module.memory, module.state_in
    return _over_time(speakers, modules, obs, present, rows.sequences, states, memories)


def _of_speakers(rows: JointRows, speakers: Speakers) -> Tensor | None:
    """Bool [N', B], who of them acted; None for everybody."""
    if rows.everybody:
        return None
    if len(speakers.sizes) == len(rows.modules):
        return rows.present
    parts = rows.present.split([len(module.agents) for module in rows.modules.values()])
    return torch.cat([part for m, part in zip(rows.modules, parts, strict=True) if m in speakers.sizes])


def _over_time(
    speakers: Speakers,
    modules: Mapping[ModuleID, Any],
    obs: Mapping[ModuleID, Tensor],
    present: Tensor | None,
    sequences: RowSequences,
    state_in: Mapping[ModuleID, Tensor],
    memories: Mapping[ModuleID, MemoryLayout],
    max_rows: int | None = None,
) -> dict[ModuleID, Tensor]:
    """The exchange where it has a memory: along time, all agents of a row together.

    Args:
        speakers: who.
        modules: all modules.
        obs: {module: [n, B, …]}.
        present: bool [N', B], or None for everybody.
        sequences: of the B rows.
        state_in: {module: [n, C, S]}, the states entering each training sequence.
        memories: {module: what a state is}.
        max_rows: split calls of more than so many padded rows.

    Returns:
        {module: [n, B, D]}; 0 in rows in which nobody acts.
    """
    team = sequences.of_team()
    layout = SequenceLayout(team.begins, team.present, 1, speakers.order.device, max_rows)
    states = [team.entering(state_in[m], memories[m]) for m in speakers.sizes]  # [n, G, S] each
    found = []
    for call in layout.calls:
        rows, shape = call.rows.flatten(), call.rows.shape
        seen = [obs[m].index_select(1, rows).unflatten(1, shape) for m in speakers.sizes]
        there = None if present is None else present.index_select(1, rows).unflatten(1, shape)
        entering = [state.index_select(1, call.segments) for state in states]
        features, _ = scan(speakers.modules(modules), seen, speakers.order, there, entering)
        found.append(torch.cat(features).permute(1, 2, 0, 3))  # [Q, L, N', D]
    by_agent = layout.by_row(found).transpose(0, 1)
    return dict(zip(speakers.sizes, by_agent.split(list(speakers.sizes.values())), strict=True))


@torch.no_grad()
def exchanged_rollouts(
    batches: Sequence[JointBatch],
    speakers: Speakers,
    modules: Mapping[ModuleID, Any],
    memories: Mapping[ModuleID, MemoryLayout],
) -> list[JointBatch]:
    """The batches with what communicating modules make of each joint row in place of what their agents saw.

    What follows a row is heard by those whose values go on behind it: an agent that is cut off alone hears nobody.

    Args:
        batches: of one team.
        speakers: who exchanges messages.
        modules: all modules.
        memories: {module: what its state is}, of those that remember in the exchange.
    """
    along = _along_time if speakers.remembering else _row_by_row
    found = []
    for batch in batches:
        features = along(batch, speakers, modules, memories)
        streams = {
            module_id: dataclasses.replace(batch.modules[module_id], obs=own.numpy(), bootstrap_obs=following.numpy())
            for module_id, (own, following) in features.items()
        }
        found.append(dataclasses.replace(batch, modules={**batch.modules, **streams}))
    return found


Features = dict[ModuleID, tuple[Tensor, Tensor]]
"""{module: features [T, n, E, D] of its rows and [n, K, D] of what follows the bootstrap rows}, on the host."""


def _row_by_row(
    batch: JointBatch, speakers: Speakers, modules: Mapping[ModuleID, Any], _: Mapping[ModuleID, MemoryLayout]
) -> Features:
    streams = {module_id: batch.modules[module_id] for module_id in speakers.sizes}
    there = {m: (s.present & batch.valid[:, None]).swapaxes(0, 1) for m, s in streams.items()}  # [n, T, E]
    follows = {m: is_followed(s, batch.valid) for m, s in streams.items()}
    num_agents, envs, size = len(speakers.order), batch.num_envs, batch.valid.size

    def parts(length: int, at_a_time: int) -> list[slice]:
        return [slice(i, min(i + at_a_time, length)) for i in range(0, length, at_a_time)]

    rows: dict[ModuleID, list[Tensor]] = {m: [] for m in streams}
    for part in parts(batch.num_steps, max(1, VALUE_ROWS // (num_agents * envs))):
        obs = {m: s.obs[part].swapaxes(0, 1).reshape(len(s.agents), -1, s.obs.shape[-1]) for m, s in streams.items()}
        present = np.concatenate([mine[:, part].reshape(len(mine), -1) for mine in there.values()])
        for m, features in _exchange(speakers, modules, obs, present).items():
            rows[m].append(features.unflatten(1, (-1, envs)).transpose(0, 1))  # [t, n, E, D]
    behind: dict[ModuleID, list[Tensor]] = {m: [] for m in streams}
    for part in parts(len(batch.bootstrap_rows), max(1, VALUE_ROWS // num_agents)):
        obs = {m: s.bootstrap_obs[:, part] for m, s in streams.items()}
        picked = batch.bootstrap_rows[part]
        present = np.concatenate([mine.reshape(len(mine), size)[:, picked] for mine in follows.values()])
        for m, features in _exchange(speakers, modules, obs, present).items():
            behind[m].append(features)
    width = next(iter(rows.values()))[0].shape[-1]
    nothing = {m: torch.zeros(len(s.agents), 0, width) for m, s in streams.items()}
    return {m: (torch.cat(rows[m]), torch.cat([nothing[m], *behind[m]], dim=1)) for m in streams}


def _exchange(
    speakers: Speakers, modules: Mapping[ModuleID, Any], obs: Mapping[ModuleID, np.ndarray], present: np.ndarray
) -> dict[ModuleID, Tensor]:
    """{module: [n, B, D]} on the host, of observations [n, B, …] and presence [N', B]."""
    device = speakers.order.device
    features, _ = speakers.exchange(
        modules,
        {m: torch.tensor(x, device=device) for m, x in obs.items()},
        torch.from_numpy(present).to(device),
    )
    return {m: own.float().cpu() for m, own in features.items()}


def _along_time(
    batch: JointBatch, speakers: Speakers, modules: Mapping[ModuleID, Any], memories: Mapping[ModuleID, MemoryLayout]
) -> Features:
    axis, device = TimeAxis.of(batch), speakers.order.device
    streams = {module_id: batch.modules[module_id] for module_id in speakers.sizes}
    present = np.concatenate([axis.present(batch, m) for m in streams])
    obs, states, index = {}, {}, {}
    for m, s in streams.items():
        index[m] = axis.obs_index(batch, len(s.agents))
        width = s.obs.shape[3:]
        flat = np.concatenate([s.obs.reshape(-1, *width), s.bootstrap_obs.reshape(-1, *width)])
        obs[m] = torch.from_numpy(flat[index[m]]).to(device)
        states[m] = torch.tensor(s.state_in, device=device)
    features = _over_time(
        speakers,
        modules,
        obs,
        torch.from_numpy(present).to(device),
        dataclasses.replace(axis.sequences, present=present),
        states,
        memories,
        max(1, VALUE_ROWS // len(speakers.order)),
    )
    found: Features = {}
    for m, own in features.items():
        n, following = len(streams[m].agents), len(batch.bootstrap_rows)
        both = torch.zeros(batch.valid.size * n + n * following, own.shape[-1])
        both[torch.from_numpy(index[m].ravel())] = own.float().cpu().flatten(0, 1)
        rows, behind = both.split([batch.valid.size * n, n * following])
        found[m] = rows.view(batch.num_steps, n, batch.num_envs, -1), behind.view(n, following, -1)
    return found
