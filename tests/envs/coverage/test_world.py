"""The coverage world as a vectorised environment: spaces, seeds, streams, saving, settings."""

import copy

import numpy as np
import pytest

from tests.envs.helpers import assert_same, play_vector, row
from thrust_rllib.envs import make_vector_env
from thrust_rllib.envs.coverage import CoverageWorld

KINDS = {
    "plain": {},
    "moves": {"actions": "moves", "cover_r": 0},
    "window": {"observation": "window", "window": 2, "terrain": "rooms"},
    "masked": {"mask": "safe_goals", "roles": True, "terrain": "random"},
    "masked moves": {"mask": "safe_goals", "actions": "moves", "links": False},
    "skills": {"skills": True, "mask": "safe_goals", "observation": "window", "terrain": "random"},
    "no links": {"links": False, "num_agents": 2},
    "alone": {"num_agents": 1},
}
SMALL = {"grid": 7, "num_agents": 3, "horizon": 6}


def world(kind, num_envs=3, **changed):
    return make_vector_env("coverage", {**SMALL, **KINDS[kind], **changed}, num_envs)


@pytest.mark.parametrize("kind", KINDS)
def test_environment_e_equals_a_single_one_seeded_alike(kind):
    seeds = [5, 6, 7]
    log = play_vector(world(kind), seeds, 20)
    assert_same(log, play_vector(world(kind), seeds, 20))
    for e, seed in enumerate(seeds):
        alone = world(kind, 1)
        assert_same(row(log, e, alone.stacked), row(play_vector(alone, [seed], 20), 0, alone.stacked))
    first, other = (np.stack(list(play_started(kind, seed))) for seed in (5, 6))
    assert (first != other).any()


def play_started(kind, seed):
    """Where agents begin in three episodes in a row."""
    env = world(kind, 1)
    for seeds in ([seed], [None], [None]):
        env.reset_joint(seeds)
        yield env.positions.copy()


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_from_where_it_was_saved(kind):
    first, second = world(kind), world(kind)
    play_vector(first, [1, 2, 3], 9)
    state = copy.deepcopy(first.get_state())
    second.reset_joint([7, 8, 9])
    second.set_state(state)
    ahead = play_vector(first, [None] * 3, 20, action_seeds=[4, 5, 6])
    assert_same(ahead, play_vector(second, [None] * 3, 20, action_seeds=[4, 5, 6]))
    # In the middle of an episode: no reset in between.
    first.set_state(state)
    second.set_state(state)
    actions = {agent: np.array([first.action_spaces[agent].sample()] * 3) for agent in first.possible_agents}
    given = np.stack(list(actions.values())) if first.stacked else actions
    one, other = first.step_joint(given), second.step_joint(given)
    assert_same(one.rewards, other.rewards)
    assert_same(one.observations, other.observations)


@pytest.mark.parametrize("kind", KINDS)
def test_observations_lie_in_their_spaces_and_the_state_too(kind):
    env = world(kind)
    assert env.stacked == (kind == "no links")
    log = play_vector(env, [1, 2, 3], 15)
    for observations in (entry[0] for entry in log[1:] if not isinstance(entry[0], str)):
        for e in range(3):
            seen = row([observations], e, env.stacked)[0]
            for i, agent in enumerate(env.possible_agents):
                one = seen[i] if env.stacked else seen[agent]
                assert env.observation_spaces[agent].contains(one)
    for one in env.state():
        assert env.state_space.contains(one)
    assert env.state().shape == (3, 3 * 49 + 1)
    np.testing.assert_array_equal(env.state()[:, 98:147].sum(axis=1), len(env.possible_agents))


def test_shapes_of_observations_and_actions():
    env = CoverageWorld()
    assert (env.num_envs, env.num_agents, env.episode_length) == (1, 4, 100)
    space = env.observation_spaces["agent_0"]
    assert {key: inner.shape for key, inner in space.items()} == {"links": (4,), "observations": (5, 16, 16)}
    assert env.action_spaces["agent_0"].n == 9
    env = CoverageWorld(observation="window", window=3, mask="safe_goals", roles=True)
    space = env.observation_spaces["agent_3"]
    assert {key: inner.shape for key, inner in space.items()} == {
        "links": (4,), "observations": (9, 7, 7), "action_mask": (11,),
    }  # fmt: skip
    assert env.action_spaces["agent_3"].nvec.tolist() == [2, 9]
    assert CoverageWorld(skills=True, actions="moves").action_spaces["agent_0"].nvec.tolist() == [3, 5]
    assert CoverageWorld(links=False).observation_spaces["agent_0"].shape == (5, 16, 16)


