"""What agents see: planes over the whole grid, or a window around each.

| plane | over the grid | in the window |
|---|---|---|
| 0 | 1 at the own cell | 1 in the middle |
| 1 | what the agent believes to be covered | outside the grid 0 |
| 2 | walls | outside the grid 1 |
| 3 | 1 where another agent within comm_r stands | outside the grid 0 |
| 4 | t / horizon everywhere | the same |
| 5, 6 | – | own row / G and own column / G everywhere |
| 7, 8 | – | (row − own row) / G and (column − own column) / G of the nearest free cell not believed to be covered, \
0 where there is none |

"Nearest" is by Chebyshev distance; ties go to the smaller row, then the smaller column.
Shapes: E environments, N agents, G cells a side, C = G², w radius of the window.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from gymnasium import spaces

from thrust_rllib.envs.coverage.geometry import all_cells, axis_distances, number_of
from thrust_rllib.envs.spaces import ACTION_MASK

PLANES, WINDOW_PLANES = 5, 9


@dataclass(frozen=True, eq=False)
class View:
    """What observations are made of.

    Args:
        positions: int [E, N, 2].
        walls: bool [E, G, G].
        beliefs: bool [E, N, G, G].
        heard: others within comm_r, bool [E, N, N], false on the diagonal.
        time: t / horizon, [E].
    """

    positions: np.ndarray
    walls: np.ndarray
    beliefs: np.ndarray
    heard: np.ndarray
    time: np.ndarray


def planes_space(grid: int) -> spaces.Box:
    """The space of one agent's planes."""
    return spaces.Box(0, 1, (PLANES, grid, grid))


def planes(view: View) -> np.ndarray:
    """Float32 [N, E, 5, G, G]."""
    envs, count, grid = view.beliefs.shape[:3]
    cells = number_of(view.positions, grid)
    out = np.zeros((count, envs, PLANES, grid * grid), dtype=np.float32)
    out[np.arange(count)[:, None], np.arange(envs), 0, cells.T] = 1
    out[:, :, 1] = view.beliefs.reshape(envs, count, -1).swapaxes(0, 1)
    out[:, :, 2] = view.walls.reshape(envs, -1)
    env, agent, other = np.nonzero(view.heard)
    out[agent, env, 3, cells[env, other]] = 1
    out[:, :, 4] = view.time[:, None]
    return out.reshape(count, envs, PLANES, grid, grid)


class Window:
    """Cuts the planes around each agent.

    Args:
        grid: G.
        radius: w.
    """

    def __init__(self, grid: int, radius: int) -> None:
        self.grid, self.radius, self.side = grid, radius, 2 * radius + 1
        cells = all_cells(grid)[:, None] + all_cells(self.side) - radius
        # [C, (2w + 1)²]: the cells around each cell, and which of them exist.
        self._inside = ((cells >= 0) & (cells < grid)).all(axis=-1)
        self._around = np.where(self._inside, number_of(cells, grid), 0)

    @property
    def space(self) -> spaces.Box:
        """The space of one agent's window."""
        low = np.zeros((WINDOW_PLANES, self.side, self.side), dtype=np.float32)
        low[7:] = -1
        return spaces.Box(low, np.ones_like(low))

    def __call__(self, view: View) -> np.ndarray:
        """Float32 [N, E, 9, 2w + 1, 2w + 1]."""
        envs, count = view.beliefs.shape[:2]
        radius, grid = self.radius, self.grid
        cells = number_of(view.positions, grid)
        around, inside = self._around[cells], self._inside[cells]  # [E, N, (2w + 1)²]
        beliefs = np.take_along_axis(view.beliefs.reshape(envs, count, -1), around, axis=-1) & inside
        walls = view.walls.reshape(envs, -1)[np.arange(envs)[:, None, None], around] | ~inside
        out = np.zeros((count, envs, WINDOW_PLANES, self.side**2), dtype=np.float32)
        out[:, :, 0, self.side**2 // 2] = 1
        out[:, :, 1], out[:, :, 2] = beliefs.swapaxes(0, 1), walls.swapaxes(0, 1)
        env, agent, other = np.nonzero(view.heard)
        offset = view.positions[env, other] - view.positions[env, agent]
        near = np.abs(offset).max(axis=-1) <= radius
        out[agent[near], env[near], 3, number_of(offset + radius, self.side)[near]] = 1
        out[:, :, 4] = view.time[:, None]
        constants = np.concatenate([view.positions, self._to_uncovered(view)], axis=-1) / grid
        out[:, :, 5:] = constants.swapaxes(0, 1)[..., None]
        return out.reshape(count, envs, WINDOW_PLANES, self.side, self.side)

    def _to_uncovered(self, view: View) -> np.ndarray:
        """Rows and columns to the nearest free cell that is not believed to be covered, int [E, N, 2]."""
        rows, columns = axis_distances(view.positions, self.grid)
        apart = np.maximum(rows[..., :, None], columns[..., None, :])
        left = ~view.beliefs & ~view.walls[:, None]
        apart = np.where(left, apart, np.int16(self.grid)).reshape(*left.shape[:2], -1)
        nearest = apart.argmin(axis=-1)
        there = np.stack(np.divmod(nearest, self.grid), axis=-1)
        some = np.take_along_axis(apart, nearest[..., None], axis=-1) < self.grid
        return np.where(some, there - view.positions, 0)


def observation_space(seen: spaces.Box, links: int, choices: int) -> spaces.Space:
    """The space of an agent: a Dict, or what it sees alone.

    Args:
        seen: the space of its planes or window.
        links: N; 0 for none.
        choices: logits of the action mask; 0 for none.
    """
    parts: dict[str, spaces.Space] = {"observations": seen}
    if links:
        parts["links"] = spaces.Box(0, 1, (links,))
    if choices:
        parts[ACTION_MASK] = spaces.Box(0, 1, (choices,), np.int8)
    return spaces.Dict(parts) if len(parts) > 1 else seen


def state_space(grid: int, num_agents: int) -> spaces.Box:
    """The space of `global_state`."""
    high = np.ones(3 * grid * grid + 1, dtype=np.float32)
    high[2 * grid * grid : -1] = num_agents
    return spaces.Box(np.zeros_like(high), high)


def link_strengths(distances: np.ndarray, heard: np.ndarray, comm_r: int) -> np.ndarray:
    """How close each agent is that is heard, 1 − d / (comm_r + 1), else 0; float32 [N, E, N].

    Args:
        distances: int [E, N, N].
        heard: see `View`.
        comm_r: largest distance.
    """
    return np.where(heard, 1 - distances / (comm_r + 1), 0).swapaxes(0, 1).astype(np.float32)


def global_state(covered: np.ndarray, walls: np.ndarray, positions: np.ndarray, time: np.ndarray) -> np.ndarray:
    """Covered cells, walls and the number of agents on each cell, then the time; float32 [E, 3 C + 1].

    Args:
        covered: bool [E, G, G].
        walls: bool [E, G, G].
        positions: int [E, N, 2].
        time: t / horizon, [E].
    """
    envs, grid = covered.shape[:2]
    agents = np.zeros((envs, grid * grid), dtype=np.float32)
    np.add.at(agents, (np.arange(envs)[:, None], number_of(positions, grid)), 1)
    parts = (covered.reshape(envs, -1), walls.reshape(envs, -1), agents, time[:, None])
    return np.concatenate(parts, axis=1, dtype=np.float32)
