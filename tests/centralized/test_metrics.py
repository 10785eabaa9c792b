"""What centralized training reports is on the page of metrics, and diversity comes every so many updates."""

from __future__ import annotations

import pytest

from tests.centralized.algorithms import spread
from tests.heads.worlds import CONDITIONAL, World
from tests.support import make_learner, make_runner, tiny_config, update
from tests.test_docs import flatten, undescribed
from thrust_rllib import RedundancyPenalty


def check(result):
    found = {path for path in flatten(result) if path.startswith(("env_runners/", "learners/"))}
    assert not undescribed(found), undescribed(found)
    return found


def test_every_metric_is_described(build):
    algo = build(spread(critic_lr=1e-3, cross_agent_losses={"redundancy": RedundancyPenalty()}))
    algo.train()
    found = check(algo.train())
    for path in (
        "learners/team_critic/vf_loss",
        "learners/agent_0/auxiliary_loss/covered",
        "learners/agent_2/auxiliary_accuracy/collisions",
        "learners/__all_modules__/constraints/collisions/saturated",
        "learners/__all_modules__/diversity/agent_0_and_2_more/jensen_shannon",
    ):
        assert path in found, path


def test_every_metric_of_heads_is_described(build):
    algo = build(tiny_config(World, model={"fcnet_hiddens": [8], **CONDITIONAL}, ratio="per_head", critic="mean",
                             credit="shared"))  # fmt: skip
    algo.train()
    found = check(algo.train())
    assert {"learners/a0/heads/skill/entropy", "learners/a2/heads/goal/clip_fraction"} <= found


@pytest.mark.parametrize("interval, measured", [(1, {0, 1, 2, 3}), (3, {0, 3}), (0, set())])
def test_diversity_is_measured_every_so_many_updates(interval, measured, monkeypatch):
    config = spread(diversity_interval=interval)
    learner, runner, told = make_learner(config), make_runner(config), []
    updates = []
    probe = "thrust_rllib.learner.probe_diversity"
    monkeypatch.setattr(
        probe, lambda *args: updates.append(len(told)) or {"agent_0_and_2_more": {"total_variation": 0.25}}
    )
    for _ in range(4):
        told.append(update(learner, runner.sample(num_timesteps=64))["__all_modules__"])
    assert set(updates) == measured
    for results in told:  # between them the last known
        assert results.get("diversity") == ({"agent_0_and_2_more": {"total_variation": 0.25}} if interval else None)
