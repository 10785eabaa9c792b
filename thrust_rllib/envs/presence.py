"""Who acts, waits and has ended in a running episode of a `JointEnv`, and checks of what a step says about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from thrust_rllib.envs.joint_env import AgentID, JointStepResult
from thrust_rllib.envs.names import DECLARE_ALL

Where = Callable[[], str]  # the beginning of an error message: environment and step


@dataclass(frozen=True, slots=True)
class AgentStep:
    """What one step did to the agents.

    | field      | meaning                                                                              |
    |------------|--------------------------------------------------------------------------------------|
    | acted      | agents that acted in the step                                                        |
    | terminated | {agent: bool} of the agents that lived before the step                               |
    | truncated  | likewise; False for an agent that is terminated, too                                 |
    | over       | whether the episode is over                                                          |
    """

    acted: list[AgentID]
    terminated: dict[AgentID, bool]
    truncated: dict[AgentID, bool]
    over: bool

    @property
    def ended(self) -> list[AgentID]:
        """Agents whose life ended in the step."""
        return [agent for agent, end in self.terminated.items() if end or self.truncated[agent]]


class EpisodeAgents:
    """Follows the agents of one `JointEnv` through its episodes.

    An agent lives from its first observation to its end. It acts in a step before which it got an observation, and
    waits in the others.

    | attribute | meaning                                                         |
    |-----------|-----------------------------------------------------------------|
    | agents    | `possible_agents`                                               |
    | acting    | agents that act in the next step                                |
    | living    | agents that act or wait                                         |
    | ended     | agents whose life has ended in this episode                     |
    | everybody | whether all agents act in the next step                         |

    All lists are in the order of `agents`.

    Args:
        agents: `possible_agents`.
    """

    def __init__(self, agents: Sequence[AgentID]) -> None:
        self.agents = list(agents)
        self.acting: list[AgentID] = []
        self.living: list[AgentID] = []
        self.ended: list[AgentID] = []
        self.everybody = False
        self._all = frozenset(agents)
        flags = {flag: dict.fromkeys(self.agents, flag) for flag in (False, True)}
        self._plain = {
            (end, cut): AgentStep(self.agents, flags[end], flags[cut], end or cut)
            for end, cut in ((False, False), (True, False), (False, True))
        }

    def begin(self, observations: Any, where: Where) -> None:
        """Starts an episode with the first observations.

        Raises:
            TypeError: no dict.
            ValueError: an unknown agent, or nobody.
        """
        check_agents(observations, self.agents, "observations", where)
        if not observations:
            raise ValueError(f"{where()}: observations are empty; return those of the agents that act first")
        self.acting = self.agents if len(observations) == len(self.agents) else self._among(observations)
        self.living, self.ended = self.acting, []
        self.everybody = self.acting is self.agents

    def choose(self, actions: Mapping[AgentID, Any], where: Where) -> dict[AgentID, Any]:
        """The actions of exactly the agents that act.

        Raises:
            ValueError: one is missing.
        """
        try:
            return {agent: actions[agent] for agent in self.acting}
        except KeyError as error:
            raise ValueError(
                f"{where()}: actions have no entry for agent {error.args[0]!r}; needed: one for each of {self.acting}"
            ) from None

    def advance(self, result: JointStepResult, where: Where) -> AgentStep:
        """Takes in a step.

        Raises:
            TypeError: rewards, observations or flags of a wrong type.
            ValueError: an entry is missing, or there is one of an unknown agent or of one that ended earlier.
        """
        if self._is_plain(result):
            terminated, truncated = bool(result.terminated), bool(result.truncated) and not result.terminated
            if terminated or truncated:
                self.ended, self.acting, self.living, self.everybody = self.agents, [], [], False
            return self._plain[terminated, truncated]
        acted, before = self.acting, self.living
        observations = result.observations
        for name, given in (("rewards", result.rewards), ("observations", observations)):
            check_agents(given, self.agents, name, where)
            self._refuse_ended(given, name, where)
        for agent in acted:
            if agent not in result.rewards:
                raise ValueError(
                    f"{where()}: rewards have no entry for agent {agent!r}, which acted in this step; return one for "
                    f"each of {acted}, 0.0 where there is nothing to pay"
                )
        newcomers = [agent for agent in self.agents if agent in observations and agent not in before]
        ends = self._flags(result.terminated, newcomers, "terminated", where)
        cuts = self._flags(result.truncated, newcomers, "truncated", where)
        ended = {agent for agent in ends if ends[agent] or cuts[agent]}.union(self.ended)
        stay = {*before, *newcomers} - ended
        for agent in acted:
            if cuts[agent] and not ends[agent] and agent not in observations:
                raise ValueError(
                    f"{where()}: observations have no entry for agent {agent!r}, which is truncated; return the last "
                    "one, whose value stands for what would have followed (nothing follows: terminate the agent)"
                )
        over = not stay if result.over is None else bool(result.over)
        if over:
            for agent in acted:
                if agent not in ended:
                    raise ValueError(
                        f"{where()}: the episode is over (JointStepResult.over), but agent {agent!r} is neither "
                        "terminated nor truncated; set one of its flags"
                    )
        self.ended, self.living = self._among(ended), self._among(stay)
        self.acting = [agent for agent in self.living if agent in observations]
        if len(self.acting) == len(self.agents):
            self.acting = self.agents
        self.everybody = self.acting is self.agents
        return AgentStep(
            acted=acted,
            terminated={agent: ends[agent] for agent in before},
            truncated={agent: cuts[agent] and not ends[agent] for agent in before},
            over=over,
        )

    def _is_plain(self, result: JointStepResult) -> bool:
        """The usual case: everybody acted, and all go on or end together."""
        return (
            self.everybody
            and isinstance(result.terminated, (bool, np.bool_))
            and isinstance(result.truncated, (bool, np.bool_))
            and (result.over is None or bool(result.over) == bool(result.terminated or result.truncated))
            and type(result.rewards) is type(result.observations) is dict
            and result.rewards.keys() == self._all == result.observations.keys()
        )

    def _among(self, chosen: Any) -> list[AgentID]:
        return [agent for agent in self.agents if agent in chosen]

    def _refuse_ended(self, given: Mapping[AgentID, Any], what: str, where: Where) -> None:
        for agent in self.ended:
            if agent in given:
                raise ValueError(
                    f"{where()}: {what} have an entry ({given[agent]!r}) for agent {agent!r}, which ended earlier in "
                    "this episode; leave it out until the next reset_joint"
                )

    def _flags(self, flags: Any, newcomers: Sequence[AgentID], what: str, where: Where) -> dict[AgentID, bool]:
        """Flags of the living agents and of newcomers, from one bool or a dict."""
        everyone = [*self.living, *newcomers]
        if isinstance(flags, (bool, np.bool_)):
            return dict.fromkeys(everyone, bool(flags))
        if not isinstance(flags, Mapping):
            raise TypeError(
                f"{where()}: {what} is a {type(flags).__name__}; return one bool for all agents or a dict agent -> bool"
            )
        check_agents(flags, self.agents, f"{what} flags", where)
        for agent in self.acting:
            if agent not in flags:
                raise ValueError(
                    f"{where()}: {what} flags have no entry for agent {agent!r}, which acted in this step; return one "
                    f"bool for all agents or an entry for each of {self.acting}"
                )
        for agent, flag in flags.items():
            if not isinstance(flag, (bool, np.bool_)):
                raise TypeError(f"{where()}: {what} of agent {agent!r} is {flag!r}; return a bool")
        return {agent: bool(flags.get(agent, False)) for agent in everyone}

    def get_state(self) -> dict[str, list[AgentID]]:
        """Who acts, lives and has ended."""
        return {name: [*getattr(self, name)] for name in ("acting", "living", "ended")}

    def set_state(self, state: Mapping[str, list[AgentID]]) -> None:
        """Goes on from where `get_state` was called."""
        self.living, self.ended = [*state["living"]], [*state["ended"]]
        self.everybody = len(state["acting"]) == len(self.agents)
        self.acting = self.agents if self.everybody else [*state["acting"]]


def check_agents(given: Any, agents: Sequence[AgentID], what: str, where: Where) -> None:
    """Raises unless `given` is a mapping whose keys are among `agents`."""
    if not isinstance(given, Mapping):
        raise TypeError(f"{where()}: {what} are a {type(given).__name__}; return a dict with one entry per agent")
    unknown = [key for key in given if key not in agents]
    if unknown:
        hint = ' ("__all__" is RLlib\'s key: leave it out and say JointStepResult(over=...))'
        raise ValueError(
            f"{where()}: {what} name {unknown}, which are not in possible_agents {list(agents)}"
            + (hint if "__all__" in unknown else f"; {DECLARE_ALL}")
        )
