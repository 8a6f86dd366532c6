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
LR, MOMENTUM = 0.02, 0.9  # the same for dense and gated
GATE_LR = 0.05
CLIP = 10.0  # the norm at which the authors clip the gradients of model and gate


@dataclass(frozen=True)
class Split:
    """The digits, scaled to mean 0 and deviation 1 by the training part."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


@dataclass(frozen=True)
class Row:
    """One line of the table; the ratios are to the dense model."""

    name: str
    budget: float | None  # None: the dense model itself
    accuracy: float
    density: float  # the largest share of parameters that any training step used
    flops: float  # one forward pass on a batch, gate included, counted while it runs
    seconds: float  # median of a training step


@dataclass
class _Run:
    """A model in training, dense or gated."""

    name: str
    budget: float | None
    model: nn.Module
    zero_grad: Callable[[], object]
    step: Callable[[], object]
    density: Callable[[], float]
    seconds: list[float] = field(default_factory=list)
    densities: list[float] = field(default_factory=list)


def digits(seed: int = 0) -> Split:
    """1,797 real 8×8 images that come with scikit-learn; every fifth, in random order, is for testing.

    >>> split = digits()
    >>> split.x.shape, split.test_x.shape
    (torch.Size([1437, 1, 8, 8]), torch.Size([360, 1, 8, 8]))
    """
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.randperm(len(data.target), generator=generator(seed, "demo", "split"))
    x = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1)[order]
    y = torch.tensor(data.target)[order]
    held = len(y) // 5 + 1
    mean, deviation = x[held:].mean(), x[held:].std()
    x = (x - mean) / deviation
    return Split(x[held:], y[held:], x[:held], y[:held])


def compare(
    budgets: Sequence[float] = BUDGETS,
    epochs: int = 20,
    batch: int = 128,
    seed: int = 0,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> list[Row]:
    """Train the dense model and a gated one per budget on the digits; a row for each, the dense one first."""
    split = digits(seed)
    runs = [_dense(seed), *(_gated(budget, split.x[:batch], seed) for budget in budgets)]
    for epoch in progress(range(epochs)):
        order = torch.randperm(len(split.y), generator=generator(seed, "demo", "batches", epoch))
        # The last, smaller batch is left out: its step time would not compare.
        for rows in torch.split(order, batch)[: len(order) // batch]:
            x, y = split.x[rows], split.y[rows]
            for run in runs:
                run.seconds.append(_step(run, x, y))
                run.densities.append(run.density())
    # Flops first: a gated model's are those of its forward in training mode, as in the steps above.
    flops = [_forward_flops(run.model, split.x[:batch]) for run in runs]
    seconds = [statistics.median(run.seconds) for run in runs]
    return [
        Row(
            name=run.name,
            budget=run.budget,
            accuracy=_accuracy(run.model, split, batch),
            density=max(run.densities),
            flops=count / flops[0],
            seconds=duration / seconds[0],
        )
        for run, count, duration in zip(runs, flops, seconds, strict=True)
    ]


def table(rows: Sequence[Row]) -> Table:
    """The rows for the terminal."""
    view = Table(title="scikit-learn digits, small CNN: dense and gated")
    view.add_column("model")
    for name in ("accuracy", "density", "FLOPs", "step time"):
        view.add_column(name, justify="right")
    for row in rows:
        view.add_row(row.name, f"{row.accuracy:.1%}", f"{row.density:.3f}", f"{row.flops:.3f}", f"{row.seconds:.2f}")
    return view


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: train, print the table, and say what runs sliced."""
    parser = argparse.ArgumentParser(prog="python -m pfedgate.demo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20, help="passes over the data (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="other random numbers, other results (default 0)")
    options = parser.parse_args(arguments)
    if options.epochs < 1:
        parser.error("--epochs must be at least 1")

    console = Console()
    rows = compare(
        epochs=options.epochs,
        seed=options.seed,
        progress=lambda epochs: track(epochs, "training", console=console, transient=True),
    )
    console.print(table(rows))
    console.print("accuracy on held-out digits; density: most parameters any step used;")
    console.print("FLOPs of the forward pass (with gate) and median step time: share of dense.")
    console.print("[bold]pfedgate.gate(model, example, budget=0.3)[/bold] does the same to your own module.")


def _dense(seed: int) -> _Run:
    model = _model(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)

    def step() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()

    return _Run("dense", None, model, optimizer.zero_grad, step, lambda: 1.0)


def _gated(budget: float, example: Tensor, seed: int) -> _Run:
    with seeded(seed, "demo", "gate"):
        gated = pfedgate.gate(_model(seed), example, budget=budget)
    optimizer = gated.optimizer("sgd", lr=LR, gate_lr=GATE_LR, momentum=MOMENTUM, clip=CLIP)

    def density() -> float:
        assert gated.last is not None, "a step comes first"
        return gated.last.density

    return _Run(f"budget {budget:g}", budget, gated, optimizer.zero_grad, optimizer.step, density)


def _model(seed: int) -> nn.Module:
    """The same initial weights for all."""
    with seeded(seed, "demo", "model"):
        return models.build("cnn_digits")


def _step(run: _Run, x: Tensor, y: Tensor) -> float:
    start = time.perf_counter()
    run.zero_grad()
    loss = F.cross_entropy(run.model(x), y)
    torch.autograd.backward(loss)
    run.step()
    return time.perf_counter() - start


def _forward_flops(model: nn.Module, x: Tensor) -> int:
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model(x)
    return int(counter.get_total_flops())


def _accuracy(model: nn.Module, split: Split, batch: int) -> float:
    model.eval()
    with torch.no_grad():
        guesses = torch.cat([model(x).argmax(1) for x in torch.split(split.test_x, batch)])
    return float((guesses == split.test_y).float().mean())


if __name__ == "__main__":
    main()
