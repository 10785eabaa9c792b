"""Inputs of real users, case 18: environments that raise, and a runner whose process ends."""

import re

import pytest

from tests.support import tiny_config
from thrust_rllib.sampling.env_restarts import CALLS_REMEMBERED, MAX_ENV_RESTARTS, EnvironmentFailed, EnvRestarts

ENV = "tests.cli.breaking_env:Breaking"
DOORS = pytest.mark.parametrize("door", ["arrays", "episodes"])


def config(door, runners=0, restart=True, **env_config):
    made = tiny_config(ENV, env_config, runners={"sampling": door, "num_env_runners": runners}, num_envs=1)
    return made.fault_tolerance(restart_failed_env_runners=restart)


@DOORS
def test_case_18_an_environment_that_raises_in_step_3_of_every_episode(build, door):
    algo = build(config(door, how="raise", at=3))
    with pytest.raises(EnvironmentFailed) as raised:
        algo.train()
    assert re.search(
        f"environment '{ENV}' failed in .*step.*OSError: the simulator lost its connect", str(raised.value)
    )
    assert f"made anew {MAX_ENV_RESTARTS} times before, and failed {MAX_ENV_RESTARTS + 1} times" in str(raised.value)


@DOORS
@pytest.mark.parametrize("runners", [0, 1])
def test_case_18_an_environment_that_raises_once(build, tmp_path, caplog, door, runners):
    """The iteration in which it does has as many steps as the others, from another episode."""
    algo = build(config(door, runners, how="raise", at=100, marker=str(tmp_path / "marker")))
    with caplog.at_level("WARNING", logger="thrust_rllib"):
        steps = [algo.train()["env_runners"]["num_env_steps_sampled"] for _ in range(3)]
    assert steps == [64] * 3 and (tmp_path / "marker").exists()
    warnings = [r.message for r in caplog.records if "the simulator lost its connection" in r.message]
    assert len(warnings) == 1 and f"(runner {runners}): " in warnings[0]
    assert warnings[0].endswith(f"it is made anew (1 of {MAX_ENV_RESTARTS} failures in {CALLS_REMEMBERED} rollouts)")
    assert algo.train()["env_runners"]["num_env_restarts"] == 1


@DOORS
def test_case_18_without_restarts_the_first_one_ends_the_run(build, tmp_path, door):
    algo = build(config(door, restart=False, how="raise", at=100, marker=str(tmp_path / "marker")))
    algo.train()
    with pytest.raises(EnvironmentFailed, match="the simulator lost its connection") as raised:
        algo.train()
    assert "made anew" not in str(raised.value)


@pytest.mark.timeout(120)
@DOORS
def test_case_18_a_runner_whose_process_exits_in_iteration_2(build, tmp_path, door):
    algo = build(config(door, runners=2, how="exit", at=40, marker=str(tmp_path / "marker")))
    lifetime = [algo.train()["num_env_steps_sampled_lifetime"] for _ in range(4)]
    assert (tmp_path / "marker").exists() and lifetime == [64, 128, 192, 256]


def test_failures_now_and_then_are_allowed_and_every_second_call_is_not():
    error = EnvironmentFailed("it fell")
    rare = EnvRestarts(allowed=True)
    for call in range(40):
        rare.failed(error) if call % 4 == 0 else rare.succeeded()
    assert len(rare.pop_told()) == 10 and rare.pop_told() == []
    often = EnvRestarts(allowed=True)
    with pytest.raises(EnvironmentFailed, match=r"^it fell \(it was made anew 3 times .* 4 times in the last 7 calls"):
        for call in range(40):
            often.failed(error) if call % 2 == 0 else often.succeeded()
