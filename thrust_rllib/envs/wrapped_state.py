"""The states of an environment of another library, which an adapter forwards where there are some."""

from __future__ import annotations

from typing import Any

import gymnasium as gym


def state_of(env: Any) -> Any:
    """What the environment's own `get_state` says.

    Raises:
        NotImplementedError: its class has no `get_state` and `set_state`. What a wrapper only lets through from inside
            is not enough: the wrapper may count steps, which would be lost.
    """
    check_has_state(env)
    return env.get_state()


def global_state_of(env: Any) -> Any:
    """What the environment's own `state()` says, the global state.

    Raises:
        NotImplementedError: it has no such method.
    """
    read = getattr(env, "state", None)
    if not callable(read):
        raise NotImplementedError(f"{type(env).__name__} has no method state(), the global state; give its class one")
    return read()


def record_states_of(env: Any) -> None:
    """Hands `JointEnv.record_states` on to a joint environment inside one of another library's kind."""
    record = getattr(env, "record_states", None)
    if callable(record):
        record()


def state_space_of(env: Any) -> gym.Space | None:
    """The environment's `state_space`, where it declares one."""
    space = getattr(env, "state_space", None)
    return space if isinstance(space, gym.Space) else None


def check_has_state(env: Any) -> None:
    """Raises NotImplementedError unless the class of `env` has `get_state` and `set_state`."""
    missing = [name for name in ("get_state", "set_state") if not callable(getattr(type(env), name, None))]
    if missing:
        raise NotImplementedError(
            f"{type(env).__name__} has no {' and no '.join(missing)}; give its class both, and its episodes go on "
            "where a checkpoint was taken"
        )
