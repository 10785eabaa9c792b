"""Trajectories of joint environments under actions that depend on a seed alone."""

from __future__ import annotations

import copy

import gymnasium as gym
import numpy as np

from thrust_rllib.envs import JointEnv, JointStepResult, VectorJointEnv
from thrust_rllib.envs.spaces import head_sizes, map_space


class Pair(JointEnv):
    """Two agents, Box(3), Discrete(2); `change` may alter what a step returns."""

    def __init__(self, length=4, change=None, agents=("a0", "a1")):
        self.possible_agents = list(agents)
        self.observation_spaces = {a: gym.spaces.Box(-1, 1, (3,)) for a in agents}
        self.action_spaces = {a: gym.spaces.Discrete(2) for a in agents}
        self.length, self.change, self.t = length, change, 0
        self.rng = np.random.default_rng()

    def _see(self):
        return {a: self.rng.uniform(-1, 1, 3).astype(np.float32) for a in self.possible_agents}

    def reset_joint(self, seed=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.t = 0
        return self._see()

    def step_joint(self, actions):
        self.t += 1
        rewards = {a: float(actions[a]) for a in self.possible_agents}
        end = {a: self.t == self.length for a in self.possible_agents}
        result = JointStepResult(rewards, self._see(), dict.fromkeys(self.possible_agents, False), end)
        return result if self.change is None else self.change(self, result)

    def get_state(self):
        return copy.deepcopy((self.t, self.rng))

    def set_state(self, state):
        self.t, self.rng = copy.deepcopy(state)


def sample(space, rng):
    """An element of `space`."""

    def draw(leaf):
        if isinstance(leaf, gym.spaces.Box):
            return rng.uniform(-1, 1, leaf.shape).astype(leaf.dtype)
        count = leaf.n if isinstance(leaf, gym.spaces.Discrete) else leaf.nvec
        return leaf.start + rng.integers(count)

    return map_space(space, draw)


def legal(env, observations, actions):
    """Replaces actions that a mask forbids, head by head."""
    for agent in env.possible_agents:
        seen = observations[agent]
        if isinstance(seen, dict) and "action_mask" in seen:
            sizes = head_sizes(env.action_spaces[agent])
            chosen = np.asarray(actions[agent])
            heads = chosen.reshape(*chosen.shape[: chosen.ndim - (len(sizes) > 1)], len(sizes))
            masks = np.split(np.asarray(seen["action_mask"]), np.cumsum(sizes)[:-1], axis=-1)
            parts = [
                np.where(np.take_along_axis(mask, head[..., None], -1)[..., 0] > 0, head, mask.argmax(-1))
                for mask, head in zip(masks, np.moveaxis(heads, -1, 0), strict=True)
            ]
            actions[agent] = np.stack(parts, axis=-1).reshape(chosen.shape)
    return actions


def play_vector(env: VectorJointEnv, seeds, steps, action_seeds=None):
    """All results of `steps` steps, by environment index: the actions of index e come from action_seeds[e]."""
    seeds = list(seeds)
    generators = [np.random.default_rng(s) for s in (seeds if action_seeds is None else action_seeds)]
    observations = env.reset_joint(seeds)
    log = [observations]
    for _ in range(steps):
        actions = {a: [] for a in env.possible_agents}
        for rng in generators:
            for agent in env.possible_agents:
                actions[agent].append(sample(env.action_spaces[agent], rng))
        batch = {a: np.stack([np.asarray(x) for x in actions[a]]) for a in env.possible_agents}
        if not env.stacked:
            batch = legal(env, observations, batch)
        result = env.step_joint(np.stack(list(batch.values())) if env.stacked else batch)
        observations = result.observations
        log.append((observations, result.rewards, result.terminated, result.truncated))
        if result.final_observations is not None:
            ended = (np.asarray(result.terminated) | result.truncated).all(axis=0)
            log.append(("final", ended, result.final_observations))
    return log


def play(env: JointEnv, seed, steps):
    """The same for one environment with dicts by agent, reset without a seed at each end."""
    rng = np.random.default_rng(seed)
    observations = env.reset_joint(seed)
    log = [observations]
    for _ in range(steps):
        actions = {a: sample(env.action_spaces[a], rng) for a in env.possible_agents}
        result = env.step_joint(legal(env, observations, actions))
        ended = all(bool(flag(result.terminated, a) or flag(result.truncated, a)) for a in env.possible_agents)
        log.append(
            {
                a: (
                    result.observations.get(a),
                    float(result.rewards[a]),
                    flag(result.terminated, a),
                    flag(result.truncated, a),
                )
                for a in env.possible_agents
            }
        )
        observations = result.observations
        if ended:
            observations = env.reset_joint()
            log.append(observations)
    return log


def flag(flags, agent):
    return bool(flags[agent] if isinstance(flags, dict) else flags)


def assert_same(left, right):
    """Bitwise equality of nested structures."""
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    else:
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


def row(log, index, stacked):
    """What environment `index` did, in a log of `play_vector`."""

    def pick(observations):
        if stacked:
            return observations[:, index]
        return {agent: pick_tree(values, index) for agent, values in observations.items()}

    out = []
    for entry in log:
        if isinstance(entry, tuple) and isinstance(entry[0], str):
            if entry[1][index]:
                out.append(pick(entry[2]))
        elif isinstance(entry, tuple):
            out.append((pick(entry[0]), *[np.asarray(part)[:, index] for part in entry[1:]]))
        else:
            out.append(pick(entry))
    return out


def pick_tree(values, index):
    if isinstance(values, dict):
        return {key: pick_tree(inner, index) for key, inner in values.items()}
    if isinstance(values, tuple):
        return tuple(pick_tree(inner, index) for inner in values)
    return values[index]
