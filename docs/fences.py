"""For the site only: docstrings get what Markdown needs.

Bare `>>>` examples and aligned columns get fences, and a dataclass gets a table of its fields with the comments that
stand beside them in the code.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))  # a build need not install the package

STAR = re.compile(r"\b(M|I|θ_[ig])\*")  # a symbol of the paper, not emphasis
ALIGNED = re.compile(r"^\S.*?\S {2,}\S", re.MULTILINE)  # name    what it means


def fenced(text: str) -> str:
    """Every example, from its first `>>>` to the next blank line, as a console block; columns as they were typed."""
    return "\n\n".join(_paragraph(paragraph) for paragraph in re.split(r"\n\s*\n", text))


def _paragraph(text: str) -> str:
    lines = text.splitlines()
    start = next((at for at, line in enumerate(lines) if line.lstrip().startswith(">>>")), None)
    if start is not None:
        before = "\n".join(lines[:start])
        return f"{before}\n\n```pycon\n" + "\n".join(lines[start:]) + "\n```"
    return f"```text\n{text}\n```" if ALIGNED.search(text) else STAR.sub(r"\1\\*", text)


class Fences(griffe.Extension):  # type: ignore[misc]
    """Rewrites each docstring once, when its object has been read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe for every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
        if isinstance(obj, griffe.Class) and obj.docstring is not None:
            obj.docstring.value += fields(obj)


def fields(described: griffe.Class) -> str:
    """The fields of a dataclass that say in a comment what they are for, as a table; empty for other classes."""
    from pfedgate.config.options import comments

    cls = getattr(importlib.import_module(described.module.path), described.name, None)
    if not dataclasses.is_dataclass(cls):
        return ""
    reasons = comments(cls)
    told = [field for field in dataclasses.fields(cls) if reasons.get(field.name)]
    rows = [f"| `{field.name}` | {_default(field)} | {_cell(reasons[field.name])} |" for field in told]
    return "\n".join(["\n\n| field | default | |", "|---|---|---|", *rows]) if len(rows) > 1 else ""


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return "" if field.default_factory is dataclasses.MISSING else f"`{field.default_factory()!r}`"
    return f"`{field.default!r}`"


def _cell(text: str) -> str:
    return STAR.sub(r"\1\\*", text).replace("|", "&#124;").replace("<", "&lt;")
