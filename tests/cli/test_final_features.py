"""The feature correlation that a training run leaves in its report folder."""

import numpy as np
import pytest

from tests.cli.helpers import TINY, thrust_rllib
from tests.support import tiny_config
from thrust_rllib.command_line.training_progress import Progress
from thrust_rllib.reporting.correlation_file import FeatureCorrelation
from thrust_rllib.reporting.final_features import MIN_ROWS, NUM_ROWS, write_feature_correlation
from thrust_rllib.team_features import feature_correlation, fresh_features

FILE = "report/feature_correlation.npz"
FAST = Progress(iteration=1, env_steps=10_000, seconds=1.0, steps_per_second=10_000)
SLOW = Progress(iteration=1, env_steps=100, seconds=100.0, steps_per_second=1)


@pytest.fixture(scope="module")
def algo(ray_session):
    algo = tiny_config("debug/random_observations").build_algo()
    yield algo
    algo.stop()


def test_file_has_the_correlation_of_the_last_weights(algo, tmp_path):
    assert write_feature_correlation(algo, tmp_path, FAST) is None
    found = FeatureCorrelation.read(tmp_path / FILE)
    agents, matrix = feature_correlation(fresh_features(algo, NUM_ROWS))
    assert (found.agents, found.widths, found.num_rows) == (agents, [12] * 3, NUM_ROWS)
    np.testing.assert_allclose(found.matrix, matrix, atol=1e-12)
    assert found.signed.shape == (36, 36)
    np.testing.assert_allclose(np.square(found.signed[:12, 12:24]).mean(), matrix[0, 1], rtol=0.01)
    assert FeatureCorrelation.read(tmp_path / "nothing.npz") is None


def test_a_slow_environment_plays_fewer_rows(algo, tmp_path):
    assert write_feature_correlation(algo, tmp_path, SLOW) is None
    assert FeatureCorrelation.read(tmp_path / FILE).num_rows == MIN_ROWS


def test_nothing_is_raised(ray_session, tmp_path):
    alone = tiny_config("debug/random_observations", {"agents": 1}).build_algo()
    (tmp_path / FILE).parent.mkdir()
    (tmp_path / FILE).write_text("of earlier weights")
    assert write_feature_correlation(alone, tmp_path, FAST) == "no feature correlation: there is one agent"
    alone.stop()
    assert write_feature_correlation(object(), tmp_path, FAST).startswith("no feature correlation: 'object' object")
    assert not (tmp_path / FILE).exists()


def test_a_training_run_writes_it_and_its_page(ray_session, tmp_path):
    code, out, _ = thrust_rllib(
        "train", "debug/match_observation", *TINY, "--iterations", 1, "--eval-episodes", 0, "--output", tmp_path / "run"
    )
    assert code == 0 and "no feature correlation" not in out
    page = (tmp_path / "run" / "report" / "report.html").read_text("utf-8")
    assert FeatureCorrelation.read(tmp_path / "run" / FILE).agents == ["agent_0", "agent_1"]
    assert page.count("data:image/png") == 4  # curves, diversity, two of the features
    code, out, _ = thrust_rllib(
        "train", "CartPole-v1", *TINY, "--iterations", 1, "--eval-episodes", 0, "--output", tmp_path / "alone"
    )
    assert code == 0 and "no feature correlation: there is one agent" in out
    assert (tmp_path / "alone" / "report" / "report.html").exists()
