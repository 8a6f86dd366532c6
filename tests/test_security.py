"""SECURITY.md promises nothing without a test."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
LINKS = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def test_every_test_that_is_named_exists() -> None:
    named = LINKS.findall(TEXT)
    assert len(named) > 30
    for file, test in named:
        assert f"\ndef {test}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file}::{test}"


def test_every_promise_names_a_test() -> None:
    """Each entry of a list is a promise; what is not promised stands in paragraphs."""
    promises = re.findall(r"^- .*?(?=^- |^$)", TEXT, re.MULTILINE | re.DOTALL)
    assert len(promises) > 20
    assert not [promise for promise in promises if not LINKS.search(promise)]


def test_pages_that_are_linked_exist() -> None:
    pages = re.findall(r"\]\(([\w/.-]+\.md)\)", TEXT)
    assert pages
    assert not [page for page in pages if not (ROOT / page).exists() and page != "docs/results/attacks.md"]
