"""Runs of the same configuration form a group: its members differ in their seed only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from thrust_rllib.reporting.labels import short_labels
from thrust_rllib.reporting.runs import Run
from thrust_rllib.reporting.settings import differing_settings, settings


@dataclass(frozen=True, eq=False)
class RunGroup:
    """Seeds of one configuration.

    Args:
        label: what sets it apart from the other groups of its environment, short.
        differences: {setting: value} of all settings that are not the same in all groups of its environment.
        runs: in the order of their seeds.
    """

    label: str
    differences: dict[str, str]
    runs: list[Run]

    @property
    def env(self) -> str:
        """Name of the environment of all its runs."""
        return self.runs[0].env


def group_runs(runs: Sequence[Run], labels: Sequence[str] = ()) -> tuple[list[RunGroup], list[str]]:
    """Groups, those of an environment side by side, else in the order in which they first appear.

    Args:
        runs: one at least.
        labels: one for each group, in place of what differs; empty for none.

    Returns:
        The groups, and what a reader has to be told about them.

    Raises:
        ValueError: another number of labels than of groups, or the same label twice in an environment.
    """
    members: dict[frozenset[tuple[str, str]], list[Run]] = {}
    for run in runs:
        members.setdefault(frozenset(settings(run.record).items()), []).append(run)
    found = [
        RunGroup("", {}, sorted(group, key=lambda run: (str(type(run.seed)), run.seed or 0)))
        for group in members.values()
    ]
    groups = [group for of_env in by_environment(found).values() for group in _told_apart(of_env)]
    if labels:
        _check_labels(labels, groups)
        groups = [replace(group, label=label) for group, label in zip(groups, labels, strict=True)]
    return groups, [note for group in groups for note in _notes(group, _prefix(group, groups))]


def by_environment(groups: Sequence[RunGroup]) -> dict[str, list[RunGroup]]:
    """{environment: its groups}, in order."""
    found: dict[str, list[RunGroup]] = {}
    for group in groups:
        found.setdefault(group.env, []).append(group)
    return found


def _told_apart(groups: Sequence[RunGroup]) -> list[RunGroup]:
    """Groups of one environment with their differences and labels; a single one is called like the environment."""
    differences = differing_settings([group.runs[0].record for group in groups])
    labels = short_labels(differences) if len(groups) > 1 else [groups[0].env]
    return [
        RunGroup(label, different, group.runs)
        for label, different, group in zip(labels, differences, groups, strict=True)
    ]


def _check_labels(labels: Sequence[str], groups: Sequence[RunGroup]) -> None:
    listed = "; ".join(
        f"{k}: {', '.join(str(run.folder) for run in group.runs)}" for k, group in enumerate(groups, start=1)
    )
    if len(labels) != len(groups):
        raise ValueError(f"--label was given {len(labels)} times; needed: one for each of the groups {listed}")
    if len({(group.env, label) for group, label in zip(groups, labels, strict=True)}) < len(labels):
        raise ValueError(f"--label gives the same name twice ({', '.join(labels)}); the groups are {listed}")


def _prefix(group: RunGroup, groups: Sequence[RunGroup]) -> str:
    """Of a note about one of the groups."""
    if len(groups) == 1:
        return ""
    of_env = f"{group.env}: " if len(by_environment(groups)) > 1 and group.label != group.env else ""
    return f"{of_env}{group.label}: "


def _notes(group: RunGroup, of: str) -> list[str]:
    notes = []
    twice = sorted({str(seed) for seed, n in Counter(str(run.seed) for run in group.runs).items() if n > 1})
    if twice:
        notes.append(
            f"{of}several runs have the same seed ({', '.join(twice)}); they are counted as if they were independent"
        )
    ends = sorted({int(run.curves.env_steps[-1]) for run in group.runs})
    if len(ends) > 1:
        notes.append(
            f"{of}runs end between {ends[0]:,} and {ends[-1]:,} environment steps; each point of a mean is over the "
            "runs that got there, and the mean ends where fewer than half of them do"
        )
    return notes
