"""Evaluations through the general door."""

from __future__ import annotations

import pytest

from tests.general.random_envs import Episode, Journal, Kind, Life, Script, ScriptedMultiAgentEnv
from tests.general.runs import episode_runner, episodes_config
from tests.support import runner_metrics
from thrust_rllib.connectors.observation_normalizer import ObservationNormalizer


@pytest.mark.parametrize("remote", [0, pytest.param(1, marks=pytest.mark.slow_general)])
def test_evaluation_plays_the_asked_episodes_greedily(build, remote):
    config = episodes_config("debug/identity", {"episode_length": 5}, runners={"normalize_observations": True})
    config.reporting(metrics_num_episodes_for_smoothing=2)
    config.evaluation(
        evaluation_interval=1, evaluation_duration=7, evaluation_num_env_runners=remote,
        evaluation_config={"explore": False},
    )  # fmt: skip
    algo = build(config)
    result = algo.train()
    evaluated = result["evaluation"]["env_runners"]
    assert evaluated["num_episodes"] == 7 and evaluated["episode_len_mean"] == 5.0
    # Greedy: each agent always sees the same, so it takes one action, and is paid in each step or in none.
    assert set(evaluated["agent_episode_returns_mean"].values()) <= {0.0, 5.0}
    assert result["env_runners"]["num_env_steps_sampled"] == 64
    group = algo.eval_env_runner_group
    (count,) = group.foreach_env_runner(lambda r: r.normalizer.moments["agent_0"].count, local_env_runner=remote == 0)
    assert count == algo.env_runner._env_to_module[ObservationNormalizer][0].moments["agent_0"].count == 64


def test_an_evaluation_reports_the_mean_of_all_its_episodes():
    """Not of the last `metrics_num_episodes_for_smoothing`; and the training's own mean comes back afterwards."""
    script = Script((Kind(),), tuple(Episode((Life("A" * n),)) for n in (1, 2, 3, 4, 5, 6)))
    config = episodes_config(ScriptedMultiAgentEnv, {"script": script, "journal": Journal()}, num_envs=1)
    config.reporting(metrics_num_episodes_for_smoothing=2)
    runner = episode_runner(config)
    runner.sample(num_timesteps=3)
    assert runner_metrics(runner)["episode_len_mean"] == 1.5
    runner.sample(num_episodes=6)
    found = runner_metrics(runner)
    assert found["num_episodes"] == 6 and found["episode_len_mean"] == 3.5
    runner.sample(num_timesteps=1)
    assert runner_metrics(runner)["episode_len_mean"] != 3.5


@pytest.mark.parametrize("afresh, episodes", [(True, [0, 0]), (False, [0, 1])])
def test_evaluation_by_timesteps(build, afresh, episodes):
    config = episodes_config("debug/constant_reward", {"episode_length": 50}, num_envs=1)
    config.evaluation(
        evaluation_interval=1,
        evaluation_duration=30,
        evaluation_duration_unit="timesteps",
        evaluation_force_reset_envs_before_iteration=afresh,
    )
    algo = build(config)
    evaluated = [algo.train()["evaluation"]["env_runners"] for _ in range(2)]
    assert [found["num_episodes"] for found in evaluated] == episodes
    assert [found["num_env_steps_sampled"] for found in evaluated] == [30, 30]
