"""Difference rewards: what of the team's reward would be missing without one agent.

For an environment that can be copied (`get_state`, `set_state`): the same step is played once more for each agent, from
the same state and with the same random numbers, with that agent's action replaced.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from thrust_rllib.envs.joint_env import AgentID, JointEnv, JointStepResult
from thrust_rllib.envs.wrapped_state import global_state_of

DIFFERENCE_REWARD = "difference_reward"
"""Name of the extra that `credit="difference"` reads."""

TeamReward = Callable[[JointStepResult], float]


def mean_reward(result: JointStepResult) -> float:
    """The mean over the agents that were paid, 0 where nobody was: the team's reward where nothing else says it."""
    return float(np.mean([*result.rewards.values()])) if result.rewards else 0.0


def difference_rewards(
    env: JointEnv,
    actions: Mapping[AgentID, Any],
    team_reward: TeamReward = mean_reward,
    default_actions: Mapping[AgentID, Any] | None = None,
) -> dict[AgentID, float]:
    r"""D_i = G(a) − G(a with agent i's action replaced), for every agent that acts.

    The environment is left as it was, its random generators included. All steps are played with the same random
    numbers, so that the difference is agent i's doing.

    Args:
        env: before the step.
        actions: a, of the agents that act.
        team_reward: G, of what a step returned.
        default_actions: {agent: what stands for doing nothing}; None: the agent's action is left out, for
            environments in which agents may be absent.

    Returns:
        {agent: D_i}.

    Raises:
        NotImplementedError: the environment has no `get_state` and `set_state`.
        ValueError: an agent has no default action, or the environment does not step without it.
    """
    state = copy.deepcopy(env.get_state())
    total = team_reward(_step_from(env, state, actions))
    without = rewards_without(env, state, actions, team_reward, default_actions)
    env.set_state(copy.deepcopy(state))
    return {agent: total - rest for agent, rest in without.items()}


def rewards_without(
    env: JointEnv,
    state: Any,
    actions: Mapping[AgentID, Any],
    team_reward: TeamReward,
    default_actions: Mapping[AgentID, Any] | None,
) -> dict[AgentID, float]:
    """{agent: G_{−i}}, as in `difference_rewards`; the environment is left behind one of these steps.

    Args:
        env: any state of it.
        state: of `get_state`, before the step; no array of it may be the environment's own.
        actions: as there.
        team_reward: as there.
        default_actions: as there.
    """
    name = type(env.unwrapped).__name__
    found = {}
    for agent in actions:
        if default_actions is None:
            others = {other: action for other, action in actions.items() if other != agent}
        elif agent in default_actions:
            others = {**actions, agent: default_actions[agent]}
        else:
            raise ValueError(
                f"default_actions have no entry for agent {agent!r}, only for {list(default_actions)}; give what "
                "stands for doing nothing for every agent"
            )
        try:
            result = _step_from(env, state, others)
        except Exception as error:
            if default_actions is not None:
                raise
            env.set_state(copy.deepcopy(state))
            raise ValueError(
                f"{name} does not step without an action of agent {agent!r} ({type(error).__name__}: {error}); give "
                "default_actions={agent: action that does nothing}"
            ) from error
        found[agent] = team_reward(result)
    return found


def _step_from(env: JointEnv, state: Any, actions: Mapping[AgentID, Any]) -> JointStepResult:
    # Copies: the same state and actions are used again, and an environment may go on with, and write into, its own.
    env.set_state(copy.deepcopy(state))
    return env.step_joint(copy.deepcopy(actions))


class WithDifferenceRewards(JointEnv):
    r"""An environment that tells each agent's difference reward as the extra "difference_reward".

    Agent i is paid r_i = own_i + G, the team's part G the same for all. The extra is its reward with the team's part
    replaced by the difference:

        difference_reward_i = r_i − G + D_i = own_i + (G − G_{−i}).

    Rewards stay as they are. Each step costs N + 1 steps of the environment.

    Args:
        env: a `JointEnv`, or anything `make_joint_env` takes.
        env_config: settings, where `env` is a class, a function or a name.
        team_reward: G, of what a step returned, as it stands in each agent's reward; by default the mean of the
            rewards: right where all agents are paid the same (G = r_i, and the extra is D_i).
        default_actions: see `difference_rewards`.

    Raises:
        TypeError: an environment and settings for one.
        NotImplementedError: the environment has no `get_state` and `set_state`.
        ValueError: default actions do not name every agent.
    """

    def __init__(
        self,
        env: Any,
        env_config: Mapping[str, Any] | None = None,
        *,
        team_reward: TeamReward = mean_reward,
        default_actions: Mapping[AgentID, Any] | None = None,
    ) -> None:
        if not isinstance(env, JointEnv):
            from thrust_rllib.envs.registry import make_joint_env

            env = make_joint_env(env, env_config)
        elif env_config:
            raise TypeError(f"WithDifferenceRewards got an environment and settings for one, {sorted(env_config)}")
        try:
            env.get_state()
        except NotImplementedError as error:
            raise NotImplementedError(f"difference rewards play each step again, and {error}") from error
        except Exception:  # it can, but has no state before its first reset
            pass
        self.env: JointEnv = env
        self.possible_agents = list(env.possible_agents)
        self.observation_spaces, self.action_spaces = env.observation_spaces, env.action_spaces
        self.state_space = env.state_space
        self.takes_turns = env.takes_turns
        self.metadata = env.metadata
        self.render_mode = env.render_mode
        self._team_reward = team_reward
        self._default_actions = default_actions
        if default_actions is not None and (missing := set(self.possible_agents).difference(default_actions)):
            raise ValueError(f"default_actions have no entry for {sorted(missing, key=str)}; give one for every agent")

    @property
    def unwrapped(self) -> Any:
        """The environment inside."""
        return self.env.unwrapped

    def reset_joint(self, seed: int | None = None) -> dict[AgentID, Any]:
        """See `JointEnv.reset_joint`."""
        return self.env.reset_joint(seed)

    def step_joint(self, actions: Mapping[AgentID, Any]) -> JointStepResult:
        """See `JointEnv.step_joint`.

        Raises:
            ValueError: the environment tells an extra of that name already, or see `difference_rewards`.
        """
        state = copy.deepcopy(self.env.get_state())
        without = rewards_without(self.env, state, actions, self._team_reward, self._default_actions)
        result = _step_from(self.env, state, actions)
        if DIFFERENCE_REWARD in result.extras:
            raise ValueError(
                f"{type(self.unwrapped).__name__} tells the extra {DIFFERENCE_REWARD!r} itself; leave "
                "WithDifferenceRewards out"
            )
        told = {agent: float(result.rewards[agent]) - rest for agent, rest in without.items()}
        result.extras = {**result.extras, DIFFERENCE_REWARD: told}
        return result

    def state(self) -> Any:
        """The environment's global state."""
        return global_state_of(self.env)

    def record_states(self) -> None:
        """See `JointEnv.record_states`."""
        super().record_states()
        self.env.record_states()

    def get_state(self) -> Any:
        """The environment's own state."""
        return self.env.get_state()

    def set_state(self, state: Any) -> None:
        """Goes on from where `get_state` was called."""
        self.env.set_state(state)

    def render(self) -> Any:
        """What the environment draws."""
        return self.env.render()

    def close(self) -> None:
        """Closes the environment."""
        self.env.close()
