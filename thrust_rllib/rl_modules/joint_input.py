"""Who in a team exchanges messages: modules whose input is made of the observations of a whole joint row.

Letters: N agents of the team, N' of them that exchange messages, n of one module, B joint rows, D features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from ray.rllib.core.columns import Columns
from torch import Tensor

from thrust_rllib.joint_batch import AgentID, ModuleID
from thrust_rllib.rl_modules.communicating import EXCHANGED, CommunicatingModule
from thrust_rllib.rl_modules.exchange import check_alike, exchange


def communicates(rl_module: Any) -> bool:
    """Whether the agents of a module hear each other."""
    return isinstance(rl_module, CommunicatingModule)


def input_column(rl_module: Any) -> str:
    """What a module's input is called in its batches: observations, or what came of them in the exchange."""
    return EXCHANGED if communicates(rl_module) else str(Columns.OBS)


@dataclass(frozen=True)
class Speakers:
    """The agents of a team that exchange messages: those of some modules, module after module.

    | field       | meaning                                                                                     |
    |-------------|---------------------------------------------------------------------------------------------|
    | sizes       | {module: how many agents it plays}, in the order of the agents' axis                        |
    | order       | [N'] int64, where each of them stands among the links that the environment shows            |
    | remembering | whether the messages are part of the modules' memory, whose state then enters the exchange   |
    """

    sizes: dict[ModuleID, int]
    order: Tensor
    remembering: bool = False

    @classmethod
    def of(
        cls,
        modules: Mapping[ModuleID, Any],
        places: Mapping[ModuleID, Sequence[int]],
        device: torch.device | str = "cpu",
    ) -> Speakers | None:
        """Asks every module; None where nobody speaks.

        Args:
            modules: {module: RLModule}, in the order of the agents' axis.
            places: {module: where each of its agents stands among all agents of the environment}.
            device: of the modules.

        Raises:
            ValueError: modules that do not understand each other.
        """
        speaking = {module_id: own for module_id in places if communicates(own := modules[module_id].unwrapped())}
        if not speaking:
            return None
        check_alike(speaking)
        order = [place for module_id in speaking for place in places[module_id]]
        return cls(
            {module_id: len(places[module_id]) for module_id in speaking},
            torch.tensor(order, dtype=torch.int64, device=device),
            any(own.remembers_in_exchange for own in speaking.values()),
        )

    @property
    def remembering_modules(self) -> tuple[ModuleID, ...]:
        """Modules whose memory is part of the exchange: behind it their rows have none."""
        return tuple(self.sizes) if self.remembering else ()

    def modules(self, modules: Mapping[ModuleID, Any]) -> list[CommunicatingModule]:
        """Theirs among all modules."""
        return [modules[module_id].unwrapped() for module_id in self.sizes]

    def exchange(
        self,
        modules: Mapping[ModuleID, Any],
        obs: Mapping[ModuleID, Tensor],
        present: Tensor | None,
        states: Mapping[ModuleID, Tensor] | None = None,
    ) -> tuple[dict[ModuleID, Tensor], dict[ModuleID, Tensor] | None]:
        """One exchange on joint rows.

        Args:
            modules: all modules.
            obs: {module: [n, B, …]}, those of others are not read.
            present: bool [N', B], who is there; None for everybody.
            states: {module: [n, B, S]} before the step, where messages are part of the memory.

        Returns:
            {module: [n, B, D]}, and the states behind the step.
        """
        before = None if states is None else [states[module_id] for module_id in self.sizes]
        features, after = exchange(self.modules(modules), [obs[m] for m in self.sizes], self.order, present, before)
        return dict(zip(self.sizes, features, strict=True)), None if after is None else dict(
            zip(self.sizes, after, strict=True)
        )


def places_of(agents: Mapping[ModuleID, Sequence[AgentID]], team: Sequence[AgentID]) -> dict[ModuleID, tuple[int, ...]]:
    """{module: where each of its agents stands among all agents of the environment}.

    Args:
        agents: {module: its agents}, in the order of the agents' axis.
        team: all agents in the environment's order.
    """
    at = {agent: i for i, agent in enumerate(team)}
    return {module_id: tuple(at[agent] for agent in mine) for module_id, mine in agents.items()}
