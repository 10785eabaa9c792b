"""Observations of any supported space as float32 arrays that a network can read.

| space | encoded as |
|---|---|
| Box, any rank, float or integer | the same shape (a single number: [1]), float32 |
| Box of dtype uint8 | the same shape, divided by 255 |
| Discrete(k, start) | one-hot [k] |
| MultiDiscrete([k0, k1, …]) | one-hots side by side [Σk] |
| MultiBinary(shape) | the same shape, 0.0 or 1.0 |
| Dict, Tuple of these | each flattened, side by side, keys in the order of the space |
| Dict with the key "action_mask" | the encoding of the rest; the mask goes its own way |
| Dict with the key "links" | the links in front, as they are, then the rest flattened |

Where the rest is only "observation" (PettingZoo's convention) or only "observations" (RLlib's), that component is
encoded by itself and keeps its shape; any other rest is a Dict without the mask, flattened as every Dict. A mask covers
the A logits of the agent's action space: the n of a Discrete, the heads of a MultiDiscrete side by side.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from thrust_rllib.envs.spaces import ACTION_MASK, LINKS, beside_action_mask, has_action_mask, map_space, num_links


class ObservationEncoder:
    """Encodes batches of one observation space, any leading axes.

    Args:
        space: the agent's observation space.

    Raises:
        ValueError: the space has no encoding; the message names what is supported.

    Attributes:
        masked: observations carry an action mask.
        num_links: so many numbers in front of an encoded observation are links; 0: there are none.
        shape_beside_links: of what stands behind them, its own where that is one component, else that of a vector;
            None without links.
    """

    def __init__(self, space: gym.Space) -> None:
        self.masked = has_action_mask(space)
        self.num_links = num_links(space)
        self.space, self._key = beside_action_mask(space)
        self.shape_beside_links: tuple[int, ...] | None = None
        if isinstance(self.space, gym.spaces.Dict) and self.num_links:
            self.space = _links_first(self.space)
            rest = [_encoded_bounds(inner)[0] for key, inner in self.space.spaces.items() if key != LINKS]
            self.shape_beside_links = rest[0].shape if len(rest) == 1 else (sum(part.size for part in rest),)
        low, high = _encoded_bounds(self.space)
        self.encoded_space = gym.spaces.Box(low, high, dtype=np.float32)
        # Comparing with infinite bounds costs a pass over the data and can only ever find a NaN.
        self.bounded = bool(np.isfinite(low).any() or np.isfinite(high).any())
        self._half_bounded = self.bounded and not bool(np.isfinite(low).all() and np.isfinite(high).all())

    def encode(self, raw: Any) -> np.ndarray:
        """[…, *space] (or a dict or tuple of arrays) to float32 […, *encoded_space.shape]."""
        return _encode(self.space, self._beside_mask(raw))

    def encode_agents(self, raw: Sequence[Any]) -> np.ndarray:
        """What k agents see, each [E, …] (or a dict or tuple of arrays), as float32 [k, E, …]."""
        mine = [self._beside_mask(each) for each in raw]
        return _encode(self.space, map_space(self.space, lambda _, *arrays: np.stack(arrays), *mine))

    def _beside_mask(self, raw: Any) -> Any:
        return raw if self._key is None else raw[self._key]

    def action_mask(self, raw: Any) -> np.ndarray:
        """The mask, bool […, A]; only for a masked space."""
        return np.asarray(raw[ACTION_MASK], dtype=bool)

    def first_violation(self, encoded: np.ndarray, check_bounds: bool = True) -> tuple[tuple[int, ...], str] | None:
        """Where the first observation lies that is not finite or not in the space: (leading index, what is wrong).

        Args:
            encoded: float32 […, *encoded_space.shape].
            check_bounds: also compare with the bounds of the space, not only look for NaN and infinity.
        """
        if self.bounded and check_bounds:
            # A NaN fails both comparisons.
            good = (encoded >= self.encoded_space.low) & (encoded <= self.encoded_space.high)
            if self._half_bounded:
                good &= np.isfinite(encoded)  # infinity lies inside an infinite bound
        else:
            good = np.isfinite(encoded)
        if good.all():
            return None
        place = tuple(int(i) for i in np.argwhere(~good)[0])
        leading = encoded.ndim - len(self.encoded_space.shape)
        element = place[leading:]
        value = encoded[place]
        if not np.isfinite(value):
            return place[:leading], f"element {element} is {value}"
        low, high = self.encoded_space.low[element], self.encoded_space.high[element]
        return place[:leading], f"element {element} is {value}, outside the space's bounds [{low}, {high}]"


def _links_first(space: gym.spaces.Dict) -> gym.spaces.Dict:
    """The space with its links in front."""
    rest = [(key, inner) for key, inner in space.spaces.items() if key != LINKS]
    return gym.spaces.Dict(OrderedDict([(LINKS, space.spaces[LINKS]), *rest]))


def _encoded_bounds(space: gym.Space) -> tuple[np.ndarray, np.ndarray]:
    if isinstance(space, gym.spaces.Box):
        scale = np.float32(255.0 if space.dtype == np.uint8 else 1.0)
        shape = space.shape or (1,)
        return space.low.astype(np.float32).reshape(shape) / scale, space.high.astype(np.float32).reshape(shape) / scale
    if isinstance(space, gym.spaces.Discrete):
        return np.zeros(int(space.n), np.float32), np.ones(int(space.n), np.float32)
    if isinstance(space, gym.spaces.MultiDiscrete):
        width = int(space.nvec.sum())
        return np.zeros(width, np.float32), np.ones(width, np.float32)
    if isinstance(space, gym.spaces.MultiBinary):
        return np.zeros(space.shape, np.float32), np.ones(space.shape, np.float32)
    if isinstance(space, (gym.spaces.Dict, gym.spaces.Tuple)):
        parts = [_encoded_bounds(s) for s in _components(space)]
        if not parts:
            raise ValueError(
                "a Dict or Tuple in the observation space holds nothing to encode; give the agent something to observe "
                "(beside the action mask, if it has one), if only a constant"
            )
        return (
            np.concatenate([low.ravel() for low, _ in parts]),
            np.concatenate([high.ravel() for _, high in parts]),
        )
    raise ValueError(
        f"observation space {space} has no encoding; supported are Box, Discrete, MultiDiscrete, MultiBinary, and "
        "Dict or Tuple of these. Wrap the environment so that it returns one of them."
    )


def _components(space: gym.spaces.Dict | gym.spaces.Tuple) -> list[gym.Space]:
    return list(space.spaces.values()) if isinstance(space, gym.spaces.Dict) else list(space.spaces)


def _encode(space: gym.Space, raw: Any) -> np.ndarray:
    if isinstance(space, gym.spaces.Box):
        array = np.asarray(raw)
        if not space.shape:
            array = array[..., None]
        if space.dtype == np.uint8:
            return np.divide(array, np.float32(255.0), dtype=np.float32)
        return array.astype(np.float32, copy=False)
    if isinstance(space, gym.spaces.MultiBinary):
        return np.asarray(raw, dtype=np.float32)
    if isinstance(space, gym.spaces.Discrete):
        return _one_hot(np.asarray(raw) - space.start, int(space.n), space)
    if isinstance(space, gym.spaces.MultiDiscrete):
        array = np.asarray(raw) - space.start
        if space.nvec.ndim != 1:
            array = array.reshape(*array.shape[: -space.nvec.ndim], -1)
        return np.concatenate(
            [_one_hot(array[..., i], int(k), space) for i, k in enumerate(space.nvec.ravel())], axis=-1
        )
    assert isinstance(space, (gym.spaces.Dict, gym.spaces.Tuple))
    keys = space.spaces.keys() if isinstance(space, gym.spaces.Dict) else range(len(space.spaces))
    parts = []
    for key, component in zip(keys, _components(space), strict=True):
        encoded = _encode(component, raw[key])
        rank = len(_encoded_bounds(component)[0].shape)
        parts.append(encoded.reshape(*encoded.shape[: encoded.ndim - rank], -1))
    return np.concatenate(parts, axis=-1)


def _one_hot(index: np.ndarray, size: int, space: gym.Space) -> np.ndarray:
    one_hot = index[..., None] == np.arange(size)
    if not one_hot.any(axis=-1).all():
        bad = index[(index < 0) | (index >= size) | (index != np.floor(index))].ravel()[0]
        start = getattr(space, "start", 0)
        raise ValueError(
            f"an observation holds category {bad + np.ravel(start)[0]}, which is not in its space {space}; return an "
            "element of the declared observation space"
        )
    return one_hot.astype(np.float32)
