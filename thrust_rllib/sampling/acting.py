"""How a team acts: encoded observations of all agents to actions for the environment, and what its modules remember.

A group of agents acts by numpy where its modules are this package's own, on the CPU (`plain_acting`), else by its
modules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModule
from torch import Tensor

from thrust_rllib.connectors.observation_normalizer import ObservationNormalizer
from thrust_rllib.rl_modules.acting_outputs import check_acting_outputs
from thrust_rllib.rl_modules.distributions import mask_logits
from thrust_rllib.rl_modules.drawing import drawing_from, generator_state, set_generator_state
from thrust_rllib.rl_modules.joint_input import input_column
from thrust_rllib.rl_modules.memory import MemoryLayout
from thrust_rllib.rl_modules.stacked import can_be_stacked
from thrust_rllib.sampling.agent_groups import AgentGroup
from thrust_rllib.sampling.group_messages import GroupMessages, Heard
from thrust_rllib.sampling.plain_acting import Noise, PlainActing


@dataclass(frozen=True)
class Acted:
    """What a group of agents saw and did in one step, [k, E, …]: input, the distribution's inputs, the actions.

    memory: [k, E, S] the states that recurrent modules entered the step with, or None. read: what the modules' rows
    read, input and state: obs and memory, or what the exchange of messages has made of them.
    """

    obs: np.ndarray
    logits: np.ndarray
    actions: np.ndarray
    memory: np.ndarray | None
    read: tuple[np.ndarray, np.ndarray | None]


class TeamActor:
    """Chooses actions for all agents with a generator of its own; torch's global one is left as it was.

    `groups` are those it was given, split where modules do not act by the same kind of network.

    Communicating modules hear each other before they act, whatever groups their agents are in.

    Recurrent modules: `act` enters a step with the memories of the agents, `advance` keeps those that come out of it
    for who acted, and begins anew where an episode has ended. Memories survive `take_weights`.

    Args:
        groups: the agents.
        module: the modules.
        normalizer: normalises encoded observations, or None.
        device: where the modules are.
        seed: of the generator.
    """

    def __init__(
        self,
        groups: list[AgentGroup],
        module: MultiRLModule,
        normalizer: ObservationNormalizer | None,
        device: Any,
        seed: int,
    ) -> None:
        self.groups = [part for group in groups for part in _acting_together(group, module)]
        self.normalizer = normalizer
        self._modules = [[module[module_id] for module_id in group.module_ids] for group in self.groups]
        self._device = torch.device(device)
        self._generator = torch.Generator(self._device)
        self._generator.manual_seed(seed)
        self._noise = [Noise(self._generator) for _ in self.groups]
        self.restart()
        self.take_weights()

    @property
    def exchanges_messages(self) -> bool:
        """Whether agents hear each other, so that it matters who is there."""
        return self._messages is not None

    def take_weights(self) -> None:
        """To be called when the modules' weights may have changed: before each rollout."""
        # [k, 1, S] of each group, or None where it has no memory.
        self._initial = [_initial_memory(*pair) for pair in zip(self.groups, self._modules, strict=True)]
        self._recurrent = any(initial is not None for initial in self._initial)
        self._messages = GroupMessages.of(self.groups, self._modules, self._device)
        self._acting: list[PlainActing | ModuleActing] = []
        for group, modules, noise in zip(self.groups, self._modules, self._noise, strict=True):
            plain = [module.unwrapped() for module in modules]
            if can_be_stacked(plain):
                self._acting.append(PlainActing(group, plain, noise))
            else:
                self._acting.append(ModuleActing(group, modules, self._generator, self._device))

    def restart(self) -> None:
        """All agents forget: to be called when all environments are reset."""
        self._memory: list[np.ndarray | None] = [None] * len(self.groups)
        self._next_memory: list[np.ndarray | None] = [None] * len(self.groups)

    def memory(self, index: int, num_envs: int) -> np.ndarray | None:
        """The states [k, E, S] that a group enters its next step with; None where it has none."""
        initial, memory = self._initial[index], self._memory[index]
        if initial is not None and memory is None:
            memory = self._memory[index] = np.repeat(initial, num_envs, axis=1)
        return memory

    def act(
        self,
        encoded: Sequence[np.ndarray],
        masks: Sequence[np.ndarray | None],
        explore: bool,
        random_actions: bool = False,
        present: np.ndarray | None = None,
    ) -> list[Acted]:
        """One step of every agent: messages first, where modules exchange some.

        Args:
            encoded: per group float32 [k, E, …].
            masks: per group bool [k, E, A] or None.
            explore: sample from the distribution; False takes its mode.
            random_actions: ignore the modules' outputs and draw uniformly from what is allowed.
            present: bool [N, E] in the environment's order, who acts in this step and can be heard; None: everybody, or
                not known, and then the links are right.
        """
        seen = [*encoded]
        if self.normalizer is not None:
            seen = [self.normalizer.normalize(g.module_ids, obs) for g, obs in zip(self.groups, seen, strict=True)]
        memories = [self.memory(index, obs.shape[1]) for index, obs in enumerate(seen)]
        heard: Heard = {}
        if self._messages is not None:
            heard = self._messages.exchange(seen, memories, present)
        acted = []
        for index, (acting, obs, mask, memory) in enumerate(zip(self._acting, seen, masks, memories, strict=True)):
            read = heard.get(index, (obs, memory))
            logits, actions, self._next_memory[index] = acting.act(read[0], mask, explore, random_actions, read[1])
            acted.append(Acted(obs, logits, actions, memory, read))
        return acted

    def advance(self, present: np.ndarray | None, over: np.ndarray) -> None:
        """Goes on to the next step.

        Args:
            present: bool [N, E] in the environment's order, who acted; None for everybody.
            over: bool [E], environments whose next step is the first one of an episode.
        """
        if not self._recurrent:
            return
        begins = over.any()
        for index, (group, initial, new) in enumerate(zip(self.groups, self._initial, self._next_memory, strict=True)):
            before = self._memory[index]
            if initial is None or new is None or before is None:
                continue
            if present is not None:
                new = np.where(present[group.positions][..., None], new, before)
            if begins:
                new = np.where(over[:, None], initial, new)
            self._memory[index] = new

    def get_drawing_state(self) -> dict[str, Any]:
        """Where the random numbers of actions are."""
        return {
            "generator": generator_state(self._generator),
            "noise": [noise.get_state() for noise in self._noise],
        }

    def set_drawing_state(self, state: Mapping[str, Any]) -> None:
        """Goes on with the same random numbers; with others where groups or the kind of device have changed."""
        if len(state["noise"]) == len(self._noise) and self._device.type == state["generator"]["device"]:
            for noise, mine in zip(self._noise, state["noise"], strict=True):
                noise.set_state(mine)
        set_generator_state(self._generator, state["generator"])

    def get_memories(self) -> list[np.ndarray | None]:
        """The states [k, E, S] that the groups enter their next step with; None where that is the initial one."""
        return [*self._memory]

    def set_memories(self, memories: Sequence[np.ndarray | None]) -> None:
        """Goes on with what `get_memories` gave."""
        self.restart()
        self._memory = [*memories]

    def logp(self, index: int, logits: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """Log-probabilities [T, k, E] of stored actions [T, k, E, …] of a group under stored logits [T, k, E, A]."""
        distribution = self._modules[index][0].get_exploration_action_dist_cls()
        return distribution.from_logits(torch.from_numpy(logits)).logp(torch.from_numpy(actions)).numpy()

    def head_logp(self, index: int, logits: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """As `logp`, head by head [T, k, E, H]."""
        distribution = self._modules[index][0].get_exploration_action_dist_cls()
        return distribution.from_logits(torch.from_numpy(logits)).head_logp(torch.from_numpy(actions)).numpy()


def _initial_memory(group: AgentGroup, modules: Sequence[Any]) -> np.ndarray | None:
    """The initial states [k, 1, S] of a group's agents; None where they have none."""
    layouts = [MemoryLayout.of(module.unwrapped()) for module in modules]
    initial = [layout.initial for layout in layouts if layout is not None]
    return np.repeat(np.stack(initial), len(group) // len(modules), axis=0)[:, None] if initial else None


def _acting_together(group: AgentGroup, module: MultiRLModule) -> list[AgentGroup]:
    """The group, or one for each of its modules where these do not act by the same kind of network."""
    if len(group.module_ids) == 1 or can_be_stacked([module[m].unwrapped() for m in group.module_ids]):
        return [group]
    return group.split()


class ModuleActing:
    """Acts by the modules' own forward passes and their distributions.

    Args:
        group: the agents.
        modules: one, or several with the same distributions.
        generator: what everything random is drawn from.
        device: of the modules.
    """

    def __init__(
        self, group: AgentGroup, modules: Sequence[Any], generator: torch.Generator, device: torch.device
    ) -> None:
        self._group = group
        self._modules = modules
        self._generator = generator
        self._device = device
        self._memories = [MemoryLayout.of(module.unwrapped()) for module in modules]

    def act(
        self,
        obs: np.ndarray,
        mask: np.ndarray | None,
        explore: bool,
        random_actions: bool,
        memory: np.ndarray | None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """As `PlainActing.act`."""
        with torch.no_grad(), drawing_from(self._generator):
            logits, next_memory = self._logits(obs, explore, memory)
            if random_actions:
                logits = torch.zeros_like(logits)
            if mask is not None:
                classes = self._modules[0].get_exploration_action_dist_cls()
                logits = mask_logits(logits, torch.from_numpy(mask).to(self._device), classes)
            if random_actions and isinstance(self._group.action_space, gym.spaces.Box):
                actions = torch.rand(*obs.shape[:2], *self._group.action_shape, device=self._device) * 2.0 - 1.0
            else:
                actions = self._choose(logits, explore or random_actions)
        return logits.cpu().numpy(), actions.cpu().numpy(), next_memory

    def _logits(self, obs: np.ndarray, explore: bool, memory: np.ndarray | None) -> tuple[Tensor, np.ndarray | None]:
        """Logits [k, E, A], and the states [k, E, S] of recurrent modules behind the step."""
        rows = torch.from_numpy(obs).to(self._device)
        parts, states = [], []
        for (module_id, mine), module, layout in zip(self._group.by_module, self._modules, self._memories, strict=True):
            batch: dict[str, Any] = {input_column(module.unwrapped()): rows[mine].flatten(0, 1)}
            if layout is not None:
                assert memory is not None
                batch = layout.one_step(batch, torch.from_numpy(memory[mine]).to(self._device).flatten(0, 1))
            outputs = module.forward_exploration(batch) if explore else module.forward_inference(batch)
            check_acting_outputs(module_id, module, outputs, layout is not None)
            parts.append(outputs[Columns.ACTION_DIST_INPUTS])
            if layout is not None:
                states.append(layout.flatten(outputs[Columns.STATE_OUT]))
        logits = torch.cat([part.flatten(0, -2) for part in parts]).view(*obs.shape[:2], -1)
        return logits, torch.cat(states).view(*obs.shape[:2], -1).cpu().numpy() if states else None

    def _choose(self, logits: Tensor, sample: bool) -> Tensor:
        module = self._modules[0]
        if sample:
            return module.get_exploration_action_dist_cls().from_logits(logits).sample()
        return module.get_inference_action_dist_cls().from_logits(logits).to_deterministic().sample()
