"""Running episodes of the general door, and what its modules are about to see, as plain data.

An episode's state leaves out what its runner knows (spaces, the mapping of agents to modules) and clocks of this
process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from ray.rllib.core.columns import Columns
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.env.utils.infinite_lookback_buffer import InfiniteLookbackBuffer
from ray.rllib.utils.typing import ModuleID

from thrust_rllib.connectors.team_observations import Acting
from thrust_rllib.joint_batch import AgentID
from thrust_rllib.joint_episode import JointEpisode
from thrust_rllib.rl_modules.communicating import EXCHANGED
from thrust_rllib.rl_modules.memory import MemoryLayout

_LEFT_OUT = {
    "env_name", "runner_index", "env_index", "agents", "agent_to_module_mapping_fn",
   "observation_space", "action_space", "_observation_space", "_action_space",
    "_start_time", "_last_step_time", "agent_episodes", "env_t_to_agent_t", "extra_model_outputs",
}  # fmt: skip


def episode_state(episode: JointEpisode) -> dict[str, Any]:
    """A fragment's fields, those of its agents' episodes, and its time index."""
    return {
        "fields": _fields(episode),
        "index": {agent: _buffer_state(index) for agent, index in episode.env_t_to_agent_t.items()},
        "agents": {agent: _agent_state(single) for agent, single in episode.agent_episodes.items()},
    }


def restore_episode(episode: JointEpisode, state: Mapping[str, Any]) -> None:
    """Fills an empty episode, made by the runner, from `episode_state`."""
    _set_fields(episode, state["fields"])
    for agent, index in state["index"].items():
        episode.env_t_to_agent_t[agent] = _buffer(index)
    for agent, single in state["agents"].items():
        episode.agent_episodes[agent] = _agent_episode(episode, agent, single)


def _agent_state(single: SingleAgentEpisode) -> dict[str, Any]:
    outputs = {name: _buffer_state(buffer) for name, buffer in single.extra_model_outputs.items()}
    return {"fields": _fields(single), "outputs": outputs}


def _agent_episode(episode: JointEpisode, agent: AgentID, state: Mapping[str, Any]) -> SingleAgentEpisode:
    single = episode._new_agent_episode(agent)
    spaces = single.observation_space, single.action_space
    _set_fields(single, state["fields"])
    single.observation_space, single.action_space = spaces  # the buffers take them over
    for name, buffer in state["outputs"].items():
        single.extra_model_outputs[name] = _buffer(buffer)
    return single


def _fields(episode: Any) -> dict[str, Any]:
    """All attributes of plain data; buffers as theirs."""
    slots = [name for cls in type(episode).__mro__ for name in getattr(cls, "__slots__", ())]
    names = [*slots, *getattr(episode, "__dict__", ())]
    fields = {name: getattr(episode, name) for name in names if name not in _LEFT_OUT and hasattr(episode, name)}
    return {
        name: _buffer_state(value)
        if isinstance(value, InfiniteLookbackBuffer)
        else dict(value)
        if isinstance(value, dict)
        else value
        for name, value in fields.items()
    }


def _set_fields(episode: Any, fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        before = getattr(episode, name, None)
        if isinstance(before, InfiniteLookbackBuffer):
            setattr(episode, name, _buffer(value))
        elif isinstance(before, dict):  # perhaps one with a default
            before.clear()
            before.update(value)
        else:
            setattr(episode, name, value)


def _buffer_state(buffer: InfiniteLookbackBuffer) -> dict[str, Any]:
    return {"data": buffer.data, "lookback": buffer.lookback}


def _buffer(state: Mapping[str, Any]) -> InfiniteLookbackBuffer:
    buffer = InfiniteLookbackBuffer(state["data"])
    buffer.lookback = state["lookback"]  # the constructor takes the number of a dict's keys for its length
    return buffer


def inputs_state(
    acting: Mapping[ModuleID, Acting], batch: Mapping[ModuleID, Mapping[str, torch.Tensor]]
) -> dict[ModuleID, dict[str, Any]]:
    """What the agents to act see and remember, by module, not normalised yet.

    Args:
        acting: who acts.
        batch: what the env-to-module pipeline has made.
    """
    return {
        module_id: {
            "rows": [*mine.rows],
            "encoded": mine.encoded,
            "action_mask": mine.action_mask,
            "memory": mine.memory,
            "columns": {
                name: column.detach().cpu().numpy()
                for name, column in batch[module_id].items()
                if name not in (Columns.OBS, Columns.STATE_IN, EXCHANGED)
            },
        }
        for module_id, mine in acting.items()
    }


def restored_inputs(
    state: Mapping[ModuleID, Mapping[str, Any]], layouts: Mapping[ModuleID, MemoryLayout], device: Any
) -> tuple[dict[ModuleID, Acting], dict[ModuleID, dict[str, Any]]]:
    """Both arguments of `inputs_state` again; the normaliser goes over them before the first step.

    Args:
        state: of `inputs_state`.
        layouts: of the recurrent modules.
        device: of the modules.
    """

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    acting, batch = {}, {}
    for module_id, saved in state.items():
        mine = acting[module_id] = Acting(saved["rows"], saved["encoded"], saved["action_mask"])
        columns: dict[str, Any] = {Columns.OBS: tensor(saved["encoded"])}
        if module_id in layouts:
            mine.layout, mine.memory = layouts[module_id], saved["memory"]
            columns = mine.layout.one_step(columns, tensor(mine.memory))
        batch[module_id] = columns | {name: tensor(column) for name, column in saved["columns"].items()}
    return acting, batch
