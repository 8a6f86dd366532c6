"""The scripts of examples/ run, in a folder of their own, and say what they promise."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from tests.support.pages import ROOT, SMALL, sections

EXAMPLES = ROOT / "examples"


def run_example(name: str, *given: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [name, *given])
    monkeypatch.setitem(sections.FITTING, "digits", SMALL)
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_own_model_keeps_its_budget(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_example("own_model.py", "--budget", "0.4", "--epochs", "5", monkeypatch=monkeypatch, folder=tmp_path)
    told = capsys.readouterr().out
    assert 0 < float(re.search(r"any resource: ([0-9.]+) of", told)[1]) <= 0.4  # type: ignore[index]
    assert float(re.search(r"epoch 5: accuracy ([0-9.]+)", told)[1]) > 0.5  # type: ignore[index]


def test_own_data_keeps_every_budget_and_personal_models_win(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_example("own_data.py", "--rounds", "6", "--out", "kept", monkeypatch=monkeypatch, folder=tmp_path)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert len(rows) == 6
    for _, budget, density, _, _ in rows:
        assert 0 < float(density) <= float(budget)
    ours, other = (sum(float(row[at]) for row in rows) / 6 for at in (3, 4))
    assert ours > other + 0.2
    assert (tmp_path / "kept" / "pfedgate" / "summary.json").exists()


def test_read_results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_example("read_results.py", monkeypatch=monkeypatch, folder=tmp_path)
    first = capsys.readouterr().out
    assert "pfedgate on digits, 6 rounds" in first
    assert "fedavg on digits, 6 rounds" in first
    assert (tmp_path / "results.png").stat().st_size > 5000
    run_example("read_results.py", "runs/example/fedavg", "--plot", "one.svg", monkeypatch=monkeypatch, folder=tmp_path)
    assert "pfedgate" not in capsys.readouterr().out
    assert (tmp_path / "one.svg").exists()


def test_theory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_example("theory.py", "--tiny", "--out", "here", monkeypatch=monkeypatch, folder=tmp_path)
    numbers = json.loads((tmp_path / "here" / "theory.json").read_text())
    assert [run["rounds"] for run in numbers["convergence"]["runs"]] == [1, 2]
    for run in numbers["uploads"]["runs"]:
        assert run["density"] <= 0.5
        assert run["density"] - 1e-9 <= run["q"] <= 1
    pictures = sorted(path.name for path in (tmp_path / "here").glob("*.svg"))
    assert pictures == ["convergence.svg", "generalisation.svg", "q.svg"]
    run_example("theory.py", "--draw", "--out", "here", monkeypatch=monkeypatch, folder=tmp_path)
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
