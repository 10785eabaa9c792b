"""RLlib multi-agent environments as joint environments, and back; one of three files here that import Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
from ray.rllib.env.multi_agent_env import MultiAgentEnv
from ray.rllib.utils.annotations import override

from thrust_rllib.envs.extras import pick_extras
from thrust_rllib.envs.joint_env import AgentID, JointEnv, JointStepResult, VectorJointEnv
from thrust_rllib.envs.names import DECLARE_ALL
from thrust_rllib.envs.presence import EpisodeAgents
from thrust_rllib.envs.returned import is_flag, returned_dicts
from thrust_rllib.envs.single import SingleJointEnv
from thrust_rllib.envs.wrapped_state import global_state_of, record_states_of, state_of, state_space_of

ALL = "__all__"
COMMON = "__common__"
"""RLlib's key for an info that belongs to no agent."""
EXTRAS = "extras"
"""Key in that info: what `JointStepResult.extras` holds."""
STATE = "thrust_rllib/global_state"
"""Key in that info: the global state, flat."""
_STEP = ("observations", "rewards", "terminateds", "truncateds", "infos")


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
            f"{type(env).__name__} names no agents; set self.possible_agents to a list of agent ids in its __init__: "
            + DECLARE_ALL
        )
    return sorted(agents, key=str) if isinstance(agents, (set, frozenset)) else list(agents)


