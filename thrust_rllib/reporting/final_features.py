"""At the end of a training run: how much the agents' features correlate, into the run's report folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from thrust_rllib.command_line.training_progress import Progress
from thrust_rllib.reporting.correlation_file import CORRELATION_FILE, MAX_HEAT_MAP, FeatureCorrelation
from thrust_rllib.reporting.runs import REPORT

NUM_ROWS = 8192
MIN_ROWS = 512
SECONDS = 10.0  # an environment that would need longer for `NUM_ROWS` plays fewer rows


def write_feature_correlation(algo: Any, folder: Path, progress: Progress) -> str | None:
    """Plays fresh rows with the last weights and writes `report/feature_correlation.npz`.

    Args:
        algo: a `JointPPO`.
        folder: of the run.
        progress: at the end of training.

    Returns:
        Why there is none; None where it was written. Nothing is raised: a run is worth more than this file.
    """
    # Not at the top: a report is read without torch.
    from thrust_rllib.team_features import fresh_features, mean_squares, signed_correlation

    num_rows = min(NUM_ROWS, max(MIN_ROWS, int(SECONDS * progress.env_steps / max(progress.seconds, 1e-9))))
    path = folder / REPORT / CORRELATION_FILE
    try:
        path.unlink(missing_ok=True)  # of earlier weights
        if len(algo.config.policy_mapping_fn.table) < 2:
            return "no feature correlation: there is one agent"
        features = fresh_features(algo, num_rows)
        signed, widths = signed_correlation(features), [z.shape[1] for z in features.values()]
        correlation = FeatureCorrelation(
            agents=[str(agent) for agent in features],
            widths=widths,
            matrix=mean_squares(signed, widths),
            signed=signed if len(signed) <= MAX_HEAT_MAP else None,
            num_rows=num_rows,
        )
        path.parent.mkdir(exist_ok=True)
        correlation.save(path)
    except Exception as error:
        return f"no feature correlation: {error or type(error).__name__}"
    return None
