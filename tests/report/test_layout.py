"""The page on screens of several widths, with long names, many clients, and fingers."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from tests.support.browser import Browser, centre, find

from pfedgate import report
from pfedgate.report import html, tables

pytestmark = pytest.mark.skipif(find() is None, reason="no Chromium here: scripts/install-chromium.sh installs one")
LONG = "a-very-long-name-of-a-run-and-all-its-settings-lr=0.05-seed="
TIP = "document.getElementById('tip').classList.contains('on')"


@pytest.fixture
def content(runs: Path) -> dict[str, Any]:
    return report.gather(report.open_runs([runs / "pfedgate", runs / "fedavg"]))


@pytest.fixture
def wide(content: dict[str, Any]) -> dict[str, Any]:
    """Runs with long names and a number in every column."""
    rows = {}
    for at, run in enumerate(content["runs"]):
        run["label"] = f"{LONG}{at}"
        large = {"bytes_up": 27.4e9, "bytes_down": 27.3e9 + at, "flops": 14.4e12, "seconds": 75540}
        large |= {"density": 0.5 + at, "epsilon": 1.5 + at}  # equal ones would not be shown
        usual = {column.key: 0.83 for column in tables.COLUMNS}
        rows[run["label"]] = {**usual, **large, "rounds_to_90": 120}
    content["table"] = tables.summarise(rows)
    assert len(content["table"]["head"]) == len(tables.COLUMNS)
    return content


@pytest.mark.parametrize("width", [1280, 1440])
def test_the_summary_fits_a_screen(browser: Browser, wide: dict[str, Any], tmp_path: Path, width: int) -> None:
    browser.open(html.write(wide, tmp_path / "r.html"), width=width)
    have, need = browser.run(
        "(() => { const s = document.querySelector('#summary .scroll'); return [s.clientWidth, s.scrollWidth]; })()"
    )
    assert need <= have


def test_long_names_leave_room_for_numbers(browser: Browser, wide: dict[str, Any], tmp_path: Path) -> None:
    browser.open(html.write(wide, tmp_path / "r.html"), width=390)
    assert browser.run("document.documentElement.scrollWidth") <= 390
    cell = "document.querySelector('#summary tbody tr:nth-child(2) td')"
    box = browser.run(f"{cell}.getBoundingClientRect().toJSON()")
    assert box["right"] < 390 / 2
    assert browser.run(f"{cell}.title") == f"{LONG}1"
    assert browser.run(f"{cell}.textContent").endswith("seed=1")  # the end tells runs apart
    number = browser.run("document.querySelector('#summary tbody td:nth-child(2)').getBoundingClientRect().toJSON()")
    assert number["left"] >= box["right"] - 1
    assert number["right"] <= 390


def many_clients(content: dict[str, Any], count: int = 50) -> dict[str, Any]:
    """Two runs with so many clients; twenty of the baseline's have the lowest accuracy."""
    ours, base = content["runs"]
    names = [f"f{4000 + at}_{at}" for at in range(count)]
    base["clients"] = [{"client": name, "accuracy": 0.5 if at < 20 else 0.9} for at, name in enumerate(names)]
    ours["clients"] = [{"client": name, "accuracy": 0.6 + at / 200} for at, name in enumerate(names)]
    return content


@pytest.mark.parametrize("width", [1280, 800, 390])
def test_names_of_many_clients_do_not_run_together(
    browser: Browser, content: dict[str, Any], tmp_path: Path, width: int
) -> None:
    browser.open(html.write(many_clients(content), tmp_path / "r.html"), width=width)
    boxes = browser.run(
        """[...document.querySelectorAll('[data-chart=clients-difference] .role-axis-label text')]
        .filter((t) => t.textContent.startsWith('f4') && t.getAttribute('opacity') !== '0')
        .map((t) => t.getBoundingClientRect().toJSON())"""
    )
    assert len(boxes) == 50 if width == 1280 else len(boxes) > 5
    # A box is as high as a line, letters are lower.
    assert all(one["right"] <= other["left"] + 2 for one, other in itertools.pairwise(boxes))
    bars = "document.querySelectorAll('[data-chart=clients-difference] .layer_0_marks path').length"
    assert browser.run(bars) == 50


