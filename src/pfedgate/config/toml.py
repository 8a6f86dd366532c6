"""TOML in and out. Python reads it (`tomllib`) but does not write it; recipes need little of it."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pfedgate.core.errors import RecipeError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read(path: str | Path) -> dict[str, Any]:
    """The tables of a file."""
    file = Path(path).expanduser()
    if not file.exists():
        raise RecipeError(f"no recipe {file}: give the path of a TOML file, or nothing for pFedGate on digits")
    return parse(file.read_text(encoding="utf-8"), str(file))


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
