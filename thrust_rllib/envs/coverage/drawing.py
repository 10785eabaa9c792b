"""A picture of one coverage world, with numpy alone.

Shapes: G × G cells, N agents.
"""

from __future__ import annotations

import numpy as np

SIDE = 480
"""Pixels that a picture has at most in each direction, unless `scale` says otherwise or the grid is larger."""
AGENTS: tuple[tuple[int, int, int], ...] = (
    (214, 40, 57), (29, 95, 191), (240, 130, 30), (122, 62, 176), (10, 125, 115), (190, 24, 130), (140, 98, 10),
    (40, 48, 64), (0, 150, 220), (120, 150, 0),
)  # fmt: skip
"""Colour of agent i: entry i modulo their number."""
WALL, COVERED, UNSEEN = (62, 68, 80), (186, 226, 190), (246, 246, 242)
LINK, EDGE = (96, 104, 120), (255, 255, 255)
COVERAGE_BAR, CONNECTED_BAR, EMPTY_BAR = (60, 160, 90), (60, 110, 190), (224, 226, 230)
"""The upper bar is the share of cells that are covered, the lower one λ₂."""


def draw(
    walls: np.ndarray,
    covered: np.ndarray,
    positions: np.ndarray,
    links: np.ndarray,
    coverage: float,
    lambda2: float,
    scale: int | None = None,
) -> np.ndarray:
    """Walls, covered cells, agents as dots and the links between them; above, a bar for coverage and one for λ₂.

    Agents on one cell are drawn as smaller dots side by side, so that each can be seen. A bar is full at 1 and above,
    and empty at NaN.

    Args:
        walls: bool [G, G].
        covered: bool [G, G].
        positions: (row, column) of each agent, int [N, 2].
        links: who hears whom, bool [N, N]; its diagonal is not looked at.
        coverage: share of free cells that are covered, in [0, 1].
        lambda2: second smallest eigenvalue of the graph's Laplacian.
        scale: pixels of a cell's side; None: the largest up to 40 with which the picture fits into `SIDE` pixels.

    Returns:
        uint8 [height, width, 3], with width = G · scale and height = width + the bars (`bars_height`).

    Raises:
        ValueError: `scale` is below 1.
    """
    grid = len(walls)
    if scale is None:
        scale = max(1, min(40, SIDE // grid))
        while scale > 1 and grid * scale + bars_height(grid * scale) > SIDE:
            scale -= 1
    if scale < 1:
        raise ValueError(f"scale is {scale}; needed: pixels of a cell's side, at least 1")
    cells = np.full((grid, grid, 3), UNSEEN, dtype=np.uint8)
    cells[covered] = COVERED
    cells[walls] = WALL
    board = cells.repeat(scale, axis=0).repeat(scale, axis=1)
    if scale >= 8:  # thin lines between the cells
        free = ~walls.repeat(scale, axis=0).repeat(scale, axis=1)
        last = np.arange(grid * scale) % scale == scale - 1
        lines = free & (last[:, None] | last[None])
        board[lines] -= 14
    points, radii = _places(positions, scale)
    for i, j in np.argwhere(np.triu(links, 1)):
        _line(board, points[i], points[j], width=max(1.0, scale / 9))
    for agent in range(len(positions)):
        _disc(board, points[agent], radii[agent], AGENTS[agent % len(AGENTS)])
    return np.concatenate([_bars(grid * scale, coverage, lambda2), board])


def bars_height(width: int) -> int:
    """Pixels of both bars and the space around them, for a picture that is `width` pixels wide."""
    return 3 * _gap(width) + 2 * _thickness(width)


def _gap(width: int) -> int:
    return max(1, width // 80)


def _thickness(width: int) -> int:
    return max(1, width // 40)


def _bars(width: int, coverage: float, lambda2: float) -> np.ndarray:
    """uint8 [bars_height(width), width, 3]."""
    gap, thick = _gap(width), _thickness(width)
    bars = np.full((bars_height(width), width, 3), 255, dtype=np.uint8)
    length = max(width - 2 * gap, 1)
    for row, (share, colour) in enumerate(((coverage, COVERAGE_BAR), (lambda2, CONNECTED_BAR))):
        top = gap + row * (thick + gap)
        bars[top : top + thick, gap : gap + length] = EMPTY_BAR
        bars[top : top + thick, gap : gap + round(length * min(float(np.nan_to_num(max(share, 0.0))), 1.0))] = colour
    return bars


def _places(positions: np.ndarray, scale: int) -> tuple[np.ndarray, np.ndarray]:
    """Middles [N, 2] and radii [N] of the agents' dots, in pixels; those of one cell stand in a square."""
    points = np.empty((len(positions), 2))
    radii = np.empty(len(positions))
    for agent, cell in enumerate(positions):
        here = np.flatnonzero((positions == cell).all(axis=1)).tolist()
        across = int(np.ceil(np.sqrt(len(here))))
        row, column = divmod(here.index(agent), across)
        rows = -(-len(here) // across)
        inside = np.array([(row + 0.5 + (across - rows) / 2) / across, (column + 0.5) / across])
        points[agent] = (cell + inside) * scale - 0.5
        radii[agent] = (0.4 if across == 1 else 0.46) * scale / across
    return points, radii


def _patch(board: np.ndarray, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The part of the board between two corners, a view, with the rows and columns of its pixels."""
    top, left = np.maximum(np.floor(low).astype(int), 0)
    bottom, right = np.minimum(np.ceil(high).astype(int) + 1, board.shape[:2])
    rows, columns = np.mgrid[top:bottom, left:right]
    return board[top:bottom, left:right], rows, columns


def _blend(patch: np.ndarray, share: np.ndarray, colour: tuple[int, int, int]) -> None:
    """Puts a colour over a part of the board; share [h, w], clipped to [0, 1]: soft edges instead of stairs."""
    share = np.clip(share, 0, 1)[..., None]
    patch[:] = np.rint(patch * (1 - share) + np.array(colour) * share).astype(np.uint8)


def _disc(board: np.ndarray, middle: np.ndarray, radius: float, colour: tuple[int, int, int]) -> None:
    patch, rows, columns = _patch(board, middle - radius - 2, middle + radius + 2)
    away = np.hypot(rows - middle[0], columns - middle[1])
    if radius >= 3:
        _blend(patch, radius + 1.5 - away, EDGE)
    _blend(patch, radius + 0.5 - away, colour)


def _line(board: np.ndarray, start: np.ndarray, end: np.ndarray, width: float) -> None:
    patch, rows, columns = _patch(board, np.minimum(start, end) - width, np.maximum(start, end) + width)
    along = end - start
    length2 = max(float(along @ along), 1e-9)  # of a line on the spot
    share = np.clip(((rows - start[0]) * along[0] + (columns - start[1]) * along[1]) / length2, 0, 1)
    away = np.hypot(rows - start[0] - share * along[0], columns - start[1] - share * along[1])
    _blend(patch, 0.8 * np.clip(width / 2 + 0.5 - away, 0, 1), LINK)
