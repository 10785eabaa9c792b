"""Runs of the same configuration form a group: its members differ in their seed only."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thrust_rllib.reporting.runs import Run

# The seed is what may differ; the environment stands in an entry of its own.
NOT_COMPARED = ("seed", "env", "env_config", "env_spec")
LABEL_WIDTH = 60
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_COEFF, _LOSS = "cross_agent_coeffs.", "cross_agent_losses."


@dataclass(frozen=True, eq=False)
class RunGroup:
    """Seeds of one configuration.

    Args:
        label: what sets it apart from the other groups, short.
        differences: {setting: value} of all settings that are not the same in all groups.
        runs: in the order of their seeds.
    """

    label: str
    differences: dict[str, str]
    runs: list[Run]


def group_runs(runs: Sequence[Run], labels: Sequence[str] = ()) -> tuple[list[RunGroup], list[str]]:
    """Groups in the order in which they first appear.

    Args:
        runs: one at least.
        labels: one for each group, in place of what differs; empty for none.

    Returns:
        The groups, and what a reader has to be told about them.

    Raises:
        ValueError: another number of labels than of groups, or the same label twice.
    """
    members: dict[frozenset[tuple[str, str]], list[Run]] = {}
    for run in runs:
        members.setdefault(frozenset(settings(run.record).items()), []).append(run)
    found = [sorted(group, key=lambda run: (str(type(run.seed)), run.seed or 0)) for group in members.values()]
    differences = differing_settings([group[0].record for group in found])
    if labels:
        _check_labels(labels, found)
    else:
        labels = short_labels(differences) if len(found) > 1 else [found[0][0].env]
    groups = [RunGroup(*parts) for parts in zip(labels, differences, found, strict=True)]
    return groups, [note for group in groups for note in _notes(group, alone=len(groups) == 1)]


def settings(record: Mapping[str, Any]) -> dict[str, str]:
    """{name: value as text} of the environment and of every option that is not the default, without the seed."""
    environment = record.get("environment", {})
    options = {name: value for name, value in record.get("changed", {}).items() if name not in NOT_COMPARED}
    return {
        "env": _text(environment.get("name")),
        **_flat(environment.get("env_config") or {}, "env_config."),
        **_flat(options, ""),
    }


def differing_settings(records: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """For each record {setting: value} of those settings that are not the same in all of them.

    An option that a record does not set has its default. The name of a cross-agent loss says nothing beside its
    coefficient, and is left out there.
    """
    changed = [settings(record) for record in records]
    names = list(dict.fromkeys(name for each in changed for name in each))
    tops = {name.split(".")[0] for name in names}
    defaults = [
        _flat({top: value for top, value in record.get("options", {}).items() if top in tops - {*NOT_COMPARED}}, "")
        for record in records
    ]
    values = {
        name: [each.get(name, default.get(name, "none")) for each, default in zip(changed, defaults, strict=True)]
        for name in names
    }
    different = {name: each for name, each in values.items() if len(set(each)) > 1}
    implied = {
        name
        for name, each in different.items()
        if name.startswith(_LOSS) and name.replace(_LOSS, _COEFF) in different and len(set(each) - {"none"}) == 1
    }
    return [
        {name.removeprefix("env_config."): each[k] for name, each in different.items() if name not in implied}
        for k in range(len(records))
    ]


def short_labels(differences: Sequence[Mapping[str, str]]) -> list[str]:
    """name=value of what differs, cut at `LABEL_WIDTH`; a number behind those that would be the same."""
    labels = []
    for each in differences:
        label = ", ".join(f"{name}={value}" for name, value in each.items())
        labels.append(label if len(label) <= LABEL_WIDTH else label[: LABEL_WIDTH - 1] + "…")
    times = Counter(labels)
    return [label if times[label] == 1 else f"{label} (group {k})" for k, label in enumerate(labels, start=1)]


def _check_labels(labels: Sequence[str], groups: Sequence[Sequence[Run]]) -> None:
    listed = "; ".join(f"{k}: {', '.join(str(run.folder) for run in group)}" for k, group in enumerate(groups, start=1))
    if len(labels) != len(groups):
        raise ValueError(f"--label was given {len(labels)} times; needed: one for each of the groups {listed}")
    if len(set(labels)) < len(labels):
        raise ValueError(f"--label gives the same name twice ({', '.join(labels)}); the groups are {listed}")


def _notes(group: RunGroup, alone: bool) -> list[str]:
    of = "" if alone else f"{group.label}: "
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


def _flat(value: Mapping[str, Any], prefix: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, inner in value.items():
        if isinstance(inner, Mapping):
            found |= _flat(inner, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = _text(inner)
    return found


def _text(value: Any) -> str:
    """A value as a person writes it; objects without their address, which is another one in every run."""
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str):
        return _ADDRESS.sub("", value)
    return _ADDRESS.sub("", json.dumps(value, ensure_ascii=False))
