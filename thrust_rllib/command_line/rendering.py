"""One episode of a team as an animated GIF."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from thrust_rllib.envs.animation import save_gif, small_image
from thrust_rllib.envs.joint_env import (
    AgentID,
    JointEnv,
    JointStepResult,
    VectorJointEnv,
    over_after,
)
from thrust_rllib.envs.registry import EnvSpec, make_vector_env
from thrust_rllib.envs.sync_vector import SyncVectorJointEnv
from thrust_rllib.evaluation import PlayedEpisodes, TeamPolicy, play_policy

MAX_FRAMES = 1001  # 1000 steps: frames are kept in memory, up to 230 kB each
DEFAULT_FPS = 10
RGB_ARRAY = "rgb_array"
NEEDED = (
    'needed: render() with an image, a uint8 array [height, width, 3], and render_mode = "rgb_array" (a setting named '
    "render_mode is given where an environment takes one)"
)


class Frames:
    """Collects the pictures of one episode, small and in 256 colours.

    Args:
        name: of the environment, for messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.fps = float(DEFAULT_FPS)
        self.images: list[Image.Image] = []
        self.refused = ""  # what the environment said to the setting render_mode
        self.cut = False  # there were more
        self._episodes = 0

    def start(self, picture: Any) -> None:
        """An episode starts: what this shows, if it is the first episode."""
        self._episodes += 1
        self.add(picture)

    def add(self, render: Any) -> None:
        """Draws, while the first episode runs and there is room."""
        if self._episodes > 1:
            return
        if len(self.images) == MAX_FRAMES:
            self.cut = True
            return
        self.images.append(small_image(self.picture(render)))

    def picture(self, render: Any) -> np.ndarray:
        """What `render` returns, if it is a picture.

        Raises:
            ValueError: something else.
        """
        try:
            picture = np.asarray(render())
        except Exception as error:
            what = f"{type(error).__name__}: {error}".removesuffix(": ")
            raise ValueError(f"environment {self.name!r} cannot be drawn: {what}; {NEEDED}{self.refused}") from error
        if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[-1] != 3:
            what = "nothing" if picture.dtype == object else f"an array {picture.dtype} {list(picture.shape)}"
            raise ValueError(
                f"environment {self.name!r} cannot be drawn: its render() returns {what}; {NEEDED}{self.refused}"
            )
        return picture


class _FilmedJointEnv(JointEnv):
    """A scalar environment whose pictures go into `frames`, the one after the last step included."""

    def __init__(self, env: JointEnv, frames: Frames) -> None:
        self.env, self.frames = env, frames
        self.possible_agents = env.possible_agents
        self.observation_spaces, self.action_spaces = env.observation_spaces, env.action_spaces

    @property
    def unwrapped(self) -> Any:
        return self.env.unwrapped

    def reset_joint(self, seed: int | None = None) -> dict[AgentID, Any]:
        observations = self.env.reset_joint(seed)
        self.frames.start(self.env.render)
        return observations

    def step_joint(self, actions: Mapping[AgentID, Any]) -> JointStepResult:
        result = self.env.step_joint(actions)
        self.frames.add(self.env.render)
        return result

    def close(self) -> None:
        self.env.close()


class _FilmedVectorEnv(VectorJointEnv):
    """One vectorised environment whose pictures go into `frames`."""

    num_envs = 1

    def __init__(self, env: VectorJointEnv, frames: Frames) -> None:
        self.env, self.frames, self.stacked = env, frames, env.stacked
        self.possible_agents = env.possible_agents
        self.observation_spaces, self.action_spaces = env.observation_spaces, env.action_spaces

    def reset_joint(self, seeds: Sequence[int | None] | None = None) -> Any:
        observations = self.env.reset_joint(seeds)
        self.frames.start(self.env.render)
        return observations

    def step_joint(self, actions: Any) -> JointStepResult:
        result = self.env.step_joint(actions)
        self.frames.add(self.env.render_final if over_after(result)[0] else self.env.render)
        return result

    def close(self) -> None:
        self.env.close()


def filmed_env(spec: EnvSpec, env_config: Mapping[str, Any], frames: Frames) -> VectorJointEnv:
    """One environment that draws itself into `frames`, made with render_mode="rgb_array" where it takes that.

    Raises:
        ValueError: it cannot be drawn.
    """
    env = make_vector_env(spec, dict(env_config), 1)
    if env.render_mode != RGB_ARRAY:
        env.close()  # before another is made: closing may take down what they draw with together
        try:
            env = make_vector_env(spec, {**env_config, "render_mode": RGB_ARRAY}, 1)
        except Exception as error:  # it may draw all the same
            frames.refused = f". With render_mode={RGB_ARRAY!r} in its env_config: {type(error).__name__}: {error}"
            env = make_vector_env(spec, dict(env_config), 1)
    env.reset_joint([0])
    frames.picture(env.render)  # an early error
    if not isinstance(env, SyncVectorJointEnv):
        frames.fps = _fps(env.metadata)
        return _FilmedVectorEnv(env, frames)
    (scalar,) = env.envs  # their vector resets before anybody could look at the end of the episode
    frames.fps = _fps(scalar.metadata)
    return SyncVectorJointEnv(lambda: _FilmedJointEnv(scalar, frames), 1)


def _fps(metadata: Mapping[str, Any]) -> float:
    return float(metadata.get("render_fps") or DEFAULT_FPS)


def film_episode(
    algo: Any, *, seed: int = 0, explore: bool = False, env_config: Mapping[str, Any] | None = None
) -> tuple[Frames, PlayedEpisodes]:
    """Plays the first episode that `play_episodes` plays in its environment 0, and draws it.

    Args:
        algo: see `play_episodes`.
        seed: see there; the episodes are equal as long as actions are not sampled.
        explore: see there.
        env_config: see there.

    Returns:
        The pictures, one before the first step and one after each of the first 1000; the episode.

    Raises:
        ValueError: the environment cannot be drawn; raised before the first step.
    """
    for driver in ("SDL_VIDEODRIVER", "SDL_AUDIODRIVER"):
        os.environ.setdefault(driver, "dummy")  # pygame opens screen and sound card, and complains where there is none
    config, spec = algo.config, algo.config.env_spec
    frames = Frames(spec.name)
    env = filmed_env(spec, config.env_config if env_config is None else env_config, frames)
    try:
        return frames, play_policy(env, TeamPolicy(algo, env, seed=seed, explore=explore), 1, seed=seed)
    finally:
        env.close()


def write_gif(path: Path, frames: Frames) -> None:
    """See `save_gif`."""
    save_gif(path, frames.images, frames.fps)
