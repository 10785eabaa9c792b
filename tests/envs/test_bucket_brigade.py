import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thrust_rllib.envs.bucket_brigade import SCENARIOS, BucketBrigade, night
from thrust_rllib.envs.bucket_brigade_policies import (
    calibrate,
    gap_closed,
    houses_from_observations,
    random_policy,
    specialist_policy,
)

GAMES = json.loads((Path(__file__).parents[1] / "data" / "bucket_brigade_golden.json").read_text())["games"]

# Team reward per step of the original engine: mean and half width of the 95 % interval, mean episode length.
PUBLISHED = {
    "minimal_specialization": ((-90.6, 2.8), (-30.6, 2.3), 13.2),
    "default": ((248.1, 3.2), (311.6, 2.6), 13.2),
    "rest_trap": ((302.7, 2.1), (386.2, 0.7), 13.2),
    "easy": ((356.5, 2.5), (387.6, 1.3), 11.1),
    "hard": ((115.7, 5.0), (170.6, 4.7), 16.3),
    "chain_reaction": ((222.1, 4.4), (306.7, 3.3), 16.2),
}


def uniforms(draws, absent):
    return [absent if draw is None else draw for draw in draws]


def replay(game, absent=1.0, first_previous=None):
    """Differences of a recorded game from `night`: (night, what) for each."""
    scenario = dataclasses.replace(SCENARIOS[game["scenario"]], kappa=game["kappa"], rho=game["rho"])
    houses = np.array([game["initial_houses"]])
    previous = np.zeros_like(houses) if first_previous is None else first_previous(houses)
    wrong = []
    for t, step in enumerate(game["steps"]):
        result = night(
            houses,
            previous,
            np.array(step["actions"])[:, None],
            np.array([uniforms(step["u_extinguish"], absent)]),
            np.array([uniforms(step["u_spark"], absent)]),
            scenario,
            np.array([t]),
        )
        if result.houses[0].tolist() != step["houses"]:
            wrong.append((t, "houses"))
        if result.rewards[:, 0].tolist() != step["rewards"]:
            wrong.append((t, "rewards"))
        if bool(result.terminated[0]) != step["done"]:
            wrong.append((t, "done"))
        houses = previous = result.houses
    return wrong


@pytest.mark.parametrize("absent", [0.0, 1.0])
def test_recorded_games_to_the_number(absent):
    assert len(GAMES) == 24 and sum(len(game["steps"]) for game in GAMES) == 342
    for game in GAMES:
        # Draws that were not recorded cannot matter: any number in their place gives the same game.
        assert replay(game, absent) == []


def test_recorded_games_notice_a_wrong_previous_state():
    assert any(replay(game, first_previous=np.copy) for game in GAMES)


def test_all_recorded_games_as_one_batch():
    scenario = SCENARIOS["default"]
    games = [g for g in GAMES if g["scenario"] == "default" and (g["kappa"], g["rho"]) == (0.5, 0.02)]
    steps = [g["steps"][0] for g in games]
    houses = np.array([g["initial_houses"] for g in games])
    result = night(
        houses,
        np.zeros_like(houses),
        np.array([s["actions"] for s in steps]).transpose(1, 0, 2),
        np.array([uniforms(s["u_extinguish"], 1.0) for s in steps]),
        np.array([uniforms(s["u_spark"], 1.0) for s in steps]),
        scenario,
        np.zeros(len(games), dtype=int),
    )
    assert len(games) > 1
    assert result.houses.tolist() == [s["houses"] for s in steps]
    assert result.rewards.T.tolist() == [s["rewards"] for s in steps]


def slow_night(houses, previous, actions, u_extinguish, u_spark, scenario, index):
    """One game, house by house and agent by agent."""
    num_houses, num_agents = len(houses), len(actions)
    after = list(houses)
    for h in range(num_houses):
        if houses[h] == 1:
            workers = sum(1 for a in actions if a[0] == h and a[1] == 1)
            after[h] = 0 if u_extinguish[h] < 1 - (1 - scenario.kappa) ** workers else 2
    for h in range(num_houses):
        if after[h] == 0 and u_spark[h] < scenario.rho:
            after[h] = 1
    rewards = []
    for i in range(num_agents):
        reward = -scenario.work_cost if actions[i][1] == 1 else 0.5
        for h in range(i, num_houses, num_agents):
            reward += scenario.own_saved * (previous[h] != 0 and after[h] == 0)
            reward -= scenario.own_ruined * (after[h] == 2)
        reward += scenario.team_reward * after.count(0) / num_houses
        reward -= scenario.team_penalty * after.count(2) / num_houses
        rewards.append(reward)
    return after, rewards, index >= scenario.min_nights and 1 not in after


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(SCENARIOS)),
    st.integers(1, 6),
    st.integers(1, 12),
    st.integers(1, 5),
    st.integers(0, 20),
    st.integers(0, 2**32),
)
def test_night_equals_the_slow_reference(name, num_agents, num_houses, num_envs, index, seed):
    rng = np.random.default_rng(seed)
    houses, previous = rng.integers(3, size=(2, num_envs, num_houses))
    actions = rng.integers((num_houses, 2, 2), size=(num_agents, num_envs, 3))
    u_extinguish, u_spark = rng.random((2, num_envs, num_houses))
    result = night(houses, previous, actions, u_extinguish, u_spark, SCENARIOS[name], np.full(num_envs, index))
    for e in range(num_envs):
        after, rewards, done = slow_night(
            houses[e].tolist(), previous[e], actions[:, e], u_extinguish[e], u_spark[e], SCENARIOS[name], index
        )
        assert result.houses[e].tolist() == after
        np.testing.assert_allclose(result.rewards[:, e], rewards, rtol=0, atol=1e-10)
        assert result.terminated[e] == done


