"""Errors for misspelt options: the nearest known name, whichever way the option came in."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

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
