"""In the general door's env-to-module pipeline: what the agents that act next tell each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModule
from ray.rllib.utils.annotations import override
from torch import Tensor

from thrust_rllib.connectors.team_codec import TeamCodec
from thrust_rllib.connectors.team_observations import ACTING, Acting
from thrust_rllib.joint_batch import ModuleID
from thrust_rllib.joint_episode import JointEpisode
from thrust_rllib.rl_modules.communicating import EXCHANGED
from thrust_rllib.rl_modules.joint_input import Speakers, places_of
from thrust_rllib.rl_modules.memory import MemoryLayout


class TeamExchange(ConnectorV2):
    """Gives every communicating module the features of its agents behind the exchange of messages.

    Who does not act next says nothing. Behind `TeamObservations` and the normaliser, in front of `TeamMemory`, which
    leaves modules alone whose memory is part of the exchange. Other modules are left as they are.

    Args:
        input_observation_space: as of every ConnectorV2; not used.
        input_action_space: not used.
        codec: the team.
        **kwargs: for RLlib.
    """

    def __init__(
        self,
        input_observation_space: gym.Space | None = None,
        input_action_space: gym.Space | None = None,
        *,
        codec: TeamCodec,
        **kwargs: Any,
    ) -> None:
        self.codec = codec
        super().__init__(input_observation_space, input_action_space, **kwargs)

    @override(ConnectorV2)
    def get_ctor_args_and_kwargs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (self.input_observation_space, self.input_action_space), {"codec": self.codec}

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
        """{module: {…, "exchanged": [R, D]}}; with a state and a time axis of length 1 where messages are remembered.

        Called again on what it has made, with other weights or moments of observations, it makes that anew.
        """
        acting: dict[ModuleID, Acting] = shared_data[ACTING]
        device = next((batch[m][Columns.OBS].device for m in acting), torch.device("cpu"))
        agents = {module_id: codec.agents for module_id, codec in self.codec.modules.items()}
        speakers = Speakers.of(rl_module, places_of(agents, list(self.codec.module_of)), device)
        if speakers is None:
            return batch
        places = {m: self._places(m, acting[m]) for m in speakers.sizes if m in acting}
        if not places:  # none of them acts
            return batch
        shapes = {m: (len(agents[m]), len(episodes)) for m in speakers.sizes}
        obs, present = {}, []
        for m, shape in shapes.items():
            seen = np.zeros((*shape, *self.codec.modules[m].encoder.encoded_space.shape), np.float32)
            there = np.zeros(shape, bool)
            if m in places:
                seen[places[m]], there[places[m]] = acting[m].obs, True
            obs[m] = torch.from_numpy(seen).to(device)
            present.append(there)
        states: dict[ModuleID, Tensor] | None = None
        if speakers.remembering:
            states = self._enter(rl_module, speakers, acting, places, shapes, episodes, device)
        with torch.no_grad():
            heard = torch.from_numpy(np.concatenate(present)).to(device)
            features, after = speakers.exchange(rl_module, obs, heard, states)
        for m, index in places.items():
            columns, mine = batch[m], features[m][index]
            if after is not None:
                layout = acting[m].layout
                assert layout is not None
                flat = {name: x for name, x in columns.items() if name not in (Columns.STATE_IN, EXCHANGED)}
                if Columns.STATE_IN in columns:  # there is a time axis already
                    flat = {name: x[:, 0] for name, x in flat.items()}
                batch[m] = layout.one_step({**flat, EXCHANGED: mine}, after[m][index])
            else:
                columns[EXCHANGED] = mine[:, None] if Columns.STATE_IN in columns else mine
        return batch

    def _places(self, module_id: ModuleID, acting: Acting) -> tuple[np.ndarray, np.ndarray]:
        """Where each row stands in arrays [n, E, …]."""
        at = {agent: i for i, agent in enumerate(self.codec.modules[module_id].agents)}
        return np.array([at[agent] for _, agent in acting.rows]), np.array([e for e, _ in acting.rows])

    @staticmethod
    def _enter(
        rl_module: MultiRLModule,
        speakers: Speakers,
        acting: Mapping[ModuleID, Acting],
        places: Mapping[ModuleID, tuple[np.ndarray, np.ndarray]],
        shapes: Mapping[ModuleID, tuple[int, int]],
        episodes: Sequence[JointEpisode],
        device: Any,
    ) -> dict[ModuleID, Tensor]:
        """The states [n, E, S] that enter the step; initial ones where nobody acts."""
        states = {}
        for m in speakers.remembering_modules:
            layout = MemoryLayout.of(rl_module[m].unwrapped())
            assert layout is not None
            entering = np.broadcast_to(layout.initial, (*shapes[m], layout.size)).copy()
            if m in places:
                mine = acting[m]
                mine.layout = layout
                mine.memory = np.stack([episodes[e].memory.get(agent, layout.initial) for e, agent in mine.rows])
                entering[places[m]] = mine.memory
            states[m] = torch.from_numpy(entering).to(device)
        return states