def test_a_tooltip_stays_when_the_finger_lifts(browser: Browser, content: dict[str, Any], tmp_path: Path) -> None:
    browser.open(html.write(content, tmp_path / "r.html"), width=390)
    chart = "[data-chart=accuracy-rounds]"

    def tap() -> None:
        browser.touch(*centre(browser, f"{chart} .plot"))
        browser.wait(TIP, 5)

    tap()
    browser.run("new Promise((done) => setTimeout(done, 300))")
    assert browser.run(TIP), "it must stay after the finger is gone"
    title = browser.run(f"document.querySelector('{chart} h3').getBoundingClientRect().toJSON()")
    browser.touch(title["x"] + 5, title["y"] + 5)
    browser.wait(f"!{TIP}", 5)
    tap()
    browser.run("scrollBy({ top: 120, behavior: 'instant' })")
    browser.wait(f"!{TIP}", 5)
    assert browser.console == []


def test_arrows_move_the_tooltip(browser: Browser, content: dict[str, Any], tmp_path: Path) -> None:
    browser.open(html.write(many_clients(content), tmp_path / "r.html"))
    heard = "document.getElementById('tip').textContent"
    for chart, least in (("accuracy-rounds", 2), ("clients-difference", 40)):
        area = f"document.querySelector('[data-chart={chart}] .plot')"
        press = f"{area}.dispatchEvent(new KeyboardEvent('keydown', {{ key: '%s', bubbles: true }}))"
        centre(browser, f"[data-chart={chart}] .plot")
        browser.run(f"{area}.focus({{ preventScroll: true }})")
        told = set()
        for key in ["Home"] + ["ArrowRight"] * 50:
            browser.run(press % key)
            told.add(browser.run(heard))
        assert browser.run(TIP)
        assert len(told) >= least, chart
        browser.run(press % "Escape")
        assert not browser.run(TIP)
    assert browser.console == []


def test_what_can_be_focused_has_a_role_and_a_name(browser: Browser, content: dict[str, Any], tmp_path: Path) -> None:
    browser.open(html.write(content, tmp_path / "r.html"))
    nameless = """[...document.querySelectorAll('[tabindex]')].filter((node) => !node.getAttribute('role')
        || !node.getAttribute('aria-label') || node.closest('[role=img]')).length"""
    assert browser.run("document.querySelectorAll('[tabindex]').length") >= 10
    assert browser.run(nameless) == 0


def test_a_run_has_its_pattern_in_charts_and_legends(browser: Browser, content: dict[str, Any], tmp_path: Path) -> None:
    browser.open(html.write(content, tmp_path / "r.html"))
    dashes = """[...document.querySelectorAll('%s')]
        .map((node) => node.getAttribute('stroke-dasharray').split(/[ ,]/).map(Number))"""
    drawn = browser.run(dashes % "[data-chart=accuracy-rounds] .mark-line path")
    assert drawn == [[1, 0], [8, 4]]
    assert browser.run(dashes % "[data-chart=accuracy-rounds] .legend line") == drawn
    assert browser.run(dashes % "#summary tbody .key line") == drawn


def test_a_saved_picture_has_a_title_and_a_legend(browser: Browser, content: dict[str, Any], tmp_path: Path) -> None:
    browser.open(html.write(content, tmp_path / "r.html"))
    browser.run(
        """URL.createObjectURL = (blob) => { blob.text().then((text) => { window.saved = text; }); return "#"; }"""
    )
    browser.run("document.querySelector('[data-chart=accuracy-rounds] button.save').click()")
    browser.wait("window.saved", 5)
    saved = browser.run("window.saved")
    assert all(f">{run['label']}</text>" in saved for run in content["runs"])
    assert ">Over rounds</text>" in saved


def test_charts_follow_the_window_and_the_theme(browser: Browser, content: dict[str, Any], tmp_path: Path) -> None:
    browser.open(html.write(content, tmp_path / "r.html"), width=1280)
    ink = "document.querySelector('[data-chart=q] .role-axis-label text').getAttribute('fill')"
    before = browser.run(ink)
    browser.resize(600, 900, "dark")
    browser.wait("document.querySelector('[data-chart=accuracy-rounds] svg')?.clientWidth < 600", 5)
    browser.wait(f"{ink} !== '{before}'", 5)
    assert browser.run("document.documentElement.scrollWidth") <= 600
