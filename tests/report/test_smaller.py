"""A page stays small, whatever it is of: it loses what is missed least first, and says so."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest

from pfedgate.report import content as facts
from pfedgate.report import html, tables
from pfedgate.report.html import STEPS


def many(content: dict, runs: int, clients: int, rounds: int) -> dict:
    """A report of so many runs, clients and rounds."""
    told, steps = [], list(range(1, rounds + 1))
    for at in range(runs):
        run = copy.deepcopy(content["runs"][at % 2])
        run["label"] = f"run {at}"
        run["curves"] = {
            name: steps if name == "round" else [0.12345 + s / 1000 for s in steps] for name in run["curves"]
        }
        run["training"] = {name: steps if name == "round" else [12345.6 * s for s in steps] for name in run["training"]}
        run["clients"] = [
            {"client": f"f{c:04d}_{c}", "accuracy": 0.12345 + c / 10**6 + at / 1000} for c in range(clients)
        ]
        told.append(run)
    table = tables.summarise({run["label"]: tables.numbers(run["summary"]) for run in told})
    return {**content, "runs": told, "table": table, "clients": facts.rounded(facts.client_table(told))}


def data_of(page: str) -> dict:
    found = re.search(r'id="content">(.*?)</script>', page, re.S)
    assert found is not None
    told: dict = json.loads(found.group(1))
    return told


@pytest.mark.parametrize(("count", "clients", "rounds"), [(29, 539, 400), (4, 30_000, 20), (40, 10, 5_000)])
def test_a_page_never_is_too_large(content: dict, tmp_path: Path, count: int, clients: int, rounds: int) -> None:
    path = html.write(many(content, count, clients, rounds), tmp_path / "r.html")
    assert path.stat().st_size <= html.LARGEST
    page = data_of(path.read_text())
    assert len(page["runs"]) == count
    assert {"accuracy-rounds", "clients-sorted", "uploaded"} <= {card["name"] for card in page["cards"]}


def test_a_page_that_is_small_has_it_all(content: dict, tmp_path: Path) -> None:
    page = html.write(content, tmp_path / "r.html").read_text()
    assert "Left out" not in page
    assert data_of(page)["copies"]["clients"]["csv"] == content["clients"]["csv"]


def test_every_step_makes_it_smaller_and_can_be_read(
    content: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = many(content, 4, 50, 400)
    monkeypatch.setattr(html, "LARGEST", len(html.render(large).encode()))
    assert "Left out" not in html.write(large, tmp_path / "r.html").read_text()
    for parts in range(1, len(STEPS) + 1):
        monkeypatch.setattr(html, "LARGEST", (tmp_path / "r.html").stat().st_size - 1)
        page = html.write(large, tmp_path / "r.html").read_text()
        assert len(page.encode()) <= html.LARGEST
        said = "; ".join(list(STEPS)[:parts])
        assert f"Left out to keep this file small: {said}." in page
    monkeypatch.setattr(html, "LARGEST", 1000)
    with pytest.warns(UserWarning, match="fewer runs"):
        html.write(large, tmp_path / "r.html")
