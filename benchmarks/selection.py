"""How long the choice of blocks takes, and how far it is from a MILP solver's optimum.

    python benchmarks/selection.py            times in milliseconds
    python benchmarks/selection.py --milp     also the loss against HiGHS, in percent (minutes)

Median and maximum over five inputs of each kind. Writes benchmarks/results/selection.json. The loss is that of
the first input against the best choice HiGHS found. Where HiGHS ran out of time (--seconds), it is at most the one
against HiGHS' upper bound, which is printed with "<".
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # processor time of one thread; read when numpy is imported

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from tests.gating import selection as s

import pfedgate
from pfedgate import models
from pfedgate.core import measure
from pfedgate.gating.selection.budget import Budget, CostModel, Selector

REPETITIONS = 15
SEEDS = 5
GAP = 1e-3  # up to which HiGHS solves


def cases() -> dict[str, tuple[CostModel, Budget]]:
    random = np.random.default_rng(0)
    sizes = [2400, 32, 51_200, 64, 192_000, 120, 10_080, 84, 840, 10]
    many = random.integers(1_000, 200_000, 50).tolist()

    def planned(name: str) -> CostModel:
        return pfedgate.gate(models.build(name), models.example(name), 1.0).plan.costs

    return {
        "CIFAR-10 network, all resources": (planned("cnn_cifar10"), Budget.of(0.3)),
        "CIFAR-10 network, parameters": (planned("cnn_cifar10"), Budget(params=0.3)),
        "CIFAR-10 network, paper's blocks": (s.flat(sizes), Budget(params=0.3)),
        "FEMNIST network, all resources": (planned("cnn_femnist"), Budget.of(0.3)),
        "CIFAR-100 network, all resources": (planned("cnn_cifar100"), Budget.of(0.3)),
        "50 tensors, 200 blocks, parameters": (s.flat(many), Budget(params=0.3)),
        "ResNet-8, all resources": (planned("resnet"), Budget.of(0.3)),
        "plain 20, all resources": (s.plain(20, random), Budget.of(0.3)),
        "plain 50, all resources": (s.plain(50, random), Budget.of(0.3)),
        "plain 50, FLOPs": (s.plain(50, random), Budget(flops=0.3)),
        "residual 51, all resources": (s.residual(16), Budget.of(0.4)),
        "independent 50, three resources": (s.independent(50, 3, random), Budget.of(0.3)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--milp", action="store_true", help="compare with HiGHS")
    parser.add_argument("--seconds", type=float, default=60.0, help="of HiGHS for each choice")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "selection.json")
    args = parser.parse_args()
    rows = []
    print(f"{'':36}{'solver':>10}{'build ms':>10}" + "".join(f"{kind:>14}" for kind in s.KINDS))
    for name, (costs, budget) in cases().items():
        start = time.process_time()
        selector = Selector(costs, budget)
        build = 1e3 * (time.process_time() - start)
        row: dict[str, Any] = {
            "case": name,
            "solver": selector.solver,
            "build_ms": build,
            "ms": {},
            "loss_percent": {},
            "loss_at_most_percent": {},
        }
        cells = []
        for kind in s.KINDS:
            inputs = [s.importances(kind, costs, np.random.default_rng(seed)) for seed in range(SEEDS)]
            ms = [milliseconds(selector, importance) for importance in inputs]
            row["ms"][kind] = {"median": float(np.median(ms)), "max": max(ms)}
            cells.append(f"{np.median(ms):.2f} /{max(ms):5.2f}")
            if args.milp:
                best, upper = s.milp_range(costs, selector.limits, inputs[0], GAP, args.seconds)
                ours = float(inputs[0][selector.select(inputs[0])].sum())
                solved = upper - best <= 2 * GAP * upper
                loss = 100 * (1 - ours / (best if solved else upper))
                row["loss_percent"][kind] = loss if solved else None
                row["loss_at_most_percent"][kind] = 100 * (1 - ours / upper)
                cells[-1] = f"{np.median(ms):.2f} {' ' if solved else '<'}{loss:.2f}%"
        print(f"{name:36}{selector.solver:>10}{build:>10.1f}" + "".join(f"{cell:>14}" for cell in cells), flush=True)
        rows.append(row)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(
        json.dumps({"machine": {**measure.machine(), "load": os.getloadavg()[0]}, "rows": rows}, indent=1) + "\n"
    )


def milliseconds(selector: Selector, importance: s.Floats) -> float:
    """Processor time of one selection: the least of several, since other processes only ever add to it."""
    seconds = []
    for _ in range(REPETITIONS):
        start = time.process_time()
        selector.select(importance)
        seconds.append(time.process_time() - start)
    return 1e3 * min(seconds)


if __name__ == "__main__":
    main()
