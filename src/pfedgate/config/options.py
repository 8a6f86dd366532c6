"""What may be set and how: names, types, defaults and reasons, read from the code that uses them.

Dataclasses and keyword arguments are the only place where an option is declared; recipes, the command line and the
tables of options all read them here, comments included (a comment beside a field, or the lines above it).
"""

from __future__ import annotations

import dataclasses
import inspect
import io
import tokenize
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pfedgate.core.errors import RecipeError, unknown

REQUIRED = dataclasses.MISSING


@dataclass(frozen=True)
class Option:
    """One thing that can be set."""

    name: str
    type: Any
    default: Any
    why: str = ""


def of_dataclass(cls: type[Any], *, leave_out: Sequence[str] = ()) -> dict[str, Option]:
    """The fields of a dataclass as options.

    >>> from pfedgate.core.schedule import Schedule
    >>> of_dataclass(Schedule)["gamma"]
    Option(name='gamma', type=<class 'float'>, default=0.1, why='multi_step: factor at a milestone')
    """
    hints, why = _hints(cls), comments(cls)
    found = {}
    for field in dataclasses.fields(cls):
        if field.name in leave_out or not field.init:
            continue
        made = field.default_factory
        default = field.default if made is dataclasses.MISSING else made()
        found[field.name] = Option(field.name, hints[field.name], default, why.get(field.name, ""))
    return found


def of_function(function: Callable[..., Any], *, leave_out: Sequence[str] = ()) -> dict[str, Option]:
    """The named arguments of a function as options.

    >>> def net(shape, *, width: float = 1.0): ...
    >>> of_function(net, leave_out=["shape"])
    {'width': Option(name='width', type=<class 'float'>, default=1.0, why='')}
    """
    hints = _hints(function)
    found = {}
    for name, argument in inspect.signature(function).parameters.items():
        if name in leave_out or argument.kind in (argument.VAR_KEYWORD, argument.VAR_POSITIONAL):
            continue
        default = REQUIRED if argument.default is argument.empty else argument.default
        found[name] = Option(name, hints.get(name, Any), default)
    return found


def _hints(of: Any) -> dict[str, Any]:
    if of not in _HINTS:
        try:
            _HINTS[of] = typing.get_type_hints(of)
        except NameError:  # a type named only for the type checker: then anything goes, the code itself will object
            _HINTS[of] = dict.fromkeys(getattr(of, "__annotations__", {}), Any)
    return _HINTS[of]


_HINTS: dict[Any, dict[str, Any]] = {}  # a study resolves hundreds of recipes


def comments(cls: type[Any]) -> dict[str, str]:
    """What is written beside or above each field of a class, base classes included.

    >>> from pfedgate.core.types import Optim
    >>> comments(Optim)["clip"]
    'L2 norm of the gradient, for every method alike'
    """
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            if base not in _READ:
                _READ[base] = _own(base)
            found.update(_READ[base])
    return found


_READ: dict[type[Any], dict[str, str]] = {}  # a source file does not change while it runs


def _own(cls: type[Any]) -> dict[str, str]:
    try:
        return _comments(inspect.getsource(cls))
    except (OSError, TypeError):  # built in, or typed into a console
        return {}


def _comments(source: str) -> dict[str, str]:
    found: dict[str, str] = {}
    above: list[str] = []
    name, depth, line_start = "", 0, True
    for token in tokenize.generate_tokens(io.StringIO(inspect.cleandoc(source)).readline):
        if token.type == tokenize.INDENT:
            depth += 1
        elif token.type == tokenize.DEDENT:
            depth -= 1
        elif token.type == tokenize.COMMENT:
            text = token.string.lstrip("# ").rstrip()
            if name:  # beside a field; it wins over what stands above
                found[name] = text
            else:
                above.append(text)
        elif token.type == tokenize.NEWLINE:
            name, line_start, above = "", True, []
        elif token.type == tokenize.NL:
            if not token.line.strip():
                above = []
        elif line_start:
            line_start = False
            follows = token.line[token.end[1] :].lstrip()
            if depth == 1 and token.type == tokenize.NAME and follows.startswith(":"):
                name = token.string
                if above:
                    found[name] = " ".join(above)
    return found


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
    for exact in (True, False):
        for kind in _alternatives(wanted):
            try:
                return _as(value, kind, where, exact)
            except _WrongType:
                continue
    raise RecipeError(f"{where} must be {words(wanted)}, got {value!r}")


