"""Figures say what they are of: curves over s, marks that can be told apart, colours that show the few."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from pfedgate.runs.folder import Run
from pfedgate.studies import figures, paper, pareto
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


def painted_pareto() -> Figure:
    figure = Figure(layout="constrained")
    known: Any = Known(STUDY)
    assert pareto.paint(known, COSTS, figure)
    figure.canvas.draw()
    return figure


def test_curves_go_by_s() -> None:
    known: Any = Known(STUDY)
    curves = pareto.curves_of(pareto.points_of(known, "A", COSTS["A"]["costs"]))
    assert len(curves) == 5  # plain and with shift, of parameters and of all; HeteroFL
    for line in curves.values():
        budgets = [point["row"].settings["clients.budget"] for point in line]
        assert budgets == sorted(set(budgets))
    names = {point["row"].name for line in curves.values() for point in line}
    assert paper.PARTS.name not in names  # another curve than that of whole batches
    assert [len(line) for name, line in curves.items() if "pFedGate" in name] == [4] * 4


def test_marks_can_be_told_apart_and_read() -> None:
    figure = painted_pareto()
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert len(labels) == len(set(labels))
    assert any("four microbatches" in label for label in labels)
    assert {"FedAvg", "FedEM", "HeteroFL, over s", "HeteroFL, s = .55 mixed"} <= set(labels)
    drawn = {line.get_label(): line for line in figure.axes[0].lines if line.get_label() in labels}
    looks = [(d.get_marker(), d.get_linestyle(), d.get_color(), d.get_markerfacecolor()) for d in drawn.values()]
    assert len(looks) == len(set(looks)) == len(labels)
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1
    texts = [*figure.legends[0].get_texts(), *(text for axes in figure.axes for text in axes.texts)]
    assert all(float(text.get_fontsize()) >= 6 for text in texts)


def test_a_column_without_fedavg_has_nothing_to_relate_to() -> None:
    study = Study("x", "", tuple(row for row in STUDY.rows if row.method != "fedavg"))
    known: Any = Known(study)
    assert not pareto.paint(known, COSTS, Figure())


@pytest.mark.parametrize("noted", [True, False])
def test_few_gates_are_seen_beside_many(tmp_path: Path, noted: bool) -> None:
    histogram = [0] * 24
    histogram[3], histogram[16] = 2, 998
    told = {"layers": {"all blocks": {"M": {"histogram": histogram, "top": 2.0}}}}
    if noted:
        (tmp_path / "gates.jsonl").write_text("".join(json.dumps({"round": r, **told}) + "\n" for r in (5, 10)))
    known: Any = Known(Study("x", "", (Row("pFedGate", "pfedgate"),)), tmp_path)
    figure = Figure()
    assert figures.PAINTERS["gates"](known, {}, figure) == noted
    if noted:
        image: Any = figure.axes[0].images[0]
        shade = [float(image.norm(share)) for share in (1e-6, 0.002, 0.998)]
        assert shade[0] <= 0 < 0.05 < shade[1] < shade[2]
        assert list(image.get_extent()) == [2.5, 12.5, 0.0, 2.0]
