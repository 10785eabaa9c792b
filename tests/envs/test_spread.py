"""The vectorised spread world against mpe2's own, and its extras against its positions."""

import numpy as np
import pytest

from thrust_rllib.envs import make_vector_env
from thrust_rllib.envs.spread import Spread

MPE2 = "pettingzoo:mpe2.simple_spread_v3"


def difference(left, right):
    return float(np.abs(np.asarray(left, np.float64) - np.asarray(right, np.float64)).max())


def play_both(mine, theirs, steps, seed=0, drift=True):
    """The largest difference of observations, states and rewards; and the number of collisions."""
    rng = np.random.default_rng(seed)
    shape = len(mine.possible_agents), mine.num_envs
    seeds = [seed + 10 * e for e in range(mine.num_envs)]
    worst, collisions = difference(mine.reset_joint(seeds), theirs.reset_joint(seeds)), 0
    for _ in range(steps):
        actions = rng.integers(5, size=shape)
        if drift:  # to the middle, where agents push each other
            positions = mine._positions.swapaxes(0, 1)  # [N, E, 2]
            along_x = np.abs(positions[..., 0]) > np.abs(positions[..., 1])
            inward = np.where(along_x, np.where(positions[..., 0] > 0, 1, 2), np.where(positions[..., 1] > 0, 3, 4))
            actions = np.where(rng.random(shape) < 0.7, inward, actions)
        one, other = mine.step_joint(actions), theirs.step_joint(actions)
        for name in ("observations", "rewards"):
            worst = max(worst, difference(getattr(one, name), getattr(other, name)))
        np.testing.assert_array_equal(np.broadcast_to(one.truncated, shape), other.truncated)
        assert not np.any(one.terminated) and not other.terminated.any()
        assert (one.final_observations is None) == (other.final_observations is None)
        if one.final_observations is not None:
            worst = max(worst, difference(one.final_observations, other.final_observations))
        worst = max(worst, difference(mine.state(), theirs.state()))
        collisions += int(one.extras["collisions"].sum())
    return worst, collisions


@pytest.mark.parametrize(
    ("num_agents", "settings"),
    [(3, {}), (1, {}), (2, {"local_ratio": 0.0}), (5, {"local_ratio": 0.8, "max_cycles": 11})],
)
def test_it_is_mpe2s_world(num_agents, settings):
    """Several episodes with the same seeds and actions, resets without seeds among them."""
    mine = Spread(2, num_agents, **settings)
    theirs = make_vector_env(MPE2, {"N": num_agents, **settings}, 2)
    assert mine.observation_spaces == theirs.observation_spaces and mine.action_spaces == theirs.action_spaces
    assert mine.state_space == theirs.state_space and mine.possible_agents == theirs.possible_agents
    for seed in (0, 1):
        worst, collisions = play_both(mine, theirs, 60, seed)
        assert worst < 1e-6
        assert (collisions > 20) == (num_agents > 1)


def test_another_world_is_told_apart():
    worst, _ = play_both(Spread(2, local_ratio=0.4), make_vector_env(MPE2, {}, 2), 30)
    assert worst > 0.1


def test_without_the_penalty_collisions_are_told_only():
    plain, free = Spread(4, collision_penalty=True), Spread(4, collision_penalty=False)
    rng = np.random.default_rng(0)
    plain.reset_joint(range(4))
    free.reset_joint(range(4))
    seen = 0
    for _ in range(50):
        actions = rng.integers(5, size=(3, 4))
        one, other = plain.step_joint(actions), free.step_joint(actions)
        np.testing.assert_array_equal(one.extras["collisions"], other.extras["collisions"])
        np.testing.assert_allclose(other.rewards - one.rewards, 0.5 * one.extras["collisions"], atol=1e-5)
        assert (other.rewards == other.rewards[0]).all()  # the team's part is the same for all
        seen += one.extras["collisions"].sum()
    assert seen > 0


def test_extras_by_hand():
    env = Spread(1, 3, max_cycles=9)
    env.reset_joint([0])
    env._positions[0] = [(0, 0), (0.29, 0), (0.5, 0)]
    env._landmarks[0] = [(0.05, 0), (0.8, 0.8), (0.5, 0.09)]
    extras = env.step_joint(np.zeros((3, 1), int)).extras
    assert extras["collisions"][:, 0].tolist() == [1, 2, 1]
    assert extras["touching"][..., 0].tolist() == [[0, 1, 0], [1, 0, 1], [0, 1, 0]]
    assert extras["covered"].tolist() == [2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_agents": 0}, "num_agents is 0; needed: at least 1"),
        ({"local_ratio": 1.5}, "local_ratio is 1.5; a share lies in"),
        ({"max_cycles": 0}, "max_cycles is 0; needed: at least 1"),
        ({"num_envs": 0}, "num_envs is 0; needed: at least 1"),
    ],
)
def test_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        Spread(**settings)
