"""Per-FedAvg (Fallah et al. 2020, Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
Meta-Learning Approach).

The server minimises the mean of f_i(w − alpha·∇f_i(w)): a model that one gradient step makes personal. Shared: w.
Private: nothing. A meta-step takes u = w − alpha·∇f(w; D), g = ∇f(u; D'), and moves w along
    order="first"   g
    order="hf"      g − alpha·(∇f(w + d·g; D″) − ∇f(w − d·g; D″)) / 2d     (Hessian-free; 4 gradients)
Scored is u after `adapt_steps` steps with alpha on *training* batches; novel clients do the same.

Departures: local epochs count meta-steps: D' are the batches every method sees, D and D″ are drawn beside them (alpha
= 0 is FedAvg at rate beta); a client smaller than a batch uses all its data each time. d is relative, d·‖g‖ =
delta·‖w‖, so that single precision survives. The meta-step goes through the task's optimiser. The mean is weighted by
sample counts (paper: uniform). alpha belongs to the objective and is not scheduled. The widely copied implementation
adapts on *test* batches at evaluation; this one cannot see them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from pfedgate.algorithms import register
from pfedgate.core.algorithm import Algorithm
from pfedgate.core.errors import unknown
from pfedgate.core.modules import module
from pfedgate.core.seeds import seeded
from pfedgate.core.state import clone, inside, under
from pfedgate.core.types import Card, Local, State, Update
from pfedgate.training.fit import Batch, Workspace, fit, read
from pfedgate.training.workspace import Stepper

ORDERS = ("first", "hf")
Quiet = Callable[[], AbstractContextManager[None]]


@register("per_fedavg")
@dataclass(frozen=True)
class PerFedAvg(Algorithm):
    """A shared model that one gradient step makes personal."""

    order: str = "first"  # "first" or "hf": twice and four times FedAvg's work
    alpha: float = 0.01  # the personal step; the paper's
    beta: float | None = None  # the meta-step; None: the task's rate, so that it is tuned like any other
    delta: float = 1e-3  # width of the finite difference, relative to ‖w‖/‖g‖
    adapt_steps: int = 1  # personal steps before prediction; the paper's

    paper = "Fallah et al. 2020, Personalized Federated Learning: A Model-Agnostic Meta-Learning Approach"
    tunes = True
    grid: ClassVar[dict[str, tuple[object, ...]]] = {"alpha": (0.005, 0.01, 0.03, 0.05, 0.1, 0.3, 0.5)}

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(unknown("order", self.order, ORDERS))
        if self.alpha < 0 or self.delta <= 0:
            raise ValueError(f"alpha is not negative and delta > 0; got {self.alpha}, {self.delta}")

    def train(self, got: State, private: State, local: Local) -> tuple[Update, State]:
        """Meta-steps from the received model."""
        optim = self.task.optim
        rate = (optim.lr if self.beta is None else self.beta) * local.round.factor
        stepper = Stepper(optim, rate)
        beside = local.generator("beside")
        count = 0

        def draw() -> Batch:
            rows = torch.randperm(local.n, generator=beside)[: self.task.batch]
            return read(local.train, rows, local)

        def step(work: Workspace, batch: Batch) -> Tensor:
            nonlocal count
            w = work.flat.clone()
            with _aside(work, local, "inner", count):
                work.gradient(draw(), self.task.loss)
            stepper.clip(work.grad)
            work.flat.add_(work.grad, alpha=-self.alpha)
            loss = work.gradient(batch, self.task.loss)
            stepper.clip(work.grad)
            direction = work.grad.clone()
            if self.order != "first":
                curved = self._hessian(work, w, direction, draw(), partial(_aside, work, local, "curvature", count))
                direction.add_(curved, alpha=-self.alpha)
            work.flat.copy_(w)
            stepper.step(work.flat, direction)
            count += 1
            return loss

        done = fit(self.task, got, local, step=step)
        return Update(done.state, local.n, done.metrics), {}

    def _hessian(self, work: Workspace, w: Tensor, g: Tensor, batch: Batch, quiet: Quiet = nullcontext) -> Tensor:
        """∇²f(w; batch)·g, by a central difference."""
        # Relative to ‖w‖, but not to that of a model at the origin; a gradient of zero has a product of zero.
        width = self.delta * w.norm().clamp_min(1.0) / g.norm().clamp_min(1e-30)
        sides = []
        for sign in (1, -1):
            torch.add(w, g * width, alpha=sign, out=work.flat)
            with quiet():  # the same dropout on both sides, or their difference is noise
                work.gradient(batch, self.task.loss)
            sides.append(work.grad.clone())
        return torch.div(sides[0] - sides[1], 2 * width)

    def own_epochs(self, got: State, private: State, local: Local) -> tuple[State, State, float]:
        """Plain epochs from the received model, in place of the personal step."""
        done = fit(self.task, got, local)
        return got, {**private, **under("personal/", done.state)}, done.flops

    def personalise(self, got: State, private: State, local: Local) -> State:
        """The received model after the personal step."""
        if inside("personal/", private):
            return private
        optim = replace(self.task.optim, name="sgd", momentum=0.0, weight_decay=0.0)
        still = replace(local, round=replace(local.round, factor=1.0))
        task = replace(self.task, optim=optim)
        done = fit(task, got, still, lr=self.alpha, steps=self.adapt_steps, stream="tune")
        return {**private, **under("personal/", done.state)}

    def predictor(self, got: State, private: State, card: Card) -> nn.Module:
        """The model after the personal step."""
        return module(self.task, inside("personal/", private) or got)


@contextmanager
def _aside(work: Workspace, local: Local, purpose: str, count: int) -> Iterator[None]:
    """Passes beside the main one: it notices them neither in its buffers nor in its random numbers (dropout)."""
    buffers = clone(work.buffers)
    with seeded(local.round.seed, "dropout", purpose, local.round.index, local.card.id, count):
        yield
    for name, value in buffers.items():
        work.buffers[name].copy_(value)
