"""A report of runs whose main metric is not accuracy: its name, its form and its direction throughout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pfedgate import experiment, report
from pfedgate.report import charts


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("meters")
    small = {"data": {"name": "meters", "clients": 4}, "train": {"rounds": 3}, "evaluate": {"every": 1},
             "run": {"workers": 1}}  # fmt: skip
    for method in ("fedavg", "local_only"):
        experiment.run(small, algorithm=method, out=folder / method)
    return report.gather(report.open_runs([folder / "fedavg", folder / "local_only"]))


def test_words_follow_the_metric(content: dict[str, Any]) -> None:
    first, second = content["verdict"]
    scores = {run["label"]: run["summary"]["mae"] for run in content["runs"]}
    best = min(scores, key=lambda label: scores[label])
    assert first.startswith(f"{best} ends with the lowest mae, {scores[best]:.4g}, ")
    assert "points" not in first + second
    assert "accuracy" not in first + second


def test_tables_and_charts_follow_the_metric(content: dict[str, Any], tmp_path: Path) -> None:
    table = content["table"]
    assert table["head"][0]["title"] == "mae"
    winner = [row["name"] for row in table["rows"] if row["cells"][0]["best"]]
    assert winner == [min(content["runs"], key=lambda run: run["summary"]["mae"])["label"]]
    for row in content["clients"]["rows"]:
        values = [cell["value"] for cell in row["cells"]]
        assert [cell["best"] for cell in row["cells"]] == [value == min(values) for value in values]
    run, base = content["runs"]
    worst_first = [client["accuracy"] for client in charts.scored(run)]
    assert worst_first == sorted(worst_first, reverse=True)
    for row in charts.pairs(run, base):
        assert (row["verdict"] == "better") == (row["own"] <= row["base"])
        assert row["own"] < 10  # not in per cent
    spec = charts.curves(content)
    assert spec is not None
    assert "mae" in json.dumps(spec)
    assert "accuracy, %" not in json.dumps(spec)
    page = report.write([Path(run["path"]) for run in content["runs"]], tmp_path / "r.html")[0].read_text()
    assert "Lowest mae, last round" in page
    assert "Mae of every client" in page
