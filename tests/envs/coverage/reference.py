"""One coverage world, slow and obvious, with sets and loops: what the vectorised one is compared with.

Written from the rules alone; it knows nothing of the package. A cell is a pair (row, column).
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

STAY, NORTH, EAST, SOUTH, WEST = range(5)
STEPS = {STAY: (0, 0), NORTH: (-1, 0), EAST: (0, 1), SOUTH: (1, 0), WEST: (0, -1)}
OFFSETS = [(0, 0), (-1, 0), (0, 1), (1, 0), (0, -1), (-1, 1), (1, 1), (1, -1), (-1, -1)]
RELAY = 1


def apart(a, b):
    """Chebyshev distance."""
    return max(abs(a[0] - b[0]), abs(a[1] - b[1]))


def weights(cells, comm_r):
    """w_ij = σ(2 (comm_r − d_ij)), zero diagonal."""
    return [
        [0.0 if i == j else 1 / (1 + math.exp(-2 * (comm_r - apart(a, b)))) for j, b in enumerate(cells)]
        for i, a in enumerate(cells)
    ]


def lambda2(cells, comm_r):
    """Second smallest eigenvalue of the Laplacian."""
    if len(cells) == 1:
        return 0.0
    laplacian = -np.array(weights(cells, comm_r), dtype=np.float64)
    for i in range(len(cells)):
        laplacian[i, i] = -sum(laplacian[i, j] for j in range(len(cells)) if j != i)
    return float(sorted(np.linalg.eigvalsh(laplacian))[1])


def reached(i, cells, comm_r):
    """Agents that i reaches over links of at most comm_r, itself left out."""
    found, queue = {i}, [i]
    while queue:
        here = queue.pop()
        for j in range(len(cells)):
            if j not in found and apart(cells[here], cells[j]) <= comm_r:
                found.add(j)
                queue.append(j)
    return found - {i}


def footprint(cell, free, cover_r):
    """Free cells within cover_r."""
    return {other for other in free if apart(cell, other) <= cover_r}


def neighbours(cell):
    """(move, cell) of the four moves that are not staying."""
    return [(move, (cell[0] + dr, cell[1] + dc)) for move, (dr, dc) in STEPS.items() if move != STAY]


def distances_to(goal, free):
    """{cell: steps of the shortest path to the goal} for the cells from which there is a way."""
    found, queue = {goal: 0}, deque([goal])
    while queue:
        here = queue.popleft()
        for _, cell in neighbours(here):
            if cell in free and cell not in found:
                found[cell] = found[here] + 1
                queue.append(cell)
    return found


class World:
    """One environment, one episode.

    Args:
        walls: bool [G, G].
        starts: N cells.
        comm_r, cover_r, horizon, stride, actions, roles, floor, degree_target, tau: as the environment's settings.
        coverage_reward, reach_reward, crowding_penalty: likewise.
    """

    def __init__(
        self,
        walls,
        starts,
        *,
        comm_r=5,
        cover_r=1,
        horizon=100,
        stride=3,
        actions="goals",
        roles=False,
        floor=1e-3,
        degree_target=1.0,
        tau=0.5,
        coverage_reward=1.0,
        reach_reward=2.0,
        crowding_penalty=4.0,
    ):
        self.grid = len(walls)
        self.free = {(r, c) for r in range(self.grid) for c in range(self.grid) if not walls[r][c]}
        self.cells = [tuple(int(x) for x in cell) for cell in starts]
        self.n = len(self.cells)
        self.comm_r, self.cover_r, self.horizon, self.stride = comm_r, cover_r, horizon, stride
        self.actions, self.roles, self.floor, self.degree_target, self.tau = actions, roles, floor, degree_target, tau
        self.pay = (coverage_reward, reach_reward, crowding_penalty)
        self.t = 0
        self.seen = [footprint(cell, self.free, cover_r) for cell in self.cells]
        self.beliefs = [set(seen) for seen in self.seen]
        self.covered = set().union(*self.seen)

    # Moves

    def after(self, i, move):
        """Where i is after a move."""
        dr, dc = STEPS[move]
        there = (self.cells[i][0] + dr, self.cells[i][1] + dc)
        return there if there in self.free else self.cells[i]

    def goal_of(self, i, goal):
        """The goal's cell; outside of the grid: the border; in a wall: the nearest free cell."""
        (row, column), (dr, dc) = self.cells[i], OFFSETS[goal]
        aim = tuple(min(max(x, 0), self.grid - 1) for x in (row + dr * self.stride, column + dc * self.stride))
        return min(self.free, key=lambda cell: ((cell[0] - aim[0]) ** 2 + (cell[1] - aim[1]) ** 2, cell))

    def first_move(self, i, goal):
        """The first step of a shortest path to the goal; of two, the vertical one on even cells (row + column)."""
        steps = distances_to(self.goal_of(i, goal), self.free)
        here = self.cells[i]
        ways = [move for move, cell in neighbours(here) if cell in steps and steps[cell] == steps[here] - 1]
        order = [NORTH, SOUTH, EAST, WEST] if sum(here) % 2 == 0 else [EAST, WEST, NORTH, SOUTH]
        return min(ways, key=order.index, default=STAY)

    def move_of(self, i, action):
        """The move that an action without its role asks for."""
        return self.first_move(i, int(action)) if self.actions == "goals" else int(action)

    def breaks_a_link(self, i, move):
        """If i alone moves."""
        there = self.after(i, move)
        return any(
            apart(self.cells[i], self.cells[j]) <= self.comm_r < apart(there, self.cells[j])
            for j in range(self.n)
            if j != i
        )

    def mask(self, i):
        """One entry per goal or move: whether λ₂ stays at the floor or above when i alone takes its first move."""
        allowed = []
        for action in range(9 if self.actions == "goals" else 5):
            cells = list(self.cells)
            cells[i] = self.after(i, self.move_of(i, action))
            allowed.append(action == 0 or lambda2(cells, self.comm_r) >= self.floor - 1e-9)
        return allowed

    # Steps

    def step(self, actions):
        """Plays one step.

        Args:
            actions: per agent a goal or move, with roles a pair (role, goal or move).

        Returns:
            {name: value}, "rewards" and the extras.
        """
        moves = []
        for i, action in enumerate(actions):
            role, action = action if self.roles else (0, action)
            move = self.move_of(i, action)
            moves.append(STAY if role == RELAY and self.breaks_a_link(i, move) else move)
        self.cells = [self.after(i, move) for i, move in enumerate(moves)]
        self.t += 1

        prints = [footprint(cell, self.free, self.cover_r) for cell in self.cells]
        new = [print_ - self.covered for print_ in prints]
        alone = [
            {cell for cell in new[i] if not any(cell in prints[j] for j in range(self.n) if j != i)}
            for i in range(self.n)
        ]
        self.covered = self.covered | set().union(*prints)
        self.seen = [seen | print_ for seen, print_ in zip(self.seen, prints, strict=True)]
        before = self.beliefs
        self.beliefs = []
        for i in range(self.n):
            belief = before[i] | prints[i]
            for j in range(self.n):
                if apart(self.cells[i], self.cells[j]) <= self.comm_r:
                    belief = belief | before[j]
            self.beliefs.append(belief)
        return self._told(new, alone)

    def _told(self, new, alone):
        for_cells, for_reach, for_crowd = self.pay
        rest = []
        for i in range(self.n):
            reach = len(reached(i, self.cells, self.comm_r)) / (self.n - 1) if self.n > 1 else 0.0
            crowd = sum(self.cells[j] == self.cells[i] for j in range(self.n) if j != i)
            rest.append(for_reach * reach - for_crowd * crowd)
        value = lambda2(self.cells, self.comm_r)
        degrees = [sum(row) for row in weights(self.cells, self.comm_r)]
        counts = [len(seen) for seen in self.seen]
        return {
            "rewards": [for_cells * len(new[i]) + rest[i] for i in range(self.n)],
            "difference_reward": [for_cells * len(alone[i]) + rest[i] for i in range(self.n)],
            "lambda2": value,
            "global_lambda2": value,
            "lambda2_deficit": self.tau - value,
            "connected": float(value > 1e-3),
            "firmly_connected": float(value > 0.5),
            "local_edge_margin": [max(0.0, self.degree_target - degree) for degree in degrees],
            "coverage": len(self.covered) / len(self.free),
            "cells": counts,
            "redundancy": sum(counts) / len(self.covered),
            "top_share": max(counts) / len(self.covered),
        }

    # What agents see

    def links(self, i):
        """How close each other agent within comm_r is, else 0."""
        return [
            0.0 if j == i or (d := apart(self.cells[i], self.cells[j])) > self.comm_r else 1 - d / (self.comm_r + 1)
            for j in range(self.n)
        ]

    def heard(self, i):
        """Cells of the other agents within comm_r."""
        return {self.cells[j] for j in range(self.n) if j != i and apart(self.cells[i], self.cells[j]) <= self.comm_r}

    def _everywhere(self):
        return [(r, c) for r in range(self.grid) for c in range(self.grid)]

    def planes(self, i):
        """Own place, belief, walls, heard agents, time; [5, G, G]."""
        planes = np.zeros((5, self.grid, self.grid))
        for cell in self._everywhere():
            shown = (cell == self.cells[i], cell in self.beliefs[i], cell not in self.free, cell in self.heard(i))
            planes[(slice(None), *cell)] = [*shown, self.t / self.horizon]
        return planes

    def window(self, i, radius):
        """Planes around the agent, its place, and the way to the nearest cell not believed covered; [9, W, W]."""
        row, column = self.cells[i]
        planes, size = self.planes(i), 2 * radius + 1
        window = np.zeros((9, size, size))
        for r in range(size):
            for c in range(size):
                cell = (row + r - radius, column + c - radius)
                inside = 0 <= cell[0] < self.grid and 0 <= cell[1] < self.grid
                window[:5, r, c] = planes[(slice(None), *cell)] if inside else (0, 0, 1, 0, self.t / self.horizon)
        unknown = self.free - self.beliefs[i]
        nearest = min(unknown, key=lambda cell: (apart(cell, self.cells[i]), cell), default=self.cells[i])
        for k, number in enumerate((row, column, nearest[0] - row, nearest[1] - column)):
            window[5 + k] = number / self.grid
        return window

    def state(self):
        """Covered, walls, agents per cell, time; [3 G² + 1]."""
        everywhere = self._everywhere()
        covered = [float(cell in self.covered) for cell in everywhere]
        walls = [float(cell not in self.free) for cell in everywhere]
        agents = [float(self.cells.count(cell)) for cell in everywhere]
        return [*covered, *walls, *agents, self.t / self.horizon]
