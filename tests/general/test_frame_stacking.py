"""RLlib's frame stacking through the general door: sampling and learning see the same stacks."""

from __future__ import annotations

import numpy as np
import pytest
from ray.rllib.connectors.env_to_module.frame_stacking import FrameStackingEnvToModule
from ray.rllib.connectors.learner.frame_stacking import FrameStackingLearner

from tests.general.counting import (
    LENGTH,
    assert_the_learner_sees_what_the_modules_saw,
    general_config,
    runner_and_learner,
)
from tests.support import largest_difference, parameters, update


def frames(horizon=2, num=3, **options):
    return general_config(
        env_config={"shape": (2, 2, 1)},
        pieces=lambda env, spaces, device: FrameStackingEnvToModule(num_frames=num, multi_agent=True),
        learner=lambda observation_space, action_space: FrameStackingLearner(num_frames=num, multi_agent=True),
        runners={"episode_lookback_horizon": horizon},
        **options,
    )


def stack(t, episode, agent):
    """The right stack of Counting's agent, as [3] numbers."""
    return [0 if t - k < 0 else 1 + t - k + 20 * episode + 1000 * agent for k in (2, 1, 0)]


def test_frames_are_stacked_alike_at_both_ends():
    config = frames()
    batches = assert_the_learner_sees_what_the_modules_saw(config, num_samples=4, steps=14)
    steps = 0
    for batch in batches:
        for index, agent in enumerate(("right", "left")):
            stream = batch.stream(agent)
            for t in range(7):
                episode, step = divmod(steps + t, LENGTH)
                assert stream.obs[t, 0, 0, 0].tolist() == stack(step, episode, index)
                row = np.flatnonzero(batch.bootstrap_rows == 2 * t)
                assert bool(row.size) == (step == LENGTH - 1 or t == 6)
                if row.size:  # of a truncated episode, and of one that goes on
                    followed = batch.modules[agent].bootstrap_obs[0, row[0], 1, 1]
                    assert followed.tolist() == stack(step + 1, episode, index)
        steps += 7


def test_frames_train():
    runner, learner = runner_and_learner(frames())
    before = parameters(learner)
    update(learner, runner.sample())
    assert largest_difference(before, parameters(learner)) > 0.0


def test_frames_that_the_learner_could_not_stack_are_an_early_error():
    with pytest.raises(ValueError, match=r"horizon=1 with stacks of 3 frames.*episode_lookback_horizon=2\) or more"):
        frames(horizon=1).validate()
    config = frames()
    config._learner_connector = None
    with pytest.raises(ValueError, match=r"learner_connector is not set.*FrameStackingLearner\(num_frames=3"):
        config.validate()
    with pytest.raises(ValueError, match="normalize_observations=True with frame stacking"):
        frames().env_runners(normalize_observations=True).validate()
