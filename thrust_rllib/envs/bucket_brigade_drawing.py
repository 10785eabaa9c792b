"""A picture of a game of Bucket Brigade; needs Pillow, which comes with matplotlib."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from thrust_rllib.envs.bucket_brigade_rules import BURNING, HOUSE, MODE, RUINED, SAFE, WORK

SIZE = 480
STATES = {SAFE: ("safe", "#3f9e52"), BURNING: ("burning", "#f0821e"), RUINED: ("ruined", "#5a5a5a")}
AGENTS = ("#1f5fbf", "#b5179e", "#c1121f", "#6a3fb5", "#0b7a75", "#7a5c00", "#374151", "#a23b72")
_TEXT_RADIUS = 45  # of what stands in the middle
_INK, _PAPER, _QUIET = "#222222", "#ffffff", "#777777"


@functools.cache
def _font(size: int) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(size)


def draw_game(houses: np.ndarray, actions: np.ndarray, nights: int, rewards: np.ndarray | None) -> np.ndarray:
    """Houses on a ring; the agents as numbered dots inside it, at the house they went to: full works, hollow rests.

    The dot of an agent and the frames of the houses that it owns have the same colour.

    Args:
        houses: int [H].
        actions: of the last night, int [N, 3].
        nights: played so far; at 0 nobody has gone anywhere yet, and no agent is drawn.
        rewards: of the last night, [N]; None before the first.

    Returns:
        uint8 [SIZE, SIZE, 3].
    """
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (SIZE, SIZE), _PAPER)
    draw = ImageDraw.Draw(image)
    num_houses, num_agents = len(houses), len(actions)
    ring = 0.39 * SIZE
    side = min(28.0, 2.4 * ring / max(num_houses, 2))  # half the width of a house
    for house, state in enumerate(houses.tolist()):
        x, y = _on_ring(house, num_houses, ring)
        box = (x - side, y - side, x + side, y + side)
        draw.rectangle(box, fill=STATES[state][1], outline=AGENTS[house % num_agents % len(AGENTS)], width=4)
        draw.text((x, y), str(house), fill=_PAPER, font=_font(max(8, int(0.8 * side))), anchor="mm")
    radius = min(13.0, 0.5 * side)
    if nights:
        outermost = ring - 1.45 * side - radius
        for house in range(num_houses):
            here = np.flatnonzero(actions[:, HOUSE] == house).tolist()
            apart = min(2.2 * radius, (outermost - _TEXT_RADIUS) / max(len(here) - 1, 1))
            for place, agent in enumerate(here):
                x, y = _on_ring(house, num_houses, outermost - apart * place)
                _draw_agent(draw, x, y, radius, agent, works=bool(actions[agent, MODE] == WORK))
    centre = SIZE / 2
    draw.text((centre, centre - 12), f"night {nights}", fill=_INK, font=_font(18), anchor="mm")
    if rewards is not None:
        text = f"team reward {float(rewards.sum()):+.1f}"
        draw.text((centre, centre + 12), text, fill=_INK, font=_font(15), anchor="mm")
    _draw_legend(draw)
    return np.asarray(image)


def _on_ring(house: int, num_houses: int, radius: float) -> tuple[float, float]:
    """House 0 is at the top, the others follow clockwise."""
    angle = 2 * math.pi * house / num_houses
    return SIZE / 2 + radius * math.sin(angle), SIZE / 2 - radius * math.cos(angle)


def _draw_agent(draw: Any, x: float, y: float, radius: float, agent: int, works: bool) -> None:
    colour = AGENTS[agent % len(AGENTS)]
    box = (x - radius, y - radius, x + radius, y + radius)
    draw.ellipse(box, fill=colour if works else _PAPER, outline=colour, width=3)
    font = _font(max(8, int(1.2 * radius)))
    draw.text((x, y), str(agent), fill=_PAPER if works else colour, font=font, anchor="mm")


def _draw_legend(draw: Any) -> None:
    y = 12
    for name, colour in STATES.values():
        draw.rectangle((8, y - 5, 18, y + 5), fill=colour)
        draw.text((24, y), name, fill=_QUIET, font=_font(12), anchor="lm")
        y += 16
    for works, name in ((True, "works"), (False, "rests")):
        box = (8, y - 5, 18, y + 5)
        draw.ellipse(box, fill=_QUIET if works else _PAPER, outline=_QUIET, width=2)
        draw.text((24, y), name, fill=_QUIET, font=_font(12), anchor="lm")
        y += 16
