"""Tasks that nobody solves without memory; vectorised.

| name | who must remember what | without memory |
|---|---|---|
| `Recall` | a cue of the first step, for k steps | 1 / num_cues |
| `Relay` | what another agent said about a cue that it alone has seen, for k steps | 1 / num_cues |
| `stateless_cartpole` | earlier positions: velocities are not shown | about 50 of 500 |

In `Recall` and `Relay` the return of an episode is its success, 0 or 1. Observations are [one-hot of what is shown
(zeros: nothing), "now"], float32 [num_cues + 1]; actions that do not count are free.

Shapes: E environments, K cues.
"""

from __future__ import annotations

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import TransformObservation

from thrust_rllib.envs.fixed_length import FixedLengthEnv

POSITION_AND_ANGLE = [0, 2]


class _CueEnv(FixedLengthEnv):
    """A cue is drawn when an episode begins, each of K alike; the last action of the last agent pays if it is the cue.

    Args:
        num_envs: E.
        agents: ids; all are paid.
        delay: k, from the step that shows what is to be kept to the step that asks for it.
        num_cues: K, also the number of actions.
        episode_length: steps per episode; the last one shows "now" to the last agent.

    Raises:
        ValueError: delay below 1 or num_cues below 2.
    """

    saved_arrays = (*FixedLengthEnv.saved_arrays, "_cues")

    def __init__(self, num_envs: int, agents: list[str], delay: int, num_cues: int, episode_length: int) -> None:
        if delay < 1:
            raise ValueError(f"delay is {delay}; needed: at least 1, since the step that asks comes after the cue")
        if num_cues < 2:
            raise ValueError(f"num_cues is {num_cues}; needed: at least 2, or there is nothing to remember")
        self.num_cues = num_cues
        self._cues = np.zeros(num_envs, dtype=np.int64)
        super().__init__(
            num_envs,
            agents,
            spaces.Box(0, 1, (num_cues + 1,)),
            spaces.Discrete(num_cues),
            episode_length=episode_length,
            ends="terminated",
        )

    def _begin(self, envs: np.ndarray) -> None:
        self._cues[envs] = (self.streams.take(1, envs)[:, 0, 0] * self.num_cues).astype(np.int64)

    def _observe(self, envs: np.ndarray) -> np.ndarray:
        steps = self.step_count[envs]
        seen = np.zeros((self.num_agents, len(envs), self.num_cues + 1), dtype=np.float32)
        seen[-1, :, -1] = steps == self.episode_length - 1
        first = np.flatnonzero(steps == 0)
        seen[0, first, self._cues[envs[first]]] = 1.0
        return seen

    def _pay(self, actions: np.ndarray) -> np.ndarray:
        return (self.step_count == self.episode_length - 1) & (np.asarray(actions[-1]) == self._cues)


class Recall(_CueEnv):
    """One agent sees a cue in step 0, nothing in steps 1 to k - 1, "now" in step k, where the cue's action pays 1.

    An episode has k + 1 steps and terminates. What step k shows is the same for all cues.

    Args:
        num_envs: E.
        delay: k.
        num_cues: K.
    """

    metadata = {"name": "recall", "render_modes": ["rgb_array"]}

    def __init__(self, num_envs: int = 1, delay: int = 8, num_cues: int = 4) -> None:
        super().__init__(num_envs, ["agent_0"], delay, num_cues, episode_length=delay + 1)


class Relay(_CueEnv):
    """The speaker sees a cue; the listener sees what the speaker did at once, and must act on it k steps later.

    | step | speaker sees | listener sees |
    |---|---|---|
    | 0 | the cue | nothing |
    | 1 | nothing | the speaker's action of step 0 |
    | 2 to k | nothing | nothing |
    | k + 1 | nothing | "now": both are paid 1 if the listener's action is the cue |

    An episode has k + 2 steps and terminates.

    Args:
        num_envs: E.
        delay: k.
        num_cues: K.
    """

    metadata = {"name": "relay", "render_modes": ["rgb_array"]}
    saved_arrays = (*_CueEnv.saved_arrays, "_said")

    def __init__(self, num_envs: int = 1, delay: int = 4, num_cues: int = 2) -> None:
        self._said = np.zeros(num_envs, dtype=np.int64)
        super().__init__(num_envs, ["speaker", "listener"], delay, num_cues, episode_length=delay + 2)

    def _observe(self, envs: np.ndarray) -> np.ndarray:
        seen = super()._observe(envs)
        second = np.flatnonzero(self.step_count[envs] == 1)
        seen[1, second, self._said[envs[second]]] = 1.0
        return seen

    def _pay(self, actions: np.ndarray) -> np.ndarray:
        self._said = np.where(self.step_count == 0, actions[0], self._said)
        return super()._pay(actions)


def stateless_cartpole(max_episode_steps: int = 500) -> gym.Env:
    """CartPole-v1 that shows position and angle only, as "thrust_rllib.envs.memory_tasks:stateless_cartpole".

    RLlib's `StatelessCartPole` is the same without a time limit: a good policy's episodes never end there.

    Args:
        max_episode_steps: time limit, and best return.
    """
    env = gym.make("CartPole-v1", max_episode_steps=max_episode_steps)
    box = env.observation_space
    assert isinstance(box, spaces.Box)
    shown = spaces.Box(box.low[POSITION_AND_ANGLE], box.high[POSITION_AND_ANGLE])
    return TransformObservation(env, lambda seen: seen[POSITION_AND_ANGLE], shown)
