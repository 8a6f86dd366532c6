"""What the README shows runs, and what it links to exists."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def test_python_blocks_run_and_print_what_they_promise() -> None:
    """The blocks of the README share their names from top to bottom, as a reader would type them."""
    blocks = re.findall(r"^```python\n(.*?)^```", text(ROOT / "README.md"), re.MULTILINE | re.DOTALL)
    assert blocks, "the README shows no Python"
    names: dict[str, object] = {"__name__": "readme"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for block in blocks:
            exec(compile(block, "README.md", "exec"), names)
    density = float(printed.getvalue().split()[0])
    assert 0 < density <= 0.3


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_and_pictures_exist(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)|(?:src|href)=\"([^\"#]+)\"", text(page))
    local = [link for pair in links for link in pair if link and "://" not in link]
    missing = [link for link in local if not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", text(ROOT / "Makefile"), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z-]+)(?=\s|`|$)", "\n".join(code(text(page)))))
    assert named
    assert named <= targets


def code(page: str) -> list[str]:
    """Inline code and fenced blocks: where a reader looks for commands."""
    fenced = re.findall(r"^```[a-z]*\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    return fenced + re.findall(r"`([^`\n]+)`", page)
