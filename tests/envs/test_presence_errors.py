"""Agents that join late, end early and wait: what is refused names agent, environment and step."""

import numpy as np
import pytest

from tests.envs.lives import LIVES, JointLives, played
from thrust_rllib.envs import JointEnvMultiAgentEnv, JointEnvParallel, JointStepResult, SyncVectorJointEnv


def change_step(at, change):
    """`LIVES` whose step `at` (from 1) is altered by `change(result)`."""

    class Altered(JointLives):
        def step_joint(self, actions):
            result = super().step_joint(actions)
            if self.plan.t == at:
                change(result)
            return result

    return lambda: Altered(lives=LIVES, length=4)


def drop(field, agent):
    return lambda result: getattr(result, field).pop(agent)


def put(field, **entries):
    return lambda result: getattr(result, field).update(entries)


def over(value):
    return lambda result: setattr(result, "over", value)


ZEROS = np.zeros(3, np.float32)


@pytest.mark.parametrize(
    ("at", "change", "says"),
    [
        (
            1,
            drop("rewards", "c"),
            r"step 1 .*rewards have no entry for agent 'c', which acted in this step; .*\['a', 'c'\]",
        ),
        (3, put("rewards", a=0.0), "step 3 .*rewards have an entry .0.0. for agent 'a', which ended earlier"),
        (3, put("observations", a=ZEROS), "step 3 .*observations have an entry .* for agent 'a', which ended earlier"),
        (3, drop("observations", "b"), "step 3 .*no entry for agent 'b', which is truncated; return the last one"),
        (2, drop("terminated", "b"), "step 2 .*terminated flags have no entry for agent 'b', which acted"),
        (2, drop("truncated", "c"), "step 2 .*truncated flags have no entry for agent 'c', which acted"),
        (2, over(True), "step 2 .*the episode is over .*agent 'b' is neither terminated nor truncated; set one"),
        (1, put("rewards", z=1.0), r"step 1 .*rewards name \['z'\], which are not in possible_agents"),
    ],
)
def test_errors_name_agent_environment_and_step(at, change, says):
    env = SyncVectorJointEnv(change_step(at, change), 1)
    env.reset_joint()
    with pytest.raises(ValueError, match=f"Altered, environment 0, {says}"):
        played(env, 4)
    for adapter in (JointEnvParallel, JointEnvMultiAgentEnv):
        env = adapter(change_step(at, change)())
        env.reset()
        with pytest.raises(ValueError, match=f"Altered, {says}"):
            for _ in range(4):
                env.step({agent: 0 for agent in "abc" if agent in env.agents})


def test_nobody_in_the_first_step_is_an_error():
    class Empty(JointLives):
        def reset_joint(self, seed=None):
            return {}

    with pytest.raises(ValueError, match="Empty, environment 0, reset_joint: observations are empty"):
        SyncVectorJointEnv(lambda: Empty(lives=LIVES, length=4), 1).reset_joint()


def test_entries_that_change_nothing():
    """Flags of agents that have ended or are not born, one flag for all, an agent that comes in the last step."""

    def all_flags(result):
        result.terminated = dict.fromkeys("abc", False)
        result.truncated = {"a": True, "b": True, "c": False}

    env = SyncVectorJointEnv(change_step(3, all_flags), 1)
    env.reset_joint()
    assert [r.truncated[:, 0].tolist() for r in played(env, 3)][2] == [False, True, False]

    class Late(JointLives):
        def step_joint(self, actions):
            result = super().step_joint(actions)
            if self.plan.t == 2:
                return JointStepResult(result.rewards, {**result.observations, "b": ZEROS}, True)
            return result

    env = SyncVectorJointEnv(lambda: Late(says_over=False, lives={**LIVES, "b": (3, 3, "truncated")}, length=4), 1)
    env.reset_joint()
    results = played(env, 3)
    assert results[1].over.tolist() == [True] and results[1].terminated[:, 0].tolist() == [True, False, True]
    assert results[2].rewards[:, 0].tolist() == [1, 0, 21]
