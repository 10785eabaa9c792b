"""Agents that come and go and hear each other over a graph that changes in each step; configurations of such teams.

Links point at absent agents, too, and at those that have ended: who hears whom is known from the links *and* from who
acts. `Swarm` does not say beforehand who acts, so that its links are right.
"""

from __future__ import annotations

import copy

import gymnasium as gym
import numpy as np
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from tests.support import tiny_config
from thrust_rllib import JointEnv, JointStepResult
from thrust_rllib.envs import VectorJointEnv, make_vector_env

AGENTS = ("cat", "ant", "bee", "dog")  # the modules' order is not theirs
HEADS = (2, 3)
WIDTH = 3
ONE, GROUPS = "shared", {"left": ["cat", "bee"], "right": ["ant", "dog"]}
APART = {agent: [agent] for agent in AGENTS}
DEAF = {"deaf": ["ant"], "left": ["bee", "cat"], "right": ["dog"]}
MODEL = {"message_rounds": 2, "message_size": 8, "encoder_hiddens": [10]}
CELLS = {
    "none": {},
    "gru": {"cell": "gru", "cell_size": 5, "max_seq_len": 5},
    "lstm": {"cell": "lstm", "cell_size": 4},
    "message_gru": {"cell": "message_gru", "max_seq_len": 5},
}
NORMALIZED = {"normalize_observations": True}


