"""A training step of the gated model against the plain dense module: time, peak tensor bytes, FLOPs.

Beside it stands the step of the compact network with the same blocks: what the gated one could be at best. Forward,
backward and SGD step with momentum, in turn, channels-last on both sides. `time` compares medians by the clock,
`processor` and `/ compact` the least time of the processor, which other processes of a busy machine hardly touch (of
all threads: compare it where there is one). An operation takes microseconds however small its tensors are, so the
number of operations says what a small network can reach. Run `make bench`, or `python benchmarks/step.py --quick`;
`--network`, `--batch` and `--threads` measure only some rows again. Every case is written to
benchmarks/results/step.json as soon as it is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# Read when torch is imported: the profiler's chatter. How threads wait is left to OpenMP, which lets them spin for a
# while: with OMP_WAIT_POLICY=PASSIVE every small operation pays for waking one. On a busy machine measure one thread.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import pfedgate
from pfedgate import models
from pfedgate.core import measure
from pfedgate.engine.workers import steady
from pfedgate.runs.environment import environment

NETWORKS = ("cnn_cifar10", "cnn_femnist", "cnn_digits", "mlp")
BUDGETS = (1.0, 0.5, 0.3)
WARM_UP = 2


def dense_step(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def gated_step(gated: pfedgate.GatedModel, x: Tensor, y: Tensor) -> Callable[[], Any]:
    optimizer = gated.optimizer("sgd", lr=1e-3, gate_lr=1e-3, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(gated(x), y).backward()
        optimizer.step()

    return step


def timed(steps: Mapping[str, Callable[[], Any]], repeats: int) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of each step, called in turn: by the clock the median, of the processor the least."""
    both: dict[str, list[tuple[float, float]]] = {key: [] for key in steps}
    for _ in range(WARM_UP + repeats):
        for key, step in steps.items():
            start = time.perf_counter(), time.process_time()
            step()
            both[key].append((time.perf_counter() - start[0], time.process_time() - start[1]))
    wall = {key: statistics.median(pair[0] for pair in pairs[WARM_UP:]) for key, pairs in both.items()}
    return wall, {key: min(pair[1] for pair in pairs[WARM_UP:]) for key, pairs in both.items()}


class Counter(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def counted(step: Callable[[], Any]) -> int:
    with Counter() as counter:
        step()
    return counter.number


def case(name: str, batch: int, repeats: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)  # networks, gates and so what is kept
    generator = torch.Generator().manual_seed(0)
    x = models.example(name, batch, generator)
    layout = torch.channels_last if x.ndim == 4 else torch.preserve_format
    x, dense = x.to(memory_format=layout), models.build(name).to(memory_format=layout)
    y = torch.randint(0, dense(x).shape[1], (batch,), generator=generator)
    steps: dict[str, Callable[[], Any]] = {"dense": dense_step(dense, x, y)}
    gates: dict[str, pfedgate.GatedModel] = {}
    for budget in BUDGETS:
        model = models.build(name).to(memory_format=layout)
        # Fresh networks, so gates as pFedGate begins with, and blocks as in the recipes: ranked as they stand, in steps
        # of four units.
        gated = gates[f"s = {budget:g}"] = pfedgate.gate(
            model, x, budget=budget, smallest=0.1, gate={"ranking": "nested"}
        )
        steps[f"s = {budget:g}"] = gated_step(gated, x, y)
        if budget < 1:
            least = pfedgate.compact(gated, x).to(memory_format=layout).train().requires_grad_()
            steps[f"compact, s = {budget:g}"] = dense_step(least, x, y)
    chooser = gates[f"s = {BUDGETS[-1]:g}"]

    def gate_only() -> None:
        # What the gate adds to a step: its own forward and backward, and the selection.
        selection, _ = chooser.select(x)
        selection.adapted.sum().backward()

    steps["gate + selection"] = gate_only
    seconds, processor = timed(steps, repeats)
    peaks = {key: measure.peak_bytes(step) for key, step in steps.items()}
    flops = {key: measure.flops(step) for key, step in steps.items()}
    operations = {key: counted(step) for key, step in steps.items()}
    rows = []
    for key in steps:
        small = f"compact, {key}"
        cost = gates[key].last.cost if key in gates and gates[key].last is not None else {}  # type: ignore[union-attr]
        rows.append(
            {
                "network": name,
                "batch": batch,
                "threads": torch.get_num_threads(),
                "case": key,
                "ms": seconds[key] * 1e3,
                "time": seconds[key] / seconds["dense"],
                "processor_time": processor[key] / processor["dense"],
                "against_compact": processor[key] / processor[small] if small in steps else None,
                "operations": operations[key],
                "peak": peaks[key] / peaks["dense"],
                "flops": flops[key] / flops["dense"],
                "selected": cost,
            }
        )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="step of the gated model / step of the dense module")
    for column in (
        "network", "threads", "batch", "case", "ms", "time", "processor", "/ compact", "operations", "peak bytes",
        "FLOPs", "selected",
    ):  # fmt: skip
        table.add_column(column)
    for r in rows:
        selected = " ".join(f"{k} {v:.2f}" for k, v in r["selected"].items())
        table.add_row(
            r["network"], str(r["threads"]), str(r["batch"]), r["case"], f"{r['ms']:.1f}", f"{r['time']:.2f}",
            f"{r['processor_time']:.2f}", _known(r["against_compact"]), str(r["operations"]), f"{r['peak']:.2f}",
            f"{r['flops']:.2f}", selected,
        )  # fmt: skip
    Console(width=160).print(table)


def _known(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one network, batch 128, one thread")
    parser.add_argument("--network", choices=list(NETWORKS), action="append")
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--threads", type=int, action="append")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "step.json")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    steady()  # as in every run, on both sides: else the kernel clears pages anew in every step
    args.out.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    networks = args.network or (["cnn_cifar10"] if args.quick else list(NETWORKS))
    batches = args.batch or ([128] if args.quick else [32, 128, 512])
    wanted = [(n, t, b) for t in args.threads or ([1] if args.quick else [1, 2]) for n in networks for b in batches]
    for name, threads, batch in wanted:
        torch.set_num_threads(threads)
        # Short steps vary most, and are repeated most.
        made = case(name, batch, max(args.repeats // 3, args.repeats * 128 // batch))
        rows = [r for r in rows if (r["network"], r["threads"], r["batch"]) != (name, threads, batch)] + made
        args.out.write_text(json.dumps({**environment(), "load": os.getloadavg()[0], "rows": rows}, indent=1) + "\n")
    show([r for r in rows if (r["network"], r["threads"], r["batch"]) in wanted])


if __name__ == "__main__":
    main()
