"""Tiny runs on digits, made once per process."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.browser import Browser, find

from pfedgate import experiment

SMALL: dict[str, Any] = {
    "data": {"name": "digits", "clients": 8, "samples": 500},
    "train": {"rounds": 4},
    "evaluate": {"every": 2},
    "run": {"workers": 1},
}


def cut(run: Path, to: Path, rounds: int) -> Path:
    """A copy of a run as it was after so many rounds."""
    shutil.copytree(run, to)
    for name in ("summary.json", "clients.csv"):
        (to / name).unlink()
    lines = (to / "metrics.jsonl").read_text().splitlines()[:rounds]
    (to / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    return to


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs pfedgate, fedavg and ditto; two clients are novel."""
    folder = tmp_path_factory.mktemp("runs")
    for name, budget in (("pfedgate", 0.5), ("fedavg", 1.0), ("ditto", 1.0)):
        clients = {"budget": budget, "novel": 0.25}
        experiment.run(SMALL, algorithm=name, clients=clients, out=folder / name)
    return folder


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One browser for all tests; each opens a page of its own."""
    path = find()
    if path is None:
        pytest.skip("no Chromium here: scripts/install-chromium.sh installs one")
    with Browser(path) as found:
        yield found
