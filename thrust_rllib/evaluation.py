"""Plays whole episodes with a trained team and returns each one's outcome.

RLlib's `Algorithm.evaluate` reports means over episodes; a figure such as the mean over episodes of the reward per
step needs every episode's return *and* length.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from ray.rllib.utils.annotations import override

from thrust_rllib.confidence import MeanInterval, mean_interval
from thrust_rllib.envs.joint_env import AgentID, VectorJointEnv, over_after
from thrust_rllib.envs.names import nearest
from thrust_rllib.envs.registry import make_vector_env
from thrust_rllib.sampling.acting import TeamActor
from thrust_rllib.sampling.agent_groups import AgentGroup, agent_groups, env_actions
from thrust_rllib.sampling.episode_extras import EpisodeExtras
from thrust_rllib.sampling.episode_shares import episodes_per_environment
from thrust_rllib.sampling.team_runner import TeamRunner
from thrust_rllib.teams import DeclaredTeam

MAX_ENVS = 256

Policy = Callable[[Any], Any]
"""What a `VectorJointEnv` shows to the actions it takes. One that remembers derives from `RememberingPolicy`."""


class RememberingPolicy(ABC):
    """A policy whose actions depend on what it has seen before."""

    @abstractmethod
    def __call__(self, observations: Any) -> Any:
        """Actions for all environments."""

    @abstractmethod
    def restart(self) -> None:
        """All environments have been reset."""

    @abstractmethod
    def advance(self, present: np.ndarray | None, over: np.ndarray) -> None:
        """A step has been taken: bool [N, E] who acted (None: everybody), bool [E] which environments begin anew."""


@dataclass(frozen=True)
class PlayedEpisodes:
    """Outcomes of K episodes of N agents.

    | field        | shape         | meaning                                                       |
    |--------------|---------------|---------------------------------------------------------------|
    | agents       | N             | the environment's order                                       |
    | returns      | [K, N]        | undiscounted return                                           |
    | lengths      | [K]           | steps                                                         |
    | final_extras | {name: array} | what the environment's extras said in the episode's last step |
    | mean_extras  | {name: array} | their mean over its steps, float64; of bools the share        |

    Extras are [K, ...] of the team, [K, N, ...] of agents and [K, N, N] of pairs; both are empty where the environment
    gives none. An agent counts as 0 in the steps in which it did not act, the last one included.
    """

    agents: list[AgentID]
    returns: np.ndarray
    lengths: np.ndarray
    final_extras: Mapping[str, np.ndarray] = field(default_factory=dict)
    mean_extras: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def team_returns(self) -> np.ndarray:
        """[K] the sum over agents."""
        return self.returns.sum(axis=1)

    @property
    def team_reward_per_step(self) -> np.ndarray:
        """[K] each episode's mean per step of the sum over agents. Its mean is not the ratio of the means."""
        return self.team_returns / self.lengths

    def means(self) -> EpisodeMeans:
        """Means over the episodes with 95 % intervals, by Student's t distribution.

        Of extras only those of the team that are one number.
        """
        return EpisodeMeans(
            team_return=mean_interval(self.team_returns),
            team_reward_per_step=mean_interval(self.team_reward_per_step),
            agent_returns={agent: mean_interval(self.returns[:, i]) for i, agent in enumerate(self.agents)},
            length=mean_interval(self.lengths),
            final_extras=_extra_means(self.final_extras),
            mean_extras=_extra_means(self.mean_extras),
        )


@dataclass(frozen=True)
class EpisodeMeans:
    """Means over episodes; the names are those of `PlayedEpisodes`."""

    team_return: MeanInterval
    team_reward_per_step: MeanInterval
    agent_returns: dict[AgentID, MeanInterval]
    length: MeanInterval
    final_extras: dict[str, MeanInterval] = field(default_factory=dict)
    mean_extras: dict[str, MeanInterval] = field(default_factory=dict)


def _extra_means(extras: Mapping[str, np.ndarray]) -> dict[str, MeanInterval]:
    with np.errstate(invalid="ignore"):  # an infinite extra has no spread
        return {name: mean_interval(values) for name, values in extras.items() if values.ndim == 1}