class Meadow(JointEnv):
    """Four agents with lives drawn anew in each episode; one of them lives through all of it.

    Agents are born late, end early (terminated with or without a last observation, or truncated alone), or are not in
    the episode at all. They see their index, the step and a random number, moved by the last actions. The same goes for
    who is paid: by the own action and those of the others.

    Args:
        heads: sizes of MultiDiscrete actions; None: three actions.
        masked: observations carry a mask, which forbids one category of each head.
        stays: everybody lives through all episodes.
        length: the most steps of an episode.
    """

    def __init__(self, heads=None, masked=False, stays=False, length=9):
        self.possible_agents = list(AGENTS)
        self.heads, self.masked, self.stays, self.length = heads, masked, stays, length
        self.sizes = (3,) if heads is None else tuple(heads)
        space = gym.spaces.Discrete(3) if heads is None else gym.spaces.MultiDiscrete(heads)
        seen = {
            "links": gym.spaces.Box(0, 1, (len(AGENTS),)),
            "observations": gym.spaces.Box(-20, 20, (WIDTH,)),
            **({"action_mask": gym.spaces.Box(0, 1, (sum(self.sizes),), np.int8)} if masked else {}),
        }
        self.observation_spaces = {a: gym.spaces.Dict(seen) for a in AGENTS}
        self.action_spaces = {a: copy.deepcopy(space) for a in AGENTS}
        self.rng, self.t, self.moved, self.last, self.lives = np.random.default_rng(), 0, 0, 0, {}

    def reset_joint(self, seed=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.t, self.moved = 0, 0
        self.last = int(self.rng.integers(3, self.length))
        whole = AGENTS[self.rng.integers(len(AGENTS))]
        self.lives = {}
        for agent in AGENTS:
            stays = self.stays or agent == whole
            first = 0 if stays else int(self.rng.integers(max(1, self.last // 2)))
            last = self.last if stays or self.rng.random() < 0.3 else int(self.rng.integers(first, self.last + 1))
            end = ("terminated", "truncated", "silent")[self.rng.integers(3)]
            if stays or self.rng.random() < 0.85:
                self.lives[agent] = (first, last, end)
        self.draw()
        return self.see(self.acting())

    def acting(self):
        return [a for a, (first, last, _) in self.lives.items() if first <= self.t <= last]

    def draw(self):
        """The next graph, numbers and masks."""
        n = len(AGENTS)
        self.links = self.rng.uniform(0.1, 1.0, (n, n)) * (self.rng.random((n, n)) < 0.6) * (1 - np.eye(n))
        self.numbers = self.rng.normal(size=n) + 0.5 * self.moved
        self.masks = np.ones((n, sum(self.sizes)), np.int8)
        for i in range(n):
            for start, size in zip(np.cumsum([0, *self.sizes[:-1]]), self.sizes, strict=True):
                self.masks[i, start + self.rng.integers(size)] = 0

    def see(self, agents):
        return {agent: self.seen_by(AGENTS.index(agent)) for agent in agents}

    def seen_by(self, i):
        seen = {
            "links": self.links[i].astype(np.float32),
            "observations": np.array([i - 1.5, 0.3 * self.t, self.numbers[i]], np.float32),
        }
        return {**seen, "action_mask": self.masks[i].copy()} if self.masked else seen

    def step_joint(self, actions):
        acted = self.acting()
        assert set(actions) == set(acted)
        for agent, action in actions.items():
            if self.masked:
                allowed = np.split(self.masks[AGENTS.index(agent)], np.cumsum(self.sizes)[:-1])
                assert all(mask[a] for mask, a in zip(allowed, np.atleast_1d(action), strict=True))
        done = {a: int(np.sum(action)) for a, action in actions.items()}
        self.moved = sum(done.values())
        rewards = {a: float(done[a] - 0.3 * self.moved + 0.1 * self.t + AGENTS.index(a)) for a in acted}
        ended = {a: self.lives[a][2] for a in acted if self.lives[a][1] == self.t}
        self.t += 1
        self.draw()
        seen = self.see([*self.acting(), *(a for a, end in ended.items() if end != "silent")])
        return JointStepResult(
            rewards,
            seen,
            {a: ended.get(a) in ("terminated", "silent") for a in acted},
            {a: ended.get(a) == "truncated" for a in acted},
            {"difference_reward": {a: np.float32(done[a] + 0.2 * self.t) for a in acted}},
            over=self.t > self.last,
        )

    def get_state(self):
        names = ("t", "moved", "last", "lives", "links", "numbers", "masks")
        return copy.deepcopy({"rng": self.rng.bit_generator.state, **{name: getattr(self, name) for name in names}})

    def set_state(self, state):
        state = copy.deepcopy(state)
        self.rng.bit_generator.state = state.pop("rng")
        vars(self).update(state)


class Swarm(VectorJointEnv):
    """E meadows as arrays. Absent agents show numbers of their space that mean nothing.

    Args:
        num_envs: E.
        tells: `acts_next` says who acts, and links point at absent agents, too.
        **meadow: of `Meadow`.
    """

    def __init__(self, num_envs=1, tells=False, **meadow):
        self.inner = make_vector_env(lambda: Meadow(**meadow), {}, num_envs)
        self.num_envs, self.tells = num_envs, tells
        self.possible_agents = list(AGENTS)
        self.observation_spaces = self.inner.observation_spaces
        self.action_spaces = self.inner.action_spaces

    def acts_next(self):
        return self.inner.acts_next() if self.tells else None

    def _shown(self, seen, acting, ended):
        """{agent: {key: [E, …]}}; agents that act next see, and those whose last observation is shown."""
        if seen is None:
            return None
        shown = {}
        for i, agent in enumerate(AGENTS):
            shown[agent] = {key: x.copy() for key, x in seen[agent].items()}
            absent = ~(acting[i] | ended[i])
            shown[agent]["observations"][absent] = -17.0
            shown[agent]["links"][absent] = 0.9
            if not self.tells:
                shown[agent]["links"] *= acting.T
        return shown

    def reset_joint(self, seeds=None):
        seen, acting = self.inner.reset_joint(seeds), self.inner.acts_next()
        return self._shown(seen, acting, ~acting & False)

    def step_joint(self, actions):
        result = self.inner.step_joint(actions)
        result.observations = self._shown(result.observations, self.inner.acts_next(), result.truncated)
        result.final_observations = self._shown(result.final_observations, result.truncated, result.truncated)
        return result

    def get_state(self):
        return self.inner.get_state()

    def set_state(self, state):
        self.inner.set_state(state)


def team_config(cell="none", policies=None, env=Meadow, env_config=None, model=None, **options):
    """`tiny_config` of a team that exchanges messages; the module "deaf" does not.

    Args:
        cell: of `CELLS`.
        policies: as `.multi_agent(policies=…)`.
        env: as in `tiny_config`.
        env_config: as in `tiny_config`.
        model: more of the `model_config`.
        **options: as in `tiny_config`.
    """
    policies = GROUPS if policies is None else policies
    common = {**MODEL, **CELLS[cell], **(model or {})}
    config = tiny_config(env, env_config, policies=policies, model=common, **options)
    if isinstance(policies, dict) and "deaf" in policies:
        memory = {"cell": "gru", "cell_size": 6, "max_seq_len": common.get("max_seq_len")} if "cell" in common else {}
        plain = {"fcnet_hiddens": [9], **memory}
        specs = {m: RLModuleSpec(model_config=plain if m == "deaf" else common) for m in policies}
        config.rl_module(rl_module_spec=MultiRLModuleSpec(rl_module_specs=specs), model_config={})
    return config
