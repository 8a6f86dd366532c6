"""A page stays small, whatever it is of: it loses what is missed least first, and says so."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest
from tests.support.browser import Browser, find

from pfedgate import report
from pfedgate.report import across, data, html, tables
from pfedgate.report.smaller import STEPS


@pytest.fixture(scope="module")
def content(runs: Path) -> dict:
    return report.gather(report.open_runs([runs / "pfedgate", runs / "fedavg"]))


def many(content: dict, runs: int, clients: int, rounds: int) -> dict:
    """A report of so many runs, clients and rounds."""
    told, steps = [], list(range(1, rounds + 1))
    for at in range(runs):
        run = copy.deepcopy(content["runs"][at % 2])
        run["label"] = f"run {at}"
        run["curves"] = {
            name: steps if name == "round" else [0.12345 + s / 1000 for s in steps] for name in run["curves"]
        }
        run["training"] = {name: steps if name == "round" else [12345.6 + s for s in steps] for name in run["training"]}
        run["clients"] = [
            {"client": f"f{c:04d}_{c}", "accuracy": 0.12345 + c / 10**6 + at / 1000} for c in range(clients)
        ]
        told.append(run)
    table = tables.summarise({run["label"]: tables.numbers(run["summary"]) for run in told})
    return {**content, "runs": told, "table": table, "clients": data.rounded(across.client_table(told))}


def data_of(page: str) -> dict:
    found = re.search(r'id="data">(.*?)</script>', page, re.S)
    assert found is not None
    told: dict = json.loads(found.group(1))
    return told


@pytest.mark.parametrize(("count", "clients", "rounds"), [(29, 539, 400), (4, 30_000, 20), (40, 10, 5_000)])
def test_a_page_never_is_too_large(content: dict, tmp_path: Path, count: int, clients: int, rounds: int) -> None:
    path = html.write(many(content, count, clients, rounds), tmp_path / "r.html")
    assert path.stat().st_size <= html.LARGEST
    told = data_of(path.read_text())
    assert len(told["runs"]) == count
    assert all(run["training"]["bytes_up"] for run in told["runs"])
    for run in told["runs"]:
        assert run["curves"]["round"][0] == 1
        assert run["curves"]["round"][-1] == rounds


def test_a_page_that_is_small_has_it_all(content: dict, tmp_path: Path) -> None:
    told = data_of(html.write(content, tmp_path / "r.html").read_text())
    assert "left_out" not in told
    assert told["runs"] == json.loads(json.dumps(content["runs"]))
    assert told["clients"]["csv"] == content["clients"]["csv"]


def test_every_step_makes_it_smaller_and_can_be_read(
    content: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = many(content, 4, 50, 400)
    monkeypatch.setattr(html, "LARGEST", len(html.render(large).encode()))
    assert "left_out" not in data_of(html.write(large, tmp_path / "r.html").read_text())
    said = []
    while len(said) < len({what for what, _ in STEPS}):
        monkeypatch.setattr(html, "LARGEST", (tmp_path / "r.html").stat().st_size - 1)
        told = data_of(html.write(large, tmp_path / "r.html").read_text())
        assert (tmp_path / "r.html").stat().st_size <= html.LARGEST
        assert told["left_out"][: len(said)] == said
        said = told["left_out"]
        if len(said) == 1:
            assert told["runs"][0]["gates"]["weights"] is None
            assert told["runs"][0]["gates"]["kept"]
    monkeypatch.setattr(html, "LARGEST", 1000)
    with pytest.warns(UserWarning, match="fewer runs"):
        html.write(large, tmp_path / "r.html")


@pytest.mark.skipif(find() is None, reason="no Chromium here: scripts/install-chromium.sh installs one")
def test_what_is_left_out_is_said(
    browser: Browser, content: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = many(content, 4, 50, 400)
    for share in (0.9, 0.7, 0.5):
        monkeypatch.setattr(html, "LARGEST", int(share * len(html.render(large))))
        browser.open(html.write(large, tmp_path / "r.html"))
        said = browser.run("document.querySelector('[data-missing=size]').textContent")
        assert said.startswith("Left out to keep this file small: weights M and importances G of single blocks")
        assert browser.console == []


@pytest.mark.skipif(find() is None, reason="no Chromium here: scripts/install-chromium.sh installs one")
def test_many_values_have_an_extent(browser: Browser, content: dict, tmp_path: Path) -> None:
    browser.open(html.write(content, tmp_path / "r.html"))
    many_values = "Array.from({ length: 300001 }, (_, i) => i % 7 ? i : null)"
    assert browser.run(f"extent({many_values}, 1)") == [1, 300000]
    assert browser.run(f"largest({many_values})") == 300000
