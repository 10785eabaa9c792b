"""Saved teams that exchange messages act step by step as they do in an evaluation."""

from __future__ import annotations

import numpy as np
import pytest

from tests.communicating.test_checkpoints import config_of
from tests.communicating.world import APART, DEAF, GROUPS, ONE, Meadow
from tests.test_playing import play, same
from thrust_rllib import evaluation, load_team
from thrust_rllib.evaluation import play_episodes


class Recorded:
    """An environment in arrays that writes down who did what."""

    def __init__(self, make, log):
        self._make, self._log = make, log

    def __call__(self, *args):
        env, log = self._make(*args), self._log
        step = env.step_joint

        def step_joint(actions):
            actions = {agent: np.array(action) for agent, action in actions.items()}
            result = step(actions)
            there = [True] * len(actions) if result.present is None else result.present[:, 0]
            log.append({a: actions[a][0] for a, acted in zip(env.possible_agents, there, strict=True) if acted})
            return result

        env.step_joint = step_joint
        return env


@pytest.mark.parametrize("explore", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("door, cell, policies", [
    ("arrays", "none", GROUPS),
    ("arrays", "message_gru", DEAF),
    ("episodes", "message_gru", APART),
    ("episodes", "lstm", ONE),
    ("arrays", "gru", APART),
])  # fmt: skip
def test_a_team_acts_alone_as_in_an_evaluation(build, tmp_path, monkeypatch, door, cell, policies, explore):
    algo = build(config_of(door, cell, policies, lr=0.05))
    algo.train()
    team = load_team(algo.save_to_path(tmp_path / "saved"), seed=7)
    log = []
    monkeypatch.setattr(evaluation, "make_vector_env", Recorded(evaluation.make_vector_env, log))
    evaluated = play_episodes(team, 6, seed=7, explore=explore, num_envs=1)
    steps = play(team, 6, 7, explore)
    assert len(steps) == len(log) == evaluated.lengths.sum() > 15
    assert min(map(len, log)) < max(map(len, log))  # some are absent
    for mine, other in zip(steps, log, strict=True):
        assert mine.keys() == other.keys()
        assert all(same(mine[agent], other[agent]) for agent in mine), (mine, other)


def test_who_is_not_there_says_nothing_to_a_team_that_acts_alone(build, tmp_path):
    """An agent without an observation is not heard, though links point at it."""
    algo = build(config_of("arrays", "none", GROUPS, env_config={}))
    algo.train()
    team = load_team(algo.save_to_path(tmp_path / "saved"))
    env = Meadow(stays=True)
    seen = env.reset_joint(0)
    changed = 0
    for _ in range(4):
        for absent in list(seen):
            some = {agent: x for agent, x in seen.items() if agent != absent}
            cut = {agent: {**x, "links": x["links"].copy()} for agent, x in some.items()}
            for x in cut.values():
                x["links"][env.possible_agents.index(absent)] = 0.0
            logits = [_logits(team, observations) for observations in (some, cut, seen)]
            for agent in some:
                np.testing.assert_array_equal(logits[0][agent], logits[1][agent])
                changed += not np.array_equal(logits[0][agent], logits[2][agent])
        seen = env.step_joint({agent: 0 for agent in seen}).observations
        if not env.acting():
            seen = env.reset_joint()
    assert changed > 5


def _logits(team, observations):
    """{agent: distribution's inputs} of a greedy step."""
    found, actor = {}, team._actor
    act = actor.act

    def looked_at(*args, **kwargs):
        acted = act(*args, **kwargs)
        for group, mine in zip(actor.groups, acted, strict=True):
            found.update(zip(group.agents, mine.logits[:, 0], strict=True))
        return acted

    actor.act = looked_at
    team.act(observations, explore=False)
    del actor.act
    return found
