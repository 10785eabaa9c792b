"""The safe-goal mask: what it allows never takes λ₂ below the floor when one agent moves alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.envs.coverage import reference
from tests.envs.coverage.play import random_actions, references, reset, step
from thrust_rllib.envs.coverage.safe_goals import safe_moves

STAY_GOAL = 0


@given(
    seed=st.integers(0, 10_000),
    num_agents=st.integers(2, 5),
    comm_r=st.integers(1, 4),
    floor=st.sampled_from([1e-3, 0.1, 0.5, 1.0]),
    terrain=st.sampled_from(["open", "rooms", "random"]),
    actions=st.sampled_from(["goals", "moves"]),
    steps=st.integers(0, 8),
)
@settings(max_examples=40, deadline=None)
def test_an_allowed_move_of_one_agent_keeps_lambda2_at_the_floor(
    seed, num_agents, comm_r, floor, terrain, actions, steps
):
    rng = np.random.default_rng(seed)
    chosen = {"actions": actions, "comm_r": comm_r, "floor": floor, "horizon": 20}
    env, observations, _ = reset([seed], grid=9, num_agents=num_agents, terrain=terrain, mask="safe_goals", **chosen)
    for _ in range(steps):
        observations = step(env, random_actions(env, rng)).seen
    (world,) = references(env, chosen)
    state = env.get_state()
    for i in range(num_agents):
        allowed = observations["action_mask"][i, 0]
        assert allowed[STAY_GOAL] == 1 and set(np.unique(allowed)) <= {0, 1}
        np.testing.assert_array_equal(allowed, world.mask(i))
        for action in np.flatnonzero(allowed).tolist():
            env.set_state(state)
            joint = np.zeros((num_agents, 1), int)  # all others stay
            joint[i] = action
            result = step(env, joint)
            if action != STAY_GOAL:
                assert result.extras["lambda2"][0] >= floor - 1e-6
                assert reference.lambda2([tuple(c) for c in env.positions[0].tolist()], comm_r) >= floor - 1e-9


def test_a_mask_forbids_what_it_should():
    """Two agents at distance 2 with comm_r 1: whoever goes away falls below the floor, whoever comes does not."""
    env, observations, _ = reset(
        range(40), grid=7, num_agents=2, comm_r=1, floor=0.05, mask="safe_goals", actions="moves"
    )
    forbidden = 0
    for e in range(40):
        a, b = env.positions[e].tolist()
        mask = observations["action_mask"][0, e]
        for move, (dr, dc) in reference.STEPS.items():
            there = (min(max(a[0] + dr, 0), 6), min(max(a[1] + dc, 0), 6))
            value = 2 / (1 + np.exp(-2 * (1 - max(abs(there[0] - b[0]), abs(there[1] - b[1])))))  # of two agents
            assert mask[move] == (move == 0 or value >= 0.05)
            forbidden += mask[move] == 0
    assert forbidden > 10


@pytest.mark.parametrize(
    "cells, comm_r, floor, allowed",
    [
        ([(0, 0), (0, 5), (5, 0), (5, 5)], 5, 2.0, True),  # exactly the floor: rounding must not forbid it
        ([(0, 0), (0, 5), (5, 0), (5, 5)], 5, 2.0 + 1e-6, False),
        ([(0, 0), (0, 50), (50, 0), (50, 50), (25, 90)], 2, 0.0, True),  # a floor of 0 forbids nothing
        ([(0, 0), (0, 5)], 5, 1.0, True),
        ([(0, 0), (0, 6)], 5, 0.2384, True),
        ([(0, 0), (0, 6)], 5, 0.2385, False),
    ],
)
def test_staying_at_a_floor(cells, comm_r, floor, allowed):
    positions = np.array([cells])
    safe = safe_moves(positions, positions[:, :, None], comm_r, floor)
    assert safe.shape == (1, len(cells), 1) and (safe == allowed).all()


@pytest.mark.parametrize("floor", [0.0, 1e-3, 0.1, 0.29, 0.5, 1.5])
def test_the_short_cut_for_connected_teams_changes_nothing(floor):
    """Teams that hang together need no eigenvalues; the answer is that of λ₂ all the same."""
    rng = np.random.default_rng(1)
    for count in (2, 3, 4, 6):
        positions = rng.integers(0, 8, (40, count, 2))
        moved = positions[:, :, None] + np.array([(0, 0), (-1, 0), (0, 1), (1, 0), (0, -1)])
        safe = safe_moves(positions, moved, 2, floor)
        for e, i, move in np.ndindex(safe.shape):
            cells = [tuple(cell) for cell in positions[e].tolist()]
            cells[i] = tuple(moved[e, i, move].tolist())
            value = reference.lambda2(cells, 2)
            assert abs(value - floor) < 1e-8 or safe[e, i, move] == (value >= floor)


def test_without_a_mask_there_is_none():
    _, observations, _ = reset([0], grid=7, num_agents=2)
    assert set(observations) == {"links", "observations"}


def test_a_mask_below_the_floor_leaves_goals_that_bring_agents_together():
    """Far apart, only staying is allowed unless a move alone lifts λ₂ to the floor."""
    env, observations, worlds = reset([7], grid=12, num_agents=2, comm_r=1, floor=0.5, mask="safe_goals", stride=3)
    for _ in range(8):  # agent 0 goes north-west, agent 1 south-east
        observations = step(env, np.array([[8], [6]])).seen
    assert reference.lambda2([tuple(c) for c in env.positions[0].tolist()], 1) < 1e-3
    np.testing.assert_array_equal(observations["action_mask"].sum(axis=-1), [[1], [1]])


@pytest.mark.parametrize("heads", ["roles", "skills"])
def test_other_heads_are_never_masked(heads):
    _, observations, worlds = reset(
        [1, 2], grid=9, num_agents=3, comm_r=1, floor=0.5, mask="safe_goals", **{heads: True}
    )
    size = 2 if heads == "roles" else 3
    mask = observations["action_mask"]
    assert mask.shape == (3, 2, size + 9) and mask[..., :size].all()
    for e, world in enumerate(worlds):
        for i in range(3):
            np.testing.assert_array_equal(mask[i, e, size:], world.mask(i))
