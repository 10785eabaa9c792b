"""Costs as runners of both doors record them: each step counts once, and the returns that are reported are not paid."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

from tests.centralized.algorithms import spread
from tests.support import make_learner, tiny_config, update
from thrust_rllib import Constraint, JointEnv, JointStepResult
from thrust_rllib.joint_costs import mean_cost, penalised

AGENTS = ["agent_10", "agent_2", "agent_1"]  # not in the order of the modules


class Turns(JointEnv):
    """One agent after another, five steps an episode; the costs of each step are its number since the start."""

    takes_turns = True
    possible_agents = AGENTS
    observation_spaces = dict.fromkeys(AGENTS, gym.spaces.Box(-9, 9, (1,)))
    action_spaces = dict.fromkeys(AGENTS, gym.spaces.Discrete(2))
    played: list[int]

    def __init__(self):
        self.steps = 0

    def _turn(self):
        return AGENTS[self.t % len(AGENTS)]

    def reset_joint(self, seed=None):
        self.t = 0
        return {self._turn(): np.zeros(1, np.float32)}

    def step_joint(self, actions):
        (who,) = actions
        self.t, self.steps = self.t + 1, self.steps + 1
        self.played.append(self.steps)
        over = self.t == 5
        return JointStepResult(
            observations=dict.fromkeys(AGENTS if over else [self._turn()], np.zeros(1, np.float32)),
            rewards={who: 1.0},
            terminated=dict.fromkeys(AGENTS, over),
            truncated=dict.fromkeys(AGENTS, False),
            extras={"team": float(self.steps), "own": {a: self.steps + 1000.0 * (a != who) for a in AGENTS}},
        )


def sampler(config):
    """(runner, learner)."""
    config.validate()
    runner = config.env_runner_cls(config=config, worker_index=0)
    return runner, make_learner(config, runner.get_spaces())


def test_each_turn_costs_once_wherever_a_rollout_ends():
    Turns.played = []
    runner, learner = sampler(tiny_config(Turns, num_envs=1, train_batch_size_per_learner=7, minibatch_size=4))
    found, paid = {"team": 0.0, "own": 0.0}, 0.0
    for _ in range(5):  # 35 steps, seven episodes; the last rollout ends with one
        (batch,) = learner._batches(runner.sample(num_timesteps=7))
        acted = np.concatenate([streams.present for streams in batch.modules.values()], axis=1)
        assert batch.valid.sum() >= acted.sum()
        for name in found:
            found[name] += mean_cost([batch], name) * acted.sum()
        less = penalised(batch, {"own": 1.0})
        paid += sum((batch.modules[m].rewards - less.modules[m].rewards).sum() for m in batch.modules)
    assert Turns.played == list(range(1, 36))
    assert found["team"] == pytest.approx(sum(Turns.played)) and found["own"] == pytest.approx(sum(Turns.played))
    assert paid == pytest.approx(sum(Turns.played))


def test_both_doors_measure_the_same_and_report_the_environments_returns():
    told = {}
    for sampling in ("arrays", "episodes"):
        for coefficient in (0.0, 1000.0):
            limits = (
                Constraint("collisions", 0.1, coefficient=coefficient),
                Constraint("touching", 0.01, "pid", kp=1.0, ki=0.1, kd=0.3),
                Constraint("covered", 2.0, "lagrangian", rate=1.0, sense="at_least"),
            )
            config = spread(plain=True, constraints=limits).env_runners(sampling=sampling)
            runner, learner = sampler(config)
            result = update(learner, runner.sample(num_timesteps=64))["__all_modules__"]["constraints"]
            costs = {name: own["cost"] for name, own in result.items()}
            told[sampling, coefficient] = [costs, runner.get_metrics()["episode_return_mean"].peek()]
            assert result["collisions"]["multiplier"] == coefficient
    first = told["arrays", 0.0]
    assert all(cost > 0 for cost in first[0].values())
    for other in told.values():
        assert other == [pytest.approx(first[0]), pytest.approx(first[1])]
