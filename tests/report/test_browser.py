"""The report of tiny runs in a real browser: it draws, answers and asks nobody for anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.browser import Browser, centre, find

from pfedgate import report

CHARTS = {
    "accuracy-rounds", "accuracy-flops", "accuracy-bytes", "accuracy-seconds", "clients-sorted", "clients-difference",
    "density", "q", "uploaded", "blocks", "gate-M", "gate-G", "changes", "tree", "partition-0",
}  # fmt: skip
pytestmark = pytest.mark.skipif(find() is None, reason="no Chromium here: scripts/install-chromium.sh installs one")


@pytest.fixture(scope="module")
def page(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("page") / "report.html"
    return report.write([runs / "pfedgate", runs / "fedavg", runs / "ditto"], target)[0]


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_everything_is_drawn(browser: Browser, page: Path, tmp_path: Path, width: int, theme: str) -> None:
    browser.open(page, width=width, theme=theme)
    drawn = browser.run("[...document.querySelectorAll('figure')].map((f) => [f.dataset.chart, f.dataset.drawn])")
    assert dict(drawn) == dict.fromkeys(CHARTS, "true")
    few = "(s) => s.querySelectorAll('path, rect, image, circle').length < 4"
    small = browser.run(f"[...document.querySelectorAll('figure .plot > svg')].filter({few}).length")
    assert small == 0
    wide = "[...document.querySelectorAll('figure .plot > svg')].map((s) => s.clientWidth / s.parentNode.clientWidth)"
    browser.wait(f"({wide}).every((share) => share > 0.85 && share <= 1.05)", 10)  # a plot takes its card's width
    assert browser.run("document.documentElement.scrollWidth") <= width, "the page must not scroll sideways"
    beyond = """[...document.querySelectorAll('figure .plot > svg')].flatMap((svg) => {
        const room = svg.getBoundingClientRect();
        const out = (box) => box.left < room.left - 8 || box.right > room.right + 12;
        const wrong = [...svg.querySelectorAll('text')].filter((t) => out(t.getBoundingClientRect()));
        return wrong.map((t) => t.textContent);
    })"""
    assert browser.run(beyond) == []
    assert browser.console == []
    assert [url for url in browser.requests if not url.startswith(("file:", "data:"))] == []
    assert len([url for url in browser.requests if url.startswith("file:")]) == 1
    assert browser.run("document.documentElement.dataset.theme") == theme
    browser.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 50_000


@pytest.mark.parametrize("name", sorted(CHARTS))
def test_every_chart_has_a_tooltip(browser: Browser, page: Path, name: str) -> None:
    browser.open(page)
    cells = {"tree": " .mark-rect path", "partition-0": " .mark-symbol path"}
    browser.move(*centre(browser, f"[data-chart={name}] .plot{cells.get(name, '')}"))
    browser.wait("document.getElementById('tip').classList.contains('on')", 5)
    said = browser.run("document.getElementById('tip').textContent")
    assert any(letter.isdigit() for letter in said), said
    box = browser.run("document.getElementById('tip').getBoundingClientRect().toJSON()")
    assert min(box["left"], box["top"]) >= 0
    assert box["right"] <= 1280
    assert box["bottom"] <= 900
    browser.move(2, 2)
    browser.wait("!document.getElementById('tip').classList.contains('on')", 5)
    assert browser.console == []


def test_a_legend_hides_a_run_everywhere(browser: Browser, page: Path) -> None:
    browser.open(page)
    count = "[...document.querySelectorAll('.plot .mark-line path')].filter((p) => p.getAttribute('d')).length"
    before = browser.run(count)
    assert before >= 12
    browser.click(*centre(browser, "[data-chart=accuracy-rounds] .legend [data-run=fedavg]"))
    browser.wait(f"{count} <= {before - 5}", 5)
    pressed = (
        "document.querySelector('[data-chart=clients-sorted] .legend [data-run=fedavg]').getAttribute('aria-pressed')"
    )
    assert browser.run(pressed) == "false"
    browser.click(*centre(browser, "[data-chart=clients-sorted] .legend [data-run=fedavg]"))
    browser.wait(f"{count} === {before}", 5)


def test_switches_change_what_is_drawn(browser: Browser, page: Path) -> None:
    browser.open(page)
    for chart, button in (
        ("accuracy-rounds", "loss"),
        ("blocks", "weight"),
        ("blocks", "by likeness"),
        ("gate-M", "histograms"),
    ):
        drawing = f"(document.querySelector('[data-chart={chart}] .plot > svg') || {{}}).innerHTML"
        before = browser.run(drawing)
        browser.click(*centre(browser, f"[data-chart={chart}] [data-value='{button}']"))
        browser.wait(f"![undefined, {json.dumps(before)}].includes({drawing})", 5)
    choose = """(() => { const box = document.querySelector('[data-chart=%s] select'); box.selectedIndex = 1;
        box.dispatchEvent(new Event('change')); })()"""
    for chart in ("clients-difference", "gate-M"):
        drawing = f"(document.querySelector('[data-chart={chart}] .plot > svg') || {{}}).innerHTML"
        before = browser.run(drawing)
        browser.run(choose % chart)
        browser.wait(f"![undefined, {json.dumps(before)}].includes({drawing})", 5)
    assert browser.console == []


def test_theme_button(browser: Browser, page: Path) -> None:
    browser.open(page)
    colour = "getComputedStyle(document.body).backgroundColor"
    before = browser.run(colour)
    browser.click(*centre(browser, ".theme"))
    assert browser.run("document.documentElement.dataset.theme") == "dark"
    assert browser.run(colour) != before


def test_tables_are_copied(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.run("window.copied = []; navigator.clipboard.writeText = async (text) => { window.copied.push(text); }")
    for name in ("latex", "markdown", "csv"):
        browser.click(*centre(browser, f"#summary [data-copy={name}]"))
    browser.wait("window.copied.length === 3", 5)
    latex, markdown, comma = browser.run("window.copied")
    assert latex.startswith("\\begin{tabular}")
    assert markdown.startswith("| run |")
    assert comma.startswith("run,")


def test_one_run_without_gates(browser: Browser, runs: Path, tmp_path: Path) -> None:
    browser.open(report.write([runs / "fedavg"], tmp_path / "one.html")[0], width=390)
    names = browser.run("[...document.querySelectorAll('figure')].map((f) => f.dataset.chart)")
    rest = {"clients-difference", "uploaded", "density", "q", "blocks", "gate-M", "gate-G", "changes", "tree"}
    assert set(names) == CHARTS - rest
    assert browser.console == []


def test_names_are_text_not_markup(browser: Browser, runs: Path, tmp_path: Path) -> None:
    runs_ = report.open_runs([runs / "pfedgate", runs / "fedavg"])
    content = report.gather(runs_)
    for run in content["runs"]:
        run["label"] = "<img src=x onerror=console.log('evil')>" + run["label"]
    from pfedgate.report import html

    browser.open(html.write(content, tmp_path / "evil.html"))
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert browser.console == []