@pytest.mark.parametrize("scenario", sorted(PUBLISHED))
def test_policies_agree_with_the_original_engine(scenario):
    *rewards, length = PUBLISHED[scenario]
    for policy, (mean, half_width) in zip(("random", "specialist"), rewards, strict=True):
        found = calibrate(scenario, policy, episodes=3000, seed=7, batch=1500)
        combined = np.hypot(found.standard_error, half_width / 1.96)
        assert abs(found.mean - mean) <= 4 * combined, (policy, found, mean)
        assert abs(found.mean_length - length) < 0.15
        assert found.interval[0] < found.mean < found.interval[1]


def test_calibration_tells_the_two_policies_apart_and_is_repeatable():
    random = calibrate("rest_trap", "random", episodes=200, seed=1)
    specialist = calibrate("rest_trap", "specialist", episodes=200, seed=1)
    assert specialist.mean - random.mean > 10 * np.hypot(random.standard_error, specialist.standard_error)
    assert random == calibrate("rest_trap", "random", episodes=200, seed=1)
    assert gap_closed(random.mean, random.mean, specialist.mean) == 0
    assert gap_closed(specialist.mean, random.mean, specialist.mean) == 1
    with pytest.raises(ValueError, match="at least 2"):
        calibrate("rest_trap", "random", episodes=1)


def test_trivial_cooperation_never_burns():
    found = calibrate("trivial_cooperation", "specialist", episodes=10)
    assert found.mean == 4 * (100 + 0.5) and found.mean_length == 13 and found.standard_error == 0


def test_specialist_works_at_its_lowest_burning_house():
    houses = np.array([[0, 0, 0, 0, 1, 0, 0, 0, 1, 0], [1, 2, 0, 0, 0, 1, 0, 0, 0, 1]])
    actions = specialist_policy(houses)
    assert actions[:, 0].tolist() == [[4, 1, 1], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert actions[:, 1].tolist() == [[0, 1, 1], [5, 1, 1], [0, 0, 0], [0, 0, 0]]


def test_observation_shows_what_it_says():
    env = BucketBrigade(2, "hard", num_agents=3, num_houses=5)
    first = env.reset_joint([1, 2])
    assert first.shape == (3, 2, 15 + 9 + 1 + 3) and first.dtype == np.float32
    np.testing.assert_array_equal(houses_from_observations(first, 3), env.houses)
    actions = np.array([[[4, 1, 0], [0, 0, 1]], [[2, 0, 1], [1, 1, 1]], [[0, 1, 1], [3, 0, 0]]])
    seen = env.step_joint(actions).observations
    np.testing.assert_array_equal(houses_from_observations(seen, 3), env.houses)
    np.testing.assert_allclose(seen[0, 0, 15:18], [0.8, 0.4, 0.0])  # locations / H
    assert seen[0, 0, 18:21].tolist() == [0, 1, 1]  # signals
    assert seen[0, 0, 21:24].tolist() == [1, 0, 1]  # modes
    assert seen[0, 0, 24] == np.float32(1 / 20)
    np.testing.assert_array_equal(seen[:, 0, 25:], np.eye(3))
    np.testing.assert_array_equal(seen[0, :, :25], env.state())


@pytest.mark.parametrize("raw", [False, True])
def test_observations_lie_in_their_space(raw):
    env = BucketBrigade(8, "hard", raw_observations=raw)
    rng = np.random.default_rng(0)
    observations = env.reset_joint(range(8))
    for _ in range(60):
        for i, agent in enumerate(env.possible_agents):
            for e in range(8):
                assert env.observation_spaces[agent].contains(observations[i, e])
        assert all(env.state_space.contains(state) for state in env.state())
        observations = env.step_joint(random_policy(env.houses, rng)).observations


def test_settings():
    assert BucketBrigade(scenario="easy", kappa=0.1, min_nights=3).scenario == dataclasses.replace(
        SCENARIOS["easy"], kappa=0.1, min_nights=3
    )
    with pytest.raises(ValueError, match="unknown scenario 'rest_tarp'; did you mean 'rest_trap'"):
        BucketBrigade(scenario="rest_tarp")
    with pytest.raises(ValueError, match="rho is 1.5; a probability"):
        BucketBrigade(rho=1.5)
    with pytest.raises(ValueError, match="num_houses is 0"):
        BucketBrigade(num_houses=0)


def test_bad_actions_are_named():
    env = BucketBrigade(2)
    env.reset_joint([0, 1])
    actions = np.zeros((4, 2, 3), dtype=int)
    with pytest.raises(ValueError, match=r"shape \(4, 2\).*\(4, 2, 3\)"):
        env.step_joint(actions[..., 0])
    actions[2, 1, 0] = 10
    with pytest.raises(ValueError, match=r"agent 'agent_2' of environment 1 .*\[10, 0, 0\]"):
        env.step_joint(actions)


def test_first_night_of_every_episode_pays_no_saving():
    env = BucketBrigade(
        16, "hard", kappa=1.0, rho=0.3, own_saved=1000, own_ruined=0, team_reward=0, team_penalty=0, min_nights=1
    )
    rng = np.random.default_rng(0)
    env.reset_joint(range(16))
    first, first_nights, other_nights = np.ones(16, dtype=bool), [], []
    for _ in range(200):
        play = specialist_policy if rng.random() < 0.5 else random_policy
        result = env.step_joint(play(env.houses, rng))
        first_nights.append(result.rewards[:, first])
        other_nights.append(result.rewards[:, ~first])
        first = result.terminated[0]
    first_rewards = np.concatenate(first_nights, axis=1)
    assert first_rewards.shape[1] > 50 and first_rewards.max() < 1
    assert np.concatenate(other_nights, axis=1).max() > 900
