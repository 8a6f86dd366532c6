"""Weak and strong clients in one federation: what each of them gets, judged on validation data.

    python benchmarks/mixed_trials.py                 all trials that are not in the file yet (two minutes each)
    python benchmarks/mixed_trials.py --table         the results as Markdown

The small copy of CIFAR-10 of `gate_trials.py`, and half of its clients can afford .1 of the parameters, half .5.
Accuracies are means over these two groups of clients, also where all have the same budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from gate_trials import NESTED, PARAMS, TRIED, Found, Trial, around, main, run
from pfedgate.engine.endpoint import Scored
from pfedgate.engine.roster import budgets

OUT = Path(__file__).parent / "results" / "mixed_trials.jsonl"
MIXED = {"0.5": 0.5, "0.1": 0.5}

TRIALS: dict[str, Trial] = around(
    "all",
    {"lr": 0.2, "shift": True, **PARAMS, **NESTED, **TRIED},
    {"at .1": {"budget": 0.1}, "at .5": {"budget": 0.5}},
) | around(
    "half at .1, half at .5",
    {"lr": 0.2, "shift": True, "budget": MIXED, **PARAMS, **NESTED, **TRIED},
    {
        "": {},
        "a quarter of all steps at .1": {"narrow": 0.25},
        "half of all steps at .1": {"narrow": 0.5},
    },
)


def groups(scores: Sequence[Scored]) -> dict[str, Any]:
    """Accuracy of the clients that are weak, or strong, where budgets are mixed."""
    clients = [score.client for score in scores]
    of = dict(zip(clients, budgets(MIXED, clients), strict=True))
    return {
        name: round(100 * fmean(score.val.accuracy for score in scores if of[score.client] == share), 1)
        for name, share in (("weak", 0.1), ("strong", 0.5))
    }


def one(trial: Trial, data_dir: str | None) -> dict[str, Any]:
    """A run."""
    return run(trial, data_dir, more=groups)


def table(found: Found) -> str:
    """All trials in their order."""
    lines = ["| trial | validation | weak clients | strong clients | test |", "|---|---|---|---|---|"]
    for name in TRIALS:
        if (done := found.get(name)) is not None:
            cells = [name, done["validation"][-1], done["weak"], done["strong"], done["test"]]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main(TRIALS, OUT, one, table, __doc__)
