"""How a team acts: encoded observations of all agents to actions for the environment, one forward per module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModule
from ray.rllib.core.rl_module.rl_module import RLModule

from thrust_rllib.connectors.observation_normalizer import ObservationNormalizer
from thrust_rllib.rl_modules.distributions import mask_logits, runs_alike
from thrust_rllib.sampling.module_agents import ModuleAgents


@dataclass(frozen=True)
class Acted:
    """What one module saw and did in one step, [n, E, …]: its input, the distribution's inputs, the actions."""

    obs: np.ndarray
    logits: np.ndarray
    actions: np.ndarray


class TeamActor:
    """Chooses actions for all agents with a generator of its own; torch's global one is left as it was.

    Args:
        agents: the agents of each module.
        module: the modules.
        normalizer: normalises encoded observations, or None.
        device: where the modules are.
        seed: of the generator.
    """

    def __init__(
        self,
        agents: list[ModuleAgents],
        module: MultiRLModule,
        normalizer: ObservationNormalizer | None,
        device: Any,
        seed: int,
    ) -> None:
        self.agents = agents
        self.module = module
        self.normalizer = normalizer
        self.device = device
        self._generator_state = torch.Generator().manual_seed(seed).get_state()

    def act(
        self, encoded: list[np.ndarray], masks: list[np.ndarray | None], explore: bool, random_actions: bool = False
    ) -> list[Acted]:
        """One step of every module.

        Args:
            encoded: per module float32 [n, E, …].
            masks: per module bool [n, E, A] or None.
            explore: sample from the distribution; False takes its mode.
            random_actions: ignore the modules' outputs and draw uniformly from what is allowed.
        """
        with torch.no_grad(), self._own_generator():
            if self.normalizer is not None:
                encoded = [
                    self.normalizer.normalize(agents.module_id, observed)
                    for agents, observed in zip(self.agents, encoded, strict=True)
                ]
            logits = [
                self._logits(agents, obs, mask, explore, random_actions)
                for agents, obs, mask in zip(self.agents, encoded, masks, strict=True)
            ]
            actions = self._choose(logits, explore, random_actions)
        return [
            Acted(
                obs=obs,
                logits=x.cpu().numpy().reshape(*obs.shape[:2], -1),
                actions=chosen.cpu().numpy().reshape(*obs.shape[:2], *agents.action_shape),
            )
            for agents, obs, x, chosen in zip(self.agents, encoded, logits, actions, strict=True)
        ]

    def _choose(self, logits: list[torch.Tensor], explore: bool, random_actions: bool) -> list[torch.Tensor]:
        """Actions [n·E, …] of every module from its logits [n·E, A]; modules that are alike draw together."""
        actions: list[torch.Tensor] = []
        classes = [self._distribution_class(agents, explore) for agents in self.agents]
        for run in runs_alike(classes, logits):
            distribution = classes[run.start].from_logits(torch.cat(logits[run]))
            if not (explore or random_actions):
                distribution = distribution.to_deterministic()
            drawn = distribution.sample()
            if random_actions and isinstance(self.agents[run.start].action_space, gym.spaces.Box):
                drawn = torch.rand_like(drawn) * 2.0 - 1.0
            actions += drawn.split([len(x) for x in logits[run]])
        return actions

    def logp(self, agents: ModuleAgents, logits: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """Log-probabilities […] of stored actions […, k] under stored logits […, A]."""
        leading = logits.shape[:-1]
        distribution = self._distribution_class(agents, explore=True).from_logits(
            torch.from_numpy(logits.reshape(-1, logits.shape[-1]))
        )
        flat_actions = torch.from_numpy(actions.reshape(-1, *agents.action_shape))
        return distribution.logp(flat_actions).reshape(leading).numpy()

    def _logits(
        self, agents: ModuleAgents, obs: np.ndarray, mask: np.ndarray | None, explore: bool, random_actions: bool
    ) -> torch.Tensor:
        """The (masked) inputs of the action distribution [n·E, A] of one module."""
        rows = obs.shape[0] * obs.shape[1]
        batch = {Columns.OBS: torch.from_numpy(obs.reshape(rows, *obs.shape[2:])).to(self.device)}
        module = self.module[agents.module_id]
        outputs = module.forward_exploration(batch) if explore else module.forward_inference(batch)
        if Columns.ACTION_DIST_INPUTS not in outputs:
            raise ValueError(
                f"module {agents.module_id!r} ({type(module).__name__}) returned {sorted(outputs)}; PPO needs "
                f"'{Columns.ACTION_DIST_INPUTS}' (the logits) from forward_exploration and forward_inference"
            )
        logits = outputs[Columns.ACTION_DIST_INPUTS]
        if random_actions:
            logits = torch.zeros_like(logits)
        if mask is None:
            return logits
        return mask_logits(logits, torch.from_numpy(mask.reshape(rows, -1)).to(self.device))

    def _distribution_class(self, agents: ModuleAgents, explore: bool) -> Any:
        module: RLModule = self.module[agents.module_id]
        return module.get_exploration_action_dist_cls() if explore else module.get_inference_action_dist_cls()

    @contextmanager
    def _own_generator(self) -> Iterator[None]:
        """Lets torch draw from the actor's generator inside the block (a few µs)."""
        outside = torch.get_rng_state()
        torch.set_rng_state(self._generator_state)
        try:
            yield
        finally:
            self._generator_state = torch.get_rng_state()
            torch.set_rng_state(outside)
