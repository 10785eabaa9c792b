"""The global states of a rollout in the fast door: before each step, and what follows rows that are bootstrapped."""

from __future__ import annotations

import numpy as np

from thrust_rllib.envs.global_state import flat_states
from thrust_rllib.envs.joint_env import VectorJointEnv
from thrust_rllib.envs.wrapped_state import global_state_of
from thrust_rllib.sampling.env_restarts import EnvironmentFailed


class StateReader:
    """Reads `state()` of E environments as flat numbers; says so to them (`record_states`).

    Args:
        env: the environments.
        name: what the user called them, for messages.
    """

    def __init__(self, env: VectorJointEnv, name: str) -> None:
        self._env, self._name = env, name
        self._size: int | None = None
        env.record_states()

    def before(self, t: int) -> np.ndarray:
        """The states before step t of the rollout, float32 [E, S].

        Raises:
            EnvironmentFailed: its own code fails.
            TypeError: no numbers.
            ValueError: not of the declared shape, or of another size than before.
        """
        where = f"environment {self._name!r}, step {t} of this rollout"
        try:
            states = global_state_of(self._env)
        except (TypeError, ValueError):
            raise
        except Exception as error:
            raise EnvironmentFailed(f"{where}: state() failed: {type(error).__name__}: {error}") from error
        flat = flat_states(self._env.state_space, states, self._env.num_envs, where)
        self._size = flat.shape[1] if self._size is None else self._size
        if flat.shape[1] != self._size:
            raise ValueError(
                f"{where}: state() has {flat.shape[1]} numbers, before it had {self._size}; return as many in "
                "every step"
            )
        return flat

    def following(
        self, t: int, states: np.ndarray, envs: np.ndarray, over: np.ndarray, final_state: object
    ) -> np.ndarray:
        """What follows step t in the environments `envs`, float32 [K, S].

        Args:
            t: the step.
            states: `before(t + 1)`.
            envs: [K] indices.
            over: bool [E], whose episode is over.
            final_state: `JointStepResult.final_state`.

        Raises:
            ValueError: an episode is over, and the environment does not say what its state was.
        """
        following = states[envs]
        ended = over[envs]
        if not ended.any():
            return following
        where = f"environment {self._name!r}, environment index {int(envs[ended][0])}, step {t} of this rollout"
        if final_state is None:
            raise ValueError(
                f"{where}: an agent is truncated and the episode is over, but the state before the automatic reset is "
                "not told; let step_joint return JointStepResult(final_state=...), shaped as state()"
            )
        final = flat_states(self._env.state_space, final_state, self._env.num_envs, where, rows=envs[ended])
        if final.shape[1] != states.shape[1]:
            raise ValueError(
                f"{where}: final_state has {final.shape[1]} numbers, state() {states.shape[1]}; they must have as many"
            )
        following[ended] = final
        return following
