"""The general door's env-to-module pipeline, behind the user's pieces: what the agents to act see, module by module."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core.columns import Columns
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.utils.annotations import override

from thrust_rllib.connectors.team_codec import TeamCodec
from thrust_rllib.joint_batch import AgentID, ModuleID
from thrust_rllib.rl_modules.memory import MemoryLayout

ACTING = "thrust_rllib_acting"
"""Key of `shared_data`: {module: `Acting`} of the step that is about to be taken."""


class Acting:
    """The agents of one module that act now: where each stands, and what was put before the module.

    rows: [(environment index, agent)]; encoded and, perhaps normalised, obs: float32 [R, …]; action_mask: bool [R, A]
    or None. Of a recurrent module: memory: float32 [R, S], the states that enter the step, and layout: what they are.
    """

    __slots__ = ("action_mask", "encoded", "layout", "memory", "obs", "rows")

    def __init__(self, rows: list[tuple[int, AgentID]], obs: np.ndarray, action_mask: np.ndarray | None) -> None:
        self.rows, self.encoded, self.obs, self.action_mask = rows, obs, obs, action_mask
        self.layout: MemoryLayout | None = None
        self.memory: np.ndarray | None = None


class TeamObservations(ConnectorV2):
    """Collects the newest observation of every agent that acts next, and encodes it.

    In place of RLlib's default pieces (add observations, map agents to modules, batch, to tensors), which go agent by
    agent. Columns that a user's piece in front of it has added, RLlib's "obs" included (frame stacking), go along.

    Args:
        input_observation_space: Dict {agent: space} as the pieces in front leave it.
        input_action_space: Dict {agent: space}.
        codec: the team.
        device: of the tensors.
        takes_written: pieces in front may write observations into the batch instead of the episodes.
        **kwargs: for RLlib.
    """

    def __init__(
        self,
        input_observation_space: gym.Space | None = None,
        input_action_space: gym.Space | None = None,
        *,
        codec: TeamCodec,
        device: Any = None,
        takes_written: bool = True,
        **kwargs: Any,
    ) -> None:
        self.codec = codec
        self._device = device
        self._takes_written = takes_written
        self._order = {agent: i for i, agent in enumerate(codec.module_of)}
        super().__init__(input_observation_space, input_action_space, **kwargs)

    @override(ConnectorV2)
    def recompute_output_observation_space(self, *args: Any) -> gym.Space:
        return gym.spaces.Dict({m: codec.encoder.encoded_space for m, codec in self.codec.modules.items()})

    @override(ConnectorV2)
    def recompute_output_action_space(self, *args: Any) -> gym.Space:
        return gym.spaces.Dict({m: codec.action_space for m, codec in self.codec.modules.items()})

    @override(ConnectorV2)
    def get_ctor_args_and_kwargs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (self.input_observation_space, self.input_action_space), {
            "codec": self.codec,
            "device": self._device,
            "takes_written": self._takes_written,
        }

    @override(ConnectorV2)
    def __call__(
        self,
        *,
        episodes: Sequence[MultiAgentEpisode],
        batch: dict[str, Any] | None = None,
        shared_data: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> dict[ModuleID, dict[str, torch.Tensor]]:
        """{module: {"obs": [R, …], …}}; empty where nobody acts."""
        rows: dict[ModuleID, list[tuple[int, AgentID]]] = defaultdict(list)
        keys: dict[ModuleID, list[tuple[Any, AgentID, ModuleID]]] = defaultdict(list)
        seen: dict[ModuleID, list[Any]] = defaultdict(list)
        batch = batch or {}
        module_of, added = self.codec.module_of, batch.get(Columns.OBS)
        if added and not self._takes_written:
            raise ValueError(
                "a piece of env_to_module_connector wrote observations into the batch: the learner would see those of "
                "the episodes. Let it write into the episodes (set_observations), or set its counterpart with "
                ".learners(learner_connector=...) and leave normalize_observations off"
            )
        for env_index, episode in enumerate(episodes):
            for agent in sorted(episode.get_agents_to_act(), key=self._order.__getitem__):
                module_id = module_of[agent]
                rows[module_id].append((env_index, agent))
                if batch:
                    keys[module_id].append((episode.id_, agent, module_id))
                if not added:
                    seen[module_id].append(episode.agent_episodes[agent].observations.data[-1])
        acting: dict[ModuleID, Acting] = {}
        result: dict[ModuleID, dict[str, torch.Tensor]] = {}
        for module_id in self.codec.modules:
            if module_id not in rows:
                continue
            observations = [added[key][-1] for key in keys[module_id]] if added else seen[module_id]
            try:
                obs, mask = self.codec.modules[module_id].encode(observations)
            except ValueError as error:
                raise ValueError(
                    f"agents {sorted({str(agent) for _, agent in rows[module_id]})} of module {module_id!r}: what they "
                    f"saw is not in the space {self.codec.modules[module_id].observation_space}, which environment and "
                    f"connector pieces declare: {error}"
                ) from error
            acting[module_id] = Acting(rows[module_id], obs, mask)
            columns = {Columns.OBS: obs}
            for name, items in batch.items():
                if name != Columns.OBS and all(key in items for key in keys[module_id]):
                    columns[name] = np.stack([np.asarray(items[key][-1]) for key in keys[module_id]])
            result[module_id] = {name: torch.from_numpy(x).to(self._device) for name, x in columns.items()}
        if shared_data is not None:
            shared_data[ACTING] = acting
        return result
