"""λ₂, reach and weights against values by hand and against the slow reference."""

import numpy as np
import pytest

from tests.envs.coverage import reference
from thrust_rllib.envs.coverage import connectivity

COMM_R = 5


def line(count, spacing):
    return [(0, i * spacing) for i in range(count)]


BY_HAND = [
    (line(2, 3), 1.964028),
    (line(2, 5), 1.0),
    (line(2, 6), 0.238406),
    (line(2, 8), 0.004945),
    (line(3, 4), 0.885742),
    (line(4, 3), 0.776609),
    (line(4, 4), 0.52018),
    (line(4, 5), 0.292971),
    (line(10, 3), 0.141427),
    (line(10, 5), 0.048961),
    ([(0, 0), (0, 4), (4, 0), (4, 4)], 3.523188),
    ([(2, 2)] * 3, 2.999864),
]


@pytest.mark.parametrize("cells, value", BY_HAND)
def test_lambda2_by_hand(cells, value):
    assert round(reference.lambda2(cells, COMM_R), 6) == value
    for moved in (np.array(cells), np.array(cells)[:, ::-1] + 7):  # turned and shifted it is the same
        found = connectivity.lambda2_of(moved[None], COMM_R)
        assert found.shape == (1,) and float(found[0]) == pytest.approx(value, abs=6e-7)


@pytest.mark.parametrize("count", range(1, 8))
@pytest.mark.parametrize("comm_r", [1, 2, 4])
def test_random_teams_are_as_the_reference_says(count, comm_r):
    rng = np.random.default_rng(10 * count + comm_r)
    teams = rng.integers(0, 12, (3, 5, count, 2))
    distances = connectivity.chebyshev(teams)
    weights, values = connectivity.edge_weights(distances, comm_r), connectivity.lambda2_of(teams, comm_r)
    reached = connectivity.reachable(distances <= comm_r)
    assert values.shape == (3, 5) and weights.dtype == np.float64
    for place in np.ndindex(3, 5):
        cells = [tuple(cell) for cell in teams[place].tolist()]
        assert distances[place].tolist() == [[reference.apart(a, b) for b in cells] for a in cells]
        np.testing.assert_allclose(weights[place], reference.weights(cells, comm_r), atol=1e-12)
        np.testing.assert_allclose(values[place], reference.lambda2(cells, comm_r), atol=1e-9)
        for i in range(count):
            found = reference.reached(i, cells, comm_r) | {i}
            assert set(np.flatnonzero(reached[place][i]).tolist()) == found


def test_a_chain_is_reached_link_by_link():
    linked = connectivity.chebyshev(np.array(line(9, 2))) <= 2
    assert connectivity.reachable(linked).all()
    linked[4, 5] = linked[5, 4] = False
    halves = (np.arange(9)[:, None] > 4) == (np.arange(9) > 4)
    np.testing.assert_array_equal(connectivity.reachable(linked), halves)


def test_far_agents_have_no_link_and_lambda2_stays_finite():
    """Distances at which exp overflows."""
    assert connectivity.lambda2_of(np.array([(0, 0), (0, 4000)]), COMM_R) == 0
    assert connectivity.lambda2_of(np.zeros((4, 1, 2), int), COMM_R).tolist() == [0, 0, 0, 0]
