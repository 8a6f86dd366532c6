"""How long the choice of blocks takes, and how far it is from a MILP solver's optimum.

    python benchmarks/selection.py            times in milliseconds
    python benchmarks/selection.py --milp     also the loss against HiGHS, in percent (minutes)

Median and maximum over five inputs of each kind; the loss is that of the first input. HiGHS has --seconds for
each choice; where that is too short, the loss is printed with "<" and taken against HiGHS' upper bound.
Writes benchmarks/results/selection.json.
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
from tests.support import selection as s

from pfedgate.gating.selection.budget import Budget, CostModel, Selector
from pfedgate.runs.environment import environment

REPETITIONS = 15
SEEDS = 5
GAP = 1e-3  # up to which HiGHS solves


def cases() -> dict[str, tuple[CostModel, Budget]]:
    random = np.random.default_rng(0)
    sizes = [2400, 32, 51_200, 64, 192_000, 120, 10_080, 84, 840, 10]
    return {
        "CIFAR-10 network, all resources": (s.planned("cnn_cifar10"), Budget.of(0.3)),
        "CIFAR-10 network, parameters": (s.planned("cnn_cifar10"), Budget(params=0.3)),
        "CIFAR-10 network, paper's blocks": (s.flat(sizes), Budget(params=0.3)),
        "FEMNIST network, all resources": (s.planned("cnn_femnist"), Budget.of(0.3)),
        "ResNet-8, all resources": (s.planned("resnet"), Budget.of(0.3)),
        "ViT-12, all resources": (s.planned("vit", depth=12), Budget.of(0.3)),
        **{
            f"{n} tensors, parameters": (s.flat(random.integers(1_000, 200_000, n).tolist()), Budget(params=0.3))
            for n in (24, 49, 81)
        },
        **{f"ResNet-{n}, all resources": (s.planned("resnet", depth=n), Budget.of(0.4)) for n in (20, 32, 50)},
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
        row: dict[str, Any] = {"case": name, "solver": selector.solver, "build_ms": build, "ms": {}}
        row |= {"loss_percent": {}, "loss_at_most_percent": {}}
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
    args.out.write_text(json.dumps({**environment(), "load": os.getloadavg()[0], "rows": rows}, indent=1) + "\n")


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
