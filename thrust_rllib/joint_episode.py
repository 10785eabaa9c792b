"""The episode of the general door: RLlib's `MultiAgentEpisode` with a time index of its own.

RLlib's class loses data where agents come and go: an agent that terminates without a last observation gets one entry
too many in the time index; a truncated agent counts as terminated when the others terminate; an episode is over once
all agents seen so far have ended, though others are still to come; rewards before an agent's first observation, and
those that wait for its next one where a fragment is cut, are not trained on. `add_env_step` and `cut` are written anew
here; everything else, and what callbacks and connectors read, is RLlib's.

Longer than others: growing, cutting and the messages belong to one class, as in RLlib.
"""

from __future__ import annotations

import copy
import itertools
import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.env.utils.infinite_lookback_buffer import InfiniteLookbackBuffer
from ray.rllib.utils.annotations import override
from ray.util import log_once

from thrust_rllib.envs.extras import check_extras
from thrust_rllib.envs.names import DECLARE_ALL
from thrust_rllib.envs.rllib import ALL, COMMON, EXTRAS, STATE
from thrust_rllib.joint_batch import AgentID

logger = logging.getLogger(__name__)


class JointEpisode(MultiAgentEpisode):
    """One episode, or a fragment of it, of all agents.

    An agent's *step* goes from its action to its next observation or its end. What it is paid in between, and before
    its first observation, is the reward of that step (of its first one). A step that is open where a fragment is cut
    (the agent waits for its turn) goes over to the next fragment and is completed there.

    Beside RLlib's attributes:

    | attribute        | meaning                                                                             |
    |------------------|-------------------------------------------------------------------------------------|
    | step_times       | {agent: [environment step of each of its completed steps in this fragment]}         |
    | acting           | agents that act next, in the environment's order                                    |
    | acted            | {agent: number of its actions in this fragment, of open steps, too}                 |
    | runner_index     | which runner sampled it                                                             |
    | env_index        | which of the runner's environments this is                                          |
    | extras           | {environment step: {name: value, or {agent: value}}} from infos["__common__"]["extras"] |
    | states           | {environment step: [S], the global state before it}, where it is recorded; also what follows |
    |                  | the last step, from infos["__common__"][`STATE`]                                    |
    | bootstrap_inputs | {agent: what its module would see next}, where observations are normalised          |
    | memory           | {agent: [S], the state in which its recurrent module enters its next step}; without |
    |                  | an entry it is the initial one                                                      |

    Args:
        env_name: of the environment, for messages.
        runner_index: see above.
        env_index: see above.
        agents: all agents of the environment, in its order.
        **kwargs: as of `MultiAgentEpisode`, without data.
    """

    _start_time: float | None

    def __init__(
        self, *, env_name: str, runner_index: int, env_index: int, agents: Sequence[AgentID], **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.env_name = env_name
        self.runner_index = runner_index
        self.env_index = env_index
        self.agents = tuple(agents)
        self.step_times: dict[AgentID, list[int]] = defaultdict(list)
        self.acting: tuple[AgentID, ...] = ()
        self.acted: dict[AgentID, int] = defaultdict(int)
        self.extras: dict[int, Mapping[str, Any]] = {}
        self.states: dict[int, np.ndarray] = {}
        self.bootstrap_inputs: dict[AgentID, Any] = {}
        self.memory: dict[AgentID, np.ndarray] = {}
        self._finished = False  # numpy arrays; nothing can be added
        self._stepped: tuple[AgentID, ...] = ()  # agents with an observation of this moment
        self._ended: set[AgentID] = set()
        self._acted_at: dict[AgentID, int] = {}  # open steps

    # --- growing --------------------------------------------------------------------------------------------------

    @override(MultiAgentEpisode)
    def add_env_reset(self, *, observations: Mapping[AgentID, Any], infos: Mapping[AgentID, Any] | None = None) -> None:
        self._check_known(observations)
        super().add_env_reset(observations=observations, infos=infos)
        self._keep_state(infos or {})
        self.acting = self._stepped = tuple(agent for agent in self.agents if agent in observations)

    @override(MultiAgentEpisode)
    def add_env_step(
        self,
        observations: Mapping[AgentID, Any],
        actions: Mapping[AgentID, Any],
        rewards: Mapping[AgentID, float],
        infos: Mapping[AgentID, Any] | None = None,
        *,
        terminateds: Mapping[AgentID, bool] | None = None,
        truncateds: Mapping[AgentID, bool] | None = None,
        extra_model_outputs: Mapping[AgentID, Any] | None = None,
    ) -> None:
        """Takes in one step of the environment.

        Raises:
            ValueError: an agent that has ended is observed, paid or acts; an agent that acted is not paid; a truncated
                agent that was still to be observed is not. The message names environment, agent and step.
        """
        if self.is_done:
            raise ValueError(f"{self._where()}: the episode is over, and still a step was added to it")
        infos, terminateds, truncateds = infos or {}, terminateds or {}, truncateds or {}
        outputs = extra_model_outputs or {}
        over_by_end, over_by_cut = bool(terminateds.get(ALL)), bool(truncateds.get(ALL))
        over = over_by_end or over_by_cut
        now = self.env_t
        self.env_t += 1
        self._check_known(observations, rewards)
        self._keep_state(infos)
        if extras := (infos.get(COMMON) or {}).get(EXTRAS):
            check_extras(extras, self.agents, [agent for agent in self.agents if agent in actions], self._where)
            self.extras[now] = copy.deepcopy(extras)  # an environment may write the next ones into the same dict

        stepped, acting = [], []
        for agent in self.agents:
            observed, acts, paid = agent in observations, agent in actions, agent in rewards
            flagged = bool(terminateds.get(agent)), bool(truncateds.get(agent))
            if agent in self._ended:
                if observed or acts or paid:
                    self._refuse_ended(agent, observations, rewards)
                continue
            episode = self.agent_episodes.get(agent)
            if not (observed or acts or paid or any(flagged) or over):
                continue
            # An agent without a flag of its own ends with the episode; one with both is terminated.
            terminated = flagged[0] or (over_by_end and not flagged[1])
            truncated = not terminated and (flagged[1] or over_by_cut)
            if acts:
                if not paid and (observed or terminated or truncated):  # who waits is paid later
                    raise ValueError(
                        f"{self._where(agent)} acted but got no reward; return a number for every agent that acted "
                        "(0.0 where nothing happened)"
                    )
                self._acted_at[agent] = now
                self._hanging_actions_end[agent] = actions[agent]
                self._hanging_extra_model_outputs_end[agent] = outputs.get(agent)
                self.acted[agent] += 1
            if paid:
                waiting_for = self._hanging_rewards_end if agent in self._acted_at else self._hanging_rewards_begin
                waiting_for[agent] += self._number(agent, rewards[agent])
            if observed and episode is None and not (terminated or truncated):
                self._begin_agent(agent, observations[agent], infos.get(agent))
                stepped.append(agent)
            elif observed and agent not in self._acted_at and episode is not None:
                raise ValueError(f"{self._where(agent)} was observed again before it acted on what it saw last")
            elif agent in self._acted_at and (observed or terminated or truncated):
                if not observed and truncated:
                    raise ValueError(
                        f"{self._where(agent)} was truncated without a last observation, whose value its return goes "
                        "on with; return one, or let it terminate"
                    )
                self._complete_step(agent, observations, infos.get(agent), terminated, truncated)
                stepped.append(agent)
            if terminated or truncated:
                self._end_agent(agent)
            elif observed:
                acting.append(agent)

        for agent, index in self.env_t_to_agent_t.items():
            if agent not in stepped:
                index.append(self.SKIP_ENV_TS_TAG)
        # Connector pieces rewrite what these agents saw; of one that ended unobserved it is rewritten already.
        self.acting, self._stepped = tuple(acting), tuple(agent for agent in stepped if agent in observations)
        self.is_terminated, self.is_truncated = over_by_end, over_by_cut and not over_by_end
        self._last_step_time = time.perf_counter()
        if self._start_time is None:
            self._start_time = self._last_step_time

    def _keep_state(self, infos: Mapping[AgentID, Any]) -> None:
        """The state before the next step."""
        if (state := (infos.get(COMMON) or {}).get(STATE)) is not None:
            self.states[self.env_t] = state

    def _begin_agent(self, agent: AgentID, observation: Any, infos: Any) -> None:
        """The agent's first observation."""
        episode = self._new_agent_episode(agent)
        episode.add_env_reset(observation=observation, infos=infos)
        self.agent_episodes[agent] = episode
        index = self.env_t_to_agent_t[agent]
        lookback = next((other.lookback for other in self.env_t_to_agent_t.values() if other is not index), 0)
        index.extend([self.SKIP_ENV_TS_TAG] * (self.env_t - self.env_t_started + lookback))
        index.lookback = lookback
        index.append(0)

    def _new_agent_episode(self, agent: AgentID) -> SingleAgentEpisode:
        return SingleAgentEpisode(
            agent_id=agent,
            module_id=self.module_for(agent),
            multi_agent_episode_id=self.id_,
            observation_space=self.observation_space.get(agent),
            action_space=self.action_space.get(agent),
        )

    def _complete_step(
        self, agent: AgentID, observations: Mapping[AgentID, Any], infos: Any, terminated: bool, truncated: bool
    ) -> None:
        """Closes the agent's open step; where it terminates unobserved, its last observation stands in (not read)."""
        episode = self.agent_episodes[agent]
        reward = self._hanging_rewards_end.pop(agent, 0.0) + self._hanging_rewards_begin.pop(agent, 0.0)
        episode.add_env_step(
            observation=observations[agent] if agent in observations else episode.observations.data[-1],
            action=self._hanging_actions_end.pop(agent),
            reward=reward,
            infos=infos,
            terminated=terminated,
            truncated=truncated,
            extra_model_outputs=self._hanging_extra_model_outputs_end.pop(agent),
        )
        self.step_times[agent].append(self._acted_at.pop(agent))
        self.env_t_to_agent_t[agent].append(episode.t)

    def _end_agent(self, agent: AgentID) -> None:
        dropped = self._hanging_rewards_begin.get(agent, 0.0)
        if dropped and log_once(f"thrust_rllib_dropped_{self.env_name}_{agent}"):
            logger.warning(
                "%s: it was paid %g but never acted in this episode: no row can carry that reward, and it is left out "
                "of training (told once)",
                self._where(agent),
                dropped,
            )
        self._del_hanging(agent)
        self.memory.pop(agent, None)
        self._ended.add(agent)

    # --- cutting --------------------------------------------------------------------------------------------------

    @override(MultiAgentEpisode)
    def cut(self, len_lookback_buffer: int = 0) -> JointEpisode:
        """The fragment that goes on from here, with all open steps and rewards, and what the agents remember.

        Args:
            len_lookback_buffer: number of steps of each agent that the new fragment can look back to, as far as there
                are so many; in environment steps that is more where agents wait.
        """
        if self.is_done:
            raise ValueError(f"{self._where()}: the episode is over and cannot go on in another fragment")
        successor = JointEpisode(
            env_name=self.env_name,
            runner_index=self.runner_index,
            env_index=self.env_index,
            agents=self.agents,
            id_=self.id_,
            observation_space=self.observation_space,
            action_space=self.action_space,
            env_t_started=self.env_t,
            agent_module_ids=dict(self._agent_to_module_mapping),
            agent_to_module_mapping_fn=self.agent_to_module_mapping_fn,
        )
        living = [agent for agent in self.agents if agent in self.agent_episodes and agent not in self._ended]
        window = len_lookback_buffer + 1
        for agent in living:  # as many of its own observations as asked for, and one that an open step began with
            newest_first = reversed(self.env_t_to_agent_t[agent].data)
            observed = (i for i, entry in enumerate(newest_first, 1) if entry != self.SKIP_ENV_TS_TAG)
            window = max(window, *itertools.islice(observed, len_lookback_buffer + 1))
        for agent in living:
            index = self.env_t_to_agent_t[agent].data[-window:]
            seen = sum(entry != self.SKIP_ENV_TS_TAG for entry in index)
            before = self.agent_episodes[agent]
            after = before.cut(len_lookback_buffer=seen - 1)
            after.agent_id, after.module_id = before.agent_id, before.module_id
            after.multi_agent_episode_id = self.id_
            successor.agent_episodes[agent] = after
            successor.agent_t_started[agent] = before.t
            successor.env_t_to_agent_t[agent] = InfiniteLookbackBuffer(list(index), lookback=len(index) - 1)
        successor.acting, successor._stepped = self.acting, self._stepped
        successor.memory = dict(self.memory)
        # Steps that are open stand in the next fragment's batch once more.
        began = set(self._acted_at.values())
        successor.extras = {t: self.extras[t] for t in began if t in self.extras}
        following = {self.env_t, *began, *(t + 1 for t in began)}
        successor.states = {t: self.states[t] for t in sorted(following) if t in self.states}
        successor._ended = set(self._ended)
        successor._acted_at = dict(self._acted_at)
        for name in ("actions_end", "extra_model_outputs_end", "rewards_end", "rewards_begin"):
            getattr(successor, f"_hanging_{name}").update(getattr(self, f"_hanging_{name}"))
        successor._custom_data = copy.deepcopy(self.custom_data)
        return successor

    # --- reading --------------------------------------------------------------------------------------------------

    @override(MultiAgentEpisode)
    def to_numpy(self) -> JointEpisode:
        if not self._finished:  # RLlib's loop asks for it after each step, for all episodes that have ended so far
            self._finished = True
            super().to_numpy()
        return self

    @property
    @override(MultiAgentEpisode)
    def is_reset(self) -> bool:
        # RLlib's asks the agents: where a fragment is cut while nobody lives, the next one has none.
        return self.env_t > 0 or bool(super().is_reset)

    @override(MultiAgentEpisode)
    def get_agents_to_act(self) -> set[AgentID]:
        return set(self.acting)

    @override(MultiAgentEpisode)
    def get_agents_that_stepped(self) -> set[AgentID]:
        return set(self._stepped)

    # --- messages -------------------------------------------------------------------------------------------------

    def _where(self, agent: AgentID | None = None) -> str:
        who = "" if agent is None else f": agent {agent!r}"
        return (
            f"environment {self.env_name!r}, environment index {self.env_index}, step {self.env_t} of its episode{who}"
        )

    def _check_known(self, *given: Mapping[AgentID, Any]) -> None:
        for mapping in given:
            for agent in mapping:
                if agent not in self.agents:
                    raise ValueError(
                        f"{self._where()}: agent {agent!r} is not in possible_agents {list(self.agents)}; {DECLARE_ALL}"
                    )

    def _number(self, agent: AgentID, reward: Any) -> float:
        if type(reward) is not float:
            array = np.asarray(reward)
            if array.ndim or array.dtype.kind not in "biuf":
                raise ValueError(f"{self._where(agent)} got the reward {reward!r}; return one number")
        return float(reward)

    def _refuse_ended(
        self, agent: AgentID, observations: Mapping[AgentID, Any], rewards: Mapping[AgentID, float]
    ) -> None:
        given = [
            what
            for what, mapping in (("an observation", observations), (f"the reward {rewards.get(agent)}", rewards))
            if agent in mapping
        ]
        raise ValueError(
            f"{self._where(agent)} has ended and still got {' and '.join(given) or 'an action'}; leave an agent out of "
            "all dicts after its end (a reward of 0.0, too)"
        )
