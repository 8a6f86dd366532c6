"""Tiny runs on digits, made once per process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.browser import Browser, find
from tests.support.runs import GATED, SMALL

from pfedgate import experiment, report


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs pfedgate, fedavg and ditto; two clients are novel."""
    folder = tmp_path_factory.mktemp("runs")
    for method, budget in ((GATED, 0.5), ({"name": "fedavg"}, 1.0), ({"name": "ditto"}, 1.0)):
        clients = {"budget": budget, "novel": 0.25}
        experiment.run(SMALL, algorithm=method, clients=clients, out=folder / method["name"])
    return folder


@pytest.fixture(scope="session")
def content(runs: Path) -> dict:
    """What a report of the first two runs says; a test that changes it copies it before."""
    return report.gather(report.open_runs([runs / "pfedgate", runs / "fedavg"]))


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One browser for all tests; each opens a page of its own."""
    path = find()
    if path is None:
        pytest.skip("no Chromium here: scripts/install-chromium.sh installs one")
    with Browser(path) as found:
        yield found
