"""Table 5: its formulas come to what is measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pfedgate.config.recipe import Recipe
from pfedgate.engine.metrics import Record
from pfedgate.studies import bench, complexity, paper
from pfedgate.studies.declare import TINY
from pfedgate.studies.sweep import Campaign

METHODS = {row.name: row.method for row in bench.COMPLEXITY_ROWS}
TRAINING, INFERENCE = (line.title for line in complexity.QUANTITIES[:2])


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """On a small network with convolutions, where FLOPs do not go with parameters."""
    campaign = Campaign(TINY, Path("nowhere"))
    column, world = bench.data_of(campaign)
    settings = {name: value for name, value in world.settings.items() if not name.startswith("model.")}
    conv = replace(world, settings={**settings, "model.name": "cnn_digits"})
    return complexity.lines(bench.measured(bench.recipes_of(campaign, bench.COMPLEXITY_ROWS, column, conv), 1), METHODS)


@pytest.mark.parametrize("quantity", [TRAINING, INFERENCE, "communication, up", "communication, down", "disk, client"])
def test_formulas_come_to_what_is_measured(found: list[dict[str, Any]], quantity: str) -> None:
    told = {line["row"]: line for line in found if line["quantity"] == quantity}
    assert set(told) == set(METHODS)
    for line in told.values():  # messages have heads, the first layer's input needs no gradient
        assert line["predicted"] == pytest.approx(line["ratio"], rel=0.03), line["row"]


def test_compute_is_not_the_share_of_parameters(found: list[dict[str, Any]]) -> None:
    """What table 5 said before, s + s_φ of FedAvg's FLOPs, is wrong on convolutions."""
    ratios = {line["row"]: line["ratio"] for line in found if line["quantity"] == TRAINING}
    assert ratios["pFedGate, s = 0.5, all resources"] < 0.4 < 0.5 < ratios["pFedGate, s = 0.5"]


def test_what_cannot_be_predicted_is_left_open(found: list[dict[str, Any]]) -> None:
    text = "\n".join(complexity.table({"complexity": found}))
    assert "| predicted, × FedAvg | measured, × FedAvg |" in text
    peak = next(line for line in text.split("## Peak memory")[1].splitlines() if line.startswith("| FedAvg"))
    assert peak.split(" | ")[3] == "–"


def test_older_records_are_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of code that counted less, and those of another version of the results."""
    ran: list[int] = []

    def measured(recipes: Mapping[str, Recipe], turns: int) -> dict[str, Record]:
        ran.append(turns)
        return {name: {"ms": 1.0, bench.LATEST: 2.0} for name in recipes}

    monkeypatch.setattr(bench, "_fresh", lambda: ThreadPoolExecutor(1))
    monkeypatch.setattr(bench, "measured", measured)
    study, campaign = paper.get("table5"), Campaign(TINY, tmp_path)
    path = tmp_path / "measures" / "table5.json"
    for change, runs in (({}, 1), ({}, 1), ({"version": 0}, 2), ({"costs": {"FedAvg": {"ms": 1.0}}}, 3)):
        if path.exists():
            path.write_text(json.dumps(json.loads(path.read_text()) | change))
        bench.all_costs(study, campaign)
        assert len(ran) == runs
