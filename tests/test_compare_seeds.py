"""`pfedgate compare --seeds`: the same statistics for users as for the studies."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.support.cli import call

from pfedgate.report.paired import paired, scores
from pfedgate.runs import folder as runfolder


def test_seeds_are_compared_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    settings = ["train.rounds=1", "data.clients=4", "data.samples=300", "run.workers=1", "run.seed=3"]
    words = [word for setting in settings for word in ("--set", setting)]
    text = call("compare", "fedavg", "local_only", "--seeds", "3", "--out", str(tmp_path / "c"), *words)
    runs = runfolder.load_all(tmp_path / "c")
    assert [run.name for run in runs] == [f"{name}-seed{s}" for name in ("fedavg", "local_only") for s in (3, 4, 5)]
    assert [run.recipe.run.seed for run in runs] == [3, 4, 5] * 2
    gap = paired({r.recipe.run.seed: scores(r) for r in runs[3:]}, {r.recipe.run.seed: scores(r) for r in runs[:3]})
    assert gap is not None
    assert gap.seeds == 3
    assert str(gap) in text
    assert re.search(r"fedavg .* ± ", text)
    one = call("compare", "fedavg", "--out", str(tmp_path / "one"), *words)
    assert "± " not in one
    assert [run.name for run in runfolder.load_all(tmp_path / "one")] == ["fedavg"]
