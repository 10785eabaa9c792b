"""The contract of a joint environment: one call steps all agents that act.

Two forms, one step result: `JointEnv` is one environment with dicts by agent, `VectorJointEnv` is E
environments with arrays. `SyncVectorJointEnv` (sync_vector.py) makes the second out of the first,
`SingleJointEnv` (single.py) the first out of the second.

Shapes: E environments, N agents. Longer than other files: the whole contract stands in one place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

AgentID = str | int


@dataclass(init=False, eq=False, slots=True)
class JointStepResult:
    """What one joint step returns, in both forms.

    | field | `JointEnv` | `VectorJointEnv` |
    |---|---|---|
    | rewards | {agent: float} | float32 [N, E] |
    | observations | {agent: observation} | as `VectorJointEnv.reset_joint` returns them |
    | terminated, truncated | {agent: bool}, or one bool for all | bool [N, E], or [E] for all agents |
    | extras | {name: value}, {name: {agent: value}} or {name: {agent: {agent: value}}} | {name: array [E, ...], \
[N, E, ...] or [N, N, E]} |
    | final_observations | not used | observations before the automatic reset, or None |
    | final_state | not used | what `state()` was before the automatic reset, or None |
    | present | None | bool [N, E]: who acted in this step; None: everybody |
    | over | bool or None | bool [E] or None: whether the episode is over; None: see `JointEnv`, `episode_over` |

    In the second form an agent that is absent still shows some element of its observation space (zeros, say): nobody
    learns from it. An agent that is both terminated and truncated counts as terminated (no bootstrap).

    Extras are of the whole team, of each agent that acted, or of each pair of agents (whose: the outer key, with whom:
    the inner one); pairs that are left out are 0. In arrays the shape says which: of pairs where it begins with
    (N, N, E), of agents where it begins with (N, E), else of the team. Return the same names in every step.

    Args:
        rewards: reward of each agent for this step.
        observations: what each agent sees next.
        terminated: the agent's end by the task: what follows is worth 0.
        truncated: the agent's end from outside, such as a time limit: what follows is bootstrapped. Default:
            nobody.
        extras: named arrays beside the rewards, such as costs, auxiliary targets or per-agent credit.
        final_observations: see the table.
        present: see the table.
        over: see the table.
        final_state: see the table; asked for by `record_states`.
        done: in place of `terminated` and `truncated`: every end is a termination.

    Raises:
        TypeError: neither `terminated` nor `done` is given, or `done` together with one of the two.
    """

    rewards: Any
    observations: Any
    terminated: Any
    truncated: Any
    extras: Mapping[str, Any]
    final_observations: Any
    present: Any
    over: Any
    final_state: Any

    def __init__(
        self,
        rewards: Any,
        observations: Any,
        terminated: Any = None,
        truncated: Any = None,
        extras: Mapping[str, Any] | None = None,
        final_observations: Any = None,
        present: Any = None,
        over: Any = None,
        final_state: Any = None,
        *,
        done: Any = None,
    ) -> None:
        if done is not None:
            if terminated is not None or truncated is not None:
                raise TypeError(
                    "JointStepResult got done together with terminated or truncated; give either done "
                    "(every end is a termination) or terminated and truncated"
                )
            terminated = done
        elif terminated is None:
            raise TypeError(
                "JointStepResult got no terminated; give terminated (and truncated), each a bool or one "
                "bool per agent, or done=..."
            )
        self.rewards = rewards
        self.observations = observations
        self.terminated = terminated
        self.truncated = False if truncated is None else truncated
        self.extras = {} if extras is None else extras
        self.final_observations = final_observations
        self.present = present
        self.over = over
        self.final_state = final_state


class _Spaces:
    """What both forms declare: who acts and in which spaces."""

    possible_agents: list[AgentID]
    observation_spaces: dict[AgentID, gym.Space]
    action_spaces: dict[AgentID, gym.Space]
    state_space: gym.Space | None = None
    metadata: dict[str, Any] = {}
    render_mode: str | None = None
    takes_turns: bool = False  # agents wait while others act: only RLlib's episodes can train them
    records_state: bool = False  # whether `record_states` was called

    def state(self) -> Any:
        """The global state now, for a critic that sees more than its agent: an element of `state_space`, or E of them.

        Without a `state_space` an array, [...] or [E, ...]. What is trained on is flat, see `global_state`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no global state; override state()")

    @property
    def state_parts(self) -> gym.Space | None:
        """The space that names the parts of the state; `state_space`, where that has not been made flat."""
        return self.state_space

    def record_states(self) -> None:
        """Says that `state` is read in every step, and `JointStepResult.final_state` where an episode is over."""
        self.records_state = True

    def get_state(self) -> Any:
        """Everything that decides how the environment goes on, its random generators included."""
        raise NotImplementedError(f"{type(self).__name__} cannot be saved; override get_state() and set_state()")

    def set_state(self, state: Any) -> None:
        """Goes on from where `get_state` was called; changes nothing in `state`."""
        raise NotImplementedError(f"{type(self).__name__} cannot be restored; override get_state() and set_state()")

    @property
    def unwrapped(self) -> Any:
        """This environment itself (Gymnasium's word, which RLlib asks for)."""
        return self

    def close(self) -> None:  # noqa: B027 - optional: most environments hold nothing that needs closing
        """Frees what the environment holds (windows, processes)."""


