"""Agents survey a grid together, and are paid for staying in touch; vectorised.

Shapes: E environments, N agents, G cells a side, C = G².
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from thrust_rllib.envs.coverage.checks import check_settings
from thrust_rllib.envs.coverage.connectivity import chebyshev, lambda2_of
from thrust_rllib.envs.coverage.controller import first_moves
from thrust_rllib.envs.coverage.geometry import GOALS, MOVES, number_of
from thrust_rllib.envs.coverage.movement import RELAY, destinations, hold_links
from thrust_rllib.envs.coverage.observations import (
    View,
    Window,
    global_state,
    link_strengths,
    observation_space,
    planes,
    planes_space,
    state_space,
)
from thrust_rllib.envs.coverage.safe_goals import action_masks
from thrust_rllib.envs.coverage.signals import Pay, rewards_and_extras
from thrust_rllib.envs.coverage.survey import first_cover, footprints, share_beliefs
from thrust_rllib.envs.coverage.terrain import fixed_walls, random_walls, start_positions
from thrust_rllib.envs.fixed_length import FixedLengthEnv
from thrust_rllib.envs.spaces import ACTION_MASK
from thrust_rllib.envs.streams import UniformStreams

ROLES = ("explorer", "relay")
SKILLS = ("disperse", "flock", "hold")


class CoverageWorld(FixedLengthEnv):
    """E grids of G × G cells, in each of which N agents cover cells and keep a radio network.

    All agents begin close together. A step: moves are chosen; all agents move at once (cells may be shared); free cells
    within Chebyshev distance `cover_r` of an agent are covered; each agent believes covered what it has seen, and what
    the agents within `comm_r` knew one step before; rewards; observations. After `horizon` steps an episode is
    truncated. Agents at distance d are linked with weight σ(2 (comm_r − d)); λ₂ is the second smallest eigenvalue of
    that graph's Laplacian (`connectivity`). Reward of agent i:

        coverage_reward · (cells of its footprint that nobody had covered before this step)
        + reach_reward · (fraction of the others that it reaches over links d ≤ comm_r)
        − crowding_penalty · (number of others on its cell).

    Actions: "goals", Discrete(9): stay, N, E, S, W, NE, SE, SW, NW, each `stride` cells away; the agent makes one step
    of a shortest path there (`controller`). "moves", Discrete(5): stay, N, E, S, W. With `roles` MultiDiscrete([2, 9
    or 5]): explorer or relay first; a relay stays where its move alone would break one of its links. With `skills`
    MultiDiscrete([3, 9 or 5]): disperse, flock or hold first, which the world does not look at.

    Observation of an agent: Dict with "observations", planes or a window (`observations`), "links" [N], for each other
    agent within comm_r 1 − d / (comm_r + 1), else 0, and with a mask "action_mask" [A], int8, a head behind the other.
    Without links and mask the planes alone. `state()`: covered cells, walls, agents on each cell, t / horizon.

    | extra | shape | meaning |
    |---|---|---|
    | global_lambda2, lambda2 | [E] | λ₂ after the moves, as a cost ("at_least") and as an auxiliary target |
    | lambda2_deficit | [E] | τ − λ₂, as a cost with the limit 0 |
    | local_edge_margin | [N, E] | max(0, degree_target − Σ_j w_ij) |
    | difference_reward | [N, E] | the reward with only those new cells that no other agent's footprint holds |
    | coverage | [E] | share of the free cells that is covered |
    | connected, firmly_connected | [E] | 1 where λ₂ > 0.001, and λ₂ > 0.5 |
    | cells | [N, E] | cells that the agent has had in its footprint in this episode |
    | redundancy, top_share | [E] | sum, and largest, of `cells` divided by the team's covered cells |

    Args:
        num_envs: E.
        grid: G, at least 3.
        num_agents: N.
        horizon: steps of an episode.
        comm_r: reach of the radio, Chebyshev distance.
        cover_r: radius of a footprint; 0 is the own cell.
        terrain: "open", "rooms" (four, with doors), or "random" (new walls for each episode, always connected).
        wall_share: walls of "random" as a share of all cells, in [0, 0.4].
        actions: "goals" or "moves".
        stride: cells to a straight goal.
        roles: see above; excludes `skills`.
        skills: see above.
        mask: "safe_goals" allows what keeps λ₂ at `floor` or above if the agent alone makes its first move; staying is
            always allowed. "none": no mask.
        floor: see `mask`.
        observation: "planes" or "window".
        window: radius of the window.
        coverage_reward: see above.
        reach_reward: see above.
        crowding_penalty: see above.
        tau: τ of the extra `lambda2_deficit`.
        degree_target: of the extra `local_edge_margin`.
        links: whether observations hold "links".

    Raises:
        ValueError: an option out of its range, or two that exclude each other.
    """

    metadata = {"name": "coverage", "render_modes": ["rgb_array"], "render_fps": 10}
    saved_arrays = (*FixedLengthEnv.saved_arrays, "positions", "walls", "covered", "seen", "beliefs", "_moves_to")

    def __init__(
        self,
        *,
        num_envs: int = 1,
        grid: int = 16,
        num_agents: int = 4,
        horizon: int = 100,
        comm_r: int = 5,
        cover_r: int = 1,
        terrain: str = "open",
        wall_share: float = 0.2,
        actions: str = "goals",
        stride: int = 3,
        roles: bool = False,
        skills: bool = False,
        mask: str = "none",
        floor: float = 1e-3,
        observation: str = "planes",
        window: int = 4,
        coverage_reward: float = 1.0,
        reach_reward: float = 2.0,
        crowding_penalty: float = 4.0,
        tau: float = 0.5,
        degree_target: float = 1.0,
        links: bool = True,
    ) -> None:
        check_settings({name: value for name, value in locals().items() if name not in ("self", "__class__")})
        self.grid, self.comm_r, self.cover_r, self.stride, self.floor = grid, comm_r, cover_r, stride, floor
        self.terrain, self.wall_share = terrain, wall_share
        self.roles, self._goals, self._masked, self._links = roles, actions == "goals", mask == "safe_goals", links
        self._pay_weights = Pay(coverage_reward, reach_reward, crowding_penalty, tau, degree_target, comm_r)
        self._window = Window(grid, window) if observation == "window" else None
        seen = planes_space(grid) if self._window is None else self._window.space
        last = len(GOALS) if self._goals else len(MOVES)
        self._first = first = len(ROLES) if roles else len(SKILLS) if skills else 0  # choices before the goal or move
        super().__init__(
            num_envs,
            num_agents,
            observation_space(seen, num_agents if links else 0, first + last if self._masked else 0),
            spaces.MultiDiscrete([first, last]) if first else spaces.Discrete(last),
            episode_length=horizon,
        )
        self._rows = 2 if terrain == "random" else 1  # of random numbers per episode
        self.streams = UniformStreams(num_envs, grid * grid + 1, block=self._rows)
        self.state_space = state_space(grid, num_agents)
        self.positions = np.zeros((num_envs, num_agents, 2), dtype=np.int64)
        self.walls = np.zeros((num_envs, grid, grid), dtype=bool)
        self.covered = np.zeros_like(self.walls)
        self.seen = np.zeros((num_envs, num_agents, grid, grid), dtype=bool)
        self.beliefs = np.zeros_like(self.seen)
        if terrain != "random":
            self.walls[:] = fixed_walls(terrain, grid)
        # The controller's tables [E, C, 9], or one for all environments.
        self._moves_to = first_moves(self.walls[:1], stride)
        if terrain == "random":
            self._moves_to = np.repeat(self._moves_to, num_envs, axis=0)
        self._told: dict[str, np.ndarray] = {}
        self._final: tuple[np.ndarray, ...] | None = None

    def reset_joint(self, seeds: Sequence[int | None] | None = None) -> Any:
        """See `VectorJointEnv.reset_joint`."""
        observations = super().reset_joint(seeds)
        self._final = None
        return observations

    def _begin(self, envs: np.ndarray) -> None:
        self._final = (np.isin(np.arange(self.num_envs), envs), *(a.copy() for a in self._shown))
        uniforms = self.streams.take(self._rows, envs)
        if self.terrain == "random":
            self._set_walls(envs, random_walls(uniforms[:, 1, :-1], self.wall_share, self.num_agents))
        self.positions[envs] = start_positions(self.walls[envs], uniforms[:, 0], self.num_agents)
        seen = footprints(self.positions[envs], self.walls[envs], self.cover_r)
        self.seen[envs], self.beliefs[envs], self.covered[envs] = seen, seen, seen.any(axis=1)

    def _set_walls(self, envs: np.ndarray, walls: np.ndarray) -> None:
        """Gives worlds with random terrain the walls [len(envs), G, G]."""
        self.walls[envs], self._moves_to[envs] = walls, first_moves(walls, self.stride)

    def _pay(self, actions: Any) -> np.ndarray:
        chosen = actions if self.stacked else np.stack([actions[agent] for agent in self.possible_agents])
        chosen = np.asarray(chosen).swapaxes(0, 1)  # [E, N], or [E, N, 2]
        last = chosen[..., 1] if self._first else chosen
        moves = self._first_moves(np.arange(self.num_envs), last[..., None])[..., 0] if self._goals else last
        moved = destinations(self.positions, moves, self.walls)
        if self.roles:
            moved = hold_links(self.positions, moved, chosen[..., 0] == RELAY, self.comm_r)
        # New arrays: what was handed out, and saved, stays.
        self.positions, self._final = moved, None
        seen_now = footprints(moved, self.walls, self.cover_r)
        first = first_cover(seen_now, self.covered)
        self.seen, self.covered = self.seen | seen_now, self.covered | seen_now.any(axis=1)
        self.beliefs = share_beliefs(self.beliefs, seen_now, chebyshev(moved) <= self.comm_r)
        free = np.count_nonzero(~self.walls.reshape(self.num_envs, -1), axis=1)
        rewards, self._told = rewards_and_extras(self._pay_weights, moved, first, self.seen, self.covered, free)
        return rewards

    def _first_moves(self, envs: np.ndarray, goals: np.ndarray) -> np.ndarray:
        """The controller's moves for goals [len(envs), N, K] of agents where they are, likewise."""
        cells = number_of(self.positions[envs], self.grid)[..., None]
        return np.asarray(self._moves_to[envs[:, None, None] % len(self._moves_to), cells, goals])

    def _extras(self) -> dict[str, np.ndarray]:
        return self._told

    def _observe(self, envs: np.ndarray) -> Any:
        positions, walls = self.positions[envs], self.walls[envs]
        distances = chebyshev(positions)
        heard = (distances <= self.comm_r) & ~np.eye(self.num_agents, dtype=bool)
        view = View(positions, walls, self.beliefs[envs], heard, self.step_count[envs] / self.episode_length)
        seen = planes(view) if self._window is None else self._window(view)
        if self.stacked:
            return seen
        parts = {"observations": seen}
        if self._links:
            parts["links"] = link_strengths(distances, heard, self.comm_r)
        if self._masked:
            every = np.broadcast_to(np.arange(len(GOALS)), (*positions.shape[:2], len(GOALS)))
            moves = self._first_moves(envs, every) if self._goals else None
            allowed = action_masks(positions, walls, moves, self.comm_r, self.floor)
            free = np.ones((*allowed.shape[:2], self._first), dtype=np.int8)  # roles and skills
            parts[ACTION_MASK] = np.concatenate([free, allowed], axis=-1, dtype=np.int8).swapaxes(0, 1)
        return {agent: {key: part[i] for key, part in parts.items()} for i, agent in enumerate(self.possible_agents)}

    def state(self) -> np.ndarray:
        """Covered cells, walls and the number of agents on each cell, then t / horizon; float32 [E, 3 G² + 1]."""
        return global_state(self.covered, self.walls, self.positions, self.step_count / self.episode_length)

    @property
    def _shown(self) -> tuple[np.ndarray, ...]:
        """What a picture shows, by environment."""
        return self.walls, self.covered, self.positions

    def render(self, index: int = 0) -> np.ndarray:
        """Walls, covered cells, agents and their links; above, bars of coverage and λ₂. Uint8 [height, width, 3]."""
        return self._draw(*(array[index] for array in self._shown))

    def render_final(self, index: int = 0) -> np.ndarray:
        """The end of the episode that the last step ended, as `render`; what that shows where it ended none."""
        if self._final is None or not self._final[0][index]:
            return self.render(index)
        return self._draw(*(array[index] for array in self._final[1:]))

    def _draw(self, walls: np.ndarray, covered: np.ndarray, positions: np.ndarray) -> np.ndarray:
        from thrust_rllib.envs.coverage.drawing import draw

        linked = chebyshev(positions) <= self.comm_r
        share = float(covered.sum() / max(int((~walls).sum()), 1))
        return draw(walls, covered, positions, linked, share, float(lambda2_of(positions, self.comm_r)))

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from where `get_state` was called."""
        super().set_state(state)
        self._final = None
