"""A client's own part of the task, offered to every method alike: its label frequencies, and a shift per class.

A method does not see it: the client's endpoint hands it a task whose loss adds the client's values to the output, and
adds the same values to what the method's `predictor` returns. Nothing of it is sent.

    correction = "prediction"   logits + log frequencies when a model is used (Bayes' rule, if only labels differ)
    correction = "training"     in the loss, too: the shared model learns what the frequencies do not say
    shift                       a value per class beside them, learnt by the client and kept
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pfedgate.core.algorithm import Algorithm
from pfedgate.core.types import Local, State, Task

SHIFT = "task/shift"  # the name in a client's private State
Step = Callable[[Tensor, Tensor], None]  # moves a vector along its gradient


def log_frequencies(labels: Tensor, classes: int) -> Tensor:
    """Logarithms of how likely each class is for a client with these labels, around 0, as far as they tell much.

    Few labels prove little, and a class not seen yet may still come: counts are smoothed by a symmetric Dirichlet
    prior, of the strength that makes the counts most likely. Then every value is moved towards 0 by 1: smaller
    differences are chance, or the same for all clients, and those the shared model learns better (on FEMNIST, whose
    writers have much the same classes, a writer's own counts predict its labels worse than everybody's).

    >>> log_frequencies(torch.tensor([0, 1, 2, 0, 1, 2]), 3).abs().max()
    tensor(0., dtype=torch.float64)
    >>> log_frequencies(torch.tensor([0] * 50 + [1] * 5), 3).argsort().tolist()
    [2, 1, 0]
    """
    counts = torch.bincount(labels.cpu().long().flatten(), minlength=classes).double()
    strengths = torch.logspace(-1, 5, 61, dtype=torch.float64)
    each = strengths[:, None] / classes
    likelihood = torch.lgamma(strengths) - torch.lgamma(counts.sum() + strengths)
    likelihood += (torch.lgamma(counts + each) - torch.lgamma(each)).sum(1)
    logs = (counts + each[int(likelihood.argmax())]).log()
    return nn.functional.softshrink(logs - logs.mean(), 1.0)


class Own:
    """The own part of one client for one call: made of its private State and its labels, read back with `state`."""

    def __init__(self, task: Task, private: State, local: Local, step: Callable[[float], Step] | None = None) -> None:
        self.task = task
        self.prior: Tensor | None = None
        classes = task.classes if task.kind == "classification" else None
        if task.correction != "none" and classes and not (labels := local.train.y).is_floating_point():
            logs = log_frequencies(labels, classes)
            self.prior = logs.float().to(local.device) if logs.count_nonzero() else None
        self.shift: Tensor | None = None
        if task.shift and classes:
            start = private.get(SHIFT, torch.zeros(classes))
            self.shift = start.to(local.device).clone().requires_grad_()
            rate = (task.optim.lr if task.shift_lr is None else task.shift_lr) * local.round.factor
            self._step = None if step is None else step(rate)

    @property
    def trains(self) -> bool:
        """Whether the client's loss differs from the task's."""
        return self.shift is not None or (self.prior is not None and self.task.correction == "training")

    @property
    def added(self) -> Tensor | None:
        """What is added to the outputs of the client's model, one value per class; None for nothing."""
        parts = [part.detach() for part in (self.prior, self.shift) if part is not None]
        return sum(parts[1:], parts[0]) if parts else None

    def method(self, algorithm: Algorithm) -> Algorithm:
        """The method with this client's task; itself if the client has nothing of its own."""
        if self.prior is None and self.shift is None:
            return algorithm
        return replace(algorithm, task=replace(self.task, loss=self.loss, added=self.added))

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """The task's loss of outputs with what is added in training."""
        if self.prior is not None and self.task.correction == "training":
            output = output + self.prior
        if self.shift is not None:
            self.settle()
            output = output + self.shift
        return self.task.loss(output, y)

    def settle(self) -> None:
        """Let the shift take the step of the last gradient: a method's own steps know nothing of it."""
        if self.shift is not None and self.shift.grad is not None:
            if self._step is not None:
                with torch.no_grad():
                    self._step(self.shift, self.shift.grad)
            self.shift.grad = None

    def state(self) -> State:
        """The private State that the client keeps of it."""
        self.settle()
        return {} if self.shift is None else {SHIFT: self.shift.detach().cpu()}

    def model(self, algorithm: Algorithm, predictor: nn.Module) -> nn.Module:
        """What the client uses: the method's predictor, with what is added to its outputs."""
        added = self.added
        return predictor if added is None or algorithm.adds else Added(predictor, added)


class Added(nn.Module):
    """A model and values added to its outputs, one per class."""

    def __init__(self, model: nn.Module, added: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("added", added)

    def forward(self, x: Tensor) -> Any:
        """The model's outputs with the values added."""
        return self.model(x) + self.added

    def stats(self) -> dict[str, float]:
        """The numbers of the model itself."""
        own: dict[str, float] = getattr(self.model, "stats", dict)()
        return own
