"""A world of skills and goals, configurations of it, and runners of both doors with the same weights."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import torch

from tests.support import tiny_config
from thrust_rllib import JointEnv, JointStepResult

SKILLS = gym.spaces.MultiDiscrete([3, 4])
CONDITIONAL = {"head_names": ("skill", "goal"), "conditional_heads": {"goal": "skill"}}
MIXED = [SKILLS, gym.spaces.Discrete(3), gym.spaces.Box(-1, 1, (2,)), gym.spaces.MultiDiscrete([2, 2, 2])]


class World(JointEnv):
    """Agents see numbers that follow from the step; every other one leaves half way. An episode has 6 steps.

    Args:
        action_spaces: of the agents, in the order of their names.
        masked: observations carry a mask, which forbids one category of each head, another one each step.
    """

    def __init__(self, action_spaces=(SKILLS, SKILLS, SKILLS), masked=False):
        self.possible_agents = [f"a{i}" for i in range(len(action_spaces))]
        self.action_spaces = dict(zip(self.possible_agents, action_spaces, strict=True))
        self.masked, self.t, self.number = masked, 0, 0
        seen = gym.spaces.Box(-20, 20, (3,))
        self.observation_spaces = dict.fromkeys(self.possible_agents, seen)
        if masked:
            self.observation_spaces = {
                agent: gym.spaces.Dict({"observation": seen, "action_mask": gym.spaces.Box(0, 1, (n,), np.int8)})
                for agent, n in ((a, int(space.nvec.sum())) for a, space in self.action_spaces.items())
            }

    def reset_joint(self, seed=None):
        self.t = 0
        self.number += 1
        return self._see(self._acting())

    def _acting(self):
        return [agent for i, agent in enumerate(self.possible_agents) if self.t < 3 or i % 2 == 0]

    def _see(self, agents):
        return {agent: self._observation(agent) for agent in agents}

    def _observation(self, agent):
        i = self.possible_agents.index(agent)
        seen = np.array([np.sin(self.t + i), np.cos(3 * self.t * (i + 1)), 0.5 * (self.number % 8)], np.float32)
        return {"observation": seen, "action_mask": self.mask(self.t, agent)} if self.masked else seen

    def mask(self, t, agent):
        sizes = self.action_spaces[agent].nvec
        mask = np.ones(sizes.sum(), np.int8)
        mask[np.cumsum([0, *sizes[:-1]]) + t % sizes] = 0
        return mask

    def step_joint(self, actions):
        acted = self._acting()
        for agent in acted:
            assert self.action_spaces[agent].contains(actions[agent]), (agent, actions[agent])
            if self.masked:
                heads = np.split(self.mask(self.t, agent), np.cumsum(self.action_spaces[agent].nvec)[:-1])
                assert all(mask[a] for mask, a in zip(heads, actions[agent], strict=True)), (agent, actions[agent])
        self.t += 1
        left = {agent: agent not in self._acting() for agent in acted}
        cut = {agent: self.t == 6 for agent in acted}
        return JointStepResult(dict.fromkeys(acted, 1.0), self._see(acted), left, cut, over=self.t == 6)


def world_config(door="arrays", model=None, *, ratio="per_head", spaces=None, masked=False, runners=None, **options):
    """A validated configuration.

    Args:
        door: which.
        model: more of the `model_config`.
        ratio: as in the configuration.
        spaces: as of `World`.
        masked: as of `World`.
        runners: as in `tiny_config`.
        **options: as of `tiny_config`.
    """
    env_config = {"action_spaces": spaces or [SKILLS] * 3, "masked": masked}
    model = {"fcnet_hiddens": [16, 12], **(model or {})}
    config = tiny_config(World, env_config, model=model, runners={**(runners or {}), "sampling": door}, **options)
    config.ratio = ratio
    config.validate()
    return config


def world_runner(config):
    """A runner with random weights, the same in both doors."""
    runner = config.env_runner_cls(config=config, worker_index=0)
    generator = torch.Generator().manual_seed(0)
    state = runner.module.get_state()
    for module_id in sorted(state):
        state[module_id] = {
            name: (0.7 * torch.randn(np.shape(value), generator=generator)).numpy()
            for name, value in sorted(state[module_id].items())
        }
    runner.set_state({"rl_module": state})
    return runner


def batch_of(config, runner, samples):
    """The learner's batch of what a runner sampled."""
    if not config.samples_episodes:
        (batch,) = samples
        return batch
    connector = config.build_learner_connector(None, None)
    columns = connector(rl_module=runner.module, batch={}, episodes=samples, shared_data={})
    return columns["joint_batch"]
