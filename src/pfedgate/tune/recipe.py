"""What was found best, into the recipe: its section [tuned.METHOD], everything else as it was, comments included."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pfedgate.config import toml
from pfedgate.core.errors import RecipeError

NOTE = "# pfedgate tune: "  # how a note begins; the next one replaces it


def with_tuned(text: str, method: str, found: Mapping[str, Any], note: str = "") -> str:
    """The text of a recipe with these settings in [tuned.METHOD]; what else stood there stays.

    note  a comment in that section, if it has a header of its own

    >>> print(with_tuned("[data]\\nname = \\"digits\\"\\n", "ditto", {"train.lr": 0.1, "algorithm.lam": 0.5}))
    [data]
    name = "digits"
    <BLANKLINE>
    [tuned.ditto]
    train.lr = 0.1
    algorithm.lam = 0.5
    <BLANKLINE>
    """
    before = toml.parse(text)
    settings = {**_dotted(before.get("tuned", {}).get(method, {})), **found}
    try:
        fresh = _edited(text, method, found, note)
    except _tomlkit().exceptions.TOMLKitError:
        fresh = ""
    if not _as_meant(before, fresh, method, settings):
        told = ", ".join(f"{name} = {toml.dump(value)}" for name, value in found.items())
        raise RecipeError(
            f"the recipe has its tuned settings in a form that cannot be changed without harm: give {method} a section "
            f"[tuned.{method}] of its own; these belong there: {told}"
        )
    return fresh


def _edited(text: str, method: str, found: Mapping[str, Any], note: str) -> str:
    document = _tomlkit().parse(text)
    own = [section for tuned in _tables(document, "tuned") for section in _tables(tuned, method)]
    if own:
        own.sort(key=lambda section: not _has_header(section))  # a part that has one takes what is new
        for name, value in found.items():
            _set(own, name, value)
        if note:
            _note(own, note)
        return str(document.as_string())
    lines = [f"[tuned.{method}]", *([NOTE + note] if note else [])]
    lines += [f"{name} = {toml.dump(value)}" for name, value in found.items()]
    return (text.rstrip() + "\n\n" if text.strip() else "") + "\n".join(lines) + "\n"


def _tomlkit() -> Any:
    try:
        import tomlkit
    except ImportError:
        raise ImportError("writing recipes needs tomlkit: pip install 'pfedgate[tune]'") from None
    return tomlkit


def _body(table: Any) -> list[tuple[Any, Any]]:
    """What a document or table holds, in order: keys with their values, and None with comments and blank lines."""
    body: list[tuple[Any, Any]] = table.body if hasattr(table, "body") else table.value.body
    return body


def _tables(table: Any, name: str) -> Iterator[Any]:
    """The tables of a name; a table may come in several parts."""
    for key, item in _body(table):
        if key is not None and key.key == name and isinstance(item, Mapping):
            yield item


def _set(own: list[Any], name: str, value: Any) -> None:
    """Change a setting where it stands, or add it where it belongs."""
    section, _, key = name.partition(".")
    item = _tomlkit().value(toml.dump(value))
    parts = [(part, key) for table in own for part in _tables(table, section)]
    parts += [(table, name) for table in own]  # "train.lr" = 0.1 is allowed, too
    for part, written in parts:
        if written in part:
            if part[written].unwrap() != item.unwrap():
                part[written] = item
            return
    part, written = parts[0]
    with _at_the_end(part):
        if written == key:
            part[key] = item
        elif _is_inline(part):
            part[section] = {key: item}
        else:
            part.append(_tomlkit().key([section, key]), item)


def _note(own: list[Any], note: str) -> None:
    """Put a note in the place of the last one, else below the settings."""
    comment = _tomlkit().comment((NOTE + note).removeprefix("# "))
    inner = [item for table in own for key, item in _body(table) if key is not None and isinstance(item, Mapping)]
    headed = list(filter(_has_header, [*own, *inner]))
    for body in map(_body, headed):
        for at, entry in enumerate(body):
            if _is_note(entry):
                comment.indent(len(entry[1].trivia.indent))
                body[at] = (None, comment)
                return
    if headed:
        with _at_the_end(headed[0]):
            headed[0].add(comment)


def _is_inline(table: Any) -> bool:
    return not hasattr(table, "is_super_table")


def _has_header(item: Any) -> bool:
    return hasattr(item, "is_super_table") and not item.is_super_table()


def _is_note(entry: tuple[Any, Any]) -> bool:
    return entry[0] is None and entry[1].as_string().lstrip().startswith(NOTE)


@contextmanager
def _at_the_end(table: Any) -> Iterator[None]:
    """Add to a table right below its last setting: comments further down are about the section there."""
    body = _body(table)
    inner = next((at for at, (_, item) in enumerate(body) if _has_header(item)), len(body))
    last = inner
    while last and not _is_inline(table) and body[last - 1][0] is None and not _is_note(body[last - 1]):
        last -= 1
    below = body[last:inner]
    if inner < len(body):  # a section of its own below: what stands above its header becomes part of it
        trivia = body[inner][1].trivia
        trivia.indent = "".join(item.as_string() for _, item in below) + trivia.indent
        body[last:inner] = [(None, _tomlkit().ws(""))] * len(below)  # no entry may change its place
        yield
        return
    del body[last:]
    yield
    body.extend(below)


def _as_meant(before: Mapping[str, Any], text: str, method: str, settings: Mapping[str, Any]) -> bool:
    """Whether a text has the settings, and all else as before."""
    try:
        after = toml.parse(text)
    except RecipeError:
        return False
    got = _dotted(after.get("tuned", {}).get(method, {}))
    return _plain(got) == _plain(settings) and _rest(after, method) == _rest(before, method)


def _rest(tables: Mapping[str, Any], method: str) -> str:
    tuned = {name: table for name, table in tables.get("tuned", {}).items() if name != method}
    return _plain({**tables, "tuned": tuned})


def _plain(tables: Mapping[str, Any]) -> str:
    return json.dumps(tables, sort_keys=True, default=str)


def _dotted(table: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Settings of a tuned section by full name: two levels, so that a table as a value stays one."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        if not above and isinstance(value, Mapping):
            found |= _dotted(value, name)
        else:
            found[f"{above}.{name}" if above else name] = value
    return found
