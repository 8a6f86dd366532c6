"""The file: whole, safe and small. What it looks like in a browser is in test_browser."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pfedgate import report
from pfedgate.cli import app
from pfedgate.report import html


def test_nothing_comes_from_elsewhere(content: dict) -> None:
    page = html.render(content)
    assert len(page) < html.LARGEST
    own = re.sub(r"(?s)<script>.*?</script>", "", page)
    links = re.findall(r"""(?:src|href)\s*=\s*["']([^"']+)""", own)
    assert all(link.startswith(("#", "data:")) for link in links)
    assert not re.search(r"https?:", own)
    assert "@import" not in own
    assert not re.search(r"url\((?!\s*data:)", own)
    assert "default-src 'none'" in page


def test_text_of_runs_cannot_become_markup(content: dict) -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    page = html.render({**content, "title": evil, "runs": [{**run, "label": evil} for run in content["runs"]]})
    assert "<script>alert" not in page
    assert "<img src=x" not in re.sub(r"(?s)<script>.*?</script>", "", page)
    data = re.search(r'id="content">(.*?)</script>', page, re.S)
    assert data is not None
    assert json.loads(data.group(1))["runs"][0] == evil


def test_vendored_scripts_are_those_of_the_registry() -> None:
    script = Path(__file__).parents[2] / "scripts/vendor-vega.py"
    subprocess.run([sys.executable, str(script), "--check"], check=True)
    page = (html._library(name) for name in html.LIBRARIES)
    assert all("Copyright (c)" in text and "sourceMappingURL" not in text for text in page)


def test_command(runs: Path, tmp_path: Path) -> None:
    folders = [str(runs / name) for name in ("pfedgate", "fedavg")]
    result = CliRunner().invoke(app, ["report", *folders, "--out", str(tmp_path / "r.html"), "--title", "My <runs>"])
    assert result.exit_code == 0, result.output
    assert str(tmp_path / "r.html") in result.output.replace("\n", "")
    assert "<title>My &lt;runs&gt;</title>" in (tmp_path / "r.html").read_text()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--baseline", "fedavq"], "did you mean 'fedavg'"),
        (["--figures", "jpg"], "unknown format"),
        (["nowhere"], "holds no run"),
    ],
)
def test_command_says_what_is_wrong(runs: Path, more: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["report", str(runs / "fedavg"), *more])
    assert result.exit_code == 1
    assert said in result.output


def test_training_can_end_with_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[dict] = []

    def build(name: str, folder: Path, recipe: object) -> object:
        assert name == "tensorboard"
        return contextlib.nullcontext(events.append)

    monkeypatch.setattr("pfedgate.runs.trackers.build", build)
    monkeypatch.setattr("pfedgate.runs.trackers.check", lambda names: None)
    few = ["--set", "train.rounds=1", "--set", "data.clients=4", "--set", "data.samples=200", "--set", "run.workers=1"]
    more = ["--out", str(tmp_path / "both"), "--report", "--track", "tensorboard"]
    result = CliRunner().invoke(app, ["compare", "pfedgate", "fedavg", *few, *more])
    assert result.exit_code == 0, result.output
    assert str(tmp_path / "both" / "report.html") in result.output
    assert '"runs":["pfedgate","fedavg"]' in (tmp_path / "both" / "report.html").read_text()
    assert [event["event"] for event in events] == ["start", "round", "end"] * 2


def test_default_place(runs: Path) -> None:
    assert report.write([runs / "fedavg"])[0] == runs / "fedavg" / "report.html"