class JointEnv(_Spaces, ABC):
    """One environment, in which one call steps all agents that act.

    A subclass sets three attributes and two methods; the rest is optional:

    | member | meaning |
    |---|---|
    | `possible_agents` | list of agent ids (str or int); its order is the order of the agents everywhere |
    | `observation_spaces`, `action_spaces` | dicts agent -> gymnasium space; agents may differ |
    | `reset_joint(seed)` | starts an episode, returns {agent: observation} |
    | `step_joint(actions)` | {agent: action} -> `JointStepResult` |
    | `takes_turns` | True: agents wait while others act, and RLlib's episodes are sampled to train them |
    | `state`, `get_state`, `set_state`, `render`, `close`, `metadata` | optional |

    In the plain case all agents have an entry in everything, act in every step and end together. Agents may also join
    late, end early and wait:

    - An agent acts in the next step if it has an observation and no end flag. One without an observation is absent:
      not born yet, ended, or waiting. (An environment whose agents wait can be played by all, and is trained with
      `sampling="episodes"`; joining late and ending early are trained in either way.)
    - `step_joint` gets the actions of exactly the agents that act, and returns a reward for each of them. Others may be
      paid, too, unless they have ended: an agent that ended in an earlier step appears nowhere, not even with 0.0.
    - `terminated` and `truncated` are one bool for all living agents (who have been observed and have not ended), or a
      dict with an entry for every agent that acted; a waiting agent may be flagged, too.
    - In the step of its end an agent may have a last observation; it must have one where it is truncated.
    - The episode is over when nobody lives any more; the next call is `reset_joint`. `JointStepResult.over` overrules
      this, for an environment in which some are still to come when all others have ended.

    Example:
        >>> class Echo(JointEnv):
        ...     def __init__(self, length=10):
        ...         self.possible_agents = ["left", "right"]
        ...         self.observation_spaces = {a: gym.spaces.Discrete(2) for a in self.possible_agents}
        ...         self.action_spaces = {a: gym.spaces.Discrete(2) for a in self.possible_agents}
        ...         self.length, self.rng = length, np.random.default_rng()
        ...
        ...     def reset_joint(self, seed=None):
        ...         if seed is not None:
        ...             self.rng = np.random.default_rng(seed)
        ...         self.t = 0
        ...         self.seen = {a: int(self.rng.integers(2)) for a in self.possible_agents}
        ...         return self.seen
        ...
        ...     def step_joint(self, actions):
        ...         rewards = {a: float(actions[a] == self.seen[a]) for a in self.possible_agents}
        ...         self.t += 1
        ...         self.seen = {a: int(self.rng.integers(2)) for a in self.possible_agents}
        ...         return JointStepResult(rewards, self.seen, False, truncated=self.t == self.length)
    """

    @abstractmethod
    def reset_joint(self, seed: int | None = None) -> dict[AgentID, Any]:
        """Starts an episode.

        Args:
            seed: restarts the random stream; None goes on with it.

        Returns:
            The first observation of every agent that acts in the first step.
        """

    @abstractmethod
    def step_joint(self, actions: Mapping[AgentID, Any]) -> JointStepResult:
        """Plays one step.

        Args:
            actions: for every agent that acts an element of its action space: `Discrete` gives a numpy integer
                (`Discrete(3, start=1)` gives 1, 2 or 3), `Box` and `MultiDiscrete` an array.
        """

    def render(self) -> Any:
        """An image uint8 [height, width, 3] (render_mode "rgb_array"), or what the render mode says."""
        raise NotImplementedError(f"{type(self).__name__} cannot be rendered; override render()")


