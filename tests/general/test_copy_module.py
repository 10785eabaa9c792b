"""`JointPPO.copy_module`: a frozen opponent becomes the learner's latest self, in every process."""

import numpy as np
import pytest

from tests.support import box as box_space
from tests.support import declared_config, discrete, largest_difference, parameters, tiny_config


def runner_weights(runner, module_id):
    return {name: np.array(value) for name, value in runner.module[module_id].get_state().items()}


def everywhere(algo, ask):
    return algo.env_runner_group.foreach_env_runner(ask)


@pytest.mark.parametrize("num_runners", [0, 2])
def test_weights_and_moments_reach_every_runner(ray_session, num_runners):
    config = tiny_config(
        "debug/random_observations",
        trained=["agent_0", "agent_1"],
        runners={"num_env_runners": num_runners, "normalize_observations": True},
    )
    algo = config.build_algo()
    try:
        algo.train()
        before = parameters(algo.learner_group._learner)
        assert largest_difference(before["agent_0"], before["agent_2"]) > 1e-3
        algo.copy_module("agent_0", "agent_2")
        after = parameters(algo.learner_group._learner)
        assert largest_difference(after["agent_2"], before["agent_0"]) == 0.0
        assert (
            largest_difference(
                {m: after[m] for m in ("agent_0", "agent_1")}, {m: before[m] for m in ("agent_0", "agent_1")}
            )
            == 0.0
        )
        for mine, copied in everywhere(
            algo, lambda runner: (runner_weights(runner, "agent_0"), runner_weights(runner, "agent_2"))
        ):
            assert largest_difference(mine, copied) == 0.0
        moments = everywhere(
            algo, lambda runner: [runner.normalizer.moments[m].get_state() for m in ("agent_0", "agent_2")]
        )
        for mine, copied in moments:
            assert mine["count"] == copied["count"] > 0
            np.testing.assert_array_equal(mine["mean"], copied["mean"])
        algo.train()  # the copy is frozen, its source goes on
        last = parameters(algo.learner_group._learner)
        assert largest_difference(last["agent_2"], after["agent_2"]) == 0.0
        assert largest_difference(last["agent_0"], after["agent_0"]) > 0.0
        for copied in everywhere(algo, lambda runner: runner_weights(runner, "agent_2")):
            assert all(np.array_equal(copied[name], after["agent_2"][name]) for name in copied)
    finally:
        algo.stop()


def test_mistakes_are_told(ray_session):
    config = declared_config([box_space(3), box_space(4)], [discrete(2)] * 2)
    algo = config.build_algo()
    try:
        with pytest.raises(ValueError, match="'a9'; the modules are"):
            algo.copy_module("a9", "a0")
        with pytest.raises(ValueError, match="'a0' twice"):
            algo.copy_module("a0", "a0")
        with pytest.raises(ValueError, match="different networks"):
            algo.copy_module("a0", "a1")
    finally:
        algo.stop()
