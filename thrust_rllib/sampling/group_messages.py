"""What agents tell each other before they act, over all groups of a team."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thrust_rllib.rl_modules.joint_input import Speakers, communicates
from thrust_rllib.sampling.agent_groups import AgentGroup

Heard = dict[int, tuple[np.ndarray, np.ndarray | None]]
"""{group: what its module's rows read [k, E, D], and the memory [k, E, S] that they read it with}."""


class GroupMessages:
    """The exchange of messages of all groups whose module communicates: each has one, since these act by themselves.

    Args:
        groups: {index of the group: it}, those that speak.
        modules: {index of the group: its module}.
        device: of the modules.
    """

    def __init__(self, groups: dict[int, AgentGroup], modules: dict[int, Any], device: torch.device) -> None:
        self._groups, self._device = groups, device
        self._modules = {group.module_ids[0]: modules[index] for index, group in groups.items()}
        places = {group.module_ids[0]: group.places for group in groups.values()}
        speakers = Speakers.of(self._modules, places, device)
        assert speakers is not None
        self._speakers = speakers

    @classmethod
    def of(
        cls, groups: Sequence[AgentGroup], modules: Sequence[Sequence[Any]], device: torch.device
    ) -> GroupMessages | None:
        """None where nobody speaks.

        Args:
            groups: of the team.
            modules: of each group.
            device: of the modules.
        """
        speaking = [index for index, own in enumerate(modules) if communicates(own[0].unwrapped())]
        if not speaking:
            return None
        return cls({i: groups[i] for i in speaking}, {i: modules[i][0] for i in speaking}, device)

    @torch.no_grad()
    def exchange(
        self, seen: Sequence[np.ndarray], memories: Sequence[np.ndarray | None], present: np.ndarray | None
    ) -> Heard:
        """One exchange.

        Args:
            seen: of each group [k, E, …], normalised.
            memories: of each group [k, E, S] or None.
            present: bool [N, E], who is there; None for everybody.
        """
        obs = {group.module_ids[0]: self._tensor(seen[index]) for index, group in self._groups.items()}
        there = states = None
        if present is not None:
            there = self._tensor(np.concatenate([present[group.positions] for group in self._groups.values()]))
        if self._speakers.remembering:
            states = {group.module_ids[0]: self._tensor(memories[index]) for index, group in self._groups.items()}
        features, after = self._speakers.exchange(self._modules, obs, there, states)
        heard: Heard = {}
        for index, group in self._groups.items():
            module_id = group.module_ids[0]
            # Behind an exchange that remembers the memory is that of the next step, and the module's rows have none.
            memory = memories[index] if after is None else after[module_id].cpu().numpy()
            heard[index] = features[module_id].cpu().numpy(), memory
        return heard

    def _tensor(self, x: Any) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(x)).to(self._device)
