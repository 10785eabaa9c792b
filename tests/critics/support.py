"""The package's words for the reference's data."""

from __future__ import annotations

import dataclasses

import gymnasium as gym
import numpy as np

from tests.core.reference_loop import AgentKind
from tests.core.test_reference_update import joint_batch
from tests.critics.data import STATE
from tests.critics.reference import TeamRollout
from tests.support import Declared
from thrust_rllib import JointBatch
from thrust_rllib.team_view import TeamView

KINDS = {"a0": AgentKind(3), "b": AgentKind(2), "a1": AgentKind(3)}
APART = {"a0": "m0", "b": "m1", "a1": "m2"}
INTERLEAVED = {"a0": "m1", "b": "m0", "a1": "m1"}  # the modules' order is not the agents'
TEAMS = {"apart": APART, "interleaved": INTERLEAVED}
WIDTHS = tuple(kind.obs for kind in KINDS.values())
VIEWS = {
    "observations": TeamView(tuple(KINDS), WIDTHS),
    "state": TeamView(tuple(KINDS), (), tuple(range(STATE))),
    "observations and scalars": TeamView(tuple(KINDS), WIDTHS, (3, 1)),
}


class WithState(Declared):
    """Has a state of two parts."""

    state_space = gym.spaces.Dict(
        {"first": gym.spaces.Box(-10, 10, (1,)), "rest": gym.spaces.Box(-10, 10, (STATE - 1,))}
    )

    def state(self):
        return {"first": np.zeros(1, np.float32), "rest": np.zeros(STATE - 1, np.float32)}


def package_batch(fixed: TeamRollout, agents=APART, with_state=True, with_difference=True) -> JointBatch:
    """The batch as the package takes it; without `sequence_rows` where the policies have no memory."""
    batch = joint_batch(fixed, agents)
    extras = {}
    if with_difference:
        extras["difference_reward"] = np.stack([fixed.difference[agent] for agent in batch.agents], axis=1)
    for streams in batch.modules.values():
        if streams.agents[0] in fixed.state_in:
            streams.state_in = np.stack([fixed.state_in[agent] for agent in streams.agents])
    flat = fixed.state_after.reshape(-1, STATE)
    return dataclasses.replace(
        batch,
        episode_start=fixed.episode_start,
        sequence_rows=fixed.sequence_rows if len(fixed.sequence_rows) else None,
        global_state=fixed.state if with_state else None,
        bootstrap_state=flat[batch.bootstrap_rows] if with_state else None,
        extras=extras,
    ).check()
