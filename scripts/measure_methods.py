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
from pfedgate.config import methods
from pfedgate.config.methods import BUDGET, CLIENTS, ROUNDS, SAMPLES
from pfedgate.core.types import Optim, Task
from pfedgate.data import from_arrays
from pfedgate.engine import server as engine
from pfedgate.models import build

ROOT = Path(__file__).resolve().parent.parent
COSTS, PAGE = ROOT / "src/pfedgate/config/costs.json", ROOT / "docs/algorithms.md"


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


if __name__ == "__main__":
    if "--page" not in sys.argv[1:]:
        costs = {name: measure(name) for name in algorithms.names()}
        COSTS.write_text(json.dumps(costs, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(methods.markdown(methods.methods()), encoding="utf-8")
