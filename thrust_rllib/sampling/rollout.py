"""The arrays of one rollout, filled step by step in the fast door and handed over as a `JointBatch`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from thrust_rllib.envs.extras import ExtrasRecorder, in_order, numbers
from thrust_rllib.joint_batch import AlignmentError, JointBatch, ModuleID, ModuleStreams
from thrust_rllib.sampling.acting import Acted
from thrust_rllib.sampling.agent_groups import AgentGroup


class RolloutRecorder:
    """Collects T steps of E environments.

    Args:
        groups: all agents of the team.
        num_steps: T.
        num_envs: E.
        sequence_length: steps of a training sequence of recurrent modules, at most T; None for all T.
    """

    def __init__(
        self, groups: list[AgentGroup], num_steps: int, num_envs: int, sequence_length: int | None = None
    ) -> None:
        self.groups = groups
        self.num_steps = num_steps
        self.num_envs = num_envs
        self._arrays: list[dict[str, np.ndarray]] = [{} for _ in groups]
        num_agents = sum(map(len, groups))
        shape = (num_steps, num_agents, num_envs)
        self.rewards = np.empty(shape, np.float32)
        self.present = np.empty(shape, bool)
        self.terminated = np.empty(shape, bool)
        self.truncated = np.empty(shape, bool)
        self._episode_start = np.empty((num_steps, num_envs), bool)
        self._extras = ExtrasRecorder()
        self.states: np.ndarray | None = None  # [T, E, S]
        self._bootstrap_states: list[np.ndarray] = []
        self._bootstrap_rows: list[np.ndarray] = []
        self._bootstrap_obs: list[list[np.ndarray]] = [[] for _ in groups]
        self._sequence_starts = range(0, num_steps, sequence_length or num_steps)
        self._states_in: list[list[np.ndarray]] = [[] for _ in groups]  # [k, E, S] of each training sequence

    def record_acted(
        self,
        t: int,
        encoded: list[np.ndarray] | None,
        masks: list[np.ndarray | None],
        acted: list[Acted],
        seen_at: np.ndarray | None = None,
    ) -> None:
        """Stores what each agent saw and did at step t.

        Args:
            t: the step.
            encoded: per group the observations before normalisation, [k, E, …]; None where there is none.
            masks: per group bool [k, E, A] or None.
            acted: per group input, logits and actions.
            seen_at: [E, 2] episode and step at which the observations came, for the audit; or None.
        """
        for index, done in enumerate(acted):
            self._store(index, t, "obs", done.obs)
            self._store(index, t, "logits", done.logits)
            self._store(index, t, "actions", done.actions)
            if encoded is not None:
                self._store(index, t, "encoded", encoded[index])
            if (mask := masks[index]) is not None:
                self._store(index, t, "action_mask", mask)
            if done.memory is not None and t in self._sequence_starts:
                self._states_in[index].append(done.memory)
            if seen_at is not None:
                self._store(index, t, "origin", np.broadcast_to(seen_at, (len(done.obs), *seen_at.shape)))

    def _store(self, index: int, t: int, name: str, value: np.ndarray) -> None:
        arrays = self._arrays[index]
        if name not in arrays:
            arrays[name] = np.empty((self.num_steps, *value.shape), value.dtype)
        arrays[name][t] = value

    def record_step(
        self,
        t: int,
        rewards: np.ndarray,
        present: np.ndarray | bool,
        terminated: np.ndarray,
        truncated: np.ndarray,
        episode_start: np.ndarray,
        extras: Mapping[str, np.ndarray],
    ) -> None:
        """Stores what the environment answered at step t: [N, E] arrays in the environment's agent order."""
        self.rewards[t], self.present[t] = rewards, present
        self.terminated[t], self.truncated[t] = terminated, truncated
        self._episode_start[t] = episode_start
        where = f"step {t} of this rollout"
        if present is True or np.any(present):
            self._extras.check_names(extras.keys(), where)
        for name, value in extras.items():
            value = numbers(value, name, where)
            self._extras.place(name, (self.num_steps,), value, where)[t] = value

    def record_state(self, t: int, state: np.ndarray) -> None:
        """Stores the global states [E, S] before step t."""
        if self.states is None:
            self.states = np.empty((self.num_steps, *state.shape), np.float32)
        self.states[t] = state

    def record_bootstrap(
        self, t: int, envs: np.ndarray, obs: list[np.ndarray], state: np.ndarray | None = None
    ) -> None:
        """Stores what follows step t in the environments `envs` [K]: per group [k, K, …], and states [K, S]."""
        if state is not None:
            self._bootstrap_states.append(state)
        self._bootstrap_rows.append(t * self.num_envs + envs)
        for stored, value in zip(self._bootstrap_obs, obs, strict=True):
            stored.append(value)

    def array(self, index: int, name: str) -> np.ndarray:
        """The array [T, k, E, …] of one group that `record_acted` filled under `name`."""
        return self._arrays[index][name]

    def bootstrap(self, index: int) -> np.ndarray:
        """The bootstrap observations [k, K, …] of one group."""
        parts = self._bootstrap_obs[index]
        if not parts:
            encoded = self._arrays[index]["obs"]
            return np.empty((encoded.shape[1], 0, *encoded.shape[3:]), encoded.dtype)
        return np.concatenate(parts, axis=1)

    def _bootstrap_state(self) -> np.ndarray | None:
        if self.states is None:
            return None
        return np.concatenate([np.empty((0, self.states.shape[2]), np.float32), *self._bootstrap_states])

    def _states(self, index: int) -> np.ndarray | None:
        """The states [k, C, S] entering the training sequences, in the order of `_sequence_rows`."""
        parts = self._states_in[index]
        return np.concatenate(parts, axis=1) if parts else None

    def _sequence_rows(self) -> np.ndarray:
        """[C] rows t·E + e, sorted."""
        return (np.array(self._sequence_starts)[:, None] * self.num_envs + np.arange(self.num_envs)).ravel()

    def _clear_absent(self, action_logp: list[np.ndarray], head_logp: list[np.ndarray] | None) -> None:
        """Zeros, and masks of ones, where an agent did not act: what it was shown there must reach nobody."""
        absent = ~self.present
        for array in (self.terminated, self.truncated):
            array[absent] = False
        for group, arrays, logp in zip(self.groups, self._arrays, action_logp, strict=True):
            rows = absent[:, group.positions]
            for array in (arrays["obs"], arrays["actions"], logp):
                array[rows] = 0
            if "action_mask" in arrays:
                arrays["action_mask"][rows] = True
        for group, logp in zip(self.groups, head_logp or [], strict=False):
            logp[absent[:, group.positions]] = 0

    def finish(
        self,
        action_logp: list[np.ndarray],
        origin: np.ndarray | None = None,
        head_logp: list[np.ndarray] | None = None,
    ) -> JointBatch:
        """The batch.

        Args:
            action_logp: [T, k, E] per group.
            origin: [T, E, 2] episode and step of each row as the ends of episodes tell, for the audit; or None.
            head_logp: [T, k, E, H] per group, the same head by head; or None.

        Raises:
            AlignmentError: the observations of a row came at another step.
        """
        rows = self._bootstrap_rows
        self.truncated &= ~self.terminated
        if not self.present.all():
            self._clear_absent(action_logp, head_logp)
        streams: dict[ModuleID, ModuleStreams] = {}
        order: list[int] = []
        for index, group in enumerate(self.groups):
            arrays, bootstrap, states = self._arrays[index], self.bootstrap(index), self._states(index)
            if origin is not None and (arrays["origin"] != origin[:, None]).any():
                raise AlignmentError(f"agents {list(group.agents)}: observations and ends of a rollout do not match")
            of_group = [x[:, group.positions] for x in (self.rewards, self.present, self.terminated, self.truncated)]
            places = np.arange(self.rewards.shape[1])[group.positions]
            for module_id, mine in group.by_module:
                order += places[mine].tolist()

                def part(array: np.ndarray, mine: slice = mine) -> np.ndarray:
                    """Of the module's agents; in one block, which Ray's object store takes over without a copy."""
                    return np.ascontiguousarray(array[:, mine])

                rewards, present, terminated, truncated = map(part, of_group)
                streams[module_id] = ModuleStreams(
                    agents=group.agents[mine],
                    obs=part(arrays["obs"]),
                    actions=part(arrays["actions"]),
                    action_logp=part(action_logp[index]),
                    rewards=rewards,
                    present=present,
                    terminated=terminated,
                    truncated=truncated,
                    bootstrap_obs=np.ascontiguousarray(bootstrap[mine]),
                    action_mask=part(arrays["action_mask"]) if "action_mask" in arrays else None,
                    origin=None if origin is None else part(arrays["origin"]),
                    state_in=None if states is None else states[mine],
                    head_logp=None if head_logp is None else part(head_logp[index]),
                )
        return JointBatch(
            modules=streams,
            bootstrap_rows=np.concatenate(rows) if rows else np.empty(0, np.int64),
            episode_start=self._episode_start,
            valid=np.ones((self.num_steps, self.num_envs), bool),
            global_state=self.states,
            bootstrap_state=self._bootstrap_state(),
            extras={name: in_order(extra, order, self.num_envs) for name, extra in self._extras.arrays.items()},
            sequence_rows=self._sequence_rows() if any(self._states_in) else None,
        ).check()