def play_episodes(
    algo: Any,
    num_episodes: int,
    *,
    seed: int = 0,
    explore: bool = False,
    num_envs: int | None = None,
    env_config: Mapping[str, Any] | None = None,
    random_agents: Collection[AgentID] = (),
) -> PlayedEpisodes:
    """Plays episodes with the current weights, in this process and in environments of its own.

    The algorithm's runners, their episodes and their random streams are left as they were. Observations are
    normalised with the algorithm's moments, which stay as they are.

    Args:
        algo: a `JointPPO`, or what else has its `config` and `env_runner`.
        num_episodes: how many; environment e plays a fixed share, so that short episodes are not favoured.
        seed: of environments and sampled actions.
        explore: sample actions; False takes the distribution's mode.
        num_envs: environments side by side; None takes one per episode, at most `MAX_ENVS`.
        env_config: settings of the environment in place of the algorithm's.
        random_agents: they act uniformly at random over what is allowed, the others with their policies: how much is
            lost tells what those agents have learned. Who stays draws the same numbers as without `random_agents`.

    Raises:
        ValueError: no episode, the algorithm has no local runner, an unknown agent, or an environment that does not
            fit the networks.
    """
    num_envs = min(max(num_episodes, 1), num_envs or MAX_ENVS)
    env = make_vector_env(
        algo.config.env_spec, dict(algo.config.env_config if env_config is None else env_config), num_envs
    )
    try:
        policy = TeamPolicy(algo, env, seed=seed, explore=explore, random_agents=random_agents)
        return play_policy(env, policy, num_episodes, seed=seed)
    finally:
        env.close()


def play_policy(env: VectorJointEnv, policy: Policy, num_episodes: int, *, seed: int = 0) -> PlayedEpisodes:
    """Plays episodes with any policy.

    Args:
        env: E environments; environment e gets the e-th number of `seed`, whoever plays.
        policy: from what the environment shows to the actions it takes.
        num_episodes: how many.
        seed: of the environments.

    Raises:
        TypeError: an extra is no array of numbers.
        ValueError: no episode, or an extra that changes its shape or is left out of some steps.
    """
    if num_episodes < 1:
        raise ValueError(f"num_episodes is {num_episodes}; needed: at least 1")
    names, num_envs = list(env.possible_agents), env.num_envs
    remaining = episodes_per_environment(num_episodes, num_envs)
    running, steps = np.zeros((len(names), num_envs)), np.zeros(num_envs, np.int64)
    extras = EpisodeExtras(len(names), num_envs)
    played: list[list[tuple[np.ndarray, int]]] = [[] for _ in range(num_envs)]
    observations = env.reset_joint(seeds_for(seed, num_envs)[:-1])
    remembering = policy if isinstance(policy, RememberingPolicy) else None
    if remembering is not None:
        remembering.restart()
    while remaining.any():
        result = env.step_joint(policy(observations))
        observations = result.observations
        running += result.rewards
        steps += 1
        over = over_after(result)
        if remembering is not None:
            remembering.advance(result.present, over)
        extras.add(result.extras, result.present)
        if over.any():
            extras.end(over, over & (remaining > 0), steps)
        for e in np.flatnonzero(over):
            if remaining[e]:
                remaining[e] -= 1
                played[e].append((running[:, e].copy(), int(steps[e])))
            running[:, e], steps[e] = 0.0, 0
    episodes = [episode for of_one in played for episode in of_one]
    final_extras, mean_extras = extras.results()
    return PlayedEpisodes(
        agents=names,
        returns=np.array([returns for returns, _ in episodes]),
        lengths=np.array([length for _, length in episodes]),
        final_extras=final_extras,
        mean_extras=mean_extras,
    )


def seeds_for(seed: int, num_envs: int) -> list[int]:
    """One for each environment, and one for the actions.

    Raises:
        ValueError: `seed` is no whole number ≥ 0.
    """
    if not isinstance(seed, int | np.integer) or seed < 0:
        raise ValueError(f"seed is {seed!r}; needed: a whole number ≥ 0")
    return np.random.SeedSequence(seed).generate_state(num_envs + 1).tolist()


