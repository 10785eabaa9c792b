"""Options that say what is wrong with them: misspelt ones, and lists of objects that may be dicts."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from thrust_rllib.envs.names import nearest


def keyword_names(cls: type, method: str) -> set[str]:
    """Keywords that `cls.method` takes, following `**kwargs` through the base classes."""
    names: set[str] = set()
    for base in cls.__mro__:
        function = base.__dict__.get(method)
        if function is None:
            continue
        parameters = inspect.signature(function).parameters.values()
        names |= {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return names - {"self"}


def checks_keywords(sections: Iterable[str]) -> Callable[[type], type]:
    """Class decorator: the methods named in `sections` say which option was probably meant.

    Raises (the decorated methods):
        ValueError: an unknown keyword, with the nearest one of the same section, or the section that has it.
    """

    def decorate(cls: type) -> type:
        for section in sections:
            setattr(cls, section, _checked(cls, section, list(sections)))
        return cls

    return decorate


def _checked(cls: type, section: str, sections: list[str]) -> Callable[..., Any]:
    method = getattr(cls, section)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        known = keyword_names(cls, section)
        for name in kwargs:
            if name in known:
                continue
            homes = [other for other in sections if name in keyword_names(cls, other)]
            if homes:
                raise ValueError(f"{name!r} is not an option of .{section}(); it belongs to .{homes[0]}({name}=…)")
            raise ValueError(f"{name!r} is not an option of .{section}(){nearest(name, known)}")
        return method(self, *args, **kwargs)

    return call


Named = TypeVar("Named")


def named_objects(option: str, value: Any, kind: type[Named]) -> tuple[Named, ...]:
    """An option that is a list of objects, each with a name of its own.

    Args:
        option: its name.
        value: objects, or dicts of their arguments, in which Tune can search and which a command line can give.
        kind: a dataclass with a field `name`.

    Raises:
        ValueError: something else, an argument that does not exist or is missing, or two objects of one name.
    """
    fields = [field for field in dataclasses.fields(kind) if field.init]  # type: ignore[arg-type]
    known = [field.name for field in fields]
    required = [field.name for field in fields if field.default is dataclasses.MISSING]
    needed = f"{kind.__name__}({', '.join([*required, '…'])}), or dicts of its arguments"
    if isinstance(value, (str, Mapping, kind)) or not isinstance(value, Iterable):
        raise ValueError(f"{option}={value!r}; needed: a tuple of {needed}")
    found: dict[Any, Named] = {}
    for given in value:
        if isinstance(given, Mapping):
            for key in given:
                if key not in known:
                    raise ValueError(
                        f"{option}: {kind.__name__} has no {key!r}; it has {known}{nearest(str(key), known)}"
                    )
            if missing := [name for name in required if name not in given]:
                raise ValueError(f"{option}: {dict(given)} lacks {missing}")
            given = kind(**given)
        if not isinstance(given, kind):
            raise ValueError(f"{option} has {given!r}; needed: {needed}")
        name = getattr(given, "name")  # noqa: B009 - of a dataclass that the type checker does not know
        if name in found:
            raise ValueError(f"{option} has {name!r} more than once; give each name once")
        found[name] = given
    return tuple(found.values())
