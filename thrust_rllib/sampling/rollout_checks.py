"""What an environment may show and pay, checked on whole rollouts: one pass per array, no work inside a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from thrust_rllib.envs.action_masks import without_choice
from thrust_rllib.joint_batch import AgentID
from thrust_rllib.sampling.agent_groups import AgentGroup


class RolloutChecks:
    """Raises where an observation or a reward must not reach a weight, naming agent, environment index and step.

    Args:
        env: name of the environment, for messages.
        agents: all agents in the environment's order.
        check_bounds: also compare observations with the bounds of their space, not only look for NaN and infinity.
    """

    def __init__(self, env: str, agents: Sequence[AgentID], check_bounds: bool) -> None:
        self._env = env
        self._agents = list(agents)
        self._check_bounds = check_bounds
        self._acting: np.ndarray | None = None

    def reset(self) -> None:
        """All environments were reset: nobody has acted."""
        self._acting = None

    def get_state(self) -> np.ndarray | None:
        """Who has acted and not ended, bool [N, E]; None: nobody has acted."""
        return self._acting

    def set_state(self, state: np.ndarray | None) -> None:
        """Goes on from where `get_state` was called."""
        self._acting = state

    def presence(
        self,
        present: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        rewards: np.ndarray,
        over: np.ndarray,
        acts_next: np.ndarray | None = None,
    ) -> None:
        """Checks who acted, [T, N, E] in the environment's agent order; goes on where the last rollout stopped.

        An agent acts from its first step to its end. One that waits in between would be credited with what happens
        meanwhile only by episodes of its own.

        Args:
            present: bool [T, N, E], who acted.
            terminated: bool [T, N, E].
            truncated: bool [T, N, E].
            rewards: [T, N, E].
            over: bool [T, E], the episode ended with this step.
            acts_next: bool [N, E], who acts in the step that follows the rollout; None: not known yet.

        Raises:
            ValueError: an agent that has acted and has not ended is absent, or an absent agent is paid.
        """
        acting = np.zeros(present.shape[1:], bool) if self._acting is None else self._acting
        last = len(present) - 1
        # The usual case: everybody acts all the time, and one look at the last step is enough.
        for t in range(last if present.all() else 0, last + 1):
            self._refuse(acting & ~present[t], t, "did not act")
            self._refuse(~present[t] & (rewards[t] != 0.0), t, "was paid without acting")
            acting = (acting | present[t]) & ~(terminated[t] | truncated[t] | over[t])
        if acts_next is not None:
            self._refuse(acting & ~acts_next, last + 1, "does not act")
        self._acting = acting

    def _refuse(self, wrong: np.ndarray, t: int, what: str) -> None:
        if wrong.any():
            agent, e = (int(i) for i in np.argwhere(wrong)[0])
            raise ValueError(
                f"environment {self._env!r}: agent {self._agents[agent]!r} {what} in environment index {e}, step {t} "
                "of this rollout. Here agents act from their first observation until they are terminated or truncated, "
                "and are paid for these steps. Agents that wait, as in turn-based environments, need RLlib's episodes "
                'to be trained: .env_runners(sampling="episodes").'
            )

    def observations(
        self,
        group: AgentGroup,
        encoded: np.ndarray,
        first_step: int = 0,
        envs: np.ndarray | None = None,
        read: np.ndarray | None = None,
    ) -> None:
        """Checks encoded observations [T, k, E, …] of one group; T = 1 for one step.

        Args:
            group: the agents.
            encoded: the observations.
            first_step: step of the first row, for the message.
            envs: environment indices of the environment axis; None for 0, 1, 2, ….
            read: bool [T, k, E], the observations to look at; None for all.

        Raises:
            ValueError: one is not finite, or outside its space.
        """
        found = group.encoder.first_violation(encoded if read is None else encoded[read], self._check_bounds)
        if found is None:
            return
        place, problem = found
        t, agent, e = place if read is None else (int(i) for i in np.argwhere(read)[place[0]])
        e = e if envs is None else int(envs[e])
        raise ValueError(
            f"environment {self._env!r} showed agent {group.agents[agent]!r} an observation that is not in its "
            f"observation space, in environment index {e}, step {first_step + t} of this rollout: {problem}. Return "
            "finite observations inside the declared space, widen the space, or switch the comparison with its bounds "
            "off with .environment(disable_env_checking=True)."
        )

    def action_masks(
        self, group: AgentGroup, masks: np.ndarray, present: np.ndarray | None = None, first_step: int = 0
    ) -> None:
        """Checks the action masks [T, k, E, A] that one group acted on; T = 1 for one step.

        Args:
            group: the agents.
            masks: bool, true = allowed.
            present: bool [T, k, E], who acted; None for everybody.
            first_step: step of the first row, for the message.

        Raises:
            ValueError: an agent that acted had nothing to choose from, in one dimension of a MultiDiscrete at least.
        """
        space = group.action_space
        stuck = without_choice(masks, space)
        if present is not None:
            stuck &= present
        if not stuck.any():
            return
        t, agent, e = (int(i) for i in np.argwhere(stuck)[0])
        raise ValueError(
            f"environment {self._env!r} showed agent {group.agents[agent]!r} an action mask that allows no action, in "
            f"environment index {e}, step {first_step + t} of this rollout: {masks[t, agent, e].astype(int).tolist()} "
            f"for {space}; return at least one legal action (MultiDiscrete: one in every dimension), or end the episode"
        )

    def links(self, group: AgentGroup, encoded: np.ndarray, present: np.ndarray) -> None:
        """Checks that nobody heard an agent that did not act, where the environment does not say who acts next.

        Args:
            group: the agents.
            encoded: observations [T, k, E, …], links in front.
            present: bool [T, N, E], who acted, in the environment's order.

        Raises:
            ValueError: an agent that acted was told that it hears one that did not.
        """
        if not group.encoder.num_links or present.all():
            return
        heard = encoded[..., : group.encoder.num_links] > 0  # [T, k, E, N]
        wrong = heard & present[:, group.positions][..., None] & ~present.transpose(0, 2, 1)[:, None]
        if not wrong.any():
            return
        t, agent, e, other = (int(i) for i in np.argwhere(wrong)[0])
        raise ValueError(
            f"environment {self._env!r}: agent {group.agents[agent]!r} hears agent {self._agents[other]!r}, which does "
            f"not act, in environment index {e}, step {t} of this rollout. Set such links to 0, or let the environment "
            "say who acts next: VectorJointEnv.acts_next()"
        )

    def states(self, states: np.ndarray, first_step: int = 0, envs: np.ndarray | None = None) -> None:
        """Checks global states [T, E, S]; T = 1 for one step; arguments as of `observations`.

        Raises:
            ValueError: one is not finite.
        """
        finite = np.isfinite(states)
        if finite.all():
            return
        t, e, place = (int(i) for i in np.argwhere(~finite)[0])
        raise ValueError(
            f"environment {self._env!r}: number {place} of its global state is {states[t, e, place]}, in environment "
            f"index {e if envs is None else int(envs[e])}, step {first_step + t} of this rollout; a critic reads it: "
            "let state() return finite numbers"
        )

    def rewards(self, rewards: np.ndarray, first_step: int = 0) -> None:
        """Checks rewards [T, N, E] in the environment's agent order; T = 1 for one step.

        Raises:
            ValueError: one is not finite.
        """
        finite = np.isfinite(rewards)
        if finite.all():
            return
        t, agent, e = (int(i) for i in np.argwhere(~finite)[0])
        raise ValueError(
            f"environment {self._env!r} paid agent {self._agents[agent]!r} the reward {rewards[t, agent, e]} in "
            f"environment index {e}, step {first_step + t} of this rollout; rewards must be finite numbers"
        )
