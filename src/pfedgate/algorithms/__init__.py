"""Algorithms by name. A file in this folder with `@register("name")` on a class is all it takes.

>>> "fedavg" in names()
True
>>> get("fedavgg")
Traceback (most recent call last):
KeyError: "unknown algorithm 'fedavgg': did you mean 'fedavg'? Known: ..."
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import pkgutil
from collections.abc import Callable
from typing import Any, TypeVar

from pfedgate.core.algorithm import Algorithm
from pfedgate.core.errors import unknown
from pfedgate.core.types import Task

_REGISTRY: dict[str, type[Algorithm]] = {}
A = TypeVar("A", bound=Algorithm)

__all__ = ["build", "get", "names", "options", "register"]


def register(name: str) -> Callable[[type[A]], type[A]]:
    """Class decorator: make an algorithm known under a name."""

    def note(cls: type[A]) -> type[A]:
        known = _REGISTRY.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"algorithm {name!r} is already {known.__module__}.{known.__qualname__}")
        cls.name = name
        _REGISTRY[name] = cls
        return cls

    return note


def names() -> tuple[str, ...]:
    """All algorithms there are, sorted."""
    for found in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{found.name}")
    return tuple(sorted(_REGISTRY))


def get(name: str) -> type[Algorithm]:
    """The class of an algorithm; an unknown name is an error that names the nearest."""
    if name not in _REGISTRY and name.isidentifier() and importlib.util.find_spec(f"{__name__}.{name}"):
        importlib.import_module(f"{__name__}.{name}")
    if name not in _REGISTRY and name not in names():
        raise KeyError(unknown("algorithm", name, names()))
    return _REGISTRY[name]


def options(name: str) -> dict[str, Any]:
    """Hyper-parameters of an algorithm and their defaults."""
    given = {}
    for field in dataclasses.fields(get(name)):
        if field.name != "task":
            made = field.default_factory
            given[field.name] = field.default if made is dataclasses.MISSING else made()
    return given


def build(name: str, task: Task, **settings: Any) -> Algorithm:
    """An algorithm ready to run; an unknown setting is an error that names the nearest."""
    known = options(name)
    for setting in settings:
        if setting not in known:
            raise TypeError(f"algorithm {name!r}: {unknown('option', setting, known)}")
    return get(name)(task, **settings)
