"""Pictures of the built-in environments, and of others through the adapters."""

import numpy as np
import pytest

from tests.envs.helpers import Pair
from thrust_rllib.envs import (
    BucketBrigade,
    GymnasiumVectorJointEnv,
    JointEnvMultiAgentEnv,
    JointEnvParallel,
    PettingZooJointEnv,
    RLlibJointEnv,
    list_envs,
    make_joint_env,
    make_vector_env,
)
from thrust_rllib.envs.bucket_brigade_drawing import AGENTS, SIZE, STATES, _on_ring, draw_game


def rgb(colour):
    return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))


def houses_in(picture, num_houses):
    """States by the colour beside each house's number."""
    colours = {rgb(colour): state for state, (_, colour) in STATES.items()}
    states = []
    for house in range(num_houses):
        x, y = _on_ring(house, num_houses, 0.39 * SIZE)
        states.append(colours[tuple(picture[int(y) + 20, int(x) + 20].tolist())])
    return states


def test_a_game_shows_its_houses_and_who_works():
    houses = np.array([0, 1, 2, 1, 0, 2])
    actions = np.array([[2, 1, 0], [5, 0, 1]])
    picture = draw_game(houses, actions, 3, np.array([1.5, -2.0]))
    assert picture.dtype == np.uint8 and picture.shape == (SIZE, SIZE, 3)
    assert houses_in(picture, 6) == houses.tolist()
    colours = [rgb(AGENTS[0]), rgb(AGENTS[1])]
    swapped = draw_game(houses, np.array([[2, 0, 0], [5, 1, 1]]), 3, np.array([1.5, -2.0]))
    worker, rester = ((picture == colour).all(-1).sum() for colour in colours)
    no_worker, now_worker = ((swapped == colour).all(-1).sum() for colour in colours)
    assert worker > no_worker and now_worker > rester  # full and hollow dots
    for other in (draw_game(houses, actions, 4, np.array([1.5, -2.0])), draw_game(houses, actions, 3, np.zeros(2))):
        assert (other != picture).any()


@pytest.mark.parametrize("num_agents, num_houses", [(1, 1), (16, 10), (3, 40)])
def test_any_size_can_be_drawn(num_agents, num_houses):
    env = BucketBrigade(1, num_agents=num_agents, num_houses=num_houses)
    env.reset_joint([0])
    env.step_joint(np.zeros((num_agents, 1, 3), int))
    assert env.render().shape == (SIZE, SIZE, 3)


def test_the_end_of_a_game_and_the_start_of_the_next_are_both_there():
    env, alone = BucketBrigade(3, "hard"), BucketBrigade(3, "hard")
    env.reset_joint([5, 6, 7])
    alone.reset_joint([5, 6, 7])
    rest = np.zeros((4, 3, 3), int)
    for _ in range(200):
        result = env.step_joint(rest)
        alone.step_joint(rest)  # never drawn: drawing changes nothing
        assert [houses_in(env.render(e), 10) for e in range(3)] == env.houses.tolist()
        pictures = [houses_in(env.render_final(e), 10) for e in range(3)]
        final = result.observations if result.final_observations is None else result.final_observations
        assert pictures == final[0, :, :30].reshape(3, 10, 3).argmax(-1).tolist()
        np.testing.assert_array_equal(env.houses, alone.houses)
        over = np.flatnonzero(result.terminated[0])
        if len(over):
            assert any(pictures[e] != env.houses[e].tolist() for e in over)
            break
    else:
        raise AssertionError("no game ended")
    env.step_joint(rest)
    assert [houses_in(env.render_final(e), 10) for e in over] == env.houses[over].tolist()


def test_a_restored_game_shows_what_was_saved():
    env = BucketBrigade(1)
    env.reset_joint([1])
    env.step_joint(np.zeros((4, 1, 3), int))
    other = BucketBrigade(1)
    other.reset_joint([2])
    other.set_state(env.get_state())
    assert houses_in(other.render(), 10) == env.houses[0].tolist()


@pytest.mark.parametrize("name", [n for n in list_envs() if n not in ("bucket_brigade", "coverage", "debug/faulty")])
def test_debug_environments_draw_a_bar_that_grows_to_the_end(name):
    env = make_joint_env(name)
    if env.render_mode is None:
        with pytest.raises(NotImplementedError, match="cannot be rendered; override render"):
            env.render()
        return
    seen = env.reset_joint(0)
    blue, over = [int((env.render() == (60, 110, 180)).all(-1).sum())], False
    while not over:
        legal = {a: x["action_mask"] if isinstance(x, dict) and "action_mask" in x else None for a, x in seen.items()}
        result = env.step_joint({a: env.action_spaces[a].sample(legal[a]) for a in env.possible_agents})
        seen, over = result.observations, result.over
        blue.append(int((env.render() == (60, 110, 180)).all(-1).sum()))
    assert blue == [64 * t for t in range(len(blue))]
    env.reset_joint(None)
    assert not (env.render() == (60, 110, 180)).all(-1).any()


@pytest.mark.parametrize("name", ["CartPole-v1", "pettingzoo:mpe2.simple_spread_v3"])
def test_adapters_pass_pictures_on(name):
    env = make_vector_env(name, {"render_mode": "rgb_array"}, 2)
    assert env.render_mode == "rgb_array"
    env.reset_joint([1, 2])
    first, second = env.render(0), env.render(1)
    assert first.dtype == np.uint8 and first.shape[2] == 3 and (first != second).any()
    env.close()


def test_gymnasiums_own_vector_draws():
    env = GymnasiumVectorJointEnv("CartPole-v1", 2, render_mode="rgb_array")
    env.reset_joint([1, 2])
    assert env.render(1).shape == (400, 600, 3) and (env.render(0) != env.render(1)).any()
    env.close()


def test_pictures_survive_the_way_around():
    around = RLlibJointEnv(JointEnvMultiAgentEnv(PettingZooJointEnv(JointEnvParallel("debug/identity"))))
    around.reset_joint(0)
    assert around.render_mode == "rgb_array" and around.render().dtype == np.uint8


def test_without_render_the_error_names_the_remedy():
    with pytest.raises(NotImplementedError, match="override render"):
        make_vector_env(Pair, {}, 1).render()
