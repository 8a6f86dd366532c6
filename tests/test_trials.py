"""The trials behind the gate's defaults: the page shows all of them, and what the scripts try are these."""

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", ["gate_trials", "mixed_trials", "writer_trials"])
def test_every_trial_was_run_as_it_stands_and_is_on_the_page(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    trials = importlib.import_module(name)
    lines = (ROOT / f"benchmarks/results/{name}.jsonl").read_text().splitlines()
    found = {record["name"]: record for record in map(json.loads, lines)}
    assert {name: record["trial"] for name, record in found.items()} == trials.TRIALS
    page = (ROOT / "docs/results/trials.md").read_text()
    assert trials.table(found) in page
