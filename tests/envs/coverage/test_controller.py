"""Goals become first moves of shortest paths."""

import numpy as np
import pytest

from tests.envs.coverage.play import reset, step
from tests.envs.coverage.reference import OFFSETS, World, distances_to
from thrust_rllib.envs.coverage import controller


def play_goals(env, goal, steps):
    """All agents with the same goal; positions [steps + 1, E, N, 2]."""
    places = [env.positions.copy()]
    for _ in range(steps):
        step(env, np.full((env.num_agents, env.num_envs), goal))
        places.append(env.positions.copy())
    return np.stack(places)


def on_the_map(a, b):
    """Steps between two cells if there were no walls."""
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


@pytest.mark.parametrize("goal", range(9))
def test_all_eight_goals_move_on_open_ground(goal):
    env, _, _ = reset(range(20), grid=15, num_agents=2, stride=3, horizon=50)
    inside = ((env.positions >= 2) & (env.positions <= 12)).all(axis=-1)
    first, second = play_goals(env, goal, 1)
    moves = (second - first)[inside]
    assert len(moves) > 10
    if goal == 0:
        assert (moves == 0).all()
    else:
        assert (np.abs(moves).sum(axis=-1) == 1).all()  # one cell
        assert ((moves * np.array(OFFSETS[goal])).sum(axis=-1) == 1).all()  # in the goal's direction


@pytest.mark.parametrize("goal", range(1, 9))
@pytest.mark.parametrize("stride", [1, 2, 3, 5])
def test_a_goal_held_leads_to_the_border_or_corner(goal, stride):
    env, _, _ = reset([3], grid=8, num_agents=2, stride=stride, horizon=50)
    places = play_goals(env, goal, 20)
    rows, columns = OFFSETS[goal]
    for i in range(2):
        row, column = places[-1, 0, i].tolist()
        start = places[0, 0, i].tolist()
        if rows:
            assert row == (0 if rows < 0 else 7)
        if columns:
            assert column == (0 if columns < 0 else 7)
        if not rows or not columns:  # a straight goal keeps the line
            assert (row == start[0]) if not rows else (column == start[1])


@pytest.mark.parametrize("goal", [5, 6, 7, 8])
def test_a_diagonal_goal_held_is_a_staircase(goal):
    env, _, _ = reset(range(20), grid=15, num_agents=2, stride=3, horizon=50)
    inside = ((env.positions >= 4) & (env.positions <= 10)).all(axis=-1)
    places = play_goals(env, goal, 4)
    assert inside.sum() > 5
    for later, steps in ((2, 1), (4, 2)):
        np.testing.assert_array_equal(
            (places[later] - places[0])[inside], np.tile(np.array(OFFSETS[goal]) * steps, (inside.sum(), 1))
        )


@pytest.mark.parametrize("terrain", ["open", "rooms", "random"])
@pytest.mark.parametrize("stride", [2, 3, 4])
def test_first_moves_are_on_shortest_paths(terrain, stride):
    """Each step ends exactly one step nearer to the goal's cell, by foot; agents at their goal stay."""
    rng = np.random.default_rng(stride)
    env, _, worlds = reset(
        range(6), grid=11, num_agents=3, terrain=terrain, stride=stride, horizon=100, wall_share=0.35
    )
    moved = detours = 0
    for _ in range(25):
        goals = rng.integers(0, 9, (3, 6))
        aims = [[world.goal_of(i, int(goals[i, e])) for i in range(3)] for e, world in enumerate(worlds)]
        before = [list(world.cells) for world in worlds]
        step(env, goals)
        for e, world in enumerate(worlds):
            world.cells = [tuple(cell) for cell in env.positions[e].tolist()]
            for i in range(3):
                steps = distances_to(aims[e][i], world.free)
                assert steps[world.cells[i]] == max(steps[before[e][i]] - 1, 0)
                moved += world.cells[i] != before[e][i]
                detours += on_the_map(world.cells[i], aims[e][i]) > on_the_map(before[e][i], aims[e][i])
    assert moved > 200
    assert (detours > 0) == (terrain != "open")  # a greedy controller would stand there for ever


@pytest.mark.parametrize("stride", [1, 3, 20])
def test_every_cell_and_goal_of_some_terrains(stride):
    """The tables against the reference, on two terrains whose free cells hang together."""
    walls = np.zeros((2, 7, 7), bool)
    walls[0, 1:6, 3] = walls[0, 3, 1:4] = True
    walls[1, ::2, :6] = True
    walls[1, [0, 4], 0] = walls[1, [2, 6], 5] = False
    moves, goals = controller.first_moves(walls, stride), controller.goal_cells(walls, stride)
    assert moves.shape == goals.shape == (2, 49, 9)
    for k in range(2):
        world = World(walls[k], [(1, 1)], stride=stride)
        assert set(distances_to(world.cells[0], world.free)) == world.free
        for cell in world.free:
            world.cells = [cell]
            number = 7 * cell[0] + cell[1]
            assert [divmod(int(aim), 7) for aim in goals[k, number]] == [world.goal_of(0, goal) for goal in range(9)]
            assert moves[k, number].tolist() == [world.first_move(0, goal) for goal in range(9)]


def test_a_terrain_in_pieces_is_an_error():
    walls = np.zeros((1, 5, 5), bool)
    walls[0, 2] = True
    with pytest.raises(ValueError, match="the free cells of a terrain must hang together"):
        controller.first_moves(walls, 2)
