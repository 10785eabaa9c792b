"""The environment that speed is measured on, and the training constants that every side has.

Each agent has a point in [-1, 1]^16 that drifts and is pushed by its action and by noise (drawn at the reset); it is
paid for the action that its point asks for. Little work, but real: two products, one tanh. Episodes last 100 steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.env.multi_agent_env import MultiAgentEnv

from thrust_rllib import JointPPOConfig, JointStepResult, VectorJointEnv

OBS, ACTIONS, LENGTH = 16, 5, 100
BATCH, MINIBATCH, EPOCHS = 2048, 256, 4
LR, GAMMA, LAMBDA, GRAD_CLIP = 3e-4, 0.99, 0.95, 0.5
CLIP, VALUE_CLIP, VALUE_COEFF, ENTROPY_COEFF = 0.2, 0.2, 0.5, 0.01


def rules() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Drift [16, 16], push of each action [5, 16] and what a point asks for [16, 5]."""
    rng = np.random.default_rng(0)
    drift = np.linalg.qr(rng.normal(size=(OBS, OBS)))[0]
    return tuple(
        m.astype(np.float32) for m in (drift, rng.normal(size=(ACTIONS, OBS)) / 4, rng.normal(size=(OBS, ACTIONS)))
    )


class DriftingTeam(MultiAgentEnv):
    """One environment, dicts by agent."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.agents = self.possible_agents = [f"agent_{i}" for i in range(config["agents"])]
        self.observation_spaces = {a: gym.spaces.Box(-1.0, 1.0, (OBS,), np.float32) for a in self.agents}
        self.action_spaces = {a: gym.spaces.Discrete(ACTIONS) for a in self.agents}
        self.drift, self.push, self.asks = rules()
        self.rng = np.random.default_rng()

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.t = 0
        self.points = self.rng.uniform(-1, 1, (len(self.agents), OBS)).astype(np.float32)
        self.noise = 0.1 * self.rng.standard_normal((LENGTH, len(self.agents), OBS), np.float32)
        return dict(zip(self.agents, self.points, strict=True)), {}

    def step(self, action_dict: dict) -> tuple[dict, dict, dict, dict, dict]:
        actions = np.fromiter((action_dict[a] for a in self.agents), np.int64, len(self.agents))
        right = (self.points @ self.asks).argmax(axis=1) == actions
        self.points = np.tanh(self.points @ self.drift + self.push[actions] + self.noise[self.t])
        self.t += 1
        rewards = dict(zip(self.agents, right.astype(float).tolist(), strict=True))
        observations = dict(zip(self.agents, self.points, strict=True))
        return observations, rewards, {"__all__": False}, {"__all__": self.t >= LENGTH}, {}


class DriftingTeamVector(VectorJointEnv):
    """The same rules for all environments at once."""

    stacked = True

    def __init__(self, num_envs: int, agents: int) -> None:
        self.num_envs = num_envs
        self.possible_agents = [f"agent_{i}" for i in range(agents)]
        self.observation_spaces = {a: gym.spaces.Box(-1.0, 1.0, (OBS,), np.float32) for a in self.possible_agents}
        self.action_spaces = {a: gym.spaces.Discrete(ACTIONS) for a in self.possible_agents}
        self.drift, self.push, self.asks = rules()
        self.rngs = [np.random.default_rng() for _ in range(num_envs)]
        self.t = np.zeros(num_envs, np.int64)
        self.points = np.zeros((agents, num_envs, OBS), np.float32)
        self.noise = np.zeros((LENGTH, agents, num_envs, OBS), np.float32)
        self.everywhere = np.arange(num_envs)

    def reset_joint(self, seeds: Sequence[int | None] | None = None) -> np.ndarray:
        for e, seed in enumerate(seeds or []):
            if seed is not None:
                self.rngs[e] = np.random.default_rng(seed)
        self._start(range(self.num_envs))
        return self.points.copy()

    def _start(self, envs: Any) -> None:
        for e in envs:
            self.t[e] = 0
            self.points[:, e] = self.rngs[e].uniform(-1, 1, (len(self.points), OBS))
            self.noise[:, :, e] = 0.1 * self.rngs[e].standard_normal((LENGTH, len(self.points), OBS), np.float32)

    def step_joint(self, actions: np.ndarray) -> JointStepResult:
        right = (self.points @ self.asks).argmax(axis=2) == actions
        noise = self.noise[self.t, :, self.everywhere].swapaxes(0, 1)
        self.points = np.tanh(self.points @ self.drift + self.push[actions] + noise)
        self.t += 1
        over = self.t >= LENGTH
        final = self.points.copy() if over.any() else None
        self._start(np.flatnonzero(over))
        return JointStepResult(
            rewards=right.astype(np.float32),
            observations=self.points.copy(),
            terminated=np.zeros(self.num_envs, bool),
            truncated=over,
            final_observations=final,
        )


def build(config: PPOConfig, env: type, agents: int, envs: int, seed: int) -> Algorithm:
    """An algorithm with the training constants, on one local runner."""
    config.environment(env, env_config={"agents": agents})
    config.env_runners(num_env_runners=0, num_envs_per_env_runner=envs)
    config.training(
        train_batch_size_per_learner=BATCH,
        minibatch_size=MINIBATCH,
        num_epochs=EPOCHS,
        lr=LR,
        gamma=GAMMA,
        lambda_=LAMBDA,
        grad_clip=GRAD_CLIP,
        clip_param=CLIP,
        vf_loss_coeff=VALUE_COEFF,
        entropy_coeff=ENTROPY_COEFF,
        use_kl_loss=False,
    ).debugging(seed=seed, log_level="ERROR")
    return config.build_algo()


def joint_ppo(
    env: type,
    agents: int,
    envs: int,
    seed: int,
    policies: Any = "per_agent",
    sampling: str = "auto",
    model_config: dict[str, Any] | None = None,
) -> Algorithm:
    """JointPPO on one of the two environments; without a `model_config` with its default network."""
    config = JointPPOConfig().training(iterate_all_minibatches=True, value_clip_range=VALUE_CLIP)
    config.env_runners(sampling=sampling)
    if model_config is not None:
        config.rl_module(model_config=model_config)
    return build(config.multi_agent(policies=policies), env, agents, envs, seed)