class TeamPolicy(RememberingPolicy):
    """The team of an algorithm, with its weights of now, as a policy for `play_policy`; see `play_episodes`.

    Args:
        algo: see there.
        env: the environments that it is going to play in.
        seed: of sampled and random actions.
        explore: see there.
        random_agents: see there.
    """

    def __init__(
        self,
        algo: Any,
        env: VectorJointEnv,
        *,
        seed: int = 0,
        explore: bool = False,
        random_agents: Collection[AgentID] = (),
    ) -> None:
        config = algo.config
        for agent in random_agents:
            if agent not in env.possible_agents:
                raise ValueError(
                    f"random_agents names {agent!r}, which the environment does not have"
                    f"{nearest(str(agent), map(str, env.possible_agents))} Its agents: {list(env.possible_agents)}"
                )
        _check_agents(env, config.policy_mapping_fn.table)
        self._env, self._explore = env, explore
        self._actor = team_actor(algo, env, seeds_for(seed, env.num_envs)[-1])
        self._groups = self._actor.groups
        self._random_rows = [np.array([agent in random_agents for agent in group.agents]) for group in self._groups]
        self._random_actor = None
        if random_agents:
            (child,) = np.random.SeedSequence(seed).spawn(1)
            self._random_actor = team_actor(algo, env, int(child.generate_state(1)[0]))

    @override(RememberingPolicy)
    def __call__(self, observations: Any) -> Any:
        encoded = [group.encode(observations) for group in self._groups]
        masks = [group.masks(observations) for group in self._groups]
        there = self._env.acts_next() if self._actor.exchanges_messages else None
        actions = [acted.actions for acted in self._actor.act(encoded, masks, self._explore, present=there)]
        if self._random_actor is not None:
            drawn = self._random_actor.act(encoded, masks, explore=False, random_actions=True)
            actions = [
                np.where(rows.reshape(-1, *[1] * (chosen.ndim - 1)), other.actions, chosen)
                for rows, chosen, other in zip(self._random_rows, actions, drawn, strict=True)
            ]
        return env_actions(self._groups, actions)

    @override(RememberingPolicy)
    def restart(self) -> None:
        self._actor.restart()

    @override(RememberingPolicy)
    def advance(self, present: np.ndarray | None, over: np.ndarray) -> None:
        self._actor.advance(present, over)


def team_actor(algo: Any, env: VectorJointEnv | DeclaredTeam, seed: int) -> TeamActor:
    """Acts in `env` with the algorithm's networks and moments of now, and a generator of its own.

    Raises:
        ValueError: the algorithm has no local runner or connector pieces of its own, or the environment does not fit
            the networks.
    """
    config, runner = algo.config, algo.env_runner
    if runner is None:
        raise ValueError("the algorithm has no local env runner; set .env_runners(create_local_env_runner=True)")
    if config._env_to_module_connector is not None or config._module_to_env_connector is not None:
        raise ValueError(
            "the team was trained with connector pieces of its own (env_to_module_connector, module_to_env_connector), "
            "which nothing but RLlib's loop calls; play with algo.evaluate()"
        )
    module_of = {agent: config.module_for_agent(agent) for agent in env.possible_agents}
    groups = agent_groups(env, module_of, config.normalize_actions, config.clip_actions)
    _check_spaces(groups, runner.get_spaces())
    normalizer = runner.normalizer if isinstance(runner, TeamRunner) else None  # RLlib's own runner has none
    return TeamActor(groups, runner.module, normalizer, runner._device, seed=seed)


def _check_agents(env: VectorJointEnv, trained: Mapping[AgentID, Any]) -> None:
    if set(env.possible_agents) != set(trained):
        raise ValueError(
            f"the environment has the agents {list(env.possible_agents)}, the team was trained as {list(trained)}; "
            "choose settings of the environment that keep the agents"
        )


def _check_spaces(groups: list[AgentGroup], trained: Mapping[str, Any]) -> None:
    for group in groups:
        encoded = group.encoder.encoded_space
        for module_id, mine in group.by_module:
            observation_space, action_space = trained[module_id]
            if encoded.shape != observation_space.shape or group.action_space != action_space:
                raise ValueError(
                    f"in this environment {list(group.agents[mine])} see numbers of shape {encoded.shape} and act in "
                    f"{group.action_space}; the network of module {module_id!r} was trained with "
                    f"{observation_space.shape} and {action_space}. Choose settings of the environment that keep the "
                    "spaces"
                )
