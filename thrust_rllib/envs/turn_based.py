"""PettingZoo environments whose agents act one after another, as joint environments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pettingzoo import AECEnv

from thrust_rllib.envs.action_masks import InfoMasks, open_mask
from thrust_rllib.envs.extras import pick_extras
from thrust_rllib.envs.joint_env import AgentID, JointEnv, JointStepResult
from thrust_rllib.envs.late_rewards import LateRewards
from thrust_rllib.envs.spaces import ACTION_MASK
from thrust_rllib.envs.wrapped_state import global_state_of, state_of, state_space_of


@dataclass
class _Step:
    """What the inner steps of one joint step gave."""

    gone: frozenset[AgentID]  # ended in an earlier joint step
    rewards: dict[AgentID, Any] = field(default_factory=dict)
    terminated: dict[AgentID, bool] = field(default_factory=dict)
    truncated: dict[AgentID, bool] = field(default_factory=dict)
    last: dict[AgentID, Any] = field(default_factory=dict)


class AECJointEnv(JointEnv):
    """A PettingZoo `AECEnv` as a `JointEnv` in which one agent acts at a time.

    Only the agent to act has an observation; the others wait. One joint step is the agent's step and what follows
    until somebody alive is to act: the steps without action (None) in which PettingZoo removes agents that ended.

    - Rewards are those that the environment pays in these steps (`AECEnv.rewards`), to whomever: the agent that
      acted always has one, another where it is not 0. What it pays to an agent in a later joint step than the one
      in which that agent ended is left out, with one warning.
    - Every agent that ended is flagged in that step, whether it acted or not, and has its last observation there.
      A mask in it is all ones: there is nothing left to choose.
    - The episode is over when no agent is left.
    - Masks in infos become part of the observations, see `InfoMasks`. The infos of the last step are in `infos`.

    Args:
        env: the environment, or what makes one when called with `env_config`.
        extras_from_infos: names that the info of an agent carries after its step; they become extras of that agent.
        **env_config: see `env`.

    Raises:
        TypeError: no `AECEnv`.
    """

    takes_turns = True

    def __init__(
        self, env: AECEnv | Callable[..., AECEnv], *, extras_from_infos: Sequence[str] = (), **env_config: Any
    ) -> None:
        if isinstance(env, AECEnv):
            if env_config:
                raise TypeError(f"AECJointEnv got an environment and settings for one, {sorted(env_config)}")
        elif callable(env):
            env = env(**env_config)
        if not isinstance(env, AECEnv):
            raise TypeError(f"AECJointEnv got a {type(env).__name__}; needed: a PettingZoo AECEnv or what makes one")
        self.env = env
        self.name = str(env.unwrapped)
        agents = getattr(env, "possible_agents", None)
        if not agents:
            raise TypeError(f"{self.name} has no possible_agents; set it to the list of all agents that may appear")
        self.possible_agents = list(agents)
        self.observation_spaces = {agent: env.observation_space(agent) for agent in self.possible_agents}
        self.action_spaces = {agent: env.action_space(agent) for agent in self.possible_agents}
        self.state_space = state_space_of(env)
        self.metadata = dict(getattr(env, "metadata", None) or {})
        self.render_mode = getattr(env, "render_mode", None)
        self._extras = tuple(extras_from_infos)
        self._masks = InfoMasks(self.observation_spaces, self.action_spaces, self._first_infos)
        self._late = LateRewards(self.name)
        self.infos: dict[AgentID, Any] = {}
        self._ended: set[AgentID] = set()
        self._running = False

    @property
    def unwrapped(self) -> AECEnv:
        """The PettingZoo environment."""
        return self.env

    def _first_infos(self) -> dict[AgentID, Any]:
        """Infos after a reset; that there is no mask, only the info of the agent to act can say."""
        self.env.reset()
        selected = self.env.agent_selection
        return {a: info for a, info in self.env.infos.items() if a == selected or ACTION_MASK in (info or {})}

    def reset_joint(self, seed: int | None = None) -> dict[AgentID, Any]:
        """See `JointEnv.reset_joint`: the first observation of the agent that acts first."""
        self._late.tell()
        self._ended.clear()
        self.env.reset(seed=seed)
        if not self.env.agents:
            raise ValueError(f"{self.name} has no agents after reset; it must have one that acts")
        self._running, self.infos = True, dict(self.env.infos)
        return {self.env.agent_selection: self._next_observation()}

    def step_joint(self, actions: Mapping[AgentID, Any]) -> JointStepResult:
        """See `JointEnv.step_joint`; `actions` holds the action of the one agent that has an observation.

        Raises:
            RuntimeError: the episode is over or none was started.
            ValueError: other actions, or an environment that breaks PettingZoo's contract.
        """
        if not self._running:
            raise RuntimeError(f"{self.name}: step_joint was called but no episode runs; call reset_joint first")
        env = self.env
        mover, alive = env.agent_selection, list(env.agents)
        if len(actions) != 1 or mover not in actions:
            raise ValueError(f"{self.name}: got actions of {list(actions)}; needed: of {mover!r}, whose turn it is")
        step = _Step(frozenset(self._ended), {mover: 0.0}, {mover: False}, {mover: False})
        env.step(actions[mover])
        self._take_in(step)
        self.infos = dict(env.infos)
        extras = pick_extras(self._extras, [mover], env.infos) if self._extras else None
        while env.agents and any(self._flags(env.agent_selection)):
            dead = env.agent_selection
            env.step(None)
            if dead in env.agents:
                raise ValueError(f"{self.name}: agent {dead!r} has ended, but its step(None) does not remove it")
            self._take_in(step)
        for agent in alive:
            if agent not in env.agents and agent not in self._ended:
                raise ValueError(
                    f"{self.name}: agent {agent!r} left env.agents without an end; set its terminations or truncations"
                )
        self._running = bool(env.agents)
        self.infos.update(env.infos)
        seen = step.last
        if self._running:
            seen = {**seen, env.agent_selection: self._next_observation()}
        else:
            self._late.tell()
        return JointStepResult(
            rewards=step.rewards,
            observations={agent: seen[agent] for agent in self.possible_agents if agent in seen},
            terminated=step.terminated,
            truncated=step.truncated,
            extras=extras,
            over=not self._running,
        )

    def _take_in(self, step: _Step) -> None:
        """Rewards and ends of one inner step; before the next, which removes agents that ended."""
        env = self.env
        alive, ends, cuts = env.agents, env.terminations, env.truncations  # wrappers make each of these slow
        for agent, reward in env.rewards.items():
            if agent in step.gone:
                self._late.add(agent, reward)
            elif reward or agent in step.rewards:
                step.rewards[agent] = step.rewards.get(agent, 0.0) + reward
        for agent in self.possible_agents:
            if agent in self._ended:
                continue
            terminated, truncated = bool(ends.get(agent)), bool(cuts.get(agent))
            if not (terminated or truncated):
                continue
            self._ended.add(agent)
            step.terminated[agent], step.truncated[agent] = terminated, truncated
            step.rewards.setdefault(agent, 0.0)
            last = env.observe(agent) if agent in alive else None
            if last is not None:
                step.last[agent] = open_mask(self.observation_spaces[agent], self._masks.put(agent, last, None))

    def _flags(self, agent: AgentID) -> tuple[bool, bool]:
        return bool(self.env.terminations.get(agent)), bool(self.env.truncations.get(agent))

    def _next_observation(self) -> Any:
        agent = self.env.agent_selection
        if agent in self._ended or agent not in self.observation_spaces:
            what = "has ended before in this episode" if agent in self._ended else "is not in possible_agents"
            raise ValueError(f"{self.name}: agent {agent!r} is to act, but it {what}")
        return self._masks.put(agent, self.env.observe(agent), self.env.infos.get(agent))

    def get_state(self) -> dict[str, Any]:
        """The environment's own state, where it has one, and who has ended."""
        ended = [agent for agent in self.possible_agents if agent in self._ended]
        return {"env": state_of(self.env), "ended": ended, "running": self._running}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from where `get_state` was called."""
        env: Any = self.env
        env.set_state(state["env"])
        self._ended, self._running = set(state["ended"]), state["running"]

    def state(self) -> Any:
        """The environment's own `state()`, where it has one."""
        return global_state_of(self.env)

    def render(self) -> Any:
        """What the environment's render mode says."""
        return self.env.render()

    def close(self) -> None:
        """Closes the environment."""
        self.env.close()
