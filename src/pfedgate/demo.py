"""Gated models on scikit-learn's digits, beside the dense one: what a budget costs and what it saves.

`python -m pfedgate.demo` (or `make demo`). All models see the same batches in turn, step by step, so that
their times can be compared on a busy machine. This is gating alone, without federated learning; it has its
own batch loop because it takes the time of every single step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import pfedgate
from pfedgate import models
from pfedgate.core.seeds import generator, seeded

BUDGETS = (1.0, 0.5, 0.3)
BATCH = 128
LR, MOMENTUM = 0.02, 0.9  # the same for dense and gated
GATE_LR = 0.05
CLIP = 10.0  # the norm at which the authors clip the gradients of model and gate


@dataclass(frozen=True)
class Row:
    """One line of the table; the ratios are to the dense model."""

    name: str
    accuracy: float
    density: float  # the largest share of parameters that any training step used
    flops: float  # one forward pass on a batch, gate included, counted while it runs
    seconds: float  # median of a training step


@dataclass
class _Run:
    """A model in training, dense or gated."""

    name: str
    model: nn.Module
    optimizer: Any
    seconds: list[float] = field(default_factory=list)
    density: float = 0.0

    def step(self, x: Tensor, y: Tensor) -> None:
        start = time.perf_counter()
        self.optimizer.zero_grad()
        torch.autograd.backward(F.cross_entropy(self.model(x), y))
        if not isinstance(self.model, pfedgate.GatedModel):  # gated ones are clipped by their optimiser
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - start)
        last = self.model.last if isinstance(self.model, pfedgate.GatedModel) else None
        self.density = max(self.density, last.density if last else 1.0)


def digits(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x and y of 1,797 real 8×8 images that come with scikit-learn, and those of every fifth, kept for testing.

    >>> [len(part) for part in digits()]
    [1437, 1437, 360, 360]
    """
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.randperm(len(data.target), generator=generator(seed, "demo", "split"))
    x = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1)[order]
    y = torch.tensor(data.target)[order]
    held = len(y) // 5 + 1
    x = (x - x[held:].mean()) / x[held:].std()
    return x[held:], y[held:], x[:held], y[:held]


def compare(
    budgets: Sequence[float] = BUDGETS,
    epochs: int = 20,
    seed: int = 0,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> list[Row]:
    """Train the dense model and a gated one per budget on the digits; a row for each, the dense one first."""
    x, y, test_x, test_y = digits(seed)
    runs = [_run(budget, x[:BATCH], seed) for budget in (None, *budgets)]
    for epoch in progress(range(epochs)):
        order = torch.randperm(len(y), generator=generator(seed, "demo", "batches", epoch))
        # The last, smaller batch is left out: its step time would not compare.
        for rows in torch.split(order, BATCH)[: len(order) // BATCH]:
            for run in runs:
                run.step(x[rows], y[rows])
    flops, accuracy = [], []
    for run in runs:  # FLOPs first: those of a forward in training mode, as in the steps above
        with torch.no_grad():
            with FlopCounterMode(display=False) as counter:
                run.model(x[:BATCH])
            flops.append(counter.get_total_flops())
            run.model.eval()
            guesses = torch.cat([run.model(part).argmax(1) for part in torch.split(test_x, BATCH)])
        accuracy.append(float((guesses == test_y).float().mean()))
    seconds = [statistics.median(run.seconds) for run in runs]
    return [
        Row(run.name, accurate, run.density, count / flops[0], duration / seconds[0])
        for run, accurate, count, duration in zip(runs, accuracy, flops, seconds, strict=True)
    ]


def _run(budget: float | None, example: Tensor, seed: int) -> _Run:
    with seeded(seed, "demo", "model"):  # the same initial weights for all
        model = models.build("cnn_digits")
    if budget is None:
        return _Run("dense", model, torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM))
    with seeded(seed, "demo", "gate"):
        gated = pfedgate.gate(model, example, budget=budget)
    optimizer = gated.optimizer("sgd", lr=LR, gate_lr=GATE_LR, momentum=MOMENTUM, clip=CLIP)
    return _Run(f"budget {budget:g}", gated, optimizer)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: train, print the table, and say what its columns mean."""
    parser = argparse.ArgumentParser(prog="python -m pfedgate.demo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20, help="passes over the data (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="other random numbers, other results (default 0)")
    options = parser.parse_args(arguments)
    if options.epochs < 1:
        parser.error("--epochs must be at least 1")
    console = Console()
    view = Table(title="scikit-learn digits, small CNN: dense and gated")
    view.add_column("model")
    for name in ("accuracy", "density", "FLOPs", "step time"):
        view.add_column(name, justify="right")
    for row in compare(
        epochs=options.epochs,
        seed=options.seed,
        progress=lambda epochs: track(epochs, "training", console=console, transient=True),
    ):
        view.add_row(row.name, f"{row.accuracy:.1%}", f"{row.density:.3f}", f"{row.flops:.3f}", f"{row.seconds:.2f}")
    console.print(view)
    console.print("accuracy on held-out digits; density: most parameters any step used;")
    console.print("FLOPs of the forward pass (with gate) and median step time: share of dense.")
    console.print("[bold]pfedgate.gate(model, example, budget=0.3)[/bold] does the same to your own module.")


if __name__ == "__main__":
    main()
