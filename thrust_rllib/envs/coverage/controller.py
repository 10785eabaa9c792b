"""The controller: from a goal to the first move of a shortest path to it, around walls.

The table of a terrain holds the move of every cell and goal, so that a step only looks it up. Letters: K terrains, G
cells a side, C = G², 9 goals.
"""

from __future__ import annotations

import numpy as np

from thrust_rllib.envs.coverage.geometry import GOALS, all_cells, nearest_first, neighbours, number_of

_VERTICAL_FIRST, _HORIZONTAL_FIRST = (1, 3, 2, 4), (2, 4, 1, 3)
_WORDS = 1 << 22  # of 64 cells each, in one go: 32 MiB


def goal_cells(walls: np.ndarray, stride: int) -> np.ndarray:
    """The cell that each goal means in each cell.

    It is the own cell plus offset · stride, brought inside the grid; where that is a wall, the free cell nearest to it
    (straight distance; ties: the smaller row, then the smaller column).

    Args:
        walls: bool [K, G, G], some cell of each free.
        stride: cells of a straight goal.

    Returns:
        int [K, C, 9].
    """
    grid = walls.shape[-1]
    wanted = np.clip(all_cells(grid)[:, None] + stride * GOALS, 0, grid - 1)
    return _nearest_free(walls)[:, number_of(wanted, grid)]


def _nearest_free(walls: np.ndarray) -> np.ndarray:
    """For each cell the free one nearest to it, int [K, C]."""
    grid = walls.shape[-1]
    nearest = np.tile(np.arange(grid * grid), (len(walls), 1))
    terrain, row, column = np.nonzero(walls)
    for rows, columns in nearest_first(grid)[1:]:
        if not len(terrain):
            break
        r, c = row + rows, column + columns
        inside = (r >= 0) & (r < grid) & (c >= 0) & (c < grid)
        found = inside & ~walls[terrain, np.where(inside, r, 0), np.where(inside, c, 0)]
        nearest[terrain[found], (row * grid + column)[found]] = (r * grid + c)[found]
        terrain, row, column = terrain[~found], row[~found], column[~found]
    return nearest


def first_moves(walls: np.ndarray, stride: int) -> np.ndarray:
    """The first move of a shortest path from each cell to each of its goals.

    Of two moves that are equally good the vertical one is taken where row + column is even, else the horizontal one: a
    diagonal goal that is chosen again and again leads along a staircase.

    Args:
        walls: bool [K, G, G]; all free cells of a terrain hang together.
        stride: see `goal_cells`.

    Returns:
        uint8 [K, C, 9], numbers of `MOVES`; 0 where the goal is reached, and in walls.
    """
    cells = walls.shape[-1] ** 2
    at_once = max(1, _WORDS // (cells * (cells // 64 + 1)))
    parts = [_first_moves(walls[k : k + at_once], stride) for k in range(0, len(walls), at_once)]
    return np.concatenate(parts)


def _first_moves(walls: np.ndarray, stride: int) -> np.ndarray:
    grid, cells = walls.shape[-1], walls.shape[-1] ** 2
    ahead, goals = neighbours(walls), goal_cells(walls, stride)
    moves = np.zeros(goals.shape, dtype=np.uint8)
    # Bit b of word w in row c: whether cell 64 w + b is at most `d` steps from c, after d rounds.
    own = np.arange(cells)
    near = np.zeros((len(walls), cells, cells // 64 + 1), dtype=np.uint64)
    near[:, own, own // 64] = np.uint64(1) << (own % 64).astype(np.uint64)
    # Pairs of a cell and a goal whose move is not known yet, and how long their path is at least.
    open_ = np.stack(np.nonzero((goals != own[:, None]) & ~walls.reshape(len(walls), -1, 1)))
    target = goals[tuple(open_)]
    least = np.abs(all_cells(grid)[open_[1]] - all_cells(grid)[target]).sum(axis=-1)
    length = 1  # of the paths found in this round
    while len(target):
        due = least <= length
        terrain, cell, goal = open_[:, due]
        word, bit = np.divmod(target[due], 64)
        even = (cell // grid + cell % grid) % 2 == 0
        move = np.zeros(len(cell), dtype=np.uint8)
        for vertical, horizontal in zip(_VERTICAL_FIRST, _HORIZONTAL_FIRST, strict=True):
            tried = np.where(even, vertical, horizontal)
            arrives = (near[terrain, ahead[terrain, cell, tried], word] >> bit.astype(np.uint64)) & np.uint64(1) == 1
            move = np.where((move == 0) & arrives, tried, move).astype(np.uint8)
        moves[terrain, cell, goal] = move
        due[due] = move != 0
        open_, target, least, length = open_[:, ~due], target[~due], least[~due], length + 1
        live = np.unique(open_[0])
        grown = near[live]
        for k in range(1, 5):
            grown |= near[live[:, None], ahead[live, :, k]]
        if len(live) and np.array_equal(grown, near[live]):
            raise ValueError("a goal cannot be reached: the free cells of a terrain must hang together")
        near[live] = grown
    return moves
