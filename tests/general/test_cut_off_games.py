"""A waiting agent whose game is cut off: by its own last observation, or a clear error."""

from __future__ import annotations

import numpy as np

from tests.envs.lives import Turns
from tests.support import make_learner, tiny_config
from thrust_rllib.episode_runner import JointEpisodeRunner


class CutOff(Turns):
    """The game is cut off in its third step; the flags are the mover's alone.

    Args:
        shown: whether who waits is shown a last observation, too.
    """

    takes_turns = True

    def __init__(self, shown=True):
        super().__init__(3)
        self.shown = shown

    def step_joint(self, actions):
        result = super().step_joint(actions)
        if self.t == self.length:
            (mover,) = actions
            seen = np.array([self.t], np.float32)
            result.observations = {agent: seen for agent in self.possible_agents if self.shown or agent == mover}
            result.terminated, result.truncated, result.over = {mover: False}, {mover: True}, True
        return result


def test_who_waits_where_the_mover_is_truncated_is_truncated_with_its_last_observation():
    config = tiny_config(CutOff, num_envs=1)
    config.validate()
    runner = JointEpisodeRunner(config=config, worker_index=0)
    (episode,) = runner.sample(num_episodes=1)
    (batch,) = make_learner(config, runner.get_spaces())._batches([episode])
    for agent, last in (("a0", 2), ("a1", 1)):
        stream = batch.stream(agent)
        assert stream.truncated[last, 0] and not stream.terminated.any()
        assert stream.bootstrap_obs[list(batch.bootstrap_rows).index(last)].tolist() == [3.0]
