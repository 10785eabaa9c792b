"""Whether the settings of a coverage world can be meant."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

from thrust_rllib.envs.coverage.terrain import TERRAINS, fixed_walls
from thrust_rllib.envs.names import nearest

_CHOICES = {
    "terrain": TERRAINS,
    "actions": ("goals", "moves"),
    "mask": ("none", "safe_goals"),
    "observation": ("planes", "window"),
}
_LEAST = {"grid": 3, "num_agents": 1, "horizon": 1, "comm_r": 1, "cover_r": 0, "stride": 1, "window": 1}
_NUMBERS = ("coverage_reward", "reach_reward", "crowding_penalty", "tau", "degree_target")
_ROOMS, _MOST_WALLS = 5, 0.4


def check_settings(given: Mapping[str, Any]) -> None:
    """Checks each option of `CoverageWorld` and what they mean together.

    Args:
        given: {option: value}, all of them.

    Raises:
        ValueError: an option out of its range, an unknown word, or options that exclude each other.
    """
    for name, least in _LEAST.items():
        value = given[name]
        if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} is {value!r}; needed: a whole number, at least {least}")
    for name, known in _CHOICES.items():
        value = given[name]
        if value not in known:
            words = ", ".join(map(repr, known))
            raise ValueError(f"{name} is {value!r}; needed: one of {words}{nearest(str(value), known)}")
    for name in _NUMBERS:
        if not _is_finite(given[name]):
            raise ValueError(f"{name} is {given[name]!r}; needed: a finite number")
    for name in ("roles", "skills", "links"):
        if not isinstance(given[name], bool):
            raise ValueError(f"{name} is {given[name]!r}; needed: True or False")
    if not _is_finite(given["wall_share"]) or not 0 <= given["wall_share"] <= _MOST_WALLS:
        raise ValueError(
            f"wall_share is {given['wall_share']!r}; needed: a share of the cells in [0, {_MOST_WALLS}]: with more "
            "walls the free cells seldom hang together"
        )
    if not _is_finite(given["floor"]) or given["floor"] < 0:
        raise ValueError(f"floor is {given['floor']!r}; needed: a finite number, at least 0 (a bound of λ₂)")
    _check_together(given)


def _check_together(given: Mapping[str, Any]) -> None:
    grid, agents = given["grid"], given["num_agents"]
    if given["roles"] and given["skills"]:
        raise ValueError(
            "roles and skills are both True; needed: one of them at most, since each is the first part of the action"
        )
    if given["mask"] == "safe_goals" and agents < 2:
        raise ValueError("mask is 'safe_goals' with one agent; needed: at least 2 (num_agents), whose links can break")
    if given["terrain"] == "rooms" and grid < _ROOMS:
        raise ValueError(f"grid is {grid} with terrain='rooms'; needed: at least {_ROOMS}, or another terrain")
    free = grid * grid if given["terrain"] == "random" else int((~fixed_walls(given["terrain"], grid)).sum())
    if agents > free:
        raise ValueError(
            f"num_agents is {agents}; there are {free} free cells to begin on. Take a larger grid or fewer agents"
        )


def _is_finite(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
