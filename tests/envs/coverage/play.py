"""Worlds beside their slow references; observations and actions as arrays [N, E, ...]."""

from dataclasses import dataclass

import numpy as np

from tests.envs.coverage.reference import World
from thrust_rllib.envs.coverage import CoverageWorld

SHARED = (
    "comm_r", "cover_r", "horizon", "stride", "actions", "roles", "floor", "degree_target", "coverage_reward",
    "reach_reward", "crowding_penalty", "tau",
)  # fmt: skip
"""Settings that the reference knows, too."""


@dataclass
class Played:
    """A step's result; `seen` and `last_seen` {key: [N, E, ...]}, the second before the reset of an episode's end."""

    rewards: np.ndarray
    extras: dict
    truncated: np.ndarray
    terminated: np.ndarray
    seen: dict
    last_seen: dict


def together(env, observations):
    """{key: [N, E, ...]} of observations by agent."""
    first = observations[env.possible_agents[0]]
    return {key: np.stack([observations[agent][key] for agent in env.possible_agents]) for key in first}


def reset(seeds, **settings):
    """A world per seed, and a reference of each at its start.

    Returns:
        The vectorised environment, its observations {key: [N, E, ...]}, one reference per environment.
    """
    env = CoverageWorld(num_envs=len(seeds), **settings)
    observations = env.reset_joint(list(seeds))
    return env, together(env, observations), references(env, settings)


def references(env, settings):
    """One reference per environment, at the start of an episode from where the environment's agents are."""
    known = {name: value for name, value in settings.items() if name in SHARED}
    return [World(env.walls[e], env.positions[e], **known) for e in range(env.num_envs)]


def step(env, actions):
    """Plays actions [N, E] or [N, E, heads]."""
    actions = np.asarray(actions)
    result = env.step_joint(dict(zip(env.possible_agents, actions, strict=True)))
    seen = together(env, result.observations)
    last = seen if result.final_observations is None else together(env, result.final_observations)
    return Played(result.rewards, result.extras, result.truncated, result.terminated, seen, last)


def random_actions(env, rng):
    """Any actions of the space, allowed by the mask or not; [N, E] or [N, E, 2]."""
    space = env.action_spaces[env.possible_agents[0]]
    sizes = getattr(space, "nvec", None)
    shape = (env.num_agents, env.num_envs)
    return rng.integers(0, space.n, shape) if sizes is None else rng.integers(0, sizes, (*shape, len(sizes)))


def cells_in(plane):
    """The cells of a boolean plane as a set."""
    return {(int(r), int(c)) for r, c in np.argwhere(plane)}
