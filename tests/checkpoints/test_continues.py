"""Ten iterations are five, a checkpoint, a fresh process and five more: to the bit."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints.continued import go_on
from tests.checkpoints.outcomes import assert_alike
from tests.support import tiny_config
from thrust_rllib import RedundancyPenalty


def config(door="arrays", cell=None, runners=0, learners=0, local=True, normalize=True, env="bucket_brigade"):
    model = {"fcnet_hiddens": [16, 12]} if cell is None else {"fcnet_hiddens": [8], "cell": cell, "max_seq_len": 4}
    made = tiny_config(
        env,
        lr=[[0, 1e-3], [1000, 1e-4]],
        critic_lr=1e-2,
        entropy_coeff=[[0, 0.05], [800, 0.0]],
        iterate_all_minibatches=True,
        target_kl=0.002,
        min_entropy=0.1,
        cross_agent_losses={"redundancy": RedundancyPenalty()},
        cross_agent_coeffs={"redundancy": [[0, 0.1], [640, 1.0]]},
        coupling_gradient_interval=3,
        minibatch_size=16 // max(learners, 1),
        model=model,
        runners={
            "sampling": door,
            "normalize_observations": normalize,
            "num_env_runners": runners,
            "create_local_env_runner": local,
        },
    )
    made.learners(num_learners=learners)
    return made.evaluation(evaluation_interval=2, evaluation_duration=3, evaluation_num_env_runners=min(runners, 1))


def check(build, tmp_path, configs, half):
    """Trains each for `half` iterations, saves, and lets a fresh process and itself go on."""
    needed, paths = [], []
    for k, each in enumerate(configs):
        algo = build(each)
        for _ in range(half):
            algo.train()
        paths.append(algo.save_to_path(tmp_path / str(k) / str(half)))
        needed.append(go_on(algo, half))
        algo.stop()
    results = tmp_path / "results"
    command = [sys.executable, "-m", "tests.checkpoints.continued", str(results), *paths]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = pickle.loads(results.read_bytes())
    assert_alike(found, needed)
    for told, _ in needed:
        assert [len(returns) for _, returns in told] and all(returns for _, returns in told)
        assert any("episode_return_mean" in path for path in told[-1][0])
        assert any("evaluation" in path for path in told[-1][0]) or half % 2


@pytest.mark.timeout(180)
def test_in_one_process_through_both_doors(build, tmp_path):
    check(build, tmp_path, [config("arrays"), config("episodes"), config("arrays", cell="lstm")], half=2)


GRID = [
    {"door": door, "cell": cell, **sizes}
    for door in ("arrays", "episodes")
    for cell in (None, "lstm")
    for sizes in ({}, {"runners": 2}, {"runners": 2, "local": False}, {"learners": 2})
]


@pytest.mark.timeout(600)
@pytest.mark.slow_checkpoints
@pytest.mark.parametrize(
    "options", GRID, ids=lambda options: "-".join(f"{key}={value}" for key, value in options.items())
)
def test_ten_iterations_are_five_and_five(build, tmp_path, options):
    check(build, tmp_path, [config(**options)], half=5)


def test_a_state_that_is_not_given_back_shows(build, tmp_path, monkeypatch):
    """Without the runners' states the second half is another one."""
    algo = build(config())
    algo.train()
    path = algo.save_to_path(tmp_path / "saved")
    needed = go_on(algo, 1)
    monkeypatch.setattr("thrust_rllib.algorithm_state.give_states", lambda *args: None)
    algo.restore_from_path(path)
    with pytest.raises(AssertionError):
        assert_alike(go_on(algo, 1), needed)
