"""The heads of a policy: how many an action space has, what they are called, which depends on which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym

from thrust_rllib.envs.names import nearest

PER_HEAD = "per_head"
"""`config.ratio` that asks for a ratio of each head's own."""


def asks_per_head(config: Any) -> bool:
    """Whether runners store log-probabilities head by head."""
    return bool(getattr(config, "ratio", None) == PER_HEAD)


def num_heads(space: gym.Space) -> int:
    """H: a MultiDiscrete's dimensions; one head for anything else."""
    return len(space.nvec) if isinstance(space, gym.spaces.MultiDiscrete) else 1


def check_head_names(space: gym.Space, names: Any) -> tuple[str, ...]:
    """The names of the heads of actions in `space`.

    Args:
        space: of the actions.
        names: one for each head, or None for "0", "1", ….

    Raises:
        ValueError: names of something that has no parts, another number of them, one twice, or not text.
    """
    count = num_heads(space)
    if names is None:
        return tuple(map(str, range(count)))
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(n and isinstance(n, str) for n in names):
        raise ValueError(f'head_names is {names!r}; needed: a tuple of names, such as ("skill", "goal")')
    if isinstance(space, gym.spaces.Box):
        raise ValueError(
            f"head_names is {list(names)}, but the actions are {space}, which has no separate heads; leave head_names "
            "out for its module"
        )
    if len(names) != count:
        raise ValueError(
            f"head_names has {len(names)} names, {list(names)}, but actions in {space} have {count} heads; name each "
            "of them once, in the order of the action's parts. Where modules differ in their actions leave the option "
            "out, and name the heads of each in its model_config"
        )
    if len(set(names)) != len(names):
        raise ValueError(f"head_names has a name twice: {list(names)}")
    if unusable := [name for name in names if "/" in name]:
        raise ValueError(f"head_names has {unusable}; needed: names without '/', since they are part of metrics' names")
    return tuple(names)


def head_parents(
    space: gym.Space, names: Sequence[str], conditional_heads: Mapping[str, str] | None
) -> tuple[int | None, ...] | None:
    """For each head the index of the one it depends on, or None; None if there is no conditional head.

    Args:
        space: of the actions.
        names: of its heads.
        conditional_heads: {head: the head whose category chooses its logits}.

    Raises:
        ValueError: the actions have no several heads, an unknown name, a head that depends on itself or on one that is
            conditional itself.
    """
    if not conditional_heads:
        return None
    if not isinstance(conditional_heads, Mapping):
        raise ValueError(
            f"conditional_heads is {conditional_heads!r}; needed: a dict {{head: head it depends on}}, such as "
            '{"goal": "skill"}'
        )
    if not isinstance(space, gym.spaces.MultiDiscrete):
        raise ValueError(
            f"conditional_heads is {dict(conditional_heads)}, but the actions are {space}; needed: MultiDiscrete, one "
            "dimension for each head"
        )
    for child, parent in conditional_heads.items():
        for name in (child, parent):
            if name not in names:
                raise ValueError(
                    f"conditional_heads is {dict(conditional_heads)}, which names {name!r}"
                    f"{nearest(name, names)} The heads of {space} are {list(names)} (head_names in the model_config)"
                )
        if parent in conditional_heads:
            raise ValueError(
                f"conditional_heads is {dict(conditional_heads)}: {child!r} depends on {parent!r}, which depends on "
                f"{conditional_heads[parent]!r} itself; needed: a head that depends on none"
            )
    return tuple(names.index(conditional_heads[name]) if name in conditional_heads else None for name in names)


def has_conditional_heads(rl_module: Any) -> bool:
    """Whether a head of the module's actions has logits of its own for each category of another."""
    layout = getattr(rl_module.get_train_action_dist_cls(), "layout", None)
    return bool(getattr(layout, "conditional", False))


def module_head_names(module_id: str, rl_module: Any, names: Sequence[str] | None = None) -> tuple[str, ...]:
    """The names of a module's heads, for a ratio of each head's own.

    Args:
        module_id: whose, for messages.
        rl_module: the module; its own `head_names` count where it has some (those of its model_config).
        names: those of the configuration, or None.

    Raises:
        ValueError: a distribution that has no `head_logp` and `head_entropy`; names that do not fit the actions, or are
            others than the module's own.
    """
    distribution = rl_module.get_train_action_dist_cls()
    if not (hasattr(distribution, "head_logp") and hasattr(distribution, "head_entropy")):
        raise ValueError(
            f"module {module_id!r} ({type(rl_module).__name__}) acts by {distribution.__name__}, which gives no "
            "log-probabilities head by head: ratio='per_head' needs head_logp(actions) and head_entropy(actions), both "
            "[…, H]. Set action_dist_cls to thrust_rllib.rl_modules.distributions.distribution_class(action_space), "
            "or ratio='joint'."
        )
    own = getattr(rl_module, "head_names", None)
    try:
        found = check_head_names(rl_module.action_space, own if names is None else names)
    except ValueError as error:
        raise ValueError(f"module {module_id!r}: {error}") from error
    if own is not None and tuple(own) != found:
        raise ValueError(
            f"module {module_id!r}: head_names is {list(found)} in the configuration and {list(own)} in its "
            "model_config; leave one of them out"
        )
    return found
