"""An environment that counts, connector pieces for it, and what the modules saw compared with what is learned from."""

from __future__ import annotations

from collections import defaultdict

import gymnasium as gym
import numpy as np
import torch
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.connectors.env_to_module.observation_preprocessor import SingleAgentObservationPreprocessor
from ray.rllib.core.columns import Columns
from ray.rllib.env.multi_agent_env import MultiAgentEnv

from tests.support import make_learner, tiny_config
from thrust_rllib.connectors.team_observations import ACTING
from thrust_rllib.episode_runner import JointEpisodeRunner

LENGTH = 5


class Counting(MultiAgentEnv):
    """Two agents see 1 + t + 20·episode + 1000·(agent's index) in every element, and earn 1; cut after `length` steps.

    Keeps what it was told to do: `self.played`, a list of {agent: action}.
    """

    def __init__(self, config):
        super().__init__()
        self.agents = self.possible_agents = ["right", "left"]
        self.shape, self.length = tuple(config.get("shape", (3,))), config.get("length", LENGTH)
        action_space = config.get("action_space", gym.spaces.Discrete(3))
        self.observation_spaces = {a: gym.spaces.Box(0.0, 5000.0, self.shape) for a in self.agents}
        self.action_spaces = {a: action_space for a in self.agents}
        self.episode, self.played = -1, []

    def _see(self):
        return {
            agent: np.full(self.shape, 1 + self.t + 20 * self.episode + 1000 * i, np.float32)
            for i, agent in enumerate(self.agents)
        }

    def reset(self, *, seed=None, options=None):
        self.t, self.episode = 0, self.episode + 1
        return self._see(), {}

    def step(self, actions):
        self.t += 1
        self.played.append(actions)
        return self._see(), dict.fromkeys(actions, 1.0), {"__all__": False}, {"__all__": self.t == self.length}, {}


def general_config(env=Counting, env_config=None, *, pieces=None, to_env=None, learner=None, runners=None, **options):
    """`tiny_config` with connector functions; sampling is left at "auto"."""
    set_ = {"env_to_module_connector": pieces, "module_to_env_connector": to_env}
    runners = {**(runners or {}), **{name: value for name, value in set_.items() if value is not None}}
    config = tiny_config(env, env_config or {}, runners=runners, **options)
    return config if learner is None else config.learners(learner_connector=learner)


def runner_and_learner(config):
    config.validate()
    assert config.env_runner_cls is JointEpisodeRunner
    runner = JointEpisodeRunner(config=config, worker_index=0)
    return runner, make_learner(config, runner.get_spaces())


def watch(runner):
    """{(agent, environment index): what its module saw, step by step}, growing."""
    seen = defaultdict(list)
    forward = runner.module.forward_exploration

    def forward_and_note(batch, **kwargs):
        for module_id, acting in runner._shared_data[ACTING].items():
            for (env, agent), obs in zip(acting.rows, batch[module_id][Columns.OBS].numpy(), strict=True):
                seen[agent, env].append(obs.copy())
        return forward(batch, **kwargs)

    runner.module.forward_exploration = forward_and_note
    return seen


def assert_the_learner_sees_what_the_modules_saw(config, num_samples=3, steps=16):
    """Of several samples that cut episodes; also what an episode that goes on bootstraps from.

    Returns:
        The batches.
    """
    runner, learner = runner_and_learner(config)
    seen, batches, following = watch(runner), [], {}
    for _ in range(num_samples):
        seen.clear()
        (batch,) = learner._batches(runner.sample(num_timesteps=steps))
        batches.append(batch)
        for stream in batch.streams():
            for env in range(runner.num_envs):
                key, acted = (stream.agent_id, env), stream.present[:, env]
                np.testing.assert_array_equal(stream.obs[acted, env], np.stack(seen[key]))
                if key in following:
                    np.testing.assert_array_equal(following[key], seen[key][0])
        following = {
            (agent, env): streams.bootstrap_obs[i, np.searchsorted(batch.bootstrap_rows, row)]
            for env, episode in enumerate(runner._ongoing_episodes)
            if len(episode.agent_episodes) and (row := last_row(batch, env)) is not None
            for streams in batch.modules.values()
            for i, agent in enumerate(streams.agents)
        }
        assert following or config.batch_mode == "complete_episodes"
    return batches


def last_row(batch, env):
    t = int(np.flatnonzero(batch.valid[:, env])[-1])
    return t * batch.valid.shape[1] + env


class Half(SingleAgentObservationPreprocessor):
    def preprocess(self, observation, episode):
        return observation / 2


class Wider(SingleAgentObservationPreprocessor):
    """Puts the number of its agent's steps behind each observation."""

    def recompute_output_observation_space(self, input_observation_space, input_action_space):
        return gym.spaces.Dict(
            {a: gym.spaces.Box(0.0, 5000.0, (s.shape[0] + 1,)) for a, s in input_observation_space.spaces.items()}
        )

    def preprocess(self, observation, episode):
        return np.append(observation, episode.t).astype(np.float32)


class Decides(ConnectorV2):
    """Chooses action 2 for all, whatever the module said."""

    def __call__(self, *, batch, **kwargs):
        for outputs in batch.values():
            outputs[Columns.ACTIONS] = torch.full((len(outputs[Columns.ACTION_DIST_INPUTS]),), 2)
        return batch


class PaysByStep(ConnectorV2):
    """Rewards become 10·t of the agent's own steps in this fragment."""

    def __call__(self, *, episodes, batch, **kwargs):
        for single in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False):
            single.set_rewards(new_data=10.0 * np.arange(len(single)))
        return batch
