"""How a team acts: encoded observations of all agents to actions for the environment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModule
from torch import Tensor

from thrust_rllib.connectors.observation_normalizer import ObservationNormalizer
from thrust_rllib.rl_modules.distributions import DiagonalGaussian, FactorizedCategorical, mask_logits
from thrust_rllib.rl_modules.stacked import STACKED_ROWS, StackedPolicies, can_be_stacked
from thrust_rllib.sampling.agent_groups import AgentGroup


@dataclass(frozen=True)
class Acted:
    """What a group of agents saw and did in one step, [k, E, …]: input, the distribution's inputs, the actions."""

    obs: np.ndarray
    logits: np.ndarray
    actions: np.ndarray


class TeamActor:
    """Chooses actions for all agents with a generator of its own; torch's global one is left as it was.

    `groups` are those it was given, split where modules do not act by the same kind of network.

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
        self._device = torch.device(device)
        self._generator = torch.Generator(self._device)
        self._generator.manual_seed(seed)
        self._policies = [GroupPolicy(group, module, self._device) for group in self.groups]

    def take_weights(self) -> None:
        """To be called when the modules' weights may have changed."""
        for policy in self._policies:
            policy.take_weights()

    def act(
        self,
        encoded: Sequence[np.ndarray],
        masks: Sequence[np.ndarray | None],
        explore: bool,
        random_actions: bool = False,
    ) -> list[Acted]:
        """One step of every agent.

        Args:
            encoded: per group float32 [k, E, …].
            masks: per group bool [k, E, A] or None.
            explore: sample from the distribution; False takes its mode.
            random_actions: ignore the modules' outputs and draw uniformly from what is allowed.
        """
        acted = []
        with torch.no_grad():
            for group, policy, obs, mask in zip(self.groups, self._policies, encoded, masks, strict=True):
                if self.normalizer is not None:
                    obs = self.normalizer.normalize(group.module_ids, obs)
                logits = policy.logits(obs, explore, self._generator)
                if random_actions:
                    logits = torch.zeros_like(logits)
                if mask is not None:
                    logits = mask_logits(logits, torch.from_numpy(mask).to(self._device))
                if random_actions and isinstance(group.action_space, gym.spaces.Box):
                    actions = torch.empty((*obs.shape[:2], *group.action_shape), device=self._device)
                    actions.uniform_(-1.0, 1.0, generator=self._generator)
                else:
                    actions = policy.choose(logits, explore or random_actions, self._generator)
                acted.append(Acted(obs, logits.cpu().numpy(), actions.cpu().numpy()))
        return acted

    def logp(self, index: int, logits: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """Log-probabilities [T, k, E] of stored actions [T, k, E, …] of a group under stored logits [T, k, E, A]."""
        return self._policies[index].logp(torch.from_numpy(logits), torch.from_numpy(actions)).numpy()


def _acting_together(group: AgentGroup, module: MultiRLModule) -> list[AgentGroup]:
    """The group, or one for each of its modules where these do not act by the same kind of network."""
    if len(group.module_ids) == 1 or can_be_stacked([module[m].unwrapped() for m in group.module_ids]):
        return [group]
    return group.split()


class GroupPolicy:
    """The modules of one group of agents: a single one, or several that `can_be_stacked`."""

    def __init__(self, group: AgentGroup, module: MultiRLModule, device: torch.device) -> None:
        self._modules = [module[module_id] for module_id in group.module_ids]
        self._module_ids = group.module_ids
        self._device = device
        self.take_weights()

    def take_weights(self) -> None:
        """See `TeamActor.take_weights`."""
        modules = [module.unwrapped() for module in self._modules]
        self._ours = can_be_stacked(modules)
        self._stacked = StackedPolicies(modules) if self._ours and len(modules) > 1 else None
        self._exploration = modules[0].get_exploration_action_dist_cls()
        self._inference = modules[0].get_inference_action_dist_cls()

    def logits(self, obs: np.ndarray, explore: bool, generator: torch.Generator) -> Tensor:
        """Inputs of the action distributions [k, E, A] of normalised observations [k, E, …]."""
        inputs = torch.from_numpy(obs).to(self._device)
        leading = inputs.shape[:2]
        rows = inputs.reshape(len(self._modules), -1, *inputs.shape[2:])
        if self._stacked is not None and rows.shape[1] <= STACKED_ROWS:
            outputs = self._stacked(rows)
        elif self._ours:
            outputs = self._one_by_one(rows, explore)
        else:
            with _drawing_from(generator):  # a module that draws random numbers takes them from torch's own generator
                outputs = self._one_by_one(rows, explore)
        return outputs.view(*leading, -1)

    def _one_by_one(self, rows: Tensor, explore: bool) -> Tensor:
        logits = []
        for module_id, module, obs in zip(self._module_ids, self._modules, rows, strict=True):
            batch = {Columns.OBS: obs}
            outputs = module.forward_exploration(batch) if explore else module.forward_inference(batch)
            if Columns.ACTION_DIST_INPUTS not in outputs:
                raise ValueError(
                    f"module {module_id!r} ({type(module).__name__}) returned {sorted(outputs)}; PPO needs "
                    f"'{Columns.ACTION_DIST_INPUTS}' (the logits) from forward_exploration and forward_inference"
                )
            logits.append(outputs[Columns.ACTION_DIST_INPUTS])
        return torch.cat(logits)

    def choose(self, logits: Tensor, sample: bool, generator: torch.Generator) -> Tensor:
        """Actions [k, E, …]: a sample, or the mode."""
        distribution = (self._exploration if sample else self._inference).from_logits(logits)
        if not sample:
            return distribution.to_deterministic().sample()
        if isinstance(distribution, (FactorizedCategorical, DiagonalGaussian)):
            return distribution.sample(generator=generator)
        with _drawing_from(generator):
            return distribution.sample()

    def logp(self, logits: Tensor, actions: Tensor) -> Tensor:
        """See `TeamActor.logp`."""
        return self._exploration.from_logits(logits).logp(actions)


@contextmanager
def _drawing_from(generator: torch.Generator) -> Iterator[None]:
    """Lets code that draws from torch's own generator of the device draw from `generator` instead."""
    device = generator.device
    state_of = torch if device.type == "cpu" else getattr(torch, device.type)
    outside = state_of.get_rng_state()
    state_of.set_rng_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(state_of.get_rng_state())
        state_of.set_rng_state(outside)
