"""For the site only: the bare `>>>` examples and aligned columns of docstrings get the fences that Markdown needs."""

from __future__ import annotations

import re
from typing import Any

import griffe

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
