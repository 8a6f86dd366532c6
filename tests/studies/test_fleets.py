"""Time, traffic and energy to an accuracy, over a fleet of unequal devices."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from tests.support.studies import page_data

from pfedgate.runs.folder import Run
from pfedgate.studies import reproduce
from pfedgate.studies.declare import Number, Row, Study
from pfedgate.studies.fleets import FEDAVG, FLEET, GATE
from pfedgate.studies.outcome import Outcomes, reach


def records(*scores: float, seconds: float = 10.0) -> list[dict[str, Any]]:
    return [
        {"virtual_seconds": seconds * (at + 1), "bytes_up": 5, "after_broadcast": {"val_accuracy": score}}
        for at, score in enumerate(scores)
    ]


def test_time_is_read_and_traffic_is_added_until_the_target() -> None:
    rounds = records(0.2, 0.5, 0.4)
    assert reach(rounds, "virtual_seconds", 0.5) == 20
    assert reach(rounds, "bytes_up", 0.5) == 10
    assert reach(rounds, "bytes_up", 0.51) == math.inf


@pytest.mark.parametrize(("scores", "ratio"), [((0.1, 0.5), 0.4), ((0.6,), 0.2), ((0.1, 0.4), math.inf)])
def test_the_target_is_the_best_of_the_first_row_with_the_same_seed(
    scores: tuple[float, ...], ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, other = Run(Path("first")), Run(Path("other"))
    lines = {first.path: records(0.3, 0.5, 0.45, seconds=10), other.path: records(*scores, seconds=4)}
    monkeypatch.setattr(Run, "metrics", property(lambda run: lines[run.path]))
    outcomes = Outcomes(Study("t", "T", (Row("first", "fedavg"), Row("other", "fedavg"))))
    outcomes.runs = {("first", "data", 0): first, ("other", "data", 0): other}
    outcomes._read = {first.path: {"val": 0.5}, other.path: {"val": max(scores)}}
    number = Number("virtual_seconds", "time", reach=True, over_first=True)
    assert outcomes.values("first", "data", number) == [1.0]
    assert outcomes.values("other", "data", number) == [pytest.approx(ratio)]


def test_the_study_runs_on_digits_and_scores_the_weakest_third(tmp_path: Path) -> None:
    over = [{"train": {"rounds": 2}, "fleet": {"deadline": 0.5}}]
    reproduce(["fleet"], scale="tiny", out=tmp_path, over=over)
    rows = {row["row"]: row["numbers"] for row in page_data(tmp_path / "tiny/results", "fleet")["rows"]}
    assert rows.keys() == {row.name for row in FLEET.rows}
    lengths = {len(Run(path.parent).metrics) for path in (tmp_path / "tiny").rglob("metrics.jsonl")}
    assert lengths == {2, 4, 6, 8, 16}, "there are more rounds where each is short or trains some of the clients only"
    assert rows[FEDAVG.name]["virtual_seconds-reach-ratio"]["mean"] == 1
    for numbers in rows.values():
        assert 0 <= numbers["weakest_third"]["mean"] <= 1
    assert rows["FedAvg, drops who is late"]["late"]["mean"] >= 0
    assert rows[GATE.name]["late"]["mean"] == 0, "a budget by device keeps its deadline"
