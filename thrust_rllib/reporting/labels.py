"""Short labels of groups: what sets one apart from the others."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from os.path import commonprefix

LABEL_WIDTH = 60
_SHORTEST_VALUE = 8  # characters that a cut leaves of a value


def short_labels(differences: Sequence[Mapping[str, str]]) -> list[str]:
    """name=value of what differs, each label at most `LABEL_WIDTH` long.

    Names are shortened to their last part. Where that is still too long, settings go without which all groups are told
    apart (the longest first), then of a single label those with the value of most groups; values are cut last. Only
    labels that are then the same get a number.

    Args:
        differences: for each group {setting: value}, all with the same settings.
    """
    names = list(differences[0])
    shown = _short_names(names)
    texts = [{name: f"{shown[name]}={each[name]}" for name in names} for each in differences]
    longest_first = sorted(names, key=lambda name: -max(len(text[name]) for text in texts))
    kept = [_separating(texts, longest_first)] * len(texts)
    for k in range(len(texts)):
        kept[k] = _unusual(texts, kept, k, longest_first)
    labels = [_cut(texts, k, [name for name in names if name in kept[k]]) for k in range(len(texts))]
    times = Counter(labels)
    return [label if times[label] == 1 else f"{label} (group {k})".lstrip() for k, label in enumerate(labels, start=1)]


def _short_names(names: Sequence[str]) -> dict[str, str]:
    """{name: as many of its last parts as tell it from the others}."""
    short = {}
    for name in names:
        parts = name.split(".")
        ends = [".".join(parts[k:]) for k in reversed(range(len(parts)))]
        if name.startswith("critic_config."):  # `cell` alone would be that of the policies
            ends = [name]
        short[name] = next(
            end for end in ends if end == name or not any(n == end or n.endswith(f".{end}") for n in names if n != name)
        )
    return short


def _join(text: Mapping[str, str], kept: Sequence[str]) -> str:
    return ", ".join(part for name, part in text.items() if name in kept)


def _separating(texts: Sequence[Mapping[str, str]], longest_first: Sequence[str]) -> list[str]:
    """Settings for all labels: all of them, or fewer that still tell all groups apart."""
    kept = list(longest_first)
    for name in longest_first:
        if all(len(_join(text, kept)) <= LABEL_WIDTH for text in texts):
            break
        rest = [other for other in kept if other != name]
        if rest and len({_join(text, rest) for text in texts}) == len(texts):
            kept = rest
    return kept


def _unusual(
    texts: Sequence[Mapping[str, str]], kept: Sequence[list[str]], k: int, longest_first: Sequence[str]
) -> list[str]:
    """Settings for label k: while it is too long and stays different, without values that most groups have."""
    others = {_join(text, names) for i, (text, names) in enumerate(zip(texts, kept, strict=True)) if i != k}
    mine = kept[k]
    for name in (name for name in longest_first if name in mine):
        if len(_join(texts[k], mine)) <= LABEL_WIDTH:
            break
        usual, times = Counter(text[name] for text in texts).most_common(1)[0]
        rest = [other for other in mine if other != name]
        if rest and 2 * times > len(texts) and texts[k][name] == usual and _join(texts[k], rest) not in others:
            mine = rest
    return mine


def _cut(texts: Sequence[Mapping[str, str]], k: int, kept: Sequence[str]) -> str:
    """Label k: from values that are too long first the start goes that all groups share, then the end."""
    label = _join(texts[k], kept)
    if len(label) <= LABEL_WIDTH:
        return label
    parts = []
    for name in kept:
        key, _, value = texts[k][name].partition("=")
        start = re.sub(r"[\w.]+$", "", commonprefix([text[name].partition("=")[2] for text in texts]))
        parts.append([key, f"…{value[len(start) :]}" if len(start) > 4 else value])
    for part in sorted(parts, key=lambda part: -len(part[1])):
        too_long = len(", ".join(f"{key}={value}" for key, value in parts)) - LABEL_WIDTH
        if too_long > 0 and len(part[1]) > _SHORTEST_VALUE:
            part[1] = part[1][: max(_SHORTEST_VALUE, len(part[1]) - too_long) - 1] + "…"
    label = ", ".join(f"{key}={value}" for key, value in parts)
    return label if len(label) <= LABEL_WIDTH else label[: LABEL_WIDTH - 1] + "…"
