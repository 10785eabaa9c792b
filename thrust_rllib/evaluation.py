"""Plays whole episodes with a trained team and returns each one's outcome.

RLlib's `Algorithm.evaluate` reports means over episodes; a figure such as the mean over episodes of the reward per
step needs every episode's return *and* length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from thrust_rllib.connectors.observation_normalizer import ObservationNormalizer
from thrust_rllib.envs.joint_env import AgentID, VectorJointEnv, episode_over, per_agent_flags
from thrust_rllib.envs.registry import make_vector_env
from thrust_rllib.sampling.acting import TeamActor
from thrust_rllib.sampling.module_agents import agents_of_modules, env_actions

MAX_ENVS = 256


@dataclass(frozen=True)
class PlayedEpisodes:
    """Outcomes of K episodes of N agents.

    | field   | shape  | meaning                         |
    |---------|--------|---------------------------------|
    | agents  | N      | the environment's order         |
    | returns | [K, N] | undiscounted return             |
    | lengths | [K]    | steps                           |
    """

    agents: list[AgentID]
    returns: np.ndarray
    lengths: np.ndarray

    @property
    def team_returns(self) -> np.ndarray:
        """[K] the sum over agents."""
        return self.returns.sum(axis=1)

    @property
    def team_reward_per_step(self) -> np.ndarray:
        """[K] each episode's mean per step of the sum over agents. Its mean is not the ratio of the means."""
        return self.team_returns / self.lengths


def play_episodes(
    algo: Any,
    num_episodes: int,
    *,
    seed: int = 0,
    explore: bool = False,
    num_envs: int | None = None,
    env_config: Mapping[str, Any] | None = None,
) -> PlayedEpisodes:
    """Plays episodes with the current weights, in this process and in environments of its own.

    The algorithm's runners, their episodes and their random streams are left as they were. Observations are
    normalised with the algorithm's moments, which stay as they are.

    Args:
        algo: a `JointPPO`.
        num_episodes: how many; environment e plays a fixed share, so that short episodes are not favoured.
        seed: of environments and sampled actions.
        explore: sample actions; False takes the distribution's mode.
        num_envs: environments side by side; None takes one per episode, at most `MAX_ENVS`.
        env_config: settings of the environment in place of the algorithm's.

    Raises:
        ValueError: no episode, or the algorithm has no local runner.
    """
    if num_episodes < 1:
        raise ValueError(f"num_episodes is {num_episodes}; needed: at least 1")
    config, runner = algo.config, algo.env_runner
    if runner is None:
        raise ValueError("the algorithm has no local env runner; set .env_runners(create_local_env_runner=True)")
    num_envs = min(num_episodes, num_envs or MAX_ENVS)
    env = make_vector_env(config.env_spec, dict(config.env_config if env_config is None else env_config), num_envs)
    try:
        return _play(env, config, runner, num_episodes, seed, explore)
    finally:
        env.close()


def _play(env: VectorJointEnv, config: Any, runner: Any, num_episodes: int, seed: int, explore: bool) -> PlayedEpisodes:
    names, num_envs = list(env.possible_agents), env.num_envs
    module_of = {agent: config.module_for_agent(agent) for agent in names}
    agents = agents_of_modules(env, module_of, config.normalize_actions, config.clip_actions)
    normalizers = runner._env_to_module[ObservationNormalizer]
    seeds = np.random.SeedSequence(seed).generate_state(num_envs + 1).tolist()
    actor = TeamActor(agents, runner.module, normalizers[0] if normalizers else None, runner._device, seed=seeds.pop())

    remaining = np.full(num_envs, num_episodes // num_envs)
    remaining[: num_episodes % num_envs] += 1
    running, steps = np.zeros((len(names), num_envs)), np.zeros(num_envs, np.int64)
    played: list[list[tuple[np.ndarray, int]]] = [[] for _ in range(num_envs)]
    observations = env.reset_joint(seeds)
    while remaining.any():
        acted = actor.act([a.encode(observations) for a in agents], [a.masks(observations) for a in agents], explore)
        result = env.step_joint(env_actions(agents, [done.actions for done in acted]))
        observations = result.observations
        running += result.rewards
        steps += 1
        terminated, truncated = (per_agent_flags(x, *running.shape) for x in (result.terminated, result.truncated))
        for e in np.flatnonzero(episode_over(terminated, truncated, result.present)):
            if remaining[e]:
                remaining[e] -= 1
                played[e].append((running[:, e].copy(), int(steps[e])))
            running[:, e], steps[e] = 0.0, 0
    episodes = [episode for of_one in played for episode in of_one]
    return PlayedEpisodes(
        agents=names,
        returns=np.array([returns for returns, _ in episodes]),
        lengths=np.array([length for _, length in episodes]),
    )
