"""Cells of a square grid, the five moves and the nine goals.

A cell is (row, column), or row · G + column where it is one number. Row 0 is north. Letters: G cells a side, C = G².
"""

from __future__ import annotations

import numpy as np

MOVES = np.array([(0, 0), (-1, 0), (0, 1), (1, 0), (0, -1)], dtype=np.int64)
"""Stay, north, east, south, west."""
GOALS = np.array([(0, 0), (-1, 0), (0, 1), (1, 0), (0, -1), (-1, 1), (1, 1), (1, -1), (-1, -1)], dtype=np.int64)
"""Stay, the four straight directions in the order of `MOVES`, then NE, SE, SW, NW."""


def all_cells(grid: int) -> np.ndarray:
    """(row, column) of every cell, int [C, 2]."""
    return np.stack(np.divmod(np.arange(grid * grid), grid), axis=-1)


def number_of(positions: np.ndarray, grid: int) -> np.ndarray:
    """Each cell as one number, int […] of int […, 2]."""
    return positions[..., 0] * grid + positions[..., 1]


def neighbours(walls: np.ndarray) -> np.ndarray:
    """Where each move leads from each cell.

    Args:
        walls: bool [K, G, G].

    Returns:
        int [K, C, 5], the cell itself where the border or a wall is in the way.
    """
    grid = walls.shape[-1]
    here = all_cells(grid)
    there = here[:, None] + MOVES
    inside = ((there >= 0) & (there < grid)).all(axis=-1)
    own = np.arange(grid * grid)[:, None]
    ahead = np.where(inside, number_of(there, grid), own)
    return np.where(walls.reshape(len(walls), -1)[:, ahead], own, ahead)


def axis_distances(positions: np.ndarray, grid: int) -> tuple[np.ndarray, np.ndarray]:
    """How many rows and how many columns away each row and each column is, two int […, G] of int […, 2]."""
    apart = np.abs(np.arange(grid)[:, None] - np.arange(grid)).astype(np.int16)
    return apart[positions[..., 0]], apart[positions[..., 1]]


def within(positions: np.ndarray, radius: int, grid: int) -> np.ndarray:
    """Cells within a Chebyshev distance, bool […, G, G] of int […, 2]."""
    near = np.abs(np.arange(grid)[:, None] - np.arange(grid)) <= radius
    return near[positions[..., 0]][..., :, None] & near[positions[..., 1]][..., None, :]


def nearest_first(grid: int) -> np.ndarray:
    """All offsets (rows, columns) in a grid, by length; equally long ones by row, then column. Int [(2G − 1)², 2]."""
    one = np.arange(1 - grid, grid)
    offsets = np.stack(np.meshgrid(one, one, indexing="ij"), axis=-1).reshape(-1, 2)
    return offsets[np.argsort(np.square(offsets).sum(axis=-1), kind="stable")]
