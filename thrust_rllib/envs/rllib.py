"""RLlib multi-agent environments as joint environments, and back; the only file here that imports Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
from ray.rllib.env.multi_agent_env import MultiAgentEnv
from ray.rllib.utils.annotations import override

from thrust_rllib.envs.joint_env import AgentID, JointEnv, JointStepResult, VectorJointEnv
from thrust_rllib.envs.single import SingleJointEnv

ALL = "__all__"


def agent_order(env: MultiAgentEnv) -> list[AgentID]:
    """The agents of an RLlib environment in an order that every process shares.

    `possible_agents` where it is a list of the environment's own; otherwise (the old `_agent_ids` set, from
    which RLlib fills `possible_agents` in hash order) the ids sorted as strings.
    """
    declared = getattr(env, "_agent_ids", None)
    if isinstance(declared, (set, frozenset)) and declared:
        return sorted(declared, key=str)
    agents = env.possible_agents or env.agents or env.get_agent_ids()
    if not agents:
        raise ValueError(
            f"{type(env).__name__} names no agents; set self.possible_agents to a list of agent ids in its __init__"
        )
    return sorted(agents, key=str) if isinstance(agents, (set, frozenset)) else list(agents)


class RLlibJointEnv(JointEnv):
    """An RLlib `MultiAgentEnv` whose agents all act in every step, as a `JointEnv`.

    `"__all__"` ends every agent: by termination, or by truncation for agents that are flagged as truncated or
    if only the truncateds' `"__all__"` is set. Without that key the episode is over when every agent ended.

    Action masks: a Dict observation with the key "action_mask", such as RLlib's {"observations", "action_mask"}.

    Args:
        env: the environment.
        extras_from_infos: names that each agent's info carries; they become extras.

    Raises:
        TypeError: no `MultiAgentEnv`.
        ValueError: it names no agents, or no space for one of them.
    """

    def __init__(self, env: MultiAgentEnv, *, extras_from_infos: Sequence[str] = ()) -> None:
        if not isinstance(env, MultiAgentEnv):
            raise TypeError(f"RLlibJointEnv got a {type(env).__name__}; needed: an RLlib MultiAgentEnv")
        self.env = env
        self.possible_agents = agent_order(env)
        self.observation_spaces = self._spaces("observation")
        self.action_spaces = self._spaces("action")
        self.metadata = env.metadata
        self.render_mode = env.render_mode
        self._extras = tuple(extras_from_infos)

    @property
    def unwrapped(self) -> MultiAgentEnv:
        """The RLlib environment."""
        return self.env

    def _spaces(self, kind: str) -> dict[AgentID, gym.Space]:
        found: dict[AgentID, gym.Space] = {}
        for agent in self.possible_agents:
            try:
                space = getattr(self.env, f"get_{kind}_space")(agent)
            except KeyError:
                space = None
            if space is None:
                raise ValueError(
                    f"{type(self.env).__name__} has no {kind} space for agent {agent!r}; set "
                    f"self.{kind}_spaces to a dict agent -> space in its __init__"
                )
            found[agent] = space
        return found

    def reset_joint(self, seed: int | None = None) -> dict[AgentID, Any]:
        """See `JointEnv.reset_joint`."""
        return self.env.reset(seed=seed)[0]

    def step_joint(self, actions: Mapping[AgentID, Any]) -> JointStepResult:
        """See `JointEnv.step_joint`."""
        observations, rewards, terminateds, truncateds, infos = self.env.step(dict(actions))
        terminated: Any = False
        truncated: Any = False
        if any(terminateds.values()) or any(truncateds.values()):
            all_end = terminateds.get(ALL, False)
            all_cut = truncateds.get(ALL, False)
            truncated, terminated = {}, {}
            for agent in self.possible_agents:
                cut = bool(truncateds.get(agent, False))
                end = bool(terminateds.get(agent, False))
                terminated[agent] = end or bool(all_end and not cut)
                truncated[agent] = cut or bool(all_cut and not end and not all_end)
        extras = None
        if self._extras:
            from thrust_rllib.envs.pettingzoo import pick_extras

            extras = pick_extras(self._extras, self.possible_agents, infos)
        return JointStepResult(rewards, observations, terminated, truncated, extras)

    def render(self) -> Any:
        """What the environment draws."""
        return self.env.render()

    def close(self) -> None:
        """Closes the environment."""
        self.env.close()


class JointEnvMultiAgentEnv(MultiAgentEnv):
    """A `JointEnv` as an RLlib `MultiAgentEnv`, for RLlib's own env runners; extras go into the infos.

    Where some agents terminate and others are truncated in the last step, `terminateds["__all__"]` is set
    (RLlib needs one `"__all__"`), and the agents' own flags say who did what.

    Args:
        env: a `JointEnv`, a `VectorJointEnv` with one environment, anything `make_joint_env` takes, or, as
            RLlib calls it, a dict with "env" and "env_config".
        env_config: settings, where `env` is a class, a function or a name.
    """

    def __init__(self, env: Any, env_config: Mapping[str, Any] | None = None) -> None:
        if isinstance(env, Mapping):
            if "env" not in env:
                raise ValueError(
                    'JointEnvMultiAgentEnv got a dict without "env"; needed: '
                    '{"env": name or class, "env_config": {...}}'
                )
            env, env_config = env["env"], env.get("env_config", env_config)
        if isinstance(env, VectorJointEnv):
            env = SingleJointEnv(env)
        if not isinstance(env, JointEnv):
            from thrust_rllib.envs.registry import make_joint_env

            env = make_joint_env(env, env_config)
        self.env: JointEnv = env
        self.possible_agents = list(env.possible_agents)
        self.agents = list(env.possible_agents)
        self.observation_spaces = dict(env.observation_spaces)
        self.action_spaces = dict(env.action_spaces)
        self.metadata = {"render_modes": [], **env.metadata}
        self.render_mode = env.render_mode
        self._nobody = dict.fromkeys([*self.possible_agents, ALL], False)
        super().__init__()

    @override(MultiAgentEnv)
    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        return dict(self.env.reset_joint(seed)), {agent: {} for agent in self.possible_agents}

    @override(MultiAgentEnv)
    def step(self, action_dict: dict[AgentID, Any]) -> tuple[dict, dict, dict, dict, dict]:
        result = self.env.step_joint(action_dict)
        terminateds, any_end, all_end = self._flags(result.terminated)
        truncateds, any_cut, all_cut = self._flags(result.truncated)
        if any_end or any_cut:
            over = all(terminateds[agent] or truncateds[agent] for agent in self.possible_agents)
            terminateds[ALL] = over and not all_cut
            truncateds[ALL] = over and all_cut and not all_end
        infos: dict[AgentID, dict[str, Any]] = {agent: {} for agent in self.possible_agents}
        for name, value in result.extras.items():
            for agent in self.possible_agents:
                infos[agent][name] = value[agent] if isinstance(value, Mapping) else value
        return dict(result.observations), dict(result.rewards), terminateds, truncateds, infos

    def _flags(self, flags: Any) -> tuple[dict[AgentID, bool], bool, bool]:
        """Flags by agent with room for `__all__`, whether any is set and whether all are."""
        if flags is False:
            return dict(self._nobody), False, False
        each = flags if isinstance(flags, Mapping) else dict.fromkeys(self.possible_agents, flags)
        by_agent = {agent: bool(each[agent]) for agent in self.possible_agents}
        return {**by_agent, ALL: False}, any(by_agent.values()), all(by_agent.values())

    @override(MultiAgentEnv)
    def render(self) -> Any:
        return self.env.render() if self.env.render_mode is not None else None

    def close(self) -> None:
        """Closes the environment."""
        self.env.close()
