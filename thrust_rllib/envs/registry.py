"""From what a user writes down as an environment to a `VectorJointEnv`.

| `env` | called as |
|---|---|
| `JointEnv` or `VectorJointEnv` class | `env(**env_config)`, `env(num_envs=E, **env_config)` |
| RLlib `MultiAgentEnv` class, name registered with `ray.tune.register_env` | `env(env_config)` |
| Gymnasium class, id such as "CartPole-v1" or "gymnasium:CartPole-v1" | `env(**env_config)`, one agent; where its \
spaces are Tuples of n entries, such as "gymnasium:lbforaging:Foraging-8x8-2p-2f-coop-v3", n agents |
| PettingZoo `ParallelEnv` or `AECEnv` class, function that makes one of these | `env(**env_config)`, `num_envs` if \
taken |
| "pettingzoo:mpe2.simple_spread_v3" | that module's `parallel_env(**env_config)`, or its `env` where it has only that |
| "package.module:name" | the class or function of that name, as above |
| built-in or registered name, see `list_envs` | as above |

Neither Ray nor PettingZoo is imported here: an environment that needs one has imported it.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym

from thrust_rllib.envs.adapt import ACCEPTED, call, gymnasium_joint_env, kind_of_class, to_joint_env
from thrust_rllib.envs.joint_env import JointEnv, VectorJointEnv
from thrust_rllib.envs.names import nearest
from thrust_rllib.envs.spaces import check_spaces
from thrust_rllib.envs.sync_vector import SyncVectorJointEnv

_DEBUG = "thrust_rllib.envs.debug:"
_BUILT_IN: dict[str, tuple[str, str]] = {
    "bucket_brigade": ("thrust_rllib.envs.bucket_brigade:BucketBrigade", "4 agents guard 10 houses against "
    "fire"),
    "climbing": ("thrust_rllib.envs.matrix_games:Climbing", "matrix game, best 11 per step"),
    "penalty": ("thrust_rllib.envs.matrix_games:Penalty", "matrix game with a penalty k, best 10 per step"),
    "two_step_game": ("thrust_rllib.envs.matrix_games:TwoStepGame", "safe branch 7, best 8"),
    "recall": ("thrust_rllib.envs.memory_tasks:Recall", "act on a cue seen k steps ago: 1 at best"),
    "relay": ("thrust_rllib.envs.memory_tasks:Relay", "a speaker sees a cue, a listener acts on it k steps later"),
    "spread": ("thrust_rllib.envs.spread:Spread", "mpe2's simple_spread; collisions are extras"),
    "speaker_listener": ("thrust_rllib.envs.speaker_listener:SpeakerListener", "mpe2's simple_speaker_listener: one "
    "speaks, one moves"),
    "coverage": ("thrust_rllib.envs.coverage:CoverageWorld", "survey a grid without losing each other: λ₂ of the radio "
    "network is an extra"),
    "debug/constant_reward": (_DEBUG + "ConstantReward", "1 per step: the value is 1 / (1 - gamma)"),
    "debug/scripted_rewards": (_DEBUG + "ScriptedRewards", "rewards 1, 2, 3, then the end"),
    "debug/identity": (_DEBUG + "Identity", "agent i sees the one-hot of i"),
    "debug/alignment": (_DEBUG + "Alignment", "the observation is (episode, step, agent)"),
    "debug/random_observations": (_DEBUG + "RandomObservations", "3 agents, 5 uniform numbers"),
    "debug/multi_discrete": (_DEBUG + "MultiDiscreteActions", "MultiDiscrete([3, 2]) actions"),
    "debug/match_observation": (_DEBUG + "MatchObservation", "act the number you see: 1 per step at best"),
    "debug/match_target": (_DEBUG + "MatchTarget", "the same with Box actions: 0 per step at best"),
    "debug/mixed_spaces": (_DEBUG + "MixedSpaces", "every agent has spaces of its own"),
    "debug/observation_kinds": (_DEBUG + "ObservationKinds", "Discrete, MultiDiscrete, Dict and image "
    "observations"),
    "debug/masked_actions": (_DEBUG + "MaskedActions", "one agent has one legal action"),
    "debug/faulty": (_DEBUG + "Faulty", "fails in a chosen step"),
}  # fmt: skip
_registered: dict[str, tuple[Any, str]] = {}
_PETTINGZOO_FAMILIES = (
    "",
    "pettingzoo.",
    "mpe2.",
    "pettingzoo.butterfly.",
    "pettingzoo.sisl.",
    "pettingzoo.classic.",
)


@dataclass(frozen=True)
class EnvSpec:
    """A resolved environment; `make_vector_env` and `make_joint_env` take it in place of a name.

    Args:
        name: for messages.
        kind: "joint", "vector", "rllib", "gymnasium" or "factory" (known when it has been called).
        target: the class or function; the id for a Gymnasium id.
    """

    name: str
    kind: str
    target: Any


def list_envs() -> dict[str, str]:
    """Names of the built-in and registered environments with one line of help each."""
    entries = {**_BUILT_IN, **_registered}
    return {name: entries[name][1] for name in sorted(entries)}


def register_joint_env(name: str, factory: Any, help: str = "") -> None:
    """Gives an environment a name in this process.

    Other processes (Ray workers) know the name only if they run the same line; a class or function given to
    the configuration directly always arrives.

    Args:
        name: without a colon.
        factory: whatever `make_vector_env` takes.
        help: one line for `list_envs`; default: the first line of the factory's docstring.

    Raises:
        ValueError: the name has a colon, or is taken by another environment.
    """
    if ":" in name:
        raise ValueError(f"the name {name!r} has a colon, which marks prefixes and paths; choose another")
    if name in _BUILT_IN or (name in _registered and _registered[name][0] is not factory):
        raise ValueError(f"the name {name!r} is taken by another environment; choose another")
    resolve_env(factory)
    _registered[name] = (factory, help or (inspect.getdoc(factory) or "no description").splitlines()[0])


def is_registered(name: str) -> bool:
    """Whether `register_joint_env` gave this name, in this process."""
    return name in _registered


def resolve_env(env: Any) -> EnvSpec:
    """Finds out what `env` is; see the table of this module.

    Raises:
        ValueError: an unknown name.
        TypeError: an object that is no environment class, function or name.
    """
    if isinstance(env, EnvSpec):
        return env
    if isinstance(env, str):
        return _resolve_name(env)
    if isinstance(env, type):
        return EnvSpec(env.__name__, kind_of_class(env), env)
    if isinstance(env, (JointEnv, VectorJointEnv, gym.Env)):
        raise TypeError(
            f"env is an object of {type(env).__name__}; give the class or a function that makes one, since "
            "several environments and processes each need their own"
        )
    if callable(env):
        return EnvSpec(getattr(env, "__name__", repr(env)), "factory", env)
    raise TypeError(f"env is {env!r}; needed: {ACCEPTED}, or a name (thrust_rllib.envs.list_envs() shows them)")


def _resolve_name(name: str) -> EnvSpec:
    if name in _BUILT_IN:
        found = _load(_BUILT_IN[name][0])
        return EnvSpec(name, kind_of_class(found), found)
    if name in _registered:
        spec = resolve_env(_registered[name][0])
        return EnvSpec(name, spec.kind, spec.target)
    if name.startswith("pettingzoo:"):
        return EnvSpec(name, "factory", _pettingzoo_factory(name.removeprefix("pettingzoo:")))
    if name.startswith("gymnasium:"):
        return EnvSpec(name, "gymnasium", _gymnasium_id(name.removeprefix("gymnasium:")))
    creator = _ray_creator(name)
    if creator is not None:
        return EnvSpec(name, "rllib", creator)
    if re.fullmatch(r"[\w.]+:[A-Za-z_]\w*", name):
        spec = resolve_env(_load(name))
        return EnvSpec(name, spec.kind, spec.target)
    if name in gym.registry or ":" in name:
        return EnvSpec(name, "gymnasium", _gymnasium_id(name))
    known = [*_BUILT_IN, *_registered, *gym.registry]
    raise ValueError(
        f"unknown environment {name!r}{nearest(name, known)} Built-in and registered names: "
        f"{sorted(list_envs())} (thrust_rllib.envs.list_envs(), or `thrust-rllib envs`); others: "
        "pettingzoo:<module>, gymnasium:<id>, "
        "package.module:name"
    )


def _load(path: str) -> Any:
    """The object at "package.module:name"."""
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(f"environment {path!r}: module {error.name!r} is not installed or misspelt") from error
    if not hasattr(module, attribute):
        names = [name for name in vars(module) if not name.startswith("_")]
        raise ValueError(f"environment {path!r}: {module_name} has no {attribute!r}{nearest(attribute, names)}")
    return getattr(module, attribute)


def _pettingzoo_factory(name: str) -> Callable[..., Any]:
    if not name:
        raise ValueError("environment 'pettingzoo:' names none; give one, such as pettingzoo:connect_four_v3")
    module_names = [prefix + name for prefix in _PETTINGZOO_FAMILIES]
    for module_name in module_names:
        try:
            with warnings.catch_warnings():
                # PettingZoo 1.27 has ids of its own as well; a module's name works with every release, and for mpe2.
                warnings.filterwarnings("ignore", "The old environment creation API", DeprecationWarning)
                module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name and (module_name + ".").startswith(error.name + "."):
                continue  # this place does not exist; another may
            raise ValueError(
                f"environment 'pettingzoo:{name}': {module_name} needs {error.name!r}, which is not installed"
            ) from error
        for attribute in ("parallel_env", "env"):
            if hasattr(module, attribute):
                return getattr(module, attribute)
        raise ValueError(f"environment 'pettingzoo:{name}': {module_name} has neither parallel_env nor env")
    raise ValueError(
        f"environment 'pettingzoo:{name}': none of {module_names} can be imported"
        f"{nearest(name, _pettingzoo_names())} Give the module that has parallel_env or env, such as "
        "pettingzoo:mpe2.simple_spread_v3, and install its package"
    )


def _pettingzoo_names() -> list[str]:
    """Environments in the families that are installed."""
    names = []
    for family in filter(None, (prefix.rstrip(".") for prefix in _PETTINGZOO_FAMILIES)):
        spec = importlib.util.find_spec(family)
        if spec is not None and spec.submodule_search_locations:
            names += [m.name for m in pkgutil.iter_modules(spec.submodule_search_locations) if "_v" in m.name]
    return names


def _gymnasium_id(env_id: str) -> str:
    if ":" not in env_id and env_id not in gym.registry:
        raise ValueError(
            f"unknown Gymnasium id {env_id!r}{nearest(env_id, gym.registry)} Import the package that "
            "registers it, or name it in the id: package:Id-v0"
        )
    return env_id


def _ray_creator(name: str) -> Callable[..., Any] | None:
    """What `ray.tune.register_env` stored under `name`; nothing can be stored while Ray is not imported."""
    import sys

    registry = sys.modules.get("ray.tune.registry")
    if registry is None or not registry._global_registry.contains(registry.ENV_CREATOR, name):
        return None
    return registry._global_registry.get(registry.ENV_CREATOR, name)


def make_joint_env(env: Any, env_config: Mapping[str, Any] | None = None) -> JointEnv:
    """One environment with dicts by agent; arguments and errors as in `make_vector_env`."""
    spec, config = resolve_env(env), {} if env_config is None else env_config
    if spec.kind == "gymnasium" and isinstance(spec.target, str):
        options = {key: value for key, value in config.items() if key == "extras_from_infos"}
        made = gym.make(spec.target, **{key: value for key, value in config.items() if key not in options})
        return gymnasium_joint_env(made, **options)
    made = call(spec.target, spec.name, config, num_envs=1, as_rllib=spec.kind == "rllib")
    return to_joint_env(made, spec.name)


def make_vector_env(env: Any, env_config: Mapping[str, Any] | None = None, num_envs: int = 1) -> VectorJointEnv:
    """E environments of the kind `env`.

    Args:
        env: see the table of this module.
        env_config: settings; keywords, or the one argument of an RLlib environment.
        num_envs: E. A vectorised environment is made once, a scalar one E times (`SyncVectorJointEnv`).

    Raises:
        ValueError: an unknown name or setting.
        TypeError: `env` is, or makes, nothing that can be stepped jointly.
    """
    spec, config = resolve_env(env), {} if env_config is None else env_config
    if spec.kind in ("vector", "factory"):
        made = call(spec.target, spec.name, config, num_envs=num_envs)
        if isinstance(made, VectorJointEnv):
            if made.num_envs != num_envs:
                raise ValueError(
                    f"environment {spec.name!r} has {made.num_envs} environments, {num_envs} were asked for; "
                    "its class or function must take num_envs and follow it"
                )
            check_spaces(made)
            return made
        first = [to_joint_env(made, spec.name)]
        return SyncVectorJointEnv(lambda: first.pop() if first else make_joint_env(spec, config), num_envs)
    return SyncVectorJointEnv(lambda: make_joint_env(spec, config), num_envs)
