"""Scripts of environments: plain data, written by hand or drawn at random (`random_envs.scripts`).

A script says who the agents are, and which episodes are played one after the other, then again from the first. An
episode has one *timeline* per agent, with a letter for each environment step of its life:

    A   it acts, and is paid
    .   it does not act: not born yet, or waiting for its turn
    +   the same, but it is paid

A timeline shorter than its episode ends before the episode does. Two agents that take turns, a third that is born
in step 2 and is truncated in step 3, where it acts for the second time:

    Episode((Life("A.A."), Life(".A.A"), Life("..AA", end="truncated")), over="terminated")

Every observation says where it was made: (episode number, step, agent number).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

AGENTS = ("north", "east", "south", "west")  # not in the order of the alphabet
MAX_STEPS = 12
FLAGS = {None: (False, False), "terminated": (True, False), "truncated": (False, True), "both": (True, True)}


@dataclass(frozen=True)
class Kind:
    """An agent's spaces: names of `observation_space` and `action_space`."""

    observation: str = "box"
    action: str = "discrete"


@dataclass(frozen=True)
class Life:
    """One agent in one episode.

    Args:
        timeline: see the module; "" for an agent that is not in this episode at all.
        end: its own flag in the last step of its timeline: "terminated", "truncated", "both" (which counts as
            terminated), or None: it has none and ends with the episode.
        last: whether it is shown an observation after its last step.
    """

    timeline: str
    end: str | None = None
    last: bool = True

    def at(self, t: int) -> str:
        """The letter of step t; " " after its end."""
        return self.timeline[t] if t < len(self.timeline) else " "

    @property
    def acts(self) -> bool:
        return "A" in self.timeline


@dataclass(frozen=True)
class Episode:
    """One episode.

    Args:
        lives: one for each agent.
        over: in which of RLlib's dicts "__all__" is true in the last step: "terminated", "truncated", "both", or
            None: in neither, every agent has acted and ends by a flag of its own.
    """

    lives: tuple[Life, ...]
    over: str | None = "terminated"

    def __post_init__(self) -> None:
        assert 1 <= self.length <= MAX_STEPS and any(life.acts for life in self.lives), self
        for life in self.lives:
            assert set(life.timeline) <= set("A.+") and (life.timeline or life.end is None), life
            if self.over is None:
                assert life.acts and life.end, "without __all__ every agent acts and has an end of its own"
            if 0 < len(life.timeline) < self.length:
                assert life.end, f"{life} is shorter than its episode and has no end of its own"
            if life.acts and (life.end or self.over) in ("truncated", "both"):
                assert life.last, f"{life} is truncated: RLlib needs a last observation"

    @property
    def length(self) -> int:
        return max(len(life.timeline) for life in self.lives)


@dataclass(frozen=True)
class Script:
    kinds: tuple[Kind, ...]
    episodes: tuple[Episode, ...]

    @property
    def agents(self) -> tuple[str, ...]:
        return AGENTS[: len(self.kinds)]


def observation_space(kind: Kind) -> gym.Space:
    """Spaces whose elements can say where they were made, see `observe`."""
    box = gym.spaces.Box(0.0, 2048.0, (3,))
    if kind.observation == "masked":
        mask = gym.spaces.Box(0, 1, (num_logits(kind),), np.int8)
        return gym.spaces.Dict({"observations": box, "action_mask": mask})
    return {
        "box": box,
        "long": gym.spaces.Box(0.0, 2048.0, (5,)),
        "square": gym.spaces.Box(0.0, 2048.0, (2, 3)),
        "discrete": gym.spaces.Discrete(2048),
    }[kind.observation]


def action_space(kind: Kind) -> gym.Space:
    return {
        "discrete": gym.spaces.Discrete(3),
        "shifted": gym.spaces.Discrete(2, start=1),
        "multi": gym.spaces.MultiDiscrete([2, 3]),
        "continuous": gym.spaces.Box(-2.0, 3.0, (2,)),
    }[kind.action]


def num_logits(kind: Kind) -> int:
    return {"discrete": 3, "shifted": 2, "multi": 5}[kind.action]


def observe(kind: Kind, episode: int, step: int, agent: int) -> Any:
    """What agent number `agent` sees before its action in step `step`."""
    where = np.array([episode, step, agent], np.float32)
    if kind.observation == "discrete":
        return np.int64(episode * (MAX_STEPS + 1) + step)
    if kind.observation == "masked":
        return {"observations": where, "action_mask": action_mask(kind, step)}
    return {"box": where, "long": np.r_[where, where[:2]], "square": np.stack([where, where])}[kind.observation]


def action_mask(kind: Kind, step: int) -> np.ndarray:
    """One action of the only, or last, head is forbidden: another one in each step."""
    head = {"discrete": 3, "shifted": 2, "multi": 3}[kind.action]
    mask = np.ones(num_logits(kind), np.int8)
    mask[len(mask) - head + step % head] = 0
    return mask


def encode(kind: Kind, observation: Any) -> np.ndarray:
    """An observation as it stands in a batch: numbers as they are, categories one-hot, without the mask."""
    if kind.observation == "discrete":
        return np.eye(2048, dtype=np.float32)[observation]
    return observation["observations"] if kind.observation == "masked" else observation


def received(kind: Kind, action: np.ndarray) -> np.ndarray:
    """What the environment gets for an action as it stands in a batch: numbers in [-1, 1] stretched over the bounds."""
    if kind.action == "continuous":
        return np.clip(-2.0 + (action.astype(np.float64) + 1.0) * 5.0 / 2.0, -2.0, 3.0)
    return action + 1 if kind.action == "shifted" else action


def origin(kind: Kind, row: np.ndarray) -> tuple[int, int]:
    """(episode number, step) of an observation as it stands in a batch."""
    if kind.observation == "discrete":  # one-hot
        return divmod(int(np.flatnonzero(row)[0]), MAX_STEPS + 1)
    return int(row.flat[0]), int(row.flat[1])


def pay(episode: int, step: int, agent: int) -> float:
    """A half or whole number from -2 to 3."""
    return ((3 * episode + 5 * step + 7 * agent) % 11 - 4) / 2
