"""GIFs: as many pictures as steps and one, of the episode that was played; environments that cannot be drawn."""

from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from PIL import Image

from tests.support import make_runner, tiny_config
from thrust_rllib import JointEnv, JointStepResult
from thrust_rllib.command_line import rendering
from thrust_rllib.command_line.rendering import film_episode, write_gif
from thrust_rllib.envs.animation import MAX_SIDE
from thrust_rllib.evaluation import play_episodes


class Flag(JointEnv):
    """Two agents, 6 steps; the picture is one colour, 40 × the steps played."""

    metadata = {"render_fps": 4}

    def __init__(self, picture="rgb"):
        self.possible_agents = ["left", "right"]
        self.observation_spaces = dict.fromkeys(self.possible_agents, spaces.Box(0, 1, (2,)))
        self.action_spaces = dict.fromkeys(self.possible_agents, spaces.Discrete(2))
        self.picture = picture
        self.t = 0

    def reset_joint(self, seed=None):
        self.t = 0
        return {agent: np.zeros(2, np.float32) for agent in self.possible_agents}

    def step_joint(self, actions):
        self.t += 1
        seen = {agent: np.zeros(2, np.float32) for agent in self.possible_agents}
        return JointStepResult({"left": 1.0, "right": 0.0}, seen, False, self.t == 6)

    def render(self):
        picture = np.full((8, 10, 3), 40 * self.t, np.uint8)
        return {"rgb": picture, "grey": picture[..., 0], "float": picture / 255, "nothing": None}[self.picture]


class FlagByMode(Flag):
    """Draws only what it is told at construction, as Gymnasium's and PettingZoo's."""

    def __init__(self, render_mode=None):
        super().__init__("rgb" if render_mode == "rgb_array" else "nothing")
        self.render_mode = render_mode


class Undrawn(Flag):
    render = JointEnv.render


def team(env, env_config=None):
    config = tiny_config(env, env_config)
    return SimpleNamespace(config=config, env_runner=make_runner(config))


@pytest.mark.parametrize("env", [Flag, FlagByMode])
def test_pictures_show_every_step_and_the_end(env):
    frames, played = film_episode(team(env))
    assert [np.asarray(image.convert("RGB"))[0, 0, 0] for image in frames.images] == [40 * t for t in range(7)]
    assert played.lengths.tolist() == [6] and played.returns.tolist() == [[6.0, 0.0]]


def test_the_gif_has_the_pictures_at_the_speed_of_the_environment(tmp_path):
    frames, _ = film_episode(team(Flag))
    write_gif(tmp_path / "flag.gif", frames)
    with Image.open(tmp_path / "flag.gif") as gif:
        assert gif.n_frames == 7 and gif.info["duration"] == 250 and gif.info["loop"] == 0
        shown = []
        for index in range(7):
            gif.seek(index)
            shown.append(gif.convert("RGB").getpixel((0, 0))[0])
    assert shown == [40 * t for t in range(7)]


@pytest.mark.parametrize(
    "env", ["bucket_brigade", "debug/match_observation", "CartPole-v1", "pettingzoo:simple_spread_v3"]
)
def test_the_filmed_episode_is_the_first_one_of_environment_0(env):
    mine = team(env)
    frames, played = film_episode(mine, seed=3)
    evaluated = play_episodes(mine, 2, seed=3)
    np.testing.assert_array_equal(played.returns[0], evaluated.returns[0])
    assert played.lengths[0] == evaluated.lengths[0] == len(frames.images) - 1
    first, last = (np.asarray(frames.images[i].convert("RGB"), int) for i in (0, -1))
    assert first.shape == last.shape and max(first.shape) <= MAX_SIDE
    assert (first != last).any()


def test_an_rllib_environment_draws_itself():
    from thrust_rllib.envs import JointEnvMultiAgentEnv

    class Around(JointEnvMultiAgentEnv):
        def __init__(self, config):
            super().__init__(FlagByMode(**config))

    frames, played = film_episode(team(Around))
    assert len(frames.images) == 7 and played.lengths.tolist() == [6]


def test_long_episodes_are_cut(monkeypatch):
    monkeypatch.setattr(rendering, "MAX_FRAMES", 4)
    frames, played = film_episode(team(Flag))
    assert len(frames.images) == 4 and frames.cut and played.lengths.tolist() == [6]


@pytest.mark.parametrize(
    "env, env_config, message",
    [
        (Undrawn, {}, "NotImplementedError: Undrawn cannot be rendered; override render"),
        (Flag, {"picture": "nothing"}, r"its render\(\) returns nothing; needed: .* unknown setting 'render_mode'"),
        (Flag, {"picture": "grey"}, r"returns an array uint8 \[8, 10\]"),
        (Flag, {"picture": "float"}, r"returns an array float64 \[8, 10, 3\]"),
    ],
)
def test_what_cannot_be_drawn_is_an_error_before_the_first_step(env, env_config, message, monkeypatch):
    steps = []
    monkeypatch.setattr(Flag, "step_joint", lambda self, actions: steps.append(actions))
    with pytest.raises(ValueError, match=message):
        film_episode(team(env, env_config))
    assert steps == []


def test_a_gymnasium_environment_without_pictures_is_an_error():
    class Blind(gym.Env):
        metadata = {"render_modes": []}
        observation_space = spaces.Box(0, 1, (1,))
        action_space = spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return np.zeros(1, np.float32), {}

        def step(self, action):
            return np.zeros(1, np.float32), 0.0, True, False, {}

    with pytest.raises(ValueError, match="environment 'Blind' cannot be drawn"):
        film_episode(team(Blind))
