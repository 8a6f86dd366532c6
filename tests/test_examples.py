"""The scripts of examples/ run, in a folder of their own, and say what they promise."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
from tests.pages import ROOT, SMALL, sections

EXAMPLES = ROOT / "examples"


def start(name: str, *given: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [name, *given])
    monkeypatch.setitem(sections.FITTING, "digits", SMALL)
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_theory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start("theory.py", "--tiny", "--out", "here", monkeypatch=monkeypatch, folder=tmp_path)
    numbers = json.loads((tmp_path / "here" / "theory.json").read_text())
    assert [run["rounds"] for run in numbers["convergence"]["runs"]] == [1, 2]
    for run in numbers["uploads"]["runs"]:
        assert run["density"] <= 0.5
        assert run["density"] - 1e-9 <= run["q"] <= 1
    pictures = sorted(path.name for path in (tmp_path / "here").glob("*.svg"))
    assert pictures == ["convergence.svg", "generalisation.svg", "q.svg"]
    start("theory.py", "--draw", "--out", "here", monkeypatch=monkeypatch, folder=tmp_path)
    told = capsys.readouterr().out.splitlines()
    assert told[: len(told) // 2] == told[len(told) // 2 :]


def test_the_committed_numbers_are_those_of_the_page() -> None:
    """What the page of theory says is in theory.json."""
    numbers = json.loads((ROOT / "docs" / "explanation" / "theory" / "theory.json").read_text())
    page = (ROOT / "docs" / "explanation" / "theory.md").read_text(encoding="utf-8")
    last = numbers["uploads"]["runs"][-1]
    said = f"after {last['batches']:.0f} batches q is {last['q']:.2f} at a density of {last['density']:.2f}"
    assert said in " ".join(page.split())
    gaps = [run["gap"] for run in numbers["generalisation"]["runs"]]
    assert f"measured between {min(gaps):.2f} and {max(gaps):.2f}" in page
