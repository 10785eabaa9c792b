"""What `thrust-rllib evaluate` found: as a table for people, and as a record for programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from thrust_rllib.command_line.messages import MAX_AGENTS_LISTED
from thrust_rllib.command_line.training_progress import number
from thrust_rllib.confidence import GapClosed, MeanInterval, gap_closed_of
from thrust_rllib.evaluation import EpisodeMeans, PlayedEpisodes


@dataclass(frozen=True)
class EvaluationResult:
    """Episodes of a team, and of baselines in the same environments.

    Args:
        checkpoint: where the team is from.
        iteration: of it.
        env_name: as the run named it.
        env_config: as it was played.
        seed: of environments and sampled actions.
        sampled: whether actions were sampled; else the most likely ones.
        policy: the team's episodes.
        baselines: {name: episodes}.
    """

    checkpoint: Path
    iteration: int
    env_name: str
    env_config: dict[str, Any]
    seed: int
    sampled: bool
    policy: PlayedEpisodes
    baselines: dict[str, PlayedEpisodes] = field(default_factory=dict)

    @property
    def gap_closed(self) -> GapClosed | None:
        """On the team reward per step, where both baselines were played."""
        if not {"random", "specialist"} <= self.baselines.keys():
            return None
        of = {name: played.means().team_reward_per_step for name, played in self.baselines.items()}
        return gap_closed_of(self.policy.means().team_reward_per_step, of["random"], of["specialist"])

    def print(self, console: Console) -> None:
        """What was played, the table, one of the team's extras if there are any, the gap closed."""
        settings = "".join(f", {name}={value}" for name, value in self.env_config.items())
        console.print(
            f"{self.checkpoint} (iteration {self.iteration:,}): {self.env_name}{settings}; "
            f"{len(self.policy.lengths):,} episode{'' if len(self.policy.lengths) == 1 else 's'}, "
            f"{'sampled' if self.sampled else 'greedy'} actions, "
            f"seed {self.seed}",
            soft_wrap=True,
            highlight=False,
            markup=False,
        )
        team = self.policy.means()
        others = {name: played.means() for name, played in self.baselines.items()}
        # As of independent samples: equal seeds of the environments make the intervals too long rather than short.
        differences = {f"team − {name}": _differences(team, means) for name, means in others.items()}
        tables = [("mean and 95 % interval", _rows, {"team": team, **others}), ("difference", _rows, differences)]
        if _extra_rows(team):
            extras = [("extras of the team", {"team": team, **others}), ("difference of extras", differences)]
            tables += [(title, _extra_rows, columns) for title, columns in extras]
        shown = [_table(title, {name: rows(m) for name, m in of.items()}) for title, rows, of in tables if of]
        for index, table in enumerate(shown):
            if index:
                console.print()
            console.print(table)
        if others:
            console.print()
        gap = self.gap_closed
        if gap is not None:
            console.print(
                f"gap closed {number(gap.value)}, standard error {number(gap.standard_error)} (team reward per step: "
                "0 is random, 1 the specialist)",
                soft_wrap=True,
                highlight=False,
            )

    def record(self) -> dict[str, Any]:
        """All numbers, with only JSON's types but for NaN."""
        team = self.policy.means()
        gap = self.gap_closed
        return {
            "checkpoint": str(self.checkpoint),
            "iteration": self.iteration,
            "environment": {"name": self.env_name, "env_config": self.env_config},
            "episodes": len(self.policy.lengths),
            "seed": self.seed,
            "sampled": self.sampled,
            "policy": {**_means_record(team), "played": _played_record(self.policy)},
            "baselines": {
                name: {
                    **_means_record(played.means()),
                    "difference": _means_record(_differences(team, played.means())),
                    "played": _played_record(played),
                }
                for name, played in self.baselines.items()
            },
            "gap_closed": None if gap is None else {"value": gap.value, "standard_error": gap.standard_error},
        }


_TEAM_RETURN, _RETURN_OF = "team return", "return of "


def _rows(means: EpisodeMeans) -> dict[str, MeanInterval]:
    return {
        _TEAM_RETURN: means.team_return,
        "team reward per step": means.team_reward_per_step,
        **{f"{_RETURN_OF}{agent}": mean for agent, mean in means.agent_returns.items()},
        "steps per episode": means.length,
    }


def _extra_rows(means: EpisodeMeans) -> dict[str, MeanInterval]:
    rows = {}
    for name, final in means.final_extras.items():
        rows[f"{name}, last step"] = final
        rows[f"{name}, mean over steps"] = means.mean_extras[name]
    return rows


def _table(title: str, columns: Mapping[str, Mapping[str, MeanInterval]]) -> Table:
    """The same rows in each column."""
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    table.add_column(title, no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", overflow="fold")
    rows = list(next(iter(columns.values())))
    agents = [row for row in rows if row.startswith(_RETURN_OF)]
    for row in rows:
        if row not in agents[MAX_AGENTS_LISTED:]:
            cells = [f"{number(means[row].mean)} ± {number(means[row].half_width)}" for means in columns.values()]
            table.add_row(Text(row), *cells, style="bold" if row == _TEAM_RETURN else "")
    if agents[MAX_AGENTS_LISTED:]:
        table.add_row(f"… {len(agents) - MAX_AGENTS_LISTED} more agents with --output")
    return table


def _means_record(means: EpisodeMeans) -> dict[str, Any]:
    return {
        "team_return": _mean_record(means.team_return),
        "team_reward_per_step": _mean_record(means.team_reward_per_step),
        "agent_returns": {str(agent): _mean_record(mean) for agent, mean in means.agent_returns.items()},
        "length": _mean_record(means.length),
        "final_extras": {name: _mean_record(mean) for name, mean in means.final_extras.items()},
        "mean_extras": {name: _mean_record(mean) for name, mean in means.mean_extras.items()},
    }


def _mean_record(mean: MeanInterval) -> dict[str, float]:
    low, high = mean.interval
    return {"mean": mean.mean, "standard_error": mean.standard_error, "low": low, "high": high}


def _differences(team: EpisodeMeans, other: EpisodeMeans) -> EpisodeMeans:
    """Team less other, mean by mean."""

    def less(mine: Mapping[Any, MeanInterval], theirs: Mapping[Any, MeanInterval]) -> dict[Any, MeanInterval]:
        return {name: mean - theirs[name] for name, mean in mine.items()}

    return EpisodeMeans(
        team_return=team.team_return - other.team_return,
        team_reward_per_step=team.team_reward_per_step - other.team_reward_per_step,
        agent_returns=less(team.agent_returns, other.agent_returns),
        length=team.length - other.length,
        final_extras=less(team.final_extras, other.final_extras),
        mean_extras=less(team.mean_extras, other.mean_extras),
    )


def _played_record(played: PlayedEpisodes) -> Mapping[str, Any]:
    return {
        "returns": {str(agent): played.returns[:, i].tolist() for i, agent in enumerate(played.agents)},
        "lengths": played.lengths.tolist(),
        "final_extras": _numbers_of_team(played.final_extras),
        "mean_extras": _numbers_of_team(played.mean_extras),
    }


def _numbers_of_team(extras: Mapping[str, np.ndarray]) -> dict[str, list[Any]]:
    return {name: values.tolist() for name, values in extras.items() if values.ndim == 1}
