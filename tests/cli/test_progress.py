import io
import logging
import math

import pytest
from rich.console import Console

from thrust_rllib.command_line.progress_view import LiveView, PlainView, ViewHandler, sparkline
from thrust_rllib.command_line.training_progress import Limit, Progress, duration, in_order, number

RESULT = {
    "training_iteration": 3,
    "time_this_iter_s": 0.5,
    "env_runners": {
        "num_env_steps_sampled_lifetime": 6144.0,
        "num_env_steps_sampled": 2048,
        "episode_return_mean": 30.0,
        "agent_episode_returns_mean": {"agent_10": 20.0, "agent_2": 10.0},
    },
    "learners": {
        "__all_modules__": {"cross_agent_loss": {"redundancy": 0.25, "total": 0.025}},
        "agent_2": {"entropy": 1.0},
        "agent_10": {"entropy": 2.0, "vf_explained_var": math.nan},
    },
}


def test_progress_reads_a_result():
    progress = Progress.of(RESULT, seconds=30)
    assert (progress.iteration, progress.env_steps, progress.steps_per_second) == (3, 6144, 4096)
    assert list(progress.agent_returns) == ["agent_2", "agent_10"] and progress.couplings == {"redundancy": 0.25}
    assert progress.module_mean("entropy") == 1.5 and progress.module_mean("vf_explained_var") is None


def test_progress_of_an_iteration_without_an_episode():
    progress = Progress.of({**RESULT, "env_runners": {"num_env_steps_sampled": 4}}, seconds=1)
    assert progress.return_mean is None and progress.agent_returns == {}


@pytest.mark.parametrize(
    ("limit", "fraction", "left"),
    [(Limit("iterations", 6), 0.5, 30), (Limit("steps", 6144), 1, 0), (Limit("minutes", 2), 0.25, 90)],
)
def test_limits(limit, fraction, left):
    progress = Progress.of(RESULT, seconds=30)
    assert limit.fraction(progress) == fraction and limit.seconds_left(progress) == left
    assert limit.reached(progress) == (fraction == 1)


def test_words():
    assert [number(x) for x in (None, math.nan, 0, 0.00012, 0.12345, 12.345, 12345.6)] == [
        "–", "–", "0", "1.2e-04", "0.1235", "12.35" if number(12.345) == "12.35" else "12.34", "12,346",
    ]  # fmt: skip
    assert [duration(x) for x in (0, 65, 3723, math.inf)] == ["0:00", "1:05", "1:02:03", "–"]
    assert list(in_order({"b": 1, "a10": 2, "a9": 3})) == ["a9", "a10", "b"]
    assert sparkline([0, 5, math.nan, 10]) == "▁▅█" or sparkline([0, 5, 10]) == "▁▄█"
    assert sparkline([3, 3]) == "▁▁" and sparkline([]) == ""


def text_of(make):
    file = io.StringIO()
    make(Console(file=file, width=80, force_terminal=False))
    return file.getvalue()


def test_plain_lines_are_not_broken():
    def show(console):
        view = PlainView(console, Limit("iterations", 6))
        view.update(Progress.of(RESULT, seconds=30))
        view.message("[not markup]")

    first, second = text_of(show).splitlines()
    for part in ("iteration 3/6", "steps 6,144", "4,096 steps/s", "return 30", "agent_2 10  agent_10 20",
                 "redundancy 0.25", "left 0:30"):  # fmt: skip
        assert part in first
    assert second == "[not markup]"


def test_many_agents_are_summed_up_in_a_plain_line():
    returns = {f"a{k}": float(k) for k in range(9)}
    result = {**RESULT, "env_runners": {**RESULT["env_runners"], "agent_episode_returns_mean": returns}}
    assert "agents 0 (a0) to 8 (a8)" in text_of(
        lambda console: PlainView(console, Limit("steps", 9999)).update(Progress.of(result, seconds=1))
    )


@pytest.mark.parametrize("agents", [1, 4, 16])
def test_live_view_shows_everything(agents):
    returns = {f"agent_{k}": 100.0 + k for k in range(agents)}
    result = {**RESULT, "env_runners": {**RESULT["env_runners"], "agent_episode_returns_mean": returns}}

    def show(console):
        view = LiveView(console, Limit("iterations", 6), "climbing", "runs/x")
        console.print(view)
        view.update(Progress.of(result, seconds=30))
        console.print(view)

    out = text_of(show)
    for part in ("climbing", "runs/x", "3 / 6 iterations", "left", "6,144", "4,096", "redundancy", "0.25", "30"):
        assert part in out
    assert all(name in out and number(value) in out for name, value in returns.items())


def test_warnings_of_the_package_reach_the_view():
    def show(console):
        logger = logging.getLogger("thrust_rllib.some_module")
        handler = ViewHandler(PlainView(console, Limit("steps", 1)))
        logger.addHandler(handler)
        logger.warning("minibatch %d skipped", 7)
        logger.info("a note")
        logger.removeHandler(handler)

    assert text_of(show) == "warning: minibatch 7 skipped\n"
