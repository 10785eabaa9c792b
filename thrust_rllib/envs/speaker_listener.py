"""Speaker and listener: one knows the goal and can only speak, the other can only move; vectorised.

The world of mpe2's `simple_speaker_listener_v4` with discrete actions, number for number: the same seed gives the same
episodes (`tests/envs/test_speaker_listener.py` compares them).

Shapes: E environments; float64 inside, as in mpe2.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from thrust_rllib.envs.fixed_length import FixedLengthEnv
from thrust_rllib.envs.streams import UniformStreams

SPEAKER, LISTENER = "speaker_0", "listener_0"
LANDMARKS = 3
COLORS = np.array([(0.65, 0.15, 0.15), (0.15, 0.65, 0.15), (0.15, 0.15, 0.65)])
"""Of the landmarks: what the speaker sees of the goal."""
_PUSH = np.array([(0, 0), (-5, 0), (5, 0), (0, -5), (0, 5)], dtype=np.float64)  # forces of the five actions
_TIME_STEP, _DAMPING = 0.1, 0.25


class SpeakerListener(FixedLengthEnv):
    """E worlds of a speaker, a listener and three landmarks, one of which is the goal of the episode.

    | agent      | sees                                                                        | acts                |
    |------------|-----------------------------------------------------------------------------|---------------------|
    | speaker_0  | the goal's colour (3)                                                       | Discrete(3): a word |
    | listener_0 | own velocity (2), where the landmarks are from here (6), the last word as a | Discrete(5):        |
    |            | one-hot (3), zeros before the first                                         | nothing, left,      |
    |            |                                                                             | right, down, up     |

    Both are paid minus the squared distance of listener and goal. `state()` is both observations behind each other,
    as in mpe2. What a word means is for the two to agree on.

    Args:
        num_envs: number of worlds E.
        max_cycles: steps of an episode, which is then truncated.

    Raises:
        ValueError: a number out of its range.
    """

    metadata = {"name": "speaker_listener", "render_modes": ["rgb_array"], "render_fps": 10}
    saved_arrays = (*FixedLengthEnv.saved_arrays, "_goals", "_position", "_velocity", "_landmarks", "_words")

    def __init__(self, num_envs: int = 1, max_cycles: int = 25) -> None:
        if max_cycles < 1:
            raise ValueError(f"max_cycles is {max_cycles}; needed: at least 1")
        super().__init__(
            num_envs,
            [SPEAKER, LISTENER],
            [spaces.Box(-np.inf, np.inf, (3,)), spaces.Box(-np.inf, np.inf, (11,))],
            [spaces.Discrete(3), spaces.Discrete(5)],
            episode_length=max_cycles,
        )
        self.state_space = spaces.Box(-np.inf, np.inf, (14,))
        self.streams = self._episodes = _Episodes(num_envs, width=1, block=1)
        self._goals = np.zeros(num_envs, dtype=np.int64)
        self._position, self._velocity = np.zeros((num_envs, 2)), np.zeros((num_envs, 2))
        self._landmarks = np.zeros((num_envs, LANDMARKS, 2))
        self._words = np.zeros((num_envs, 3), dtype=np.float32)

    def _begin(self, envs: np.ndarray) -> None:
        goals, places = self._episodes.draw(envs)
        self._goals[envs], self._position[envs], self._landmarks[envs] = goals, places[:, 1], places[:, 2:]
        self._velocity[envs] = 0
        self._words[envs] = 0

    def _pay(self, actions: Any) -> np.ndarray:
        # New arrays: what was handed out, and saved, stays.
        self._position = self._position + self._velocity * _TIME_STEP
        self._velocity = self._velocity * (1 - _DAMPING) + _PUSH[np.asarray(actions[LISTENER])] * _TIME_STEP
        self._words = np.eye(3, dtype=np.float32)[np.asarray(actions[SPEAKER])]
        goal = self._landmarks[np.arange(self.num_envs), self._goals]
        return -np.square(self._position - goal).sum(axis=1)

    def _observe(self, envs: np.ndarray) -> dict[str, np.ndarray]:
        heard = np.zeros((len(envs), 11), dtype=np.float32)
        heard[:, :2] = self._velocity[envs]
        heard[:, 2:8] = (self._landmarks[envs] - self._position[envs, None]).reshape(len(envs), -1)
        heard[:, 8:] = self._words[envs]
        return {SPEAKER: COLORS[self._goals[envs]].astype(np.float32), LISTENER: heard}

    def state(self) -> np.ndarray:
        """Both observations behind each other, float32 [E, 14]."""
        seen = self._observe(np.arange(self.num_envs))
        return np.concatenate([seen[SPEAKER], seen[LISTENER]], axis=1)


class _Episodes(UniformStreams):
    """How episodes begin, in mpe2's order of drawing: a goal, then places of speaker, listener and landmarks.

    A goal takes half of a generator's number in one episode and the other half in the next, so that nothing can be
    drawn ahead.
    """

    def draw(self, envs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Goals [K] and places [K, 5, 2]."""
        drawn = [(rng.integers(LANDMARKS), rng.uniform(-1, 1, (5, 2))) for rng in (self._generators[e] for e in envs)]
        goals, places = zip(*drawn, strict=True)
        return np.array(goals), np.array(places)
