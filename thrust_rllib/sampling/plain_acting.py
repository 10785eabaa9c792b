"""Acting of this package's own policies, in numpy from observation to action: the fast twin of `ModuleActing`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from thrust_rllib.rl_modules.categorical import gumbel_noise
from thrust_rllib.rl_modules.head_layout import MASKED_LOGIT, HeadLayout
from thrust_rllib.rl_modules.mlp import MLPModule
from thrust_rllib.rl_modules.recurrent import RecurrentModule
from thrust_rllib.rl_modules.stacked import StackedPolicies
from thrust_rllib.rl_modules.stacked_recurrent import StackedRecurrentPolicies
from thrust_rllib.sampling.agent_groups import AgentGroup

NUMBERS_OF_A_BLOCK = 1 << 16
"""At most so many random numbers are drawn at once: some hundred steps of a small team."""


class PlainActing:
    """Acts by the modules' policies with the weights they have now.

    Args:
        group: the agents.
        modules: of the group; `can_be_stacked` holds.
        noise: what everything random is taken from.
    """

    def __init__(self, group: AgentGroup, modules: Sequence[MLPModule], noise: Noise) -> None:
        recurrent = isinstance(modules[0], RecurrentModule)
        self._policies = StackedRecurrentPolicies(modules) if recurrent else StackedPolicies(modules)
        self._num_modules = len(modules)
        space = group.action_space
        self._box = isinstance(space, gym.spaces.Box)
        # The heads of a MultiDiscrete among the logits; None for one head, whose action is a number.
        self._heads: HeadLayout | None = None
        if isinstance(space, gym.spaces.MultiDiscrete):
            self._heads = modules[0].action_dist_cls.layout
            self._blocks = self._heads.blocks
        self._noise = noise

    def act(
        self,
        obs: np.ndarray,
        mask: np.ndarray | None,
        explore: bool,
        random_actions: bool,
        memory: np.ndarray | None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """One step.

        Args:
            obs: normalised observations [k, E, …].
            mask: bool [k, E, A], the categories of all heads side by side, or None.
            explore: sample; False takes the mode.
            random_actions: draw uniformly from what is allowed; memories go on as ever.
            memory: [k, E, S] states of recurrent modules before the step; None for those that have none.

        Returns:
            The (masked) inputs of the action distributions [k, E, A], actions [k, E, …], and the states after the step
            [k, E, S] or None.
        """
        rows = obs.reshape(self._num_modules, -1, *obs.shape[2:])
        with np.errstate(all="ignore"):  # as torch: diverged weights give infinities, which the learner refuses
            logits, memory = self._forward(rows, memory)
        logits = logits.reshape(*obs.shape[:2], -1)
        if random_actions:
            logits = np.zeros_like(logits)
        if mask is not None:
            if self._heads is not None and self._heads.conditional:
                mask = mask[..., self._heads.mask_columns]
            logits = np.where(mask, logits, np.float32(MASKED_LOGIT))
        if self._box:
            return logits, self._numbers(logits, explore, random_actions), memory
        return logits, self._categories(logits, explore or random_actions), memory

    def _forward(self, rows: np.ndarray, memory: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        """Rows [m, R, …] to inputs of the distributions [m, R, A]; memories [k, E, S] one step on."""
        if isinstance(self._policies, StackedPolicies):
            return self._policies(rows), None
        if memory is None:
            raise ValueError("recurrent modules act from memory=None; needed: their states [agents, environments, S]")
        logits, after = self._policies(rows, memory.reshape(*rows.shape[:2], -1))
        return logits, after.reshape(memory.shape)

    def _categories(self, logits: np.ndarray, sample: bool) -> np.ndarray:
        """The largest logit of each head, with Gumbel noise for a sample."""
        if sample:
            logits = logits + self._noise.gumbel.next(logits.shape)
        if self._heads is None:
            return logits.argmax(-1)
        return self._heads.pick_numpy(np.stack([logits[..., block].argmax(-1) for block in self._blocks], axis=-1))

    def _numbers(self, inputs: np.ndarray, explore: bool, random_actions: bool) -> np.ndarray:
        mean, log_std = np.split(inputs, 2, axis=-1)
        if random_actions:
            return self._noise.uniform.next(mean.shape)
        if not explore:
            return mean
        with np.errstate(all="ignore"):
            return mean + np.exp(log_std) * self._noise.normal.next(mean.shape)


class Noise:
    """Random numbers of three kinds for step after step; whoever takes them keeps them over changes of weights.

    Args:
        generator: on the CPU.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self.gumbel = Blocks(lambda shape: gumbel_noise(torch.empty(shape), generator), generator)
        self.normal = Blocks(lambda shape: torch.empty(shape).normal_(generator=generator), generator)
        self.uniform = Blocks(lambda shape: torch.empty(shape).uniform_(-1.0, 1.0, generator=generator), generator)
        self._kinds = {"gumbel": self.gumbel, "normal": self.normal, "uniform": self.uniform}

    def get_state(self) -> dict[str, Any]:
        """What was drawn ahead, by kind."""
        return {kind: blocks.get_state() for kind, blocks in self._kinds.items()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on with the same numbers; moves the generator, which is to be set behind this."""
        for kind, blocks in self._kinds.items():
            blocks.set_state(state[kind])


class Blocks:
    """Numbers of one kind, drawn for many steps at once.

    Args:
        draw: a shape to numbers of that shape.
        generator: that `draw` takes them from.
    """

    def __init__(self, draw: Callable[[tuple[int, ...]], torch.Tensor], generator: torch.Generator) -> None:
        self._draw = draw
        self._generator = generator
        self._drawn_at = torch.empty(0, dtype=torch.uint8)  # the generator's state in front of the block
        self._block = np.empty((0,))
        self._used = 0

    def next(self, shape: tuple[int, ...]) -> np.ndarray:
        """Numbers of `shape`, float32: a view of a block, which is never written again."""
        if self._used == len(self._block) or self._block.shape[1:] != shape:
            # The first blocks are small: who plays a few steps does not pay for hundreds.
            most = NUMBERS_OF_A_BLOCK // max(1, int(np.prod(shape)))
            steps = max(1, min(2 * len(self._block) or 16, most))
            self._drawn_at = self._generator.get_state()
            self._block, self._used = self._draw((steps, *shape)).numpy(), 0
        self._used += 1
        return self._block[self._used - 1]

    def get_state(self) -> dict[str, Any]:
        """How to draw the block again: some kB in place of up to `NUMBERS_OF_A_BLOCK` numbers."""
        return {"drawn_at": self._drawn_at.numpy().copy(), "shape": self._block.shape, "used": self._used}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Draws the block again."""
        self._drawn_at, self._used = torch.from_numpy(state["drawn_at"].copy()), state["used"]
        shape = tuple(state["shape"])
        if self._used < shape[0]:
            self._generator.set_state(self._drawn_at)
            self._block = self._draw(shape).numpy()
        else:
            self._block = np.empty(shape, np.float32)
