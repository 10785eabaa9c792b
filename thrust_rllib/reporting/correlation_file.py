"""`report/feature_correlation.npz`: how much the agents' features correlate at the end of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

CORRELATION_FILE = "feature_correlation.npz"
MAX_HEAT_MAP = 2048  # features of the whole team; a larger heat map has no pixels for them


@dataclass(frozen=True)
class FeatureCorrelation:
    """Correlation of the agents' features on the same joint rows; see `thrust_rllib.team_features`.

    | field    | shape        | meaning                                                       |
    |----------|--------------|---------------------------------------------------------------|
    | agents   | N            | ids as text                                                   |
    | widths   | N            | D_i, features of each agent                                   |
    | matrix   | [N, N]       | ‖corr(Z_i, Z_j)‖²_F / (D_i D_j)                               |
    | signed   | [ΣD, ΣD]     | every feature with every feature; None for very large teams   |
    | num_rows |              | joint rows                                                    |
    """

    agents: list[str]
    widths: list[int]
    matrix: np.ndarray
    signed: np.ndarray | None
    num_rows: int

    @property
    def mean_of_pairs(self) -> float:
        """Mean of the matrix over pairs of different agents; NaN for one agent."""
        upper = self.matrix[np.triu_indices(len(self.agents), 1)]
        return float(upper.mean()) if len(upper) else float("nan")

    def save(self, path: Path) -> None:
        """Writes it; the heat map in half precision."""
        arrays: dict[str, Any] = {
            "agents": np.array(self.agents, dtype=np.str_),
            "widths": np.array(self.widths),
            "matrix": self.matrix,
            "num_rows": np.array(self.num_rows),
        }
        if self.signed is not None and len(self.signed) <= MAX_HEAT_MAP:
            arrays["signed"] = self.signed.astype(np.float16)
        with path.open("wb") as file:
            np.savez_compressed(file, **arrays)

    @classmethod
    def read(cls, path: Path) -> FeatureCorrelation | None:
        """What `save` wrote; None where there is no such file.

        Raises:
            ValueError: the file is something else.
        """
        if not path.is_file():
            return None
        try:
            with np.load(path, allow_pickle=False) as file:
                return cls(
                    agents=[str(agent) for agent in file["agents"]],
                    widths=[int(width) for width in file["widths"]],
                    matrix=file["matrix"],
                    signed=file["signed"].astype(np.float32) if "signed" in file else None,
                    num_rows=int(file["num_rows"]),
                )
        except Exception as error:  # zipfile and numpy raise many kinds for a broken file
            raise ValueError(f"{path} cannot be read ({error}); remove it to leave it out of the report") from error