def test_every_step_tells_the_same_extras_and_an_episode_is_truncated():
    env = CoverageWorld(num_envs=2, **SMALL)
    env.reset_joint([1, 2])
    per_agent = {"local_edge_margin", "difference_reward", "cells"}
    for t in range(1, 13):
        result = env.step_joint({agent: np.full(2, 1 + t % 8) for agent in env.possible_agents})
        assert {name: values.shape for name, values in result.extras.items()} == {
            name: (3, 2) if name in per_agent else (2,)
            for name in (
                "global_lambda2", "lambda2", "lambda2_deficit", "connected", "firmly_connected", "local_edge_margin",
                "difference_reward", "coverage", "redundancy", "top_share", "cells",
            )
        }  # fmt: skip
        assert all(values.dtype == np.float32 for values in result.extras.values())
        assert result.truncated.all() == result.truncated.any() == (t % 6 == 0) and not result.terminated.any()
        assert (result.final_observations is None) == (t % 6 != 0)
    assert (env.covered.sum(axis=(1, 2)) < result.extras["coverage"] * 49).all()  # told before the reset, reset since


def test_an_observation_after_the_end_is_of_the_new_episode():
    env = CoverageWorld(num_envs=2, **SMALL)
    env.reset_joint([1, 2])
    for _ in range(6):
        result = env.step_joint({agent: np.full(2, 2) for agent in env.possible_agents})
    for agent in env.possible_agents:
        assert (result.final_observations[agent]["observations"][:, 4] == 1).all()
        assert (result.observations[agent]["observations"][:, 4] == 0).all()


@pytest.mark.parametrize("index", [0, 1])
def test_a_picture_of_the_end(index):
    env = CoverageWorld(num_envs=2, **SMALL)
    env.reset_joint([1, 2])
    np.testing.assert_array_equal(env.render(index), env.render_final(index))
    alone = CoverageWorld(num_envs=1, **{**SMALL, "horizon": 9})
    alone.reset_joint([1 + index])
    for _ in range(6):
        env.step_joint({agent: np.full(2, 2) for agent in env.possible_agents})
        alone.step_joint({agent: np.full(1, 2) for agent in alone.possible_agents})
    np.testing.assert_array_equal(env.render_final(index), alone.render())
    assert (env.render(index) != env.render_final(index)).any()
    env.step_joint({agent: np.full(2, 2) for agent in env.possible_agents})
    np.testing.assert_array_equal(env.render(index), env.render_final(index))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"grid": 2}, "grid is 2; needed: a whole number, at least 3"),
        ({"num_agents": 0}, "num_agents is 0"),
        ({"horizon": 2.5}, "horizon is 2.5; needed: a whole number"),
        ({"comm_r": True}, "comm_r is True"),
        ({"cover_r": -1}, "cover_r is -1; needed: a whole number, at least 0"),
        ({"stride": 0}, "stride is 0"),
        ({"window": 0}, "window is 0"),
        ({"terrain": "room"}, "terrain is 'room'; needed: one of .*; did you mean 'rooms'"),
        ({"actions": "goal"}, "actions is 'goal'; .*did you mean 'goals'"),
        ({"mask": "safe"}, "mask is 'safe'; needed: one of 'none', 'safe_goals'"),
        ({"observation": "plane"}, "observation is 'plane'.*did you mean 'planes'"),
        ({"wall_share": 0.5}, r"wall_share is 0.5; needed: a share of the cells in \[0, 0.4\]"),
        ({"floor": -0.1}, "floor is -0.1; needed: a finite number, at least 0"),
        ({"tau": float("nan")}, "tau is nan; needed: a finite number"),
        ({"reach_reward": "2"}, "reach_reward is '2'; needed: a finite number"),
        ({"links": 1}, "links is 1; needed: True or False"),
        ({"roles": True, "skills": True}, "roles and skills are both True"),
        ({"mask": "safe_goals", "num_agents": 1}, "with one agent; needed: at least 2"),
        ({"terrain": "rooms", "grid": 4}, "grid is 4 with terrain='rooms'; needed: at least 5"),
        ({"grid": 3, "num_agents": 10}, "num_agents is 10; there are 9 free cells"),
        ({"grid": 5, "terrain": "rooms", "num_agents": 21}, "num_agents is 21; there are 20 free cells"),
        ({"num_envs": 0}, "num_envs is 0"),
    ],
)
def test_settings_that_cannot_be_meant(given, message):
    with pytest.raises(ValueError, match=message):
        CoverageWorld(**given)


def test_as_many_agents_as_cells_and_many_walls():
    env = CoverageWorld(num_envs=20, grid=5, num_agents=12, terrain="random", wall_share=0.4)
    env.reset_joint(list(range(20)))
    for e in range(20):
        cells = {tuple(cell) for cell in env.positions[e].tolist()}
        assert len(cells) == 12 and not any(env.walls[e][cell] for cell in cells)
    full = CoverageWorld(grid=3, num_agents=9)
    full.reset_joint([0])
    assert full.covered.all() and len({tuple(cell) for cell in full.positions[0].tolist()}) == 9
