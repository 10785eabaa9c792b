"""The state of an environment of another library, which an adapter forwards where there is one."""

from __future__ import annotations

from typing import Any


def state_of(env: Any) -> Any:
    """What the environment's own `get_state` says.

    Raises:
        NotImplementedError: its class has no `get_state` and `set_state`. What a wrapper only lets through from inside
            is not enough: the wrapper may count steps, which would be lost.
    """
    check_has_state(env)
    return env.get_state()


def check_has_state(env: Any) -> None:
    """Raises NotImplementedError unless the class of `env` has `get_state` and `set_state`."""
    missing = [name for name in ("get_state", "set_state") if not callable(getattr(type(env), name, None))]
    if missing:
        raise NotImplementedError(
            f"{type(env).__name__} has no {' and no '.join(missing)}; give its class both, and its episodes go on "
            "where a checkpoint was taken"
        )