class RLlibJointEnv(JointEnv):
    """An RLlib `MultiAgentEnv` as a `JointEnv`; agents may come, end and wait.

    A missing end flag is False, as RLlib reads it. `"__all__"` ends every living agent: by termination, or by
    truncation for agents that are flagged as truncated or if only the truncateds' `"__all__"` is set. Where that key is
    False the episode goes on, unless every possible agent has ended; without it, the episode is over when every agent
    that has appeared has ended and nobody acts next. The infos of the last step are in `infos`.

    Action masks: a Dict observation with the key "action_mask", such as RLlib's {"observations", "action_mask"}.

    The global state is what a method `state()` of the environment returns, where its class has one. Extras are what
    stands in infos["__common__"]["extras"], and `extras_from_infos`.

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
        self.state_space = state_space_of(env)
        self.metadata = env.metadata
        self.render_mode = env.render_mode
        self._extras = tuple(extras_from_infos)
        self.infos: dict[Any, Any] = {}
        self._living: list[AgentID] = []
        self._ended: set[AgentID] = set()

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
        returned = returned_dicts(self.env, "reset", self.env.reset(seed=seed), ("observations", "infos"))
        observations, self.infos = returned
        self._living, self._ended = [], set()
        self._meet(observations)
        return observations

    def _meet(self, observations: Any) -> None:
        """Adds newcomers to the living agents."""
        self._living += [a for a in self.possible_agents if a in observations and a not in self._living]

    def step_joint(self, actions: Mapping[AgentID, Any]) -> JointStepResult:
        """See `JointEnv.step_joint`."""
        returned = returned_dicts(self.env, "step", self.env.step(dict(actions)), _STEP)
        observations, rewards, terminateds, truncateds, self.infos = returned
        if len(self._living) < len(self.possible_agents):
            self._meet(observations)
        terminated: Any = False
        truncated: Any = False
        over = None
        if ALL in terminateds or ALL in truncateds:
            over = bool(terminateds.get(ALL) or truncateds.get(ALL))
        if any(terminateds.values()) or any(truncateds.values()):
            terminated, truncated = self._flags(terminateds, truncateds)
            if over is False and len(self._ended) == len(self.possible_agents):
                over = True
        return JointStepResult(
            rewards,
            observations,
            terminated,
            truncated,
            self._told(actions),
            over=over,
        )

    def _told(self, actions: Mapping[AgentID, Any]) -> dict[str, Any]:
        told = (self.infos.get(COMMON) or {}).get(EXTRAS) or {}
        return {**told, **pick_extras(self._extras, actions, self.infos)} if self._extras else told

    def _flags(self, terminateds: Mapping, truncateds: Mapping) -> tuple[dict[AgentID, bool], dict[AgentID, bool]]:
        """Flags of the living agents."""
        all_end, all_cut = bool(terminateds.get(ALL)), bool(truncateds.get(ALL))
        terminated, truncated = {}, {}
        for name, flags in (("terminateds", terminateds), ("truncateds", truncateds)):
            for agent, flag in flags.items():
                if not is_flag(flag):
                    raise TypeError(f"{type(self.env).__name__}: {name} of agent {agent!r} is {flag!r}; return a bool")
        for agent in self._living:
            end, cut = bool(terminateds.get(agent)), bool(truncateds.get(agent))
            if agent in self._ended:
                continue
            terminated[agent] = end or (all_end and not cut)
            truncated[agent] = cut or (all_cut and not end and not all_end)
        self._ended.update(agent for agent in terminated if terminated[agent] or truncated[agent])
        return terminated, truncated

    def state(self) -> Any:
        """The environment's own `state()`, where it has one."""
        return global_state_of(self.env)

    def record_states(self) -> None:
        """See `JointEnv.record_states`."""
        super().record_states()
        record_states_of(self.env)

    def get_state(self) -> dict[str, Any]:
        """The environment's own state, where it has one, and who lives and has ended."""
        ended = [agent for agent in self.possible_agents if agent in self._ended]
        return {"env": state_of(self.env), "living": [*self._living], "ended": ended}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from where `get_state` was called."""
        env: Any = self.env
        env.set_state(state["env"])
        self._living, self._ended = [*state["living"]], set(state["ended"])

    def render(self) -> Any:
        """What the environment draws."""
        return self.env.render()

    def close(self) -> None:
        """Closes the environment."""
        self.env.close()


class JointEnvMultiAgentEnv(MultiAgentEnv):
    """A `JointEnv` as an RLlib `MultiAgentEnv`, for RLlib's own env runners; extras go into the infos.

    | returned by `step` | agents |
    |---|---|
    | observations | those that act in the next step, and the last ones of those that ended in this |
    | rewards | those that acted; others where it is not 0 |
    | terminateds, truncateds | those that acted, and those that waited and ended |
    | infos | those with an observation; and "__common__", RLlib's key for none of them: {"extras": all extras} |

    `"__all__"` is set where the episode is over: in `truncateds` if all agents that lived were truncated, otherwise in
    `terminateds` (RLlib needs one of them, and the agents' own flags say who did what).

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
        self.state_space = env.state_space
        self.metadata = {"render_modes": [], **env.metadata}
        self.render_mode = env.render_mode
        self._episode = EpisodeAgents(self.possible_agents)
        self._steps = 0
        super().__init__()

    @override(MultiAgentEnv)
    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        observations, self._steps = self.env.reset_joint(seed), 0
        self._episode.begin(observations, self._where)
        self.agents = list(self._episode.living)
        return dict(observations), {agent: {} for agent in observations}

    @override(MultiAgentEnv)
    def step(self, action_dict: dict[AgentID, Any]) -> tuple[dict, dict, dict, dict, dict]:
        self._steps += 1
        result = self.env.step_joint(self._episode.choose(action_dict, self._where))
        step = self._episode.advance(result, self._where)
        if step.acted is self._episode.acting:  # everybody acted and goes on
            flags = {**step.terminated, ALL: False}
            observations = dict(result.observations)
            return observations, dict(result.rewards), flags, dict(flags), self._infos(observations, result.extras)
        self.agents = [] if step.over else list(self._episode.living)
        ended = step.ended
        told = self.possible_agents if len(step.acted) == len(self.possible_agents) else {*step.acted, *ended}
        terminateds: dict[Any, bool] = {agent: end for agent, end in step.terminated.items() if agent in told}
        truncateds: dict[Any, bool] = {agent: cut for agent, cut in step.truncated.items() if agent in told}
        # Who has no flag of its own goes the way of the others: nobody is terminated that nobody has terminated.
        all_cut = step.over and any(step.truncated.values()) and not any(step.terminated.values())
        terminateds[ALL], truncateds[ALL] = step.over and not all_cut, all_cut
        acting = () if step.over else self._episode.acting
        observations = {
            agent: result.observations[agent]
            for agent in self.possible_agents
            if agent in acting or ((step.over or agent in ended) and agent in result.observations)
        }
        rewards = {agent: reward for agent, reward in result.rewards.items() if agent in step.acted or reward != 0.0}
        return observations, rewards, terminateds, truncateds, self._infos(observations, result.extras)

    @staticmethod
    def _infos(observations: Mapping[AgentID, Any], extras: Mapping[str, Any]) -> dict[AgentID, dict[str, Any]]:
        infos: dict[AgentID, dict[str, Any]] = {agent: {} for agent in observations}
        if not extras:
            return infos
        for name, value in extras.items():
            for agent, info in infos.items():
                if not isinstance(value, Mapping):
                    info[name] = value
                elif agent in value:
                    info[name] = value[agent]
        infos[COMMON] = {EXTRAS: extras}  # also those of agents that have no observation any more
        return infos

    def _where(self) -> str:
        moment = f"step {self._steps} of its episode" if self._steps else "reset_joint"
        return f"{type(self.env.unwrapped).__name__}, {moment}"

    def state(self) -> Any:
        """The joint environment's global state."""
        return global_state_of(self.env)

    def record_states(self) -> None:
        """See `JointEnv.record_states`."""
        self.env.record_states()

    def get_state(self) -> dict[str, Any]:
        """The joint environment's state, and who acts."""
        return {"env": self.env.get_state(), "steps": self._steps, "episode": self._episode.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from where `get_state` was called."""
        self.env.set_state(state["env"])
        self._steps = state["steps"]
        self._episode.set_state(state["episode"])
        self.agents = list(self._episode.living)

    @override(MultiAgentEnv)
    def render(self) -> Any:
        return self.env.render() if self.env.render_mode is not None else None

    def close(self) -> None:
        """Closes the environment."""
        self.env.close()
