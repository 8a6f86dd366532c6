"""Values of recipes: TOML in and out, and the conversion to the type that an option has.

Python reads TOML (`tomllib`) but does not write it; recipes need little of it.
"""

from __future__ import annotations

import json
import math
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pfedgate.core.errors import RecipeError, unknown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read(path: str | Path) -> dict[str, Any]:
    """The tables of a file."""
    file = Path(path).expanduser()
    if file.is_dir():
        here = "; it holds a run: `pfedgate resume` goes on with it" if (file / "config.toml").exists() else ""
        raise RecipeError(f"{file} is a folder: give the path of a TOML file, or nothing for pFedGate on digits{here}")
    if not file.exists():
        raise RecipeError(f"no recipe {file}: give the path of a TOML file, or nothing for pFedGate on digits")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{file} is not text in UTF-8, as TOML is: save it as such ({error})") from None
    return parse(text, str(file))


def parse(text: str, where: str = "the recipe") -> dict[str, Any]:
    """The tables of a text."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{where} is not valid TOML: {error}") from None


def value(text: str) -> Any:
    """A value as typed on a command line: TOML, where a plain word need not be quoted.

    >>> value("3"), value("[1, 2]"), value("fedavg"), value(".5"), value('{"0.5" = 1.0}')
    (3, [1, 2], 'fedavg', 0.5, {'0.5': 1.0})
    """
    text = text.strip()
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        if not text or text[0] in "[{\"'" or "\n" in text:
            raise RecipeError(f"{text!r} is not a TOML value: {error}") from None
    try:
        return float(text)
    except ValueError:
        return text


def split(text: str) -> list[str]:
    """Parts between commas, except those within brackets.

    >>> split("gate_lr=0.5,clients.budget=[1, 0.5]")
    ['gate_lr=0.5', 'clients.budget=[1, 0.5]']
    """
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def dump(item: Any) -> str:
    """One value as TOML.

    >>> dump({"0.5": [1, True]}), dump(1e-05), dump("a\\"b")
    ('{ "0.5" = [1, true] }', '1e-05', '"a\\\\"b"')
    """
    if item is None:
        return '"none"'
    if isinstance(item, bool):
        return "true" if item else "false"
    if isinstance(item, int):
        return str(item)
    if isinstance(item, float):
        return repr(item) if math.isfinite(item) else str(item)
    if isinstance(item, (list, tuple)):
        return "[" + ", ".join(map(dump, item)) + "]"
    if isinstance(item, Mapping):
        return "{ " + ", ".join(f"{_key(str(name))} = {dump(inner)}" for name, inner in item.items()) + " }"
    # JSON's escapes are TOML's, if nothing beyond the basic plane is escaped; DEL is the one JSON leaves as it is.
    return json.dumps(str(item), ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(name: str) -> str:
    bare = name.replace("-", "").replace("_", "").isalnum() and name.isascii()
    return name if bare else json.dumps(name, ensure_ascii=False)


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
        origin, inside = get_origin(kind), get_args(kind)
        if kind in (int, bool, float):
            if kind is float and isinstance(value, float) and not -math.inf < value <= math.inf:
                raise RecipeError(f"{where} must be a number, got {value}")
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
                fixed = origin is tuple and inside[1:] != (Ellipsis,)
                each = inside if fixed else inside[:1] * len(value)
                if len(value) != len(each):
                    raise RecipeError(f"{where} must be a list of {len(each)} values, got {value!r}")
                items = [convert(item, one, where) for item, one in zip(value, each, strict=True)]
                return items if origin is list else tuple(items)
        elif origin in (dict, Mapping):
            if isinstance(value, Mapping):
                return {name: convert(item, inside[1], f"{where}.{name}") for name, item in value.items()}
        elif isinstance(kind, type) and isinstance(value, kind):
            return value
    raise RecipeError(f"{where} must be {words(wanted)}, got {value!r}")


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
