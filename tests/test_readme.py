"""What the README shows runs, and what it links to exists."""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
WITH_COMMANDS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docs" / "index.md"]


def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text(page), re.MULTILINE | re.DOTALL)


@contextlib.contextmanager
def elsewhere() -> Iterator[None]:
    """What a page writes must not stay, nor be found by the next run."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def run(page: Path) -> str:
    """The Python blocks of a page share their names from top to bottom, as a reader would type them."""
    names: dict[str, object] = {"__name__": page.stem}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), elsewhere():
        for block in blocks(page):
            # Not with this file's own `from __future__ import annotations`: a reader has none.
            exec(compile(block, page.name, "exec", dont_inherit=True), names)
    return printed.getvalue()


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_python_blocks_run(page: Path) -> None:
    run(page)


def test_the_readme_example_keeps_its_budget() -> None:
    assert 0 < float(run(ROOT / "README.md").split()[0]) <= 0.3


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_and_pictures_exist(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)|(?:src|href)=\"([^\"#]+)\"", text(page))
    local = [link for pair in links for link in pair if link and "://" not in link]
    missing = [link for link in local if not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.name)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", text(ROOT / "Makefile"), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z-]+)(?=\s|`|$)", "\n".join(code(text(page)))))
    assert named
    assert named <= targets


def code(page: str) -> list[str]:
    """Inline code and fenced blocks: where a reader looks for commands."""
    fenced = re.findall(r"^```[a-z]*\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    return fenced + re.findall(r"`([^`\n]+)`", page)
