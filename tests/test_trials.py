"""The trials behind the gate's defaults: the page shows all of them, and what the script tries are these."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def trials() -> Any:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("gate_trials")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def test_every_trial_was_run_as_it_stands_and_is_on_the_page(trials: Any) -> None:
    lines = (ROOT / "benchmarks/results/gate_trials.jsonl").read_text().splitlines()
    found = {record["name"]: record for record in map(json.loads, lines)}
    assert {name: record["trial"] for name, record in found.items()} == trials.TRIALS
    page = (ROOT / "docs/explanation/what-makes-gating-work.md").read_text()
    assert trials.table(found) in page
