"""Environments of other packages, unchanged: what they show and how agents come and go, in one random episode each."""

import gymnasium as gym
import numpy as np
import pytest

from tests.envs.helpers import assert_same
from thrust_rllib.envs import make_joint_env
from thrust_rllib.envs.adapt import takes_turns
from thrust_rllib.envs.spaces import map_space

RLLIB = "ray.rllib.examples.envs.classes.multi_agent"
STEPS = 100
# name: settings, agents, whether they take turns, whether some end before others
ENVS = {
    "pettingzoo:mpe2.simple_tag_v3": ({}, 4, False, False),
    "pettingzoo:mpe2.simple_world_comm_v3": ({}, 6, False, False),
    "pettingzoo:mpe2.simple_crypto_v3": ({}, 3, False, False),
    "pettingzoo:mpe2.simple_reference_v3": ({}, 2, False, False),
    "pettingzoo:sisl.pursuit_v5": ({"max_cycles": 20}, 8, False, False),
    "pettingzoo:butterfly.knights_archers_zombies_v11": ({"spawn_delay": 1, "line_death": True}, 4, False, True),
    "pettingzoo:classic.rps_v2": ({}, 2, False, False),
    "pettingzoo:classic.connect_four_v3": ({}, 2, True, False),
    "pettingzoo:classic.tictactoe_v3": ({}, 2, True, False),
    "pettingzoo:classic.chess_v6": ({}, 2, True, False),
    "gymnasium:lbforaging:Foraging-8x8-2p-2f-coop-v3": ({}, 2, False, False),
    "gymnasium:rware:rware-tiny-2ag-v2": ({"max_steps": 40}, 2, False, False),
    f"{RLLIB}.double_row_corridor_env:DoubleRowCorridorEnv": ({"length": 3}, 2, False, True),
    f"{RLLIB}.guess_the_number_game:GuessTheNumberGame": ({}, 2, True, False),
    f"{RLLIB}.rock_paper_scissors:RockPaperScissors": ({"sheldon_cooper_mode": True}, 2, False, False),
    f"{RLLIB}.tic_tac_toe:TicTacToe": ({}, 2, True, False),
    f"{RLLIB}.two_step_game:TwoStepGame": ({"one_hot_state_encoding": True}, 2, False, False),
    f"{RLLIB}.pettingzoo_connect4:MultiAgentConnect4": ({}, 2, True, False),
    f"{RLLIB}.pettingzoo_chess:MultiAgentChess": ({}, 2, True, False),
    f"{RLLIB}:MultiAgentCartPole": ({"num_agents": 3}, 3, False, True),
    f"{RLLIB}.bandit_envs_discrete:SimpleContextualBandit": ({}, 1, False, False),
    f"{RLLIB}.bandit_envs_discrete:LinearDiscreteEnv": ({}, 1, False, False),
    f"{RLLIB}.bandit_envs_discrete:WheelBanditEnv": ({}, 1, False, False),
    f"{RLLIB}.bandit_envs_recommender_system:ParametricRecSys": ({"user_time_budget": 5.0}, 1, False, False),
}
# They draw from the global generators of random and numpy, whatever the seed.
UNSEEDED = ("tic_tac_toe:", "MultiAgentChess", "bandit_envs")
# They pay the agent that acts next, and not always the one that has acted.
PAYS_NEXT = ("MultiAgentConnect4", "MultiAgentChess")


def holds(space, value):
    """Whether a space contains a value, once its parts have the space's data types (RLlib's examples mix them)."""
    parts = []

    def check(leaf, part):
        part = np.asarray(part)
        parts.append(leaf.contains(part.astype(leaf.dtype)) and np.can_cast(part.dtype, leaf.dtype, "same_kind"))

    map_space(space, check, value)
    return all(parts)


def choose(space, seen, rng):
    if isinstance(seen, dict) and "action_mask" in seen:
        return rng.choice(np.flatnonzero(seen["action_mask"]))
    space.seed(int(rng.integers(2**31)))
    return space.sample()


def play(env, seed, pays_next=False):
    """Plays at most STEPS steps of an episode; the number of steps, the moment of each agent's end, whether over."""
    rng = np.random.default_rng(seed)
    seen, ends, living, over = env.reset_joint(seed), {}, set(), False
    for step in range(STEPS):
        acting = [agent for agent in seen if agent not in ends]
        assert acting and set(acting) <= set(env.possible_agents)
        living |= set(acting)
        for agent, value in seen.items():
            assert holds(env.observation_spaces[agent], value), (agent, step, value)
        result = env.step_joint({agent: choose(env.action_spaces[agent], seen[agent], rng) for agent in acting})
        assert pays_next or set(acting) <= set(result.rewards)
        assert all(np.isfinite(reward) for reward in result.rewards.values())
        for named in (result.rewards, result.observations):
            assert set(named) <= set(env.possible_agents) and not set(named) & set(ends)
        for agent in living - set(ends):
            flags = [f.get(agent, False) if isinstance(f, dict) else f for f in (result.terminated, result.truncated)]
            assert all(isinstance(f, (bool, np.bool_)) for f in flags)
            if any(flags):
                ends[agent] = step
            assert not flags[1] or flags[0] or agent in result.observations
        seen = result.observations
        over = living <= set(ends) if result.over is None else result.over
        if over:
            assert living == set(ends)
            break
    for agent, value in seen.items():
        assert holds(env.observation_spaces[agent], value), agent
    return step + 1, ends, over


@pytest.mark.parametrize("name", ENVS)
def test_an_episode(name):
    config, agents, turns, early = ENVS[name]
    env = make_joint_env(name, config)
    assert len(env.possible_agents) == agents and takes_turns(env) is turns
    assert all(isinstance(space, gym.Space) for space in env.action_spaces.values())
    steps, ends, over = play(env, 3, any(part in name for part in PAYS_NEXT))
    assert over or steps == STEPS
    if early:
        assert 0 < list(ends.values()).count(min(ends.values())) < agents
    if not any(part in name for part in UNSEEDED):
        # In new environments: lbforaging places its players anew where they did not stand before.
        assert_same(*(make_joint_env(name, config).reset_joint(5) for _ in range(2)))
    env.close()


def test_what_an_episode_would_not_forgive():
    class Wrong(gym.Env):
        observation_space = gym.spaces.Tuple((gym.spaces.Box(0, 1, (1,)),) * 2)
        action_space = gym.spaces.Tuple((gym.spaces.Discrete(2),) * 2)

        def reset(self, *, seed=None, options=None):
            return (np.zeros(1, np.float32),) * 2, {}

        def step(self, actions):
            return (np.full(1, 2.0, np.float32),) * 2, [0.0, 0.0], False, False, {}

    with pytest.raises(AssertionError, match="agent_0"):
        play(make_joint_env(Wrong), 0)
    assert not holds(gym.spaces.Discrete(2), 0.5)
