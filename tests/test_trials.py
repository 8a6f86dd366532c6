"""The trials behind the gate's defaults: the page shows all of them, and what the script tries are some of these."""

import importlib
from pathlib import Path

import pytest

from pfedgate.config.recipe import resolve

ROOT = Path(__file__).parent.parent


def test_every_trial_was_run_as_it_stands_and_is_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    trials = importlib.import_module("gate_trials")
    records = trials.recorded(trials.OUT)
    assert {name: records[name]["trial"] for name in trials.TRIALS} == trials.TRIALS
    page = (ROOT / "docs/results/trials.md").read_text().splitlines()
    assert set(trials.table(records)) <= set(page)


@pytest.mark.filterwarnings("ignore")  # Options have had other names.
def test_every_trial_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    trials = importlib.import_module("gate_trials")
    outside = ("method", "lr", "budget", "data", "epochs", "optim")
    for trial in trials.TRIALS.values():
        options = {name: value for name, value in trial.items() if name not in outside}
        before = trials.BEFORE if trial["method"] == "pfedgate" else {}
        assert resolve({"algorithm": {"name": trial["method"], **before, **options}})
