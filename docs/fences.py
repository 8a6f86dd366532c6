"""For the site only: puts the bare `>>>` examples of docstrings into the code fences Markdown needs."""

from __future__ import annotations

from typing import Any

import griffe


def fenced(text: str) -> str:
    """Every example, from its first `>>>` to the next blank line, as a Python console block."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        if not inside and line.lstrip().startswith(">>>"):
            lines.append("\n```pycon")
            inside = True
        elif inside and not line.strip():
            lines.append("```")
            inside = False
        lines.append(line)
    return "\n".join([*lines, "```"] if inside else lines)


class Fences(griffe.Extension):  # type: ignore[misc]
    """Rewrites each docstring once, when its object has been read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe for every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
