"""Figures say what they are of: curves over s, marks that can be told apart, colours that show the few."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import vl_convert

from pfedgate.core.drawing import VEGA_LITE
from pfedgate.runs.folder import Run
from pfedgate.studies import figures, paper
from pfedgate.studies.declare import Number, Row, Study


class Known:
    """Outcomes of made-up runs: one seed of every row."""

    columns = ("A",)

    def __init__(self, study: Study, folder: Path = Path()) -> None:
        self.study, self.folder = study, folder

    def rows(self, column: str) -> list[str]:
        return [row.name for row in self.study.rows]

    def seeds(self, row: str, column: str) -> list[Any]:
        return [Run(self.folder) if self.folder.name else row]

    def values(self, row: str, column: str, number: Number) -> list[float]:
        return [0.3 + len(row) / 200]

    def numbers(self, run: str) -> dict[str, float]:
        at = self.rows("A").index(run)
        return {"flops": 1.0 + at % 7, "up": 0.0 if run == "Local" else 1.0 + at % 5}


STUDY = paper.get("pareto")
COSTS = {"A": {"costs": {row.name: {"ms": 1.0 + at % 4} for at, row in enumerate(STUDY.rows)}}}


def drawn() -> str:
    known: Any = Known(STUDY)
    spec = figures.pareto(known, COSTS)
    assert spec is not None
    return vl_convert.vegalite_to_svg(spec, vl_version=VEGA_LITE)


def test_curves_hold_the_budgets_of_their_kind() -> None:
    known: Any = Known(STUDY)
    points = figures.points_of(known, "A", COSTS["A"]["costs"])
    curves: dict[str, list[float]] = {}
    for point in points:
        for name in point["curves"]:
            curves.setdefault(name, []).append(point["s"])
    assert {name: sorted(budgets) for name, budgets in curves.items()} == {
        "pFedGate, s of parameters": [0.3, 0.5, 1.0],
        "pFedGate, s of all": [0.1, 0.3, 0.5, 1.0],
        "pFedGate + shift, s of parameters": [1.0],
        "pFedGate + shift, s of all": [0.3, 0.5, 1.0],
    }
    assert all(not point["curves"] for point in points if point["method"] != "pfedgate")
    assert {p["flops"] for p in points if p["name"] == "FedAvg"} == {1.0}


def test_methods_that_nothing_cheaper_beats_have_their_names() -> None:
    points = [{"name": n, "flops": f, "y": y, "curves": []} for n, f, y in (("a", 1, 5), ("b", 2, 4), ("c", 2, 6))]
    assert figures.front([*points, {"name": "gate", "flops": 0.1, "y": 9, "curves": ["s"]}], "flops") == ["a", "c"]
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", drawn())
    assert {"other methods", "pFedGate + shift, s of all"} <= {*texts}
    assert "Local" in texts  # a cost of nothing stands at the left end


def test_a_column_without_fedavg_has_nothing_to_relate_to() -> None:
    study = Study("x", "", tuple(row for row in STUDY.rows if row.method != "fedavg"))
    known: Any = Known(study)
    assert figures.pareto(known, COSTS) is None


@pytest.mark.parametrize("noted", [True, False])
def test_few_gates_are_seen_beside_many(tmp_path: Path, noted: bool) -> None:
    histogram = [0] * 24
    histogram[3], histogram[16] = 2, 998
    told = {"layers": {"all blocks": {"M": {"histogram": histogram, "top": 2.0}}}}
    if noted:
        (tmp_path / "gates.jsonl").write_text("".join(json.dumps({"round": r, **told}) + "\n" for r in (5, 10)))
    known: Any = Known(Study("x", "", (Row("pFedGate", "pfedgate"),)), tmp_path)
    spec = figures.PAINTERS["gates"](known, {})
    assert (spec is not None) == noted
    if spec is not None:
        (panel,) = spec["hconcat"]
        rows = panel["data"]["values"]
        assert [row["round"] for row in rows] == [5, 10]
        assert (rows[0]["share"][3], rows[0]["share"][16]) == (0.2, 99.8)
        assert (rows[0]["low"][0], rows[0]["high"][-1]) == (0, 2)
        scale = panel["encoding"]["opacity"]["scale"]
        assert scale["type"] == "log"
        assert scale["domain"][0] < 0.2
