"""Recognises environments of other libraries without importing these libraries, and calls what makes them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym

from thrust_rllib.envs.joint_env import JointEnv, VectorJointEnv
from thrust_rllib.envs.names import nearest
from thrust_rllib.envs.single import SingleJointEnv

ACCEPTED = (
    "a class derived from JointEnv, VectorJointEnv, RLlib's MultiAgentEnv, PettingZoo's ParallelEnv or AECEnv, or "
    "gymnasium.Env, or a function that makes one of these"
)
_TO_DO = "Derive it from thrust_rllib.JointEnv and implement reset_joint and step_joint"
_CONFIG_NAMES = ("config", "env_config", "env_context", "cfg", "ctx")


def _foreign(module: str, name: str) -> type | None:
    """A class of another library, if that library has been imported (else nothing can be derived from it)."""
    return getattr(sys.modules.get(module), name, None)


def _is(thing: type, module: str, name: str) -> bool:
    base = _foreign(module, name)
    return base is not None and issubclass(thing, base)


def is_rllib(thing: type) -> bool:
    """Whether a class is an RLlib `MultiAgentEnv`."""
    return _is(thing, "ray.rllib.env.multi_agent_env", "MultiAgentEnv")


def is_parallel(thing: type) -> bool:
    """Whether a class is a PettingZoo `ParallelEnv`."""
    return _is(thing, "pettingzoo.utils.env", "ParallelEnv")


def is_aec(thing: type) -> bool:
    """Whether a class is a PettingZoo `AECEnv`, whose agents take turns."""
    return _is(thing, "pettingzoo.utils.env", "AECEnv")


def kind_of_class(thing: type) -> str:
    """The kind of an `EnvSpec` for a class.

    Raises:
        TypeError: the class is no environment that is known here.
    """
    if issubclass(thing, JointEnv):
        return "joint"
    if issubclass(thing, VectorJointEnv):
        return "vector"
    if is_rllib(thing):
        return "rllib"
    if is_parallel(thing) or is_aec(thing) or issubclass(thing, gym.Env):
        return "joint"
    raise TypeError(f"env is the class {thing.__name__}, which is no known environment; needed: {ACCEPTED}. {_TO_DO}")


def to_joint_env(env: Any, name: str) -> JointEnv:
    """An environment object of any known library as a `JointEnv`.

    Args:
        env: the object.
        name: what the user called it, for messages.

    Raises:
        TypeError: nothing that can be stepped jointly.
    """
    if isinstance(env, JointEnv):
        return env
    if isinstance(env, VectorJointEnv):
        return SingleJointEnv(env)
    if is_rllib(type(env)):
        from thrust_rllib.envs.rllib import RLlibJointEnv

        return RLlibJointEnv(env)
    if is_parallel(type(env)):
        from thrust_rllib.envs.pettingzoo import PettingZooJointEnv

        return PettingZooJointEnv(env)
    if is_aec(type(env)):
        from thrust_rllib.envs.turn_based import AECJointEnv

        return AECJointEnv(env)
    if isinstance(env, gym.Env):
        return gymnasium_joint_env(env)
    raise TypeError(f"environment {name!r} makes a {type(env).__name__}; needed: {ACCEPTED}. {_TO_DO}")


def gymnasium_joint_env(env: gym.Env, **options: Any) -> JointEnv:
    """A Gymnasium environment as a `JointEnv`: of n agents where its spaces are Tuples with n entries, else of one."""
    from thrust_rllib.envs.gymnasium import GymnasiumJointEnv
    from thrust_rllib.envs.tuple_style import TupleJointEnv, is_tuple_style

    return TupleJointEnv(env, **options) if is_tuple_style(env) else GymnasiumJointEnv(env, **options)


def takes_turns(env: JointEnv) -> bool:
    """Whether some agents wait while others act, so that there are no joint steps of all agents.

    Args:
        env: what `make_joint_env` or `to_joint_env` gives.

    Returns:
        True where the environment says so (`JointEnv.takes_turns`; PettingZoo's `AECEnv`), and for an RLlib
        `MultiAgentEnv` whose `reset`, which is called here, shows only some of its agents; False for others.
    """
    if env.takes_turns:
        return True
    return is_rllib(type(env.unwrapped)) and len(env.reset_joint()) < len(env.possible_agents)


def call(
    target: Callable[..., Any], name: str, config: Mapping[str, Any], *, num_envs: int, as_rllib: bool = False
) -> Any:
    """Calls an environment class or function with its settings.

    Args:
        target: the class or function.
        name: what the user called it, for messages.
        config: settings, given as keywords; as one argument to RLlib's kind, and to a function whose only
            required parameter is called config (or env_config, env_context, cfg, ctx).
        num_envs: given along if `target` has a parameter of that name and is no `JointEnv`.
        as_rllib: `target` is RLlib's kind.

    Raises:
        ValueError: a setting that `target` does not have, or lacks.
    """
    if as_rllib:
        return target(config)
    try:
        parameters = dict(inspect.signature(target).parameters)
    except (TypeError, ValueError):  # builtins without a signature
        return target(**config)
    required = [
        p.name for p in parameters.values() if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if len(required) == 1 and required[0] in _CONFIG_NAMES and required[0] not in config:
        return target(config)
    extra: dict[str, Any] = {}
    is_joint = isinstance(target, type) and issubclass(target, JointEnv)
    if "num_envs" in parameters and not is_joint:
        if "num_envs" in config:
            raise ValueError(f"env_config of {name!r} has num_envs; it is set by num_envs_per_env_runner, leave it out")
        extra["num_envs"] = num_envs
        parameters.pop("num_envs")
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        accepted = [p.name for p in parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY)]
        for key in config:
            if key not in accepted:
                raise ValueError(
                    f"env_config of {name!r} has the unknown setting {key!r}{nearest(key, accepted)} It "
                    f"takes {accepted}"
                )
    missing = [key for key in required if key not in config and key not in extra]
    if missing:
        raise ValueError(
            f"env_config of {name!r} lacks {missing}, which it needs; add env_config={{{missing[0]!r}: ...}}"
        )
    return target(**extra, **config)
