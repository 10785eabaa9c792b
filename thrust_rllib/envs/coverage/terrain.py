"""Walls of a coverage world, and where its agents begin.

Letters: K terrains, G cells a side, C = G², N agents.
"""

from __future__ import annotations

import numpy as np

from thrust_rllib.envs.coverage.geometry import all_cells

TERRAINS = ("open", "rooms", "random")
START_RADIUS = 2


def fixed_walls(terrain: str, grid: int) -> np.ndarray:
    """Walls of "open" (none) or "rooms": a cross that leaves four rooms, with a door in each of its arms.

    Doors are two cells wide from 12 cells a side on, else one.

    Args:
        terrain: "open" or "rooms".
        grid: G.

    Returns:
        bool [G, G].
    """
    walls = np.zeros((grid, grid), dtype=bool)
    if terrain == "rooms":
        middle, width = grid // 2, 2 if grid >= 12 else 1
        walls[middle], walls[:, middle] = True, True
        for start, length in ((0, middle), (middle + 1, grid - middle - 1)):
            first = start + (length - width) // 2
            walls[middle, first : first + width] = walls[first : first + width, middle] = False
    return walls


def random_walls(uniforms: np.ndarray, wall_share: float, num_agents: int) -> np.ndarray:
    """Random walls whose free cells hang together.

    The cells of the smallest numbers become walls, a share of `wall_share`; what lies outside the largest piece of free
    cells is filled. Where less than half of the free cells, or fewer cells than agents, would be left, half as many
    walls are tried.

    Args:
        uniforms: [K, C] in [0, 1).
        wall_share: walls before the filling, as a share of C.
        num_agents: free cells needed.

    Returns:
        bool [K, G, G].
    """
    count, cells = uniforms.shape
    grid = round(cells**0.5)
    rank = uniforms.argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
    number = np.full(count, round(wall_share * cells))
    walls = np.empty((count, cells), dtype=bool)
    todo = np.arange(count)
    while len(todo):
        drawn = rank[todo] < number[todo, None]
        largest = _largest_piece(~drawn.reshape(-1, grid, grid)).reshape(-1, cells)
        walls[todo] = ~largest
        needed = np.maximum((cells - number[todo]) / 2, min(num_agents, cells))
        todo = todo[largest.sum(axis=1) < needed]
        number[todo] //= 2
    return walls.reshape(count, grid, grid)


def _largest_piece(free: np.ndarray) -> np.ndarray:
    """The largest piece of free cells that hang together; of equal ones that with the first cell. Bool [K, G, G]."""
    count, grid, _ = free.shape
    cells = grid * grid
    label = np.where(free, np.arange(cells).reshape(grid, grid), cells)
    while True:
        around = np.pad(label, ((0, 0), (1, 1), (1, 1)), constant_values=cells)
        least = np.minimum(
            np.minimum(around[:, :-2, 1:-1], around[:, 2:, 1:-1]), np.minimum(around[:, 1:-1, :-2], around[:, 1:-1, 2:])
        )
        least = np.where(free, np.minimum(least, label), cells)
        # A cell may take its label's label: few rounds for long corridors.
        of_label = np.append(least.reshape(count, -1), np.full((count, 1), cells), axis=1)
        least = np.take_along_axis(of_label, least.reshape(count, -1), axis=1).reshape(label.shape)
        if np.array_equal(least, label):
            break
        label = least
    numbered = label.reshape(count, -1) + (cells + 1) * np.arange(count)[:, None]
    sizes = np.bincount(numbered.ravel(), minlength=count * (cells + 1)).reshape(count, -1)[:, :cells]
    return np.asarray(free & (label == sizes.argmax(axis=1)[:, None, None]))


def start_positions(walls: np.ndarray, uniforms: np.ndarray, num_agents: int) -> np.ndarray:
    """Distinct free cells within `START_RADIUS` of a random free anchor in the interior.

    An anchor has room for all agents within the radius; where no cell has, one with the most room is taken, and agents
    begin on the free cells nearest to it.

    Args:
        walls: bool [K, G, G], with at least N free cells.
        uniforms: [K, C + 1] in [0, 1): the order of the cells, and the anchor.
        num_agents: N.

    Returns:
        int [K, N, 2].
    """
    count, grid, _ = walls.shape
    free = ~walls.reshape(count, -1)
    anchor = _anchors(walls, uniforms[:, -1], num_agents)
    apart = np.abs(all_cells(grid) - all_cells(grid)[anchor][:, None]).max(axis=-1)  # [K, C]
    order = np.where(free, np.maximum(apart, START_RADIUS) + uniforms[:, :-1], np.inf)
    chosen = order.argsort(axis=1, kind="stable")[:, :num_agents]
    return all_cells(grid)[chosen]


def _anchors(walls: np.ndarray, uniforms: np.ndarray, num_agents: int) -> np.ndarray:
    """A cell of each terrain, int [K]."""
    count, grid, _ = walls.shape
    radius = START_RADIUS
    padded = np.pad(~walls, ((0, 0), (radius, radius), (radius, radius)))
    room = np.zeros(walls.shape, dtype=np.int64)
    for rows in range(2 * radius + 1):
        for columns in range(2 * radius + 1):
            room += padded[:, rows : rows + grid, columns : columns + grid]
    room[walls] = 0
    interior = np.zeros((grid, grid), dtype=bool)
    edge = min(radius, (grid - 1) // 2)
    interior[edge : grid - edge, edge : grid - edge] = True
    good = ((room >= num_agents) & interior).reshape(count, -1)
    most = (room == room.max(axis=(1, 2), keepdims=True)).reshape(count, -1)
    good = np.where(good.any(axis=1, keepdims=True), good, most)
    number = (uniforms * good.sum(axis=1)).astype(np.int64)  # the how manieth good cell
    return np.asarray((good.cumsum(axis=1) > number[:, None]).argmax(axis=1))
