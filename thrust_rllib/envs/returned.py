"""The form of what environments of other libraries return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from thrust_rllib.envs.joint_env import AgentID


def returned_dicts(env: Any, method: str, returned: Any, names: Sequence[str]) -> tuple[dict[AgentID, Any], ...]:
    """What `env.reset` or `env.step` returned, if it is one mapping by agent for each of `names`, as dicts.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(returned, (tuple, list)) or len(returned) != len(names):
        what = f"{len(returned)} values" if isinstance(returned, (tuple, list)) else f"a {type(returned).__name__}"
        raise TypeError(f"{type(env).__name__}.{method} returned {what}; return ({', '.join(names)})")
    for given in returned:
        if type(given) is not dict:
            break
    else:  # the usual case
        return tuple(returned)
    for name, given in zip(names, returned, strict=True):
        if not isinstance(given, Mapping):
            raise TypeError(
                f"{type(env).__name__}.{method} returned {name} as a {type(given).__name__}; return a dict agent -> "
                "value"
            )
    return tuple(dict(given) for given in returned)


def is_flag(value: Any) -> bool:
    """Whether a value says yes or no: a bool, a number, or a numpy scalar of these."""
    return isinstance(value, bool) or (not np.ndim(value) and np.asarray(value).dtype.kind in "bi")
