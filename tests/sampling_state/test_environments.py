"""Environments and adapters go on from a saved state as if nothing had happened."""

from __future__ import annotations

import pickle

import gymnasium as gym
import numpy as np
import pytest

from tests.sampling_state.games import (
    Alone,
    Forwarding,
    InTurn,
    SavedJointLives,
    SavedMultiLives,
    SavedTurns,
    SavedWalk,
    SavedZooLives,
    Together,
    Unsaved,
    Walk,
)
from tests.sampling_state.saving import differences
from thrust_rllib.envs import SingleJointEnv, list_envs, make_vector_env
from thrust_rllib.envs.bucket_brigade import BucketBrigade
from thrust_rllib.envs.gymnasium import GymnasiumJointEnv, GymnasiumVectorJointEnv
from thrust_rllib.envs.multi_agent_vector import MultiAgentVector
from thrust_rllib.envs.pettingzoo import JointEnvParallel, PettingZooJointEnv
from thrust_rllib.envs.rllib import JointEnvMultiAgentEnv, RLlibJointEnv
from thrust_rllib.envs.sync_vector import SyncVectorJointEnv
from thrust_rllib.envs.tuple_style import TupleJointEnv
from thrust_rllib.envs.turn_based import AECJointEnv

CONFIGS = {"debug/faulty": {"fault": "none"}}
SCALAR = {
    "walk": SavedWalk,
    "lives": SavedJointLives,
    "turns": SavedTurns,
    "single": lambda: SingleJointEnv(BucketBrigade),
    "single of agents that come and go": lambda: SingleJointEnv(SyncVectorJointEnv(SavedJointLives, 1)),
    "pettingzoo": lambda: PettingZooJointEnv(SavedZooLives()),
    "parallel": lambda: PettingZooJointEnv(JointEnvParallel(SavedJointLives())),
    "rllib": lambda: RLlibJointEnv(SavedMultiLives()),
    "multi-agent": lambda: RLlibJointEnv(JointEnvMultiAgentEnv(SavedTurns())),
    "multi-agent by name": lambda: RLlibJointEnv(JointEnvMultiAgentEnv("debug/match_observation")),
    "gymnasium": lambda: GymnasiumJointEnv(Alone()),
    "tuples": lambda: TupleJointEnv(Together()),
    "turn-based": lambda: AECJointEnv(InTurn()),
}
FORMS = {
    **{name: lambda make=make: SyncVectorJointEnv(make, 2) for name, make in SCALAR.items()},
    **{name: lambda name=name: make_vector_env(name, CONFIGS.get(name), 3) for name in list_envs()},
}


def actions(env, seen, rng):
    """Random ones for all agents; whoever is absent does not play them."""
    chosen = {}
    for agent, space in env.action_spaces.items():
        if isinstance(space, gym.spaces.Box):
            chosen[agent] = rng.uniform(-1, 1, (env.num_envs, *space.shape)).astype(np.float32)
        elif isinstance(space, gym.spaces.MultiDiscrete):
            chosen[agent] = rng.integers(space.nvec, size=(env.num_envs, len(space.nvec)))
        else:
            mask = None if env.stacked or not isinstance(seen[agent], dict) else seen[agent].get("action_mask")
            mask = np.ones((env.num_envs, space.n)) if mask is None else mask
            chosen[agent] = (rng.random(mask.shape) * mask).argmax(-1) + space.start
    return np.stack(list(chosen.values())) if env.stacked else chosen


def play(env, seen, rng, steps):
    """All that `steps` steps return, and the last observations."""
    answers = []
    for _ in range(steps):
        result = env.step_joint(actions(env, seen, rng))
        seen = result.observations
        answers.append({name: getattr(result, name) for name in result.__slots__})
    return answers, seen


@pytest.mark.parametrize("steps", [0, 13, 31])
@pytest.mark.parametrize("form", FORMS)
def test_a_new_environment_goes_on_where_the_first_was_saved(form, steps):
    first, second, fresh = (FORMS[form]() for _ in range(3))
    _, seen = play(first, first.reset_joint(range(first.num_envs)), np.random.default_rng(0), steps)
    before = pickle.dumps(first.get_state())
    second.set_state(pickle.loads(before))
    kept = first.get_state()
    wanted, _ = play(first, seen, np.random.default_rng(1), 30)
    assert not differences(wanted, play(second, seen, np.random.default_rng(1), 30)[0])
    assert pickle.dumps(kept) == before  # a copy, of something that goes on
    unlike = play(fresh, fresh.reset_joint(range(9, 9 + fresh.num_envs)), np.random.default_rng(1), 30)[0]
    assert not steps or differences(wanted, unlike)


class WithoutState(gym.Wrapper):
    """May hold anything."""


UNSAVED = {
    "JointEnv": Walk,
    "vector": lambda: SyncVectorJointEnv(Walk, 2),
    "multi-agent": lambda: JointEnvMultiAgentEnv(Walk()),
    "parallel": lambda: JointEnvParallel(Walk()),
    "Unsaved": lambda: RLlibJointEnv(Unsaved()),
    "Unsaved in a vector": lambda: MultiAgentVector(Unsaved, 2, "unsaved"),
    "Forwarding": lambda: PettingZooJointEnv(Forwarding(SavedZooLives())),
    "WithoutState": lambda: GymnasiumJointEnv(WithoutState(Alone())),
    "TimeLimit": lambda: GymnasiumJointEnv("CartPole-v1"),
    "gymnasium vector": lambda: GymnasiumVectorJointEnv("CartPole-v1", 2),
}


@pytest.mark.parametrize("form", UNSAVED)
def test_what_cannot_be_saved_says_so(form):
    with pytest.raises(NotImplementedError, match="get_state"):
        UNSAVED[form]().get_state()
