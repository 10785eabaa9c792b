"""Saved teams that exchange messages go on to the bit: in a fresh algorithm, and in one that has gone on."""

from __future__ import annotations

import pytest

from tests.checkpoints.continued import go_on
from tests.checkpoints.outcomes import assert_alike
from tests.communicating.world import CELLS, DEAF, GROUPS, HEADS, NORMALIZED, ONE, Meadow, Swarm, team_config
from thrust_rllib import JointPPO


def config_of(door, cell, policies, **options):
    """Rollouts of 17 steps in two environments: episodes are cut by them, and go on behind a checkpoint."""
    config = team_config(
        cell,
        policies,
        runners={**NORMALIZED, "sampling": door},
        train_batch_size_per_learner=34,
        minibatch_size=None if cell == "lstm" else 17,
        iterate_all_minibatches=True,
        **{"env_config": {"heads": HEADS, "masked": True}, **options},
    )
    return config.evaluation(evaluation_interval=2, evaluation_duration=2)


CASES = [
    *((door, cell, GROUPS, Meadow) for door in ("arrays", "episodes") for cell in CELLS),
    ("arrays", "message_gru", DEAF, Meadow),
    ("episodes", "message_gru", DEAF, Meadow),
    ("arrays", "message_gru", ONE, Swarm),
]


@pytest.mark.parametrize("door, cell, policies, env", CASES)
def test_a_restored_run_goes_on_to_the_bit(build, tmp_path, door, cell, policies, env):
    algo = build(config_of(door, cell, policies, env=env))
    algo.train()
    path = algo.save_to_path(tmp_path / "saved")
    needed = go_on(algo, 2)
    fresh = JointPPO.from_checkpoint(path)
    assert_alike(go_on(fresh, 2), needed)
    fresh.stop()
    algo.restore_from_path(path)  # and in one that has gone on
    assert_alike(go_on(algo, 2), needed)
