"""Last piece of the general door's env-to-module pipeline: what the recurrent modules of the agents to act remember."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModule
from ray.rllib.utils.annotations import override

from thrust_rllib.connectors.team_observations import ACTING, Acting
from thrust_rllib.joint_batch import ModuleID
from thrust_rllib.joint_episode import JointEpisode
from thrust_rllib.rl_modules.communicating import EXCHANGED
from thrust_rllib.rl_modules.memory import RecurrentModules


class TeamMemory(ConnectorV2):
    """Gives every recurrent module the states of its agents, and a time axis of length 1 to all its columns.

    In place of RLlib's default pieces (add time axis, add states), which find an agent's state among the outputs of its
    last completed step; here it lies in the episode (`JointEpisode.memory`), also while a step is open. Feed-forward
    modules are left as they are.
    """

    _recurrent: RecurrentModules | None = None

    def take_weights(self) -> None:
        """To be called when the modules' weights may have changed: initial states may be among them."""
        self._recurrent = None

    @override(ConnectorV2)
    def __call__(
        self,
        *,
        rl_module: MultiRLModule,
        batch: dict[ModuleID, dict[str, Any]],
        episodes: Sequence[JointEpisode],
        shared_data: dict[str, Any],
        **kwargs: Any,
    ) -> dict[ModuleID, dict[str, Any]]:
        """{module: {"obs": [R, 1, …], …, "state_in": tree of [R, …]}} of recurrent modules."""
        if self._recurrent is None:
            self._recurrent = RecurrentModules.of(rl_module)
        acting: dict[ModuleID, Acting] = shared_data[ACTING]
        for module_id, layout in self._recurrent.layouts.items():
            if module_id not in acting or EXCHANGED in batch[module_id] and Columns.STATE_IN in batch[module_id]:
                continue  # or its memory is part of an exchange of messages, which has seen to it
            mine, columns = acting[module_id], batch[module_id]
            mine.layout = layout
            mine.memory = np.stack([episodes[e].memory.get(agent, layout.initial) for e, agent in mine.rows])
            states = torch.from_numpy(mine.memory).to(columns[Columns.OBS].device)
            batch[module_id] = layout.one_step(columns, states)
        return batch
