"""What a report cannot show it says, with the reason, and does not offer; what it shows it does not oversell."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.support.browser import Browser, centre, find
from tests.support.runs import cut

from pfedgate import report
from pfedgate.report import html

pytestmark = pytest.mark.skipif(find() is None, reason="no Chromium here: scripts/install-chromium.sh installs one")
CONTROLS = """(() => {
    const found = document.querySelectorAll('[data-chart=blocks] .switch button');
    return Object.fromEntries([...found].map((b) => [b.dataset.value, !b.disabled]));
})()"""
TOLD = "[...document.querySelectorAll('.tile .who')].map((who) => who.textContent)"
CAPTION = "document.querySelector('[data-chart={}] figcaption').textContent"


@pytest.fixture(scope="module")
def stateless(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run as studies keep it: what was written down, no models and gates."""
    folder = tmp_path_factory.mktemp("stateless") / "kept"
    shutil.copytree(runs / "pfedgate", folder, ignore=shutil.ignore_patterns("*.safetensors", "private"))
    return folder


def test_without_a_checkpoint(browser: Browser, stateless: Path, tmp_path: Path) -> None:
    browser.open(report.write([stateless], tmp_path / "r.html")[0])
    assert browser.run(CONTROLS) == {}, "with one view there is nothing to choose"
    before = browser.run(CAPTION.format("blocks"))
    assert "Weights of single blocks and the likeness of gates are not available: the run's folder holds no" in before
    assert "holds no checkpoint" in browser.run("document.querySelector('[data-missing=tree]').textContent")
    assert browser.run("document.querySelector('[data-missing=data]')") is None
    assert browser.console == []


def test_controls_follow_the_run_that_is_shown(browser: Browser, runs: Path, stateless: Path, tmp_path: Path) -> None:
    browser.open(report.write([runs / "pfedgate", stateless], tmp_path / "r.html")[0])
    browser.click(*centre(browser, "[data-chart=blocks] [data-value=weight]"))
    assert all(browser.run(CONTROLS).values())
    browser.wait(f"{CAPTION.format('blocks')}.includes('The weight of a block')", 5)
    assert "The weight of a block" in browser.run(CAPTION.format("blocks"))
    choose = """(() => { const box = document.querySelector('[data-chart=blocks] select'); box.selectedIndex = %d;
        box.dispatchEvent(new Event('change')); })()"""
    browser.run(choose % 1)
    assert not browser.run(CONTROLS)["weight"]
    assert "The weight of a block" not in browser.run(CAPTION.format("blocks"))
    assert "kept: not shown, because" in browser.run("document.querySelector('[data-missing=tree]').textContent")
    pressed = "document.querySelector('[data-chart=blocks] button[data-value=%s]').getAttribute('aria-pressed')"
    assert browser.run(pressed % "kept") == "true"
    browser.run(choose % 0)
    assert "The weight of a block" in browser.run(CAPTION.format("blocks"))
    assert browser.run(pressed % "weight") == "true"
    assert browser.console == []


def test_without_the_data(browser: Browser, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*args: object, **options: object) -> None:
        raise ImportError("install the package 'datasets'")

    monkeypatch.setattr("pfedgate.config.options.federation", gone)
    browser.open(report.write([runs / "pfedgate", runs / "fedavg"], tmp_path / "r.html")[0])
    said = browser.run("document.querySelector('#data [data-missing=data]').textContent")
    assert (
        said == "Samples by client and class: not shown, because the data cannot be read here "
        "(install the package 'datasets')."
    )
    assert "datasets" in browser.run("document.querySelector('[data-missing=tree]').textContent")


