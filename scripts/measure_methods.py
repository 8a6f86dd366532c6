"""Measure what a round of every algorithm costs; write src/pfedgate/config/costs.json and docs/algorithms.md.

    python scripts/measure_methods.py           measure anew (about ten seconds), then write both
    python scripts/measure_methods.py --page    write the page alone, from the costs that ship

A few rounds run on a small invented federation. Only the last one counts, because the first ones may differ: a warm-up,
a model that is sent once. Bytes are those of real messages, operations those of the clients in training.
"""

from __future__ import annotations

import json
import sys
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import torch

from pfedgate import algorithms
from pfedgate.config import toml
from pfedgate.config.methods import BUDGET, cells, methods
from pfedgate.core.types import Optim, Task
from pfedgate.data import from_arrays
from pfedgate.engine import server as engine
from pfedgate.models import build

ROOT = Path(__file__).resolve().parent.parent
COSTS, PAGE = ROOT / "src/pfedgate/config/costs.json", ROOT / "docs/algorithms.md"
ROUNDS, CLIENTS, SAMPLES = 4, 3, 100

HEAD = f"""# Algorithms

<!-- written by `python scripts/measure_methods.py`; do not edit -->

`pfedgate run --set algorithm.name=ditto --set algorithm.lam=0.5` trains one of these, and so does a recipe with the
same in its section `[algorithm]`. To add one, see [Add an algorithm](how-to/add-an-algorithm.md).

Traffic and compute of a round are measured, relative to FedAvg: a small convolutional network (53,000 parameters),
{CLIENTS} clients of {SAMPLES * 4 // 5} samples, default options, every client at a budget of {BUDGET}; of {ROUNDS}
rounds the last is counted. Compute is that of clients in training; what a method does when it is scored (fine-tuning,
nearest neighbours) or on the server (pFedHN) comes on top.

| algorithm | shared | private | down | up | compute |
|---|---|---|---|---|---|
"""


def measure(name: str) -> dict[str, float]:
    """The last round's bytes and operations of an algorithm with default options, every client at `BUDGET`."""
    rng = np.random.default_rng(0)
    total = CLIENTS * SAMPLES
    x = rng.integers(0, 256, (total, 8, 8, 1), dtype=np.uint8)
    federation = from_arrays(x, rng.integers(0, 10, total), owners=np.arange(total) % CLIENTS, val=False)
    task = Task(
        partial(build, "cnn_digits", (1, 8, 8), 10), optim=Optim(lr=0.01), batch=20, example=torch.zeros(4, 1, 8, 8)
    )
    options = engine.Options(rounds=ROUNDS, evaluate_every=0, novel=False, budget=BUDGET, stack=0, device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        last = engine.run(algorithms.build(name, task), federation, options).history[-1]
    return {key: float(last.get(key, 0.0)) for key in ("bytes_down", "bytes_up", "flops")}


def markdown() -> str:
    """A page: a table of all, then a section for each."""
    lines, listed = HEAD.splitlines(), methods()
    for m in listed:
        lines.append(f"| [{m.name}](#{m.name}) | {m.shares} | {m.keeps} | {' | '.join(cells(m.cost))} |")
    for m in listed:
        lines += ["", f"## {m.name}", "", m.about]
        if m.options:
            lines += ["", "| option | default | why | the paper's values |", "|---|---|---|---|"]
        for option in m.options.values():
            tried, why = m.grid.get(option.name, ()), option.why.replace("|", "\\|")
            values = ", ".join(map(toml.dump, tried))
            lines.append(f"| `{option.name}` | `{toml.dump(option.default)}` | {why} | {values} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if "--page" not in sys.argv[1:]:
        costs = {name: measure(name) for name in algorithms.names()}
        COSTS.write_text(json.dumps(costs, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(markdown(), encoding="utf-8")
