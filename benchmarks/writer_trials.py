"""What helps clients that the shared model serves badly: hard writers of FEMNIST, judged on validation data.

    python benchmarks/writer_trials.py                 all trials that are not in the file yet (four minutes each)
    python benchmarks/writer_trials.py --table         the results as Markdown

A bottom decile is the accuracy of one client on a few dozen images. So a trial here is three runs with other writers
(25 each; the paper's network, batch 32, 30 rounds), and what counts is the mean over the lowest fifth of them, on
validation data.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from gate_trials import NESTED, PARAMS, Found, Trial, around, main, run
from pfedgate.engine.endpoint import Scored

OUT = Path(__file__).parent / "results" / "writer_trials.jsonl"
SEEDS = 3
LAYERS = ["conv1", "conv2", "fc1", "out"]

TRIALS: dict[str, Trial] = {
    "FedAvg": {"method": "fedavg", "lr": 0.1},
    "LG-FedAvg (own convolutions)": {"method": "lg_fedavg", "lr": 0.05},
    **around(
        "s = 0.5, params, shift",
        {"lr": 0.05, "budget": 0.5, "smallest": 0.1, "shift": True, **PARAMS, **NESTED},
        {
            "": {},
            "own first layer": {"own": "first"},
            "own convolutions": {"own": LAYERS[:2]},
            "own biases": {"own": [f"{layer}.bias" for layer in LAYERS]},
        },
    ),
}
TRIALS = {name: {"data": "femnist", **trial} for name, trial in TRIALS.items()}


def lowest(scores: Sequence[Scored]) -> dict[str, Any]:
    """The mean of the lowest fifth: what a bottom decile is about, of more than one client."""
    accuracies = sorted(score.val.accuracy for score in scores)
    return {"lowest fifth": round(100 * fmean(accuracies[: len(accuracies) // 5]), 1)}


def thrice(trial: Trial, data_dir: str | None) -> dict[str, Any]:
    """Means over seeds, and what each of them said of the lowest fifth."""
    found = [run(trial, data_dir, seed, lowest) for seed in range(SEEDS)]
    means = {key: round(fmean(told[key] for told in found), 1) for key in ("test", "bottom decile", "lowest fifth")}
    curve = [round(fmean(points), 1) for points in zip(*(told["validation"] for told in found), strict=True)]
    return {"validation": curve, **means, "each": [told["lowest fifth"] for told in found]}


def table(found: Found) -> str:
    """All trials in their order."""
    lines = [
        "| trial | validation | lowest fifth | of each seed | test | bottom decile |",
        "|---|---|---|---|---|---|",
    ]
    for name in TRIALS:
        if (done := found.get(name)) is not None:
            cells = [name, done["validation"][-1], done["lowest fifth"], _list(done["each"])]
            lines.append("| " + " | ".join(map(str, [*cells, done["test"], done["bottom decile"]])) + " |")
    return "\n".join(lines)


def _list(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in values)


if __name__ == "__main__":
    main(TRIALS, OUT, thrice, table, __doc__)
