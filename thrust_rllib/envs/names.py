"""Names that were mistyped or never declared, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

DECLARE_ALL = (
    "declare every agent that may ever appear. Agents that are named anew in each episode need fixed seats: "
    "thrust_rllib.envs.Seats"
)


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` with the nearest known name, or a full stop when none is near."""
    found = difflib.get_close_matches(str(name), [str(candidate) for candidate in known], n=1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else "."
