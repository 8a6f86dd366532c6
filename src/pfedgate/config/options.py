"""What may be set in a recipe, and how: names, types, defaults and reasons, read from the code that uses them.

Dataclasses and keyword arguments are the only place where an option is declared. Recipes, the command line and the
tables of options all read them here, comments included (a comment beside a field, or the lines above it). A field that
is itself a dataclass contributes its own fields under dotted names: `gate.shift`.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pfedgate import algorithms, models
from pfedgate.config.sections import Clients, Deploy, Evaluate, Session, Train
from pfedgate.core.errors import RecipeError, unknown
from pfedgate.data import DATASETS, Federation, conflicting, from_folder, from_table, load, synthetic
from pfedgate.data.sharing import Options as DataOptions
from pfedgate.data.sharing import Sharing

REQUIRED = dataclasses.MISSING
GIVEN = "given"  # the name of data or a model that came as a Python object
FIXED: dict[str, type[Any]] = {
    "train": Train, "clients": Clients, "evaluate": Evaluate, "run": Session, "deploy": Deploy
}  # fmt: skip
NAMED = ("data", "model", "algorithm")
SECTIONS = ("data", "model", "train", "algorithm", "clients", "evaluate", "run", "deploy")


@dataclass(frozen=True)
class Option:
    """A name that can be set, with the type and default of its value and the reason for that default."""

    name: str
    type: Any
    default: Any
    why: str = ""


# Sources of data beside the table of data sets.
BUILDERS: dict[str, Callable[..., Federation]] = {
    "synthetic": synthetic,
    "conflicting": conflicting,
    "folder": from_folder,
    "table": from_table,
}

SEED = Option("seed", int | None, None, "of the partition and the split; by default the run's")
# Options that `from_folder` and `from_table` hand on to `from_arrays`, as far as a text file can say them.
ARRAYS = {
    "classes": Option("classes", int | None, None, "how many there are, if the data does not show all of them"),
    "standardise": Option("standardise", bool, False, "mean 0 and deviation 1, measured on the training samples"),
    "mean": Option("mean", float | tuple[float, ...], (), "per channel or feature"),
    "std": Option("std", float | tuple[float, ...], (), "per channel or feature"),
}


# -- which options a section has
def options_of(section: str, name: str = "") -> dict[str, Option]:
    """The options of a section; for [data], [model] and [algorithm] they depend on the name there.

    >>> sorted(options_of("model", "mlp")), options_of("evaluate")["every"].default
    (['dropout', 'hidden'], 5)
    """
    if section in FIXED:
        return of_dataclass(FIXED[section])
    if name == GIVEN or (section == "model" and name == "auto"):
        return {}
    if section == "algorithm":
        try:
            return of_dataclass(algorithms.get(name), leave_out=["task"])
        except KeyError as error:
            raise RecipeError(f"[algorithm] {error.args[0]}") from None
    return _of_model(name) if section == "model" else _of_data(name)


@lru_cache(maxsize=64)
def _of_model(name: str) -> dict[str, Option]:
    if name not in models.names():
        raise RecipeError(f"[model] {unknown('model', name, [*models.names(), 'auto'])}")
    return {key: Option(key, _type(value), value) for key, value in models.options(name).items()}


def _type(default: Any) -> Any:
    """The type of a model's option, inferred from its default."""
    if isinstance(default, (list, tuple)) and default:
        return tuple[type(default[0]), ...]  # type: ignore[misc]
    return Any if default is None or default == () else type(default)


def _of_data(name: str) -> dict[str, Option]:
    if name in DATASETS:
        return {**of_dataclass(DataOptions, leave_out=["novel"]), "seed": SEED}
    if name not in BUILDERS:
        raise RecipeError(f"[data] {unknown('data set', name, [*DATASETS, *BUILDERS])}")
    own = {**of_function(BUILDERS[name], leave_out=["novel"]), "seed": SEED}
    if name == "synthetic":
        return own
    arrays = {} if name == "conflicting" else ARRAYS
    return {**of_dataclass(Sharing, leave_out=["novel"]), **arrays, **own}