class _WrongType(Exception):
    pass


def _alternatives(wanted: Any) -> tuple[Any, ...]:
    if get_origin(wanted) in (Union, types.UnionType):
        # None first: where it is allowed, "none" means it even if the option is a text.
        return tuple(sorted(get_args(wanted), key=lambda kind: kind is not type(None)))
    return (wanted,)


def _as(value: Any, kind: Any, where: str, exact: bool) -> Any:
    origin, inside = get_origin(kind), get_args(kind)
    if kind is type(None):
        if value is None or value == "none":
            return None
    elif kind in (int, bool, str):
        if type(value) is kind or (kind is str and isinstance(value, Path)):
            return str(value) if kind is str else value
    elif kind is float:
        if type(value) is float or (type(value) is int and not exact):
            return float(value)
    elif kind is Path:
        if isinstance(value, (str, Path)):
            return Path(value)
    elif origin is Literal:
        if value in inside:
            return value
        if isinstance(value, str) and all(isinstance(known, str) for known in inside):
            raise RecipeError(f"{where}: {unknown('value', value, inside)}")
    elif dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _dataclass(value, kind, where)
    elif origin in (tuple, list, Sequence):
        return _sequence(value, origin, inside, where)
    elif origin in (dict, Mapping):
        if isinstance(value, Mapping):
            return {name: convert(item, inside[1], f"{where}.{name}") for name, item in value.items()}
    elif isinstance(kind, type) and isinstance(value, kind):
        return value
    raise _WrongType


def _sequence(value: Any, origin: Any, inside: tuple[Any, ...], where: str) -> Any:
    if not isinstance(value, (list, tuple)):
        raise _WrongType
    if origin is tuple and inside[1:] != (Ellipsis,):
        if len(value) != len(inside):
            raise RecipeError(f"{where} must be a list of {len(inside)} values, got {value!r}")
        return tuple(convert(item, kind, where) for item, kind in zip(value, inside, strict=True))
    items = [convert(item, inside[0], where) for item in value]
    return items if origin is list else tuple(items)


def _dataclass(value: Any, kind: type[Any], where: str) -> Any:
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise _WrongType
    return kind(**settle(value, of_dataclass(kind), where))


def settle(given: Mapping[str, Any], known: Mapping[str, Option], where: str) -> dict[str, Any]:
    """Converted values of what was given; a name that is not known is an error that suggests the nearest."""
    for name in given:
        if name not in known:
            raise RecipeError(f"[{where}] {unknown('key', name, known)}")
    return {name: convert(value, known[name].type, f"{where}.{name}") for name, value in given.items()}


def words(wanted: Any) -> str:
    """A type in words.

    >>> words(float | None), words(tuple[int, ...]), words(Literal["a", "b"])
    ('a number or "none"', 'a list, each a whole number', '"a" or "b"')
    """
    origin, inside = get_origin(wanted), get_args(wanted)
    if origin in (Union, types.UnionType):
        order = [kind for kind in inside if kind is not type(None)]
        if float in order and int in order:
            order.remove(int)
        tail = ['"none"'] if type(None) in inside else []
        return " or ".join([*dict.fromkeys(map(words, order)), *tail])
    if origin is Literal:
        return " or ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in inside)
    if origin in (tuple, list, Sequence):
        return f"a list, each {words(inside[0])}"
    plain = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", Path: "a path"}
    if wanted in plain:
        return plain[wanted]
    return "a table" if origin in (dict, Mapping) or dataclasses.is_dataclass(wanted) else str(wanted)
