"""Callbacks of RLlib's users, through the general door."""

from __future__ import annotations

import numpy as np
import pytest
from ray.rllib.callbacks.callbacks import RLlibCallback

from tests.general.counting import LENGTH, Counting, general_config, runner_and_learner
from tests.support import runner_metrics, tiny_config
from thrust_rllib import JointEnvRunner
from thrust_rllib.joint_episode import JointEpisode

# --- what they are given ----------------------------------------------------------------------------------------------

EVENTS: list[tuple[str, dict]] = []
ON_EPISODE = ("on_episode_created", "on_episode_start", "on_episode_step", "on_episode_end")


class Notes:
    """A callback that notes what it was given; a metric at the end of each episode."""

    def __init__(self, name):
        self.name = name

    def __call__(self, *, episode, env_index, metrics_logger, env_runner, rl_module, prev_episode_chunks=(), **kwargs):
        event = {"id": episode.id_, "env": env_index, "steps": episode.env_steps(), "t": episode.env_t}
        assert isinstance(episode, JointEpisode) and env_runner.module is rl_module
        if self.name == "on_episode_created":
            episode.custom_data["born"] = len(EVENTS)
        if self.name == "on_episode_start":
            event["observations"] = episode.get_observations(-1)
        if self.name == "on_episode_step":
            event["actions"] = episode.get_actions(-1)
            event["rewards"] = episode.get_rewards(-1)
            event["born"] = episode.custom_data["born"]
            episode.custom_data["seen"] = episode.custom_data.get("seen", 0) + 1
        if self.name == "on_episode_end":
            event["chunks"] = [(chunk.id_, len(chunk), chunk.get_return()) for chunk in prev_episode_chunks]
            event["return"] = episode.get_return()
            event["custom"] = dict(episode.custom_data)
            metrics_logger.log_value(
                ("my", "last_return"), sum(c[2] for c in event["chunks"]) + event["return"], window=1
            )
        EVENTS.append((self.name, event))


def with_callbacks(config, kind):
    callbacks = {name: Notes(name) for name in ON_EPISODE}
    if kind == "functions":
        return config.callbacks(**callbacks)
    methods = {
        name: lambda self, *, callback=callback, **kwargs: callback(**kwargs) for name, callback in callbacks.items()
    }
    return config.callbacks(type("Watches", (RLlibCallback,), methods))


@pytest.mark.parametrize("kind", ["class", "functions"])
def test_callbacks_of_episodes_are_called(kind):
    EVENTS.clear()
    runner, _ = runner_and_learner(with_callbacks(general_config(num_envs=1), kind))
    for _ in range(4):
        runner.sample(num_timesteps=3)  # of episodes of 5
    names = [name for name, _ in EVENTS]
    created, start, step, end = (f"on_episode_{word}" for word in ("created", "start", "step", "end"))
    whole = [start, *[step] * LENGTH, end, created]
    assert names == [created, *whole, *whole, start, *[step] * 2]
    ends = [event for name, event in EVENTS if name == end]
    assert [len(event["chunks"]) for event in ends] == [1, 2]  # 3 + 2, 1 + 3 + 1
    for event in ends:
        assert {i for i, _, _ in event["chunks"]} == {event["id"]}
        assert sum(n for _, n, _ in event["chunks"]) + event["steps"] == event["t"] == LENGTH
        assert sum(r for _, _, r in event["chunks"]) + event["return"] == 2.0 * LENGTH
        assert event["custom"]["seen"] == LENGTH  # over all fragments
    steps = [event for name, event in EVENTS if name == step]
    assert all(event["rewards"] == {"left": 1.0, "right": 1.0} for event in steps)
    assert [event["actions"] for event in steps] == runner.env.envs[0].played
    (first, *_) = (event["observations"] for name, event in EVENTS if name == start)
    np.testing.assert_array_equal(first["left"], [1001.0] * 3)
    assert runner_metrics(runner)["my"]["last_return"] == 2.0 * LENGTH


def test_without_callbacks_of_episodes_arrays_are_sampled(caplog):
    def on_sample_end(*, samples, **kwargs):
        pass

    config = tiny_config(Counting).callbacks(on_sample_end=on_sample_end)
    with caplog.at_level("INFO", logger="thrust_rllib"):
        config.validate()
    assert config.env_runner_cls is JointEnvRunner
    assert "sampling by arrays (JointEnvRunner): nothing in the configuration" in caplog.text


# --- whole algorithms -------------------------------------------------------------------------------------------------


class Team(RLlibCallback):
    """What a user would write: counts, and a metric at each moment."""

    def on_algorithm_init(self, *, algorithm, **kwargs):
        EVENTS.append(("init", {}))

    def on_environment_created(self, *, env_runner, env, env_context, **kwargs):
        EVENTS.append(("environment", {"envs": env.num_envs, "length": env_context["length"]}))

    def on_episode_end(self, *, episode, metrics_logger, **kwargs):
        metrics_logger.log_value("finished", 1, reduce="sum")
        metrics_logger.log_value(("by_agent", "left"), float(episode.agent_episodes["left"].t))

    def on_sample_end(self, *, metrics_logger, samples, **kwargs):
        metrics_logger.log_value("fragments", len(samples), reduce="sum")
        assert all(isinstance(episode, JointEpisode) and episode.is_numpy for episode in samples)

    def on_train_result(self, *, result, **kwargs):
        result["mine"] = 2 * result["env_runners"]["finished"]


@pytest.mark.parametrize("num_runners", [0, pytest.param(2, marks=pytest.mark.slow_general)])
def test_custom_metrics_arrive_in_the_result(build, num_runners):
    EVENTS.clear()
    config = general_config(env_config={"length": 4}, runners={"num_env_runners": num_runners}).callbacks(Team)
    result = build(config).train()
    runners = result["env_runners"]
    episodes = 64 // 4 if num_runners == 0 else 2 * 2 * 4
    assert runners["finished"] == runners["num_episodes"] == episodes and result["mine"] == 2 * episodes
    assert runners["by_agent"]["left"] == 4.0
    assert runners["fragments"] == episodes + (2 * max(num_runners, 1) if 64 // 2 % 4 else 0)
    if num_runners == 0:
        assert EVENTS == [("environment", {"envs": 2, "length": 4}), ("init", {})]
