"""The report as one HTML file: nothing in it comes from elsewhere, and it may be mailed or put on a page as it is."""

from __future__ import annotations

import html as entities
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from pfedgate.store import write_atomically

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
        data=embedded(content),
    )


def embedded(content: Any) -> str:
    """JSON that cannot end the script element it stands in.

    >>> embedded({"name": "</script><b>"})
    '{"name":"\\\\u003c/script>\\\\u003cb>"}'
    """
    return json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def write(content: Mapping[str, Any], path: str | Path) -> Path:
    """Write the page; one that became too large leaves out what takes most: gate weights of single blocks."""
    target = Path(path)
    page = render(content)
    if len(page.encode()) > LARGEST:
        runs = [{**run, "gates": _lighter(run["gates"])} for run in content["runs"]]
        page = render({**content, "runs": runs})
    write_atomically(target, page.encode())
    return target


def _lighter(gates: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if gates is None:
        return None
    reason = gates.get("reason") or "they were left out to keep this file small"
    return {**gates, "weights": None, "importance": None, "reason": reason}


def _asset(name: str) -> str:
    return (resources.files("pfedgate.report") / "assets" / name).read_text(encoding="utf-8")
