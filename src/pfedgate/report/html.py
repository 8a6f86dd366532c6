"""The report as one HTML file: nothing in it comes from elsewhere, and it may be mailed or put on a page as it is."""

from __future__ import annotations

import html as entities
import json
import warnings
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from pfedgate.engine.store import write_atomically
from pfedgate.report.smaller import STEPS, lean

SCRIPTS = ("base.js", "shapes.js", "scores.js", "gates.js", "page.js")
LARGEST = 3_000_000  # bytes


def render(content: Mapping[str, Any]) -> str:
    """The page. Text from runs reaches it only escaped, or as data that scripts put in as text."""
    return Template(_asset("template.html")).substitute(
        title=entities.escape(content["title"]),
        subtitle=entities.escape(content["subtitle"]),
        version=entities.escape(content["version"]),
        made=entities.escape(content["made"]),
        css=_asset("report.css"),
        js="\n".join(_asset(name) for name in SCRIPTS),
        data=embedded(lean(content)),
    )


def embedded(content: Any) -> str:
    """JSON that cannot end the script element it stands in.

    >>> embedded({"name": "</script><b>"})
    '{"name":"\\\\u003c/script>\\\\u003cb>"}'
    """
    return json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def write(content: Mapping[str, Any], path: str | Path) -> Path:
    """Write the page; one that became too large leaves out what is missed least, step by step, and says so."""
    target, page = Path(path), render(content)
    left: list[str] = []
    for what, smaller in STEPS:
        if len(page.encode()) <= LARGEST:
            break
        reduced = smaller(content)
        if reduced != content:
            left += [what] if what not in left else []
            content = {**reduced, "left_out": left}
            page = render(content)
    size = len(page.encode())
    if size > LARGEST:
        warnings.warn(f"{target} has {size / 1e6:.1f} MB: make a report of fewer runs", stacklevel=2)
    write_atomically(target, page.encode())
    return target


def _asset(name: str) -> str:
    return (resources.files("pfedgate.report") / "assets" / name).read_text(encoding="utf-8")