class VectorJointEnv(_Spaces, ABC):
    """E environments of the same kind, stepped by one call, with automatic reset.

    | | `stacked = False` | `stacked = True` (all agents have identical spaces) |
    |---|---|---|
    | observations | {agent: [E, ...]}; Dict and Tuple spaces: dicts and tuples of such arrays | [N, E, ...] |
    | actions | {agent: [E, ...]} | [N, E] for Discrete, [N, E, k] for MultiDiscrete and Box |
    | rewards | float32 [N, E] | the same |
    | terminated, truncated | bool [N, E]; [E] means: for all agents | the same |
    | present | bool [N, E] or None | the same |
    | extras | {name: [E, ...], [N, E, ...] or [N, N, E]} | the same |
    | final_state | as `state()` returns it | the same |

    Agents are in the order of `possible_agents`, the agent axis is first.

    **Presence.** Actions, observations and rewards have entries for all agents, whoever acts. `present` says who acted;
    the others' actions mean nothing. What is shown to an agent that ended by truncation is its last observation.

    **Automatic reset.** Environment e is over where `over` says so; without it, when every agent that is present is
    terminated or truncated (`episode_over`). Then `observations` already holds the first observation of its next
    episode, and `final_observations` (same structure) the one before the reset. It is None when no environment
    ended; its rows of environments that did not end are unspecified. So it is with `state()` and `final_state`, which
    is needed where an agent is truncated when its episode is over, after `record_states`.

    **One random stream per environment index.** After `reset_joint(seeds)` environment e behaves like a
    single environment that was reset with `seeds[e]`, whatever E is.

    **Ownership.** Arrays that were returned belong to the caller: the environment does not write into them
    later, and keeps no reference to the actions.

    A subclass sets `num_envs`, `possible_agents`, `observation_spaces`, `action_spaces`, if it applies
    `stacked`, and the two abstract methods.
    """

    num_envs: int
    stacked: bool = False

    @abstractmethod
    def reset_joint(self, seeds: Sequence[int | None] | None = None) -> Any:
        """Starts an episode in every environment.

        Args:
            seeds: one per environment; a number restarts the stream of that environment, None goes on with
                it. None in place of the list stands for None everywhere.

        Returns:
            The first observations, see the class's table.
        """

    @abstractmethod
    def step_joint(self, actions: Any) -> JointStepResult:
        """Plays one step in every environment; resets those that are over."""

    def acts_next(self) -> np.ndarray | None:
        """Who acts in the next step, bool [N, E]; None (the default): the environment says only afterwards, `present`.

        `SingleJointEnv` needs it where agents join late.
        """
        return None

    def render(self, index: int = 0) -> Any:
        """An image uint8 [height, width, 3] of environment `index`: after an automatic reset, of the new episode."""
        raise NotImplementedError(f"{type(self).__name__} cannot be rendered; override render()")

    def render_final(self, index: int = 0) -> Any:
        """An image of the end of the episode that the last step ended; by default what `render` shows."""
        return self.render(index)


def episode_over(
    terminated: np.ndarray,
    truncated: np.ndarray,
    present: np.ndarray | None = None,
    over: np.ndarray | None = None,
) -> np.ndarray:
    """Which environments are over: someone is present and everyone present is terminated or truncated.

    Args:
        terminated: bool [N, E], or [E] for all agents.
        truncated: bool [N, E] or [E].
        present: bool [N, E] or None (everybody).
        over: bool [E], what the environment says itself; None: it says nothing.

    Returns:
        bool [E].
    """
    if over is not None:
        return np.asarray(over, dtype=bool)
    ended = np.logical_or(terminated, truncated)
    if present is None:
        return ended if ended.ndim == 1 else ended.all(axis=0)
    return (ended | ~present).all(axis=0) & present.any(axis=0)


def over_after(result: JointStepResult) -> np.ndarray:
    """Bool [E], which environments of a `VectorJointEnv` are over after this step."""
    shape = np.shape(result.rewards)
    terminated, truncated = (per_agent_flags(flags, *shape) for flags in (result.terminated, result.truncated))
    return episode_over(terminated, truncated, result.present, result.over)


def per_agent_flags(flags: Any, num_agents: int, num_envs: int) -> np.ndarray:
    """Brings end flags given as one bool, [E] or [N, E] to bool [N, E].

    Raises:
        ValueError: another shape.
    """
    array = np.asarray(flags, dtype=bool)
    if array.shape == (num_agents, num_envs):
        return array
    if array.shape in ((), (num_envs,)):
        return np.broadcast_to(array, (num_agents, num_envs))
    raise ValueError(
        f"end flags have shape {array.shape}; needed: [agents, environments] = {(num_agents, num_envs)} or "
        f"one per environment, {(num_envs,)}"
    )


def check_seeds(seeds: Sequence[int | None] | None, num_envs: int) -> list[int | None]:
    """The list of one seed per environment that `VectorJointEnv.reset_joint` was given, checked."""
    if seeds is None:
        return [None] * num_envs
    if isinstance(seeds, (int, np.integer)):
        raise TypeError(
            f"reset_joint got the single seed {seeds}; needed: one seed (or None) for each of the "
            f"{num_envs} environments"
        )
    checked = [None if seed is None else int(seed) for seed in seeds]
    if len(checked) != num_envs:
        raise ValueError(f"reset_joint got {len(checked)} seeds for {num_envs} environments; give one for each")
    return checked
