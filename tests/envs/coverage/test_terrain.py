"""Every terrain is connected, and agents start close together on free cells of their own."""

import numpy as np
import pytest

from tests.envs.coverage.play import cells_in, reset, step
from tests.envs.coverage.reference import apart, distances_to

TERRAINS = ["open", "rooms", "random"]


@pytest.mark.parametrize("terrain", TERRAINS)
@pytest.mark.parametrize("grid", [6, 9, 16, 21])
@pytest.mark.parametrize("wall_share", [0.1, 0.2, 0.4])
def test_terrain_is_connected(terrain, grid, wall_share):
    env, _, worlds = reset(range(12), grid=grid, num_agents=3, terrain=terrain, wall_share=wall_share)
    assert env.walls.shape == (12, grid, grid) and env.walls.dtype == bool
    for world in worlds:
        assert set(distances_to(world.cells[0], world.free)) == world.free
    share = env.walls.mean()
    assert (share == 0) == (terrain == "open")
    if terrain == "random":
        assert 0.4 * wall_share < share <= (1 + wall_share) / 2 + 0.02  # at most half of the free cells are filled
        assert (env.walls != env.walls[0]).any()
    else:
        assert (env.walls == env.walls[0]).all()


@pytest.mark.parametrize("terrain", TERRAINS)
@pytest.mark.parametrize("num_agents", [1, 4, 9])
def test_starts_are_close_together_on_free_cells_of_their_own(terrain, num_agents):
    env, _, worlds = reset(range(30), grid=12, num_agents=num_agents, terrain=terrain)
    for world in worlds:
        assert set(world.cells) <= world.free and len(set(world.cells)) == num_agents
        anchors = [cell for cell in world.free if all(apart(cell, other) <= 2 for other in world.cells)]
        interior = [cell for cell in anchors if 0 < min(cell) and max(cell) < 11]
        assert interior, world.cells
    assert len({tuple(world.cells) for world in worlds}) > 20


@pytest.mark.parametrize("terrain", TERRAINS)
def test_a_new_episode_has_a_new_start_and_random_ground(terrain):
    env, _, _ = reset([1], grid=10, num_agents=3, terrain=terrain, horizon=1)
    starts, grounds = set(), set()
    for _ in range(10):
        starts.add(tuple(map(tuple, env.positions[0].tolist())))
        grounds.add(frozenset(cells_in(env.walls[0])))
        step(env, np.zeros((3, 1), int))
    assert len(starts) > 5 and (len(grounds) > 3) == (terrain == "random")


def test_rooms_have_walls_with_doors():
    env, _, worlds = reset([0], grid=16, num_agents=2, terrain="rooms")
    (world,) = worlds
    corners = [(0, 0), (0, 15), (15, 0), (15, 15)]
    far = [distances_to(corner, world.free) for corner in corners]
    assert all(corner in world.free for corner in corners)
    longest = max(far[0].values())
    assert longest >= 30  # as far as on open ground, through the doors
    # Rooms: some neighbours across a wall are far apart on foot.
    around = [
        distances_to((r, c), world.free)[r, c + 2]
        for r in range(16)
        for c in range(14)
        if {(r, c), (r, c + 2)} <= world.free and (r, c + 1) not in world.free
    ]
    assert max(around) >= 4
