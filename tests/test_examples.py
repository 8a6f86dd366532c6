"""The scripts of examples/ run, in a folder of their own, and say what they promise."""

from __future__ import annotations

import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.pages import ROOT, SMALL, catalogue

EXAMPLES = ROOT / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a script in a folder of its own, on little data; all that it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(catalogue.FITTING, "digits", SMALL)

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_own_model_keeps_its_budget(example: Callable[..., str]) -> None:
    printed = example("own_model.py", "--budget", "0.4", "--epochs", "5")
    assert 0 < float(re.search(r"any resource: ([0-9.]+) of", printed)[1]) <= 0.4  # type: ignore[index]
    assert float(re.search(r"epoch 5: accuracy ([0-9.]+)", printed)[1]) > 0.5  # type: ignore[index]


def test_own_data_keeps_every_budget_and_personal_models_win(example: Callable[..., str], tmp_path: Path) -> None:
    rows = [line.split() for line in example("own_data.py", "--rounds", "6", "--out", "kept").splitlines()[1:]]
    assert len(rows) == 6
    for _, budget, density, _, _ in rows:
        assert 0 < float(density) <= float(budget)
    ours, other = (sum(float(row[at]) for row in rows) / 6 for at in (3, 4))
    assert ours > other + 0.2
    assert (tmp_path / "kept" / "pfedgate" / "summary.json").exists()


def test_read_results(example: Callable[..., str], tmp_path: Path) -> None:
    first = example("read_results.py")
    assert "pfedgate on digits, 6 rounds" in first
    assert "fedavg on digits, 6 rounds" in first
    assert (tmp_path / "results.png").stat().st_size > 5000
    assert "pfedgate" not in example("read_results.py", "runs/example/fedavg", "--plot", "one.svg")
    assert (tmp_path / "one.svg").exists()


def test_theory(example: Callable[..., str], tmp_path: Path) -> None:
    first = example("theory.py", "--tiny", "--out", "here")
    numbers = json.loads((tmp_path / "here" / "theory.json").read_text())
    assert [run["rounds"] for run in numbers["convergence"]["runs"]] == [1, 2]
    for run in numbers["uploads"]["runs"]:
        assert run["density"] <= 0.5
        assert run["density"] - 1e-9 <= run["q"] <= 1
    pictures = sorted(path.name for path in (tmp_path / "here").glob("*.svg"))
    assert pictures == ["convergence.svg", "generalisation.svg", "q.svg"]
    assert example("theory.py", "--draw", "--out", "here") == first


def test_the_committed_numbers_are_those_of_the_page() -> None:
    """What the page of theory says is in theory.json."""
    numbers = json.loads((ROOT / "docs" / "explanation" / "theory" / "theory.json").read_text())
    page = (ROOT / "docs" / "explanation" / "theory.md").read_text(encoding="utf-8")
    last = numbers["uploads"]["runs"][-1]
    said = f"after {last['batches']:.0f} batches q is {last['q']:.2f} at a density of {last['density']:.2f}"
    assert said in " ".join(page.split())
    gaps = [run["gap"] for run in numbers["generalisation"]["runs"]]
    assert f"measured between {min(gaps):.2f} and {max(gaps):.2f}" in page
