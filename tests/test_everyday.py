"""Short options, several seeds, early stopping, mixed precision."""

from __future__ import annotations

import io
import random
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from tests.support.cli import call

import pfedgate
from pfedgate.cli.commands import differences
from pfedgate.config.recipe import RecipeError
from pfedgate.runs import folder as runfolder
from pfedgate.training import fit

SMALL = ["--set", "data.clients=4", "--set", "data.samples=300", "--set", "run.workers=1"]


def test_what_everybody_sets_has_options_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    call("run", "heterofl", "--rounds", "2", "--data", "fashion", "--budget", "0.5", "--model", "mlp", *SMALL)
    recipe = runfolder.load("runs/fashion-heterofl").recipe
    assert (recipe.algorithm.name, recipe.train.rounds, recipe.data.name) == ("heterofl", 2, "fashion")
    assert (recipe.clients.budget, recipe.model.name) == (0.5, "mlp")
    Path("mine.toml").write_text('[algorithm]\nname = "ditto"\n[train]\nrounds = 9\n')
    text = call("run", "fedavg", "mine.toml", "--rounds", "5", "--set", "train.rounds=1", "--show")
    assert 'name = "fedavg"' in text
    assert "rounds = 1 " in text
    assert "one method at a time: pfedgate compare fedavg ditto" in call("run", "fedavg", "ditto", code=1)
    assert "unknown algorithm 'fedavgg': did you mean 'fedavg'" in call("run", "fedavgg", code=1)
    assert "no recipe mien.toml" in call("run", "mien.toml", code=1)


def test_data_may_be_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [f"c{at % 3},{at % 2},{at % 2 + 0.1 * (at % 5)}" for at in range(60)]
    Path("visits.csv").write_text("\n".join(["client,label,dose", *rows]))
    call("run", "fedavg", "--data", "visits.csv", "--rounds", "1", "--out", "r")
    assert sorted(pfedgate.load("r").clients) == ["c0", "c1", "c2"]


def shown(runs: Sequence[runfolder.Run]) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(differences(runs))
    return console.export_text()


def test_results_over_seeds_do_not_depend_on_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = call("run", "fedavg", "--rounds", "1", "--seeds", "3", "--out", str(tmp_path / "a"), *SMALL)
    assert "3 seeds" in text
    assert "± " in text
    assert "− fedavg" not in text
    call("compare", "fedavg", "local_only", "--data", "meters", "--seeds", "3", "--rounds", "1", *SMALL[:2],
         "--out", str(tmp_path / "b"))  # fmt: skip
    runs = runfolder.load_all(tmp_path / "b")
    assert "− fedavg, mae" in shown(runs)
    first, second = runs[:3], runs[3:]
    for seed in range(3):
        random.Random(seed).shuffle(first)
        random.Random(seed + 1).shuffle(second)
        assert shown([*first, *second]) == shown(runs)
    # A seed alone gives what it gives among others, whichever was trained before it.
    call("compare", "local_only", "fedavg", "--data", "meters", "--rounds", "1", *SMALL[:2], "--set", "run.seed=2",
         "--out", str(tmp_path / "c"))  # fmt: skip
    for one in runfolder.load_all(tmp_path / "c"):
        assert one.metrics == runfolder.load(tmp_path / f"b/{one.name}-seed2").metrics


class Stuck:
    """Data from which nothing can be learnt: labels are noise."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.x, self.y = rng.normal(size=(120, 4)).astype(np.float32), rng.integers(0, 2, 120)


@pytest.mark.filterwarnings("ignore:the gate has")
def test_training_stops_when_nothing_gets_better(tmp_path: Path) -> None:
    rows = Stuck()
    given: dict[str, Any] = {"data": (rows.x, rows.y), "owner": ["a", "b", "c"] * 40, "algorithm": "fedavg"}
    train = {"rounds": 40, "lr": 1e-6, "stop_after": 3}
    result = pfedgate.run(**given, train=train, evaluate={"every": 2}, out=tmp_path / "run")
    best = result.summary["best_round"]
    assert len(result.history) == best + 2 * 3 < 40
    assert result.summary["stopped_after"] == 3
    assert "after_broadcast" in result.history[-1]
    again = pfedgate.resume(tmp_path / "run", data=pfedgate.data.adopt(given["data"], owner=given["owner"]))
    assert again.history == result.history
    whole = pfedgate.run(**given, train={**train, "stop_after": 50}, evaluate={"every": 2})
    assert whole.history[: len(result.history)] == result.history
    assert "stopped_after" not in whole.summary
    with pytest.raises(RecipeError, match=r"train\.stop_after counts evaluations, from 1 on, got 0"):
        pfedgate.run(**given, train={"stop_after": 0})


def test_mixed_precision_is_used_where_it_is_and_said_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    small: dict[str, Any] = {"algorithm": "fedavg", "train": {"rounds": 1}, "data": {"name": "meters", "clients": 3}}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = pfedgate.run(**small, run={"amp": True, "device": "cpu"})
    assert any("run.amp is for CUDA devices" in str(warning.message) for warning in said)
    task = result.plan().algorithm.task
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(torch, "autocast", lambda *given: asked.append(given))
    fit.half(task, torch.device("cuda:0"))
    assert asked == [("cuda", torch.bfloat16)]
    with fit.half(task, torch.device("cpu")):
        assert len(asked) == 1
