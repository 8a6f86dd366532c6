"""What trust costs a round: the boundary and the guard on and off, in turns, in one process.

    python benchmarks/trust.py [--repeats 7] [--rounds 3]

The demo's network and data, without a folder; `benchmarks/durable.py` measures what flushing to the disk costs.
"without" admits every update as it is and merges by the plain mean. Processor time, medians of pairs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch

from pfedgate import experiment
from pfedgate.engine import boundary

DATA: dict[str, Any] = {
    "data": {"name": "fashion"}, "model": {"name": "cnn_femnist"}, "evaluate": {"every": 0}, "run": {"workers": 1},
}  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {
    "FedAvg": {"algorithm": {"name": "fedavg"}},
    "pFedGate at .3": {"algorithm": {"name": "pfedgate", "resources": "all"}, "clients": {"budget": 0.3}},
}


def seconds(method: str, rounds: int, trust: bool) -> float:
    """Processor time of a run."""
    with ExitStack() as stack:
        if not trust:
            stack.enter_context(mock.patch.object(boundary, "admit", lambda algorithm, got, card, update: update))
        planned = experiment.plan(
            experiment.recipe_of(
                {**DATA, **METHODS[method], "train": {"rounds": rounds}, "server.robust": "guard" if trust else "off"},
                {},
            )
        )
        began = time.process_time()
        planned.run()
        return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for method in METHODS:
        seconds(method, 1, True)
        pairs = [
            (seconds(method, given.rounds, True), seconds(method, given.rounds, False)) for _ in range(given.repeats)
        ]
        ratio = statistics.median(trust / plain for trust, plain in pairs)
        times = [1e3 * statistics.median(times) / given.rounds for times in zip(*pairs, strict=True)]
        print(f"{method}: a round {times[0]:.0f} ms, without boundary and guard {times[1]:.0f} ms: ratio {ratio:.3f}")


if __name__ == "__main__":
    main()
