"""What was found best, into the recipe: its section [tuned.METHOD], everything else as it was, comments included."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pfedgate import toml


def with_tuned(text: str, method: str, found: Mapping[str, Any], note: str = "") -> str:
    """The text of a recipe with these settings in [tuned.METHOD]; what else stood there stays.

    >>> print(with_tuned("[data]\\nname = \\"digits\\"\\n", "ditto", {"train.lr": 0.1, "algorithm.lam": 0.5}))
    [data]
    name = "digits"
    <BLANKLINE>
    [tuned.ditto]
    train.lr = 0.1
    algorithm.lam = 0.5
    <BLANKLINE>
    """
    before = toml.parse(text).get("tuned", {}).get(method, {})
    settings = {**_dotted(before), **found}
    lines = [f"[tuned.{method}]", *([f"# {note}"] if note else [])]
    lines += [f"{name} = {toml.dump(value)}" for name, value in settings.items()]
    kept = _without(text, method)
    return kept.rstrip("\n") + "\n\n" + "\n".join(lines) + "\n"


def _dotted(table: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Settings of a tuned section by full name: two levels, so that a table as a value stays one."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        if not above and isinstance(value, Mapping):
            found |= _dotted(value, name)
        else:
            found[f"{above}.{name}" if above else name] = value
    return found


def _without(text: str, method: str) -> str:
    """A recipe without its [tuned.METHOD] and what belongs to it."""
    header = re.compile(r"^\s*\[+\s*([^\]]*?)\s*\]")
    own = re.compile(rf"""^tuned\s*\.\s*["']?{re.escape(method)}["']?(\s*\.|$)""")
    kept, inside = [], False
    for line in text.split("\n"):
        found = header.match(line)
        if found:
            inside = own.match(found[1]) is not None
        if not inside:
            kept.append(line)
    return "\n".join(kept)
