"""What a person sees of constraints while a run goes on."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from thrust_rllib.command_line.progress_view import LiveView, PlainView
from thrust_rllib.command_line.training_progress import Limit, Progress, against_limit
from thrust_rllib.constraints import Constraint
from thrust_rllib.multipliers import Multipliers


def progress(**costs):
    """Of a result whose learner has these constraints and measured these costs."""
    keeper = Multipliers(
        [
            Constraint("risk_10", 0.1, mechanism="lagrangian", rate=1.0, initial=3.4),
            Constraint("risk_9", 0.25, mechanism="lagrangian", rate=1.0, initial=5.0, cap=5.0),
        ]
    )
    keeper.update(costs, {})
    return Progress.of(
        {"training_iteration": 1, "time_this_iter_s": 1.0, "learners": {"__all_modules__": keeper.metrics()}}, seconds=1
    )


def test_progress_reads_the_learners_metrics():
    constraints = progress(risk_10=0.12, risk_9=0.2).constraints
    assert list(constraints) == ["risk_9", "risk_10"]
    assert constraints["risk_10"]["cost"] == 0.12 and constraints["risk_9"]["saturated"] == 1.0
    assert Progress.of({"training_iteration": 1, "time_this_iter_s": 1.0}, seconds=1).constraints == {}


def test_the_views_show_cost_limit_and_multiplier():
    console = Console(file=io.StringIO(), width=100, force_terminal=False)
    PlainView(console, Limit("iterations", 2)).update(progress(risk_10=0.12, risk_9=0.2))
    line = console.file.getvalue()
    assert "risk_9: cost 0.2 / 0.25, λ 5 (at its cap)  risk_10: cost 0.12 / 0.1, λ 3.4  left" in line
    live = LiveView(console, Limit("iterations", 2), "title", "folder")
    live.update(progress(risk_10=0.12, risk_9=0.2))
    console.print(live)
    rows = [row.split() for row in console.file.getvalue().splitlines()]
    assert ["│", "risk_10", "0.12", "/", "0.1", "λ", "3.4", "│"] in rows
    assert ["│", "risk_9", "0.2", "/", "0.25", "λ", "5", "(at", "its", "cap)", "│"] in rows


def test_a_cost_that_was_not_measured_is_a_dash():
    console = Console(file=io.StringIO(), width=100, force_terminal=False)
    PlainView(console, Limit("iterations", 2)).update(progress(risk_9=0.2))
    line = console.file.getvalue()
    assert "risk_9: cost 0.2 / 0.25, λ 5 (at its cap)  risk_10: cost – / 0.1, λ 3.4  left" in line


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("sense, costs", [("at_most", (0.3, 0.7)), ("at_least", (0.3, 0.7)), ("equal", (0.3, 0.7))])
def test_limits_from_below_are_told_as_such(sense, costs, signed):
    keeper = Multipliers(
        [Constraint("bound", 0.5, mechanism="lagrangian", rate=1.0, sense=sense, signed=signed or sense == "equal")]
    )
    for cost in costs:
        keeper.update({"bound": cost}, {})
        told = "0.5" if sense != "at_least" else "at least 0.5"
        assert against_limit(keeper.metrics()["constraints"]["bound"]) == f"{cost} / {told}"
