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
    """Class decorator: give an algorithm the name by which recipes and the command line find it."""

    def note(cls: type[A]) -> type[A]:
        other = _REGISTRY.get(name)
        if other is not None and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"algorithm {name!r} is already {other.__module__}.{other.__qualname__}")
        cls.name = name
        _REGISTRY[name] = cls
        return cls

    return note


def names() -> tuple[str, ...]:
    """All algorithms there are, sorted."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
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
    defaults = {}
    for field in dataclasses.fields(get(name)):
        if field.name != "task":
            factory = field.default_factory
            defaults[field.name] = field.default if factory is dataclasses.MISSING else factory()
    return defaults


def build(name: str, task: Task, **settings: Any) -> Algorithm:
    """An algorithm ready to run; an unknown setting is an error that names the nearest.

    A dotted name sets a field of a hyper-parameter that has fields: `**{"gate.shift": True}`, as in recipes.
    """
    if task.kind not in (kinds := get(name).kinds):
        raise ValueError(f"algorithm {name!r} learns {' and '.join(kinds)}, not {task.kind}: choose another one")
    defaults, inner = options(name), dict[str, dict[str, Any]]()
    for setting, value in settings.items():
        option, _, field = setting.partition(".")
        if option not in defaults:
            raise TypeError(f"algorithm {name!r}: {unknown('option', setting, defaults)}")
        if field:
            inner.setdefault(option, {})[field] = value
    plain = {setting: value for setting, value in settings.items() if "." not in setting}
    nested = {option: dataclasses.replace(plain.get(option, defaults[option]), **inner[option]) for option in inner}
    return get(name)(task, **{**plain, **nested})