def usual(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Options of a data set with its own defaults written out, where they do not depend on the copy at hand.

    >>> usual("digits", {"clients": None, "partition": None})
    {'clients': 20, 'partition': 'dirichlet'}
    """
    if name not in DATASETS:
        return options
    data, filled = DATASETS[name], dict(options)
    filled["partition"] = options.get("partition") or data.partition
    if data.samples is not None and options.get("samples") is None:
        filled["samples"] = data.samples
    # The number of owners is in the data alone.
    if filled["partition"] != "owner" and options.get("clients") is None and options.get("writers") is None:
        filled["clients"] = data.clients
    return filled


def federation(name: str, options: Mapping[str, Any], *, novel: float = 0.0, seed: int = 0) -> Federation:
    """The federation that a name and its options describe; `seed` counts if the options have none."""
    given = {key: value for key, value in options.items() if value != ()}
    given["seed"] = seed if given.get("seed") is None else given["seed"]
    return load(name, novel=novel, **given) if name in DATASETS else BUILDERS[name](novel=novel, **given)


# -- options as the code declares them
def of_dataclass(cls: type[Any], *, leave_out: Sequence[str] = ()) -> dict[str, Option]:
    """The fields of a dataclass as options.

    >>> from pfedgate.core.types import Schedule
    >>> of_dataclass(Schedule)["gamma"]
    Option(name='gamma', type=<class 'float'>, default=0.1, why='multi_step: factor at a milestone')
    """
    hints, reasons = _hints(cls), comments(cls)  # type: ignore[arg-type]
    options: dict[str, Option] = {}
    for field in dataclasses.fields(cls):
        if field.name in leave_out or not field.init:
            continue
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        if dataclasses.is_dataclass(default):
            for inner in of_dataclass(type(default)).values():
                name = f"{field.name}.{inner.name}"
                options[name] = Option(name, inner.type, getattr(default, inner.name), inner.why)
        else:
            options[field.name] = Option(field.name, hints[field.name], default, reasons.get(field.name, ""))
    return options


def of_function(function: Callable[..., Any], *, leave_out: Sequence[str] = ()) -> dict[str, Option]:
    """The named arguments of a function as options.

    >>> def net(shape, *, width: float = 1.0): ...
    >>> of_function(net, leave_out=["shape"])
    {'width': Option(name='width', type=<class 'float'>, default=1.0, why='')}
    """
    hints, options = _hints(function), {}
    for name, argument in inspect.signature(function).parameters.items():
        if name in leave_out or argument.kind in (argument.VAR_KEYWORD, argument.VAR_POSITIONAL):
            continue
        default = REQUIRED if argument.default is argument.empty else argument.default
        options[name] = Option(name, hints.get(name, Any), default)
    return options


@cache  # a study resolves hundreds of recipes
def _hints(declared: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(declared)
    except NameError:  # a type imported only for the type checker: any value goes, the code itself will object
        return dict.fromkeys(getattr(declared, "__annotations__", {}), Any)


def comments(cls: type[Any]) -> dict[str, str]:
    """The comment beside or above each field of a class, base classes included.

    >>> from pfedgate.core.types import Optim
    >>> comments(Optim)["clip"]
    'L2 norm of the gradient, for every method alike'
    """
    parents = (base for base in reversed(cls.__mro__) if dataclasses.is_dataclass(base))
    return {name: text for base in parents for name, text in _written(base).items()}


_FIELD = re.compile(r"    (\w+): [^#]*(?:# *(.*))?$")
_COMMENT = re.compile(r"    # *(.*)$")


@cache  # a source file does not change while it runs
def _written(cls: type[Any]) -> dict[str, str]:
    try:
        lines = textwrap.dedent(inspect.getsource(cls)).splitlines()
    except (OSError, TypeError):  # built in, or typed into a console
        return {}
    texts: dict[str, str] = {}
    above: list[str] = []
    for line in lines:
        if comment := _COMMENT.match(line):
            above.append(comment[1].strip())
            continue
        if field := _FIELD.match(line):
            texts[field[1]] = (field[2] or " ".join(above)).strip()
        above = []
    return {field.name: texts[field.name] for field in dataclasses.fields(cls) if texts.get(field.name)}


# -- values
def settle(given: Mapping[str, Any], options: Mapping[str, Option], where: str) -> dict[str, Any]:
    """Converted values of what was given; an unknown name is an error that suggests the nearest."""
    for name in given:
        if name not in options:
            raise RecipeError(f"[{where}] {unknown('key', name, options)}")
    return {name: convert(value, options[name].type, f"{where}.{name}") for name, value in given.items()}


def convert(value: Any, wanted: Any, where: str) -> Any:
    """A value from a recipe as the type an option has; the wrong type is an error that says what is right.

    Whole numbers serve as numbers, lists as tuples, and "none" stands for None, which TOML lacks.

    >>> convert([1, 2], tuple[float, ...], "x"), convert("none", float | None, "x")
    ((1.0, 2.0), None)
    >>> convert("3", int, "train.rounds")
    Traceback (most recent call last):
    pfedgate.core.errors.RecipeError: train.rounds must be a whole number, got '3'
    """
    if wanted is Any:
        return value
    kinds = get_args(wanted) if get_origin(wanted) in (Union, types.UnionType) else (wanted,)
    if type(None) in kinds and (value is None or (isinstance(value, str) and value == "none")):
        return None
    for kind in sorted(kinds, key=lambda kind: kind is float):  # last, because it would take whole numbers, too
        try:
            return _as(value, kind, where)
        except TypeError:
            continue
    raise RecipeError(f"{where} must be {words(wanted)}, got {value!r}")


def _as(value: Any, kind: Any, where: str) -> Any:
    """The value as this kind; TypeError if it is of another one."""
    origin, inside = get_origin(kind), get_args(kind)
    if kind in (int, bool, float):
        if type(value) is kind or (kind is float and type(value) is int):
            return kind(value)
    elif kind in (str, Path):
        if isinstance(value, (str, Path)):
            return kind(value)
    elif origin is Literal:
        if value in inside:
            return value
        if isinstance(value, str):
            raise RecipeError(f"{where}: {unknown('value', value, map(str, inside))}")
    elif origin in (tuple, list, Sequence):
        if isinstance(value, (list, tuple)):
            return _sequence(value, origin, inside, where)
    elif origin in (dict, Mapping):
        if isinstance(value, Mapping):
            return {name: convert(item, inside[1], f"{where}.{name}") for name, item in value.items()}
    elif isinstance(kind, type) and isinstance(value, kind):
        return value
    raise TypeError(f"{value!r} is no {kind}")


def _sequence(value: Sequence[Any], origin: Any, inside: tuple[Any, ...], where: str) -> Any:
    kinds: Sequence[Any] = inside
    if origin is not tuple or inside[1:] == (Ellipsis,):
        kinds = [inside[0]] * len(value)
    if len(value) != len(kinds):
        raise RecipeError(f"{where} must be a list of {len(kinds)} values, got {value!r}")
    items = [convert(item, kind, where) for item, kind in zip(value, kinds, strict=True)]
    return items if origin is list else tuple(items)


_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", Path: "a path"}


def words(wanted: Any) -> str:
    """A type in words.

    >>> words(float | None), words(tuple[int, ...]), words(Literal["a", "b"])
    ('a number or "none"', 'a list, each a whole number', '"a" or "b"')
    """
    origin, inside = get_origin(wanted), get_args(wanted)
    if origin in (Union, types.UnionType):
        kinds = [kind for kind in inside if kind is not type(None) and not (kind is int and float in inside)]
        return " or ".join([*dict.fromkeys(map(words, kinds)), *(['"none"'] if type(None) in inside else [])])
    if origin is Literal:
        return " or ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in inside)
    if origin in (tuple, list, Sequence):
        return f"a list, each {words(inside[0])}"
    return _WORDS.get(wanted) or ("a table" if origin in (dict, Mapping) else str(wanted))
