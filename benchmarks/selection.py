"""How long the choice of blocks takes, and how far it is from a MILP solver's optimum.

    python benchmarks/selection.py            times in milliseconds
    python benchmarks/selection.py --milp     also the loss against HiGHS, in percent (minutes)

Interleaved repetitions; the best of each input counts, since other processes only ever add time.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.gating import selection as s

from pfedgate.gating.budget import Budget, CostModel, Selector

REPETITIONS = 30


def cases() -> dict[str, tuple[CostModel, Budget]]:
    random = np.random.default_rng(0)
    sizes = [2400, 32, 51_200, 64, 192_000, 120, 10_080, 84, 840, 10]
    many = random.integers(1_000, 200_000, 50).tolist()
    return {
        "CIFAR-10 network, all resources": (s.cifar10(), Budget.of(0.3)),
        "CIFAR-10 network, parameters": (s.cifar10(), Budget(params=0.3)),
        "CIFAR-10 network, paper's blocks": (s.flat(sizes), Budget(params=0.3)),
        "FEMNIST network, all resources": (s.femnist(), Budget.of(0.3)),
        "50 tensors, 200 blocks, parameters": (s.flat(many), Budget(params=0.3)),
        "plain 20, all resources": (s.plain(20, random), Budget.of(0.3)),
        "plain 50, all resources": (s.plain(50, random), Budget.of(0.3)),
        "plain 50, FLOPs": (s.plain(50, random), Budget(flops=0.3)),
        "residual 51, all resources": (s.residual(16), Budget.of(0.4)),
        "independent 50, three resources": (s.independent(50, 3, random), Budget.of(0.3)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--milp", action="store_true", help="compare with HiGHS")
    compare = parser.parse_args().milp
    print(f"{'':36}{'solver':>10}{'build ms':>10}" + "".join(f"{kind:>14}" for kind in s.KINDS))
    for name, (costs, budget) in cases().items():
        start = time.perf_counter()
        selector = Selector(costs, budget)
        build = 1e3 * (time.perf_counter() - start)
        inputs = [s.importances(kind, costs, np.random.default_rng(1)) for kind in s.KINDS]
        seconds = np.full((REPETITIONS, len(inputs)), np.inf)
        for row in seconds:
            for i, importance in enumerate(inputs):
                start = time.perf_counter()
                selector.select(importance)
                row[i] = time.perf_counter() - start
        cells = [f"{1e3 * best:.2f}" for best in seconds.min(0)]
        if compare:
            for i, importance in enumerate(inputs):
                best = s.by_milp(costs, selector.limits, importance, gap=1e-4, seconds=60.0)
                ours = float(importance[selector.select(importance)].sum())
                cells[i] += f" {100 * (1 - ours / best):5.2f}%"
        print(f"{name:36}{selector.solver:>10}{build:>10.1f}" + "".join(f"{cell:>14}" for cell in cells))


if __name__ == "__main__":
    main()