def test_gates_that_left_no_trace(browser: Browser, stateless: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(stateless, copy, ignore=shutil.ignore_patterns("gates.jsonl"))
    browser.open(report.write([copy], tmp_path / "r.html")[0])
    said = browser.run("document.querySelector('#gates').textContent")
    assert "Gates: not shown, because the run's folder holds no checkpoint." in said
    assert browser.console == []


def test_a_method_without_gates_needs_no_excuse(runs: Path) -> None:
    (entry,) = report.gather(report.open_runs([runs / "fedavg"]))["runs"]
    assert (entry["gates"], entry["no_gates"]) == (None, "")


def test_weights_left_out_for_size(
    browser: Browser, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = report.write([runs / "pfedgate"], tmp_path / "r.html")[0].stat().st_size
    monkeypatch.setattr(html, "LARGEST", size - 1)
    browser.open(report.write([runs / "pfedgate"], tmp_path / "r.html")[0])
    assert browser.run(CONTROLS) == {"by client": True, "by likeness": True}
    assert "to keep this file small" in browser.run(CAPTION.format("blocks"))


def test_a_run_that_is_still_going_wins_nothing(browser: Browser, runs: Path, tmp_path: Path) -> None:
    going = cut(runs / "pfedgate", tmp_path / "pfedgate", 2)  # sends less, and is not at its end
    browser.open(report.write([going, runs / "fedavg"], tmp_path / "r.html")[0])
    assert browser.run(TOLD) == ["fedavg"] * 4
    said = browser.run("document.querySelector('#summary [data-missing=rounds]').textContent")
    assert said == "Not finished, numbers so far: pfedgate (2 of 4 rounds)."


def test_a_tie_crowns_nobody(browser: Browser, runs: Path, tmp_path: Path) -> None:
    for name in "ab":
        shutil.copytree(runs / "fedavg", tmp_path / name)
    browser.open(report.write([tmp_path / "a", tmp_path / "b"], tmp_path / "r.html")[0])
    assert browser.run(TOLD) == ["the same for all 2 runs"] * 4
    browser.open(report.write([tmp_path / "a", tmp_path / "b", runs / "pfedgate"], tmp_path / "r.html")[0])
    low = browser.run("[...document.querySelectorAll('#summary tbody tr')].map((row) => row.cells[1].className)")
    told = browser.run(TOLD)[0]
    assert told == "a and b" if low[0] else told.startswith("pfedgate")


def test_scores_say_that_they_are_of_the_last_round(browser: Browser, runs: Path, tmp_path: Path) -> None:
    browser.open(report.write([runs / "pfedgate", runs / "fedavg"], tmp_path / "r.html")[0])
    titles = browser.run("[...document.querySelectorAll('.tile .what')].map((what) => what.textContent)")
    assert titles[:2] == ["Highest accuracy, last round", "Highest bottom decile, last round"]
    for chart in ("clients-sorted", "clients-difference"):
        assert "last round" in browser.run(CAPTION.format(chart))


def test_clients_without_test_data(browser: Browser, runs: Path, tmp_path: Path) -> None:
    content = report.gather(report.open_runs([runs / "pfedgate", runs / "fedavg"]))
    for run in content["runs"]:
        run["clients"][0]["accuracy"] = None
        del run["clients"][1]["accuracy"]
    browser.open(html.write(content, tmp_path / "r.html"))
    assert browser.run("document.querySelectorAll('[data-chart=clients-difference] .layer_0_marks path').length") == 4
    shown = browser.run("document.querySelector('[data-chart=clients-sorted] .mark-line path').getAttribute('d')")
    assert shown.count("L") == 3
    assert "NaN" not in browser.run("document.querySelector('main').innerHTML")
    assert browser.console == []


def test_before_the_first_evaluation(browser: Browser, runs: Path, tmp_path: Path) -> None:
    browser.open(report.write([cut(runs / "fedavg", tmp_path / "early", 1)], tmp_path / "r.html")[0])
    assert "No round is evaluated yet." in browser.run("document.querySelector('#learning').textContent")
    assert "clients" not in browser.run("document.querySelector('header.top p').textContent")
    assert browser.console == []


def test_many_clients(browser: Browser, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = report.gather(report.open_runs([runs / "pfedgate"]))
    content["runs"][0]["gates"] |= {"looked": 7, "of": 9}
    browser.open(html.write(content, tmp_path / "r.html"))
    said = browser.run(CAPTION.format("blocks"))
    assert "6 of the first 7 of 9 clients (1 more took part in no round and have no gate)" in said
    assert browser.run(CAPTION.format("gate-M")).startswith("Over the first 7 of 9 clients and blocks")


def test_seeds_that_are_left_out_are_named(browser: Browser, runs: Path, tmp_path: Path) -> None:
    content = report.gather(report.open_runs([runs / "pfedgate", runs / "fedavg"]))
    content["seeds"] = {**content["table"], "unfinished": ["fedavg, seed 7"]}
    browser.open(html.write(content, tmp_path / "r.html"))
    said = browser.run("document.querySelector('[data-missing=seeds]').textContent")
    assert said.endswith("Not finished, so not counted: fedavg, seed 7.")
