"""A rollout that the learner refuses moves nothing of it, its schedules and counters included."""

import numpy as np
import pytest

from tests.support import largest_difference, make_learner, parameters, tiny_config, update
from thrust_rllib.episode_runner import JointEpisodeRunner


def test_a_reward_that_is_not_finite_leaves_the_learner_as_it_was():
    config = tiny_config("debug/random_observations", lr=[[0, 1e-3], [1000, 0.0]], runners={"sampling": "episodes"})
    config.validate()
    runner = JointEpisodeRunner(config=config, worker_index=0)
    learner = make_learner(config, runner.get_spaces())
    update(learner, runner.sample(num_timesteps=64), steps=64)
    rates = {name: float(o.param_groups[0]["lr"]) for name, o in learner._named_optimizers.items()}
    before, number = parameters(learner), learner._weights_seq_no

    episodes = runner.sample(num_timesteps=64)
    episodes[0].agent_episodes["agent_1"].rewards.data[-1] = np.nan
    with pytest.raises(ValueError, match="agent 'agent_1' got the reward nan"):
        update(learner, episodes, steps=500)
    assert largest_difference(parameters(learner), before) == 0.0
    assert learner._weights_seq_no == number
    assert {name: float(o.param_groups[0]["lr"]) for name, o in learner._named_optimizers.items()} == rates
