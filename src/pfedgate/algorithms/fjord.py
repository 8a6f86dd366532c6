"""FjORD (Horváth et al. 2021, Fair and Accurate FL under heterogeneous targets with Ordered Dropout).

Shared: one wide model; a client gets, trains and returns the first units of every hidden layer, as many as it can
afford. Ordered Dropout: every batch trains a prefix of them, whose width is drawn from `widths` and the client's own,
so that all widths inside are models that can be used. Private: nothing. The server averages every element over the
clients that have it. With `distil` a step trains the client's whole part as well, which teaches the prefix. Without
`widths` and with whole budgets this is FedAvg.

A step is that of the authors' code for Flower, where networks have no norm: see its test. Departures: running
statistics of norms are shared by all widths (official: BatchNorm layers of their own for each); the client's own width
follows from its budget as in HeteroFL (official: one of `widths`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from pfedgate.algorithms import register
from pfedgate.algorithms.heterofl.narrow import INNER, NarrowClients, NarrowModel
from pfedgate.core.state import inside, under
from pfedgate.core.types import Local, State, Update
from pfedgate.training.fit import Batch, fit
from pfedgate.training.workspace import flops_per_sample


@register("fjord")
@dataclass(frozen=True)
class FjORD(NarrowClients):
    """Nested narrow models, trained by Ordered Dropout."""

    widths: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8)  # shares of units that a batch may train; the paper's uniform-5
    distil: bool = False  # the client's whole part teaches the prefix

    paper = "Horváth et al. 2021, FjORD: Fair and Accurate FL with Ordered Dropout"
    shares = "the first units of every layer, as many as the budget allows"
    grid: ClassVar[dict[str, tuple[object, ...]]] = {"distil": (False, True)}

    def __post_init__(self) -> None:
        if not all(0 < width <= 1 for width in self.widths):
            raise ValueError(f"widths are shares of units in (0, 1], got {self.widths}")
        if self.distil and self.task.kind != "classification":
            raise ValueError(f"distil needs classes, which {self.task.kind} has not: leave it out")

    def train(self, got: State, private: State, local: Local) -> tuple[Update, State]:
        """Local epochs, every batch at a width of its own."""
        whole = self.width(local.card)
        choices = [replace(whole, width=width) for width in self.widths if width < whole.width] + [whole]
        draw, flops = local.generator("width"), 0.0

        def objective(model: nn.Module, batch: Batch) -> Tensor:
            nonlocal flops
            assert isinstance(model, NarrowModel)
            narrow = choices[int(torch.randint(len(choices), (), generator=draw))] if len(choices) > 1 else whole
            each = [narrow, whole] if self.distil else [narrow]
            flops += sum(flops_per_sample(n, None, batch.x.shape[1:], batch.x.dtype, True) for n in each) * batch.n
            output = model(batch.x) if narrow is whole else model.within(batch.x, narrow)
            if not self.distil:
                return self.task.loss(output, batch.y).mean()
            teacher = model(batch.x)
            taught = nn.functional.cross_entropy(output, teacher.detach().softmax(1))
            return self.task.loss(teacher, batch.y).mean() + taught

        done = fit(replace(self.task, model=whole), under(INNER, got), local, objective=objective)
        metrics = {**done.metrics, "flops": flops, "density": whole.density}
        return Update(inside(INNER, done.state), local.n, metrics), {}
