"""From what a module samples to an element of the agent's action space.

Stored actions are what the loss reads: categories counted from 0, or the raw value of a Gaussian. The environment
gets them decoded: categories shifted by the space's `start`, Box values unsquashed or clipped as RLlib's
`normalize_actions` and `clip_actions` say (the twin of its `NormalizeAndClipActions` connector, on whole batches).
"""

from __future__ import annotations

import gymnasium as gym
import numpy as np


class ActionDecoder:
    """Decodes batches of one action space, any leading axes.

    Args:
        space: the agents' action space: Discrete, MultiDiscrete or Box.
        normalize_actions: read a Box action as a number in [-1, 1] and stretch it over the bounds.
        clip_actions: clip a Box action to the bounds (only where `normalize_actions` is off).

    Raises:
        ValueError: another kind of space.
    """

    def __init__(self, space: gym.Space, normalize_actions: bool = True, clip_actions: bool = False) -> None:
        self.space = space
        self.start: np.ndarray | None = None
        self.stretch = self.clip = False
        if isinstance(space, (gym.spaces.Discrete, gym.spaces.MultiDiscrete)):
            start = np.asarray(space.start)
            self.start = start if start.any() else None
        elif isinstance(space, gym.spaces.Box) and len(space.shape) == 1:
            bounded = bool(np.isfinite(space.low).all() and np.isfinite(space.high).all())
            self.stretch = normalize_actions and bounded
            # An unclipped Gaussian leaves the space now and then; only unbounded sides may stay open.
            self.clip = not self.stretch and (clip_actions or normalize_actions)
        else:
            raise ValueError(
                f"action space {space} is not supported; needed: Discrete, MultiDiscrete (one axis) or Box (one axis). "
                "Wrap the environment so that the agent acts in one of these."
            )

    def decode(self, actions: np.ndarray) -> np.ndarray:
        """Stored actions […, k] (or […] for Discrete) to elements of the space, same shape."""
        space = self.space
        if self.start is not None:
            return actions + self.start
        if not isinstance(space, gym.spaces.Box):
            return actions
        if self.stretch:
            actions = space.low + (actions + 1.0) * (space.high - space.low) / 2.0
        if self.stretch or self.clip:
            actions = np.clip(actions, space.low, space.high)
        if np.issubdtype(space.dtype, np.integer):
            actions = np.round(actions)
        return actions.astype(space.dtype, copy=False)
