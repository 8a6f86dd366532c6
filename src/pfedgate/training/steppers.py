"""Client optimisers on one flat vector: the same numbers as `torch.optim`, a handful of calls a step.

Clients start every round with empty buffers; a server that keeps momentum (pFedHN) passes `slots` on.
Step counts are Python numbers: a tensor would have to be read back from the device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pfedgate.core.state import clone
from pfedgate.core.types import Optim, State


class Stepper:
    """Optimiser of one vector, or of the rows of a matrix (clients side by side, each clipped alone).

    `step(vector, gradient)` changes `vector`; `gradient` is used up.

    >>> w = torch.ones(2)
    >>> Stepper(Optim(lr=0.5, momentum=0, weight_decay=0, clip=None)).step(w, torch.ones(2))
    >>> w.tolist()
    [0.5, 0.5]
    """

    def __init__(self, optim: Optim, lr: float | None = None, slots: State | None = None) -> None:
        self.optim = optim
        self.lr = optim.lr if lr is None else lr
        slots = clone(slots or {})
        self.first = slots.get("optim/first")  # momentum, or Adam's mean
        self.second = slots.get("optim/second")  # Adam's mean of squares
        self.steps = int(slots.get("optim/steps", 0))

    def clip(self, gradient: Tensor) -> None:
        """Scale the gradient down to the clipping norm, if it is longer; nothing is read back."""
        if self.optim.clip is not None:
            norm = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
            gradient.mul_((self.optim.clip / (norm + 1e-6)).clamp_(max=1.0))

    def step(self, vector: Tensor, gradient: Tensor) -> None:
        """Move `vector` along `gradient`."""
        self.steps += 1
        if self.optim.name == "sgd":
            self._sgd(vector, gradient)
        else:
            self._adam(vector, gradient)

    def _sgd(self, vector: Tensor, gradient: Tensor) -> None:
        if self.optim.weight_decay:
            gradient.add_(vector, alpha=self.optim.weight_decay)
        if self.optim.momentum:
            if self.first is None:
                self.first = gradient.clone()
            else:
                self.first.mul_(self.optim.momentum).add_(gradient)
            gradient = self.first
        vector.add_(gradient, alpha=-self.lr)

    def _adam(self, vector: Tensor, gradient: Tensor) -> None:
        beta1, beta2 = self.optim.betas
        if self.optim.weight_decay:
            if self.optim.name == "adamw":
                vector.mul_(1 - self.lr * self.optim.weight_decay)
            else:
                gradient.add_(vector, alpha=self.optim.weight_decay)
        if self.first is None or self.second is None:
            self.first, self.second = torch.zeros_like(vector), torch.zeros_like(vector)
        self.first.lerp_(gradient, 1 - beta1)
        self.second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        scale = math.sqrt(1 - beta2**self.steps)
        root = self.second.sqrt().div_(scale).add_(self.optim.eps)
        vector.addcdiv_(self.first, root, value=-self.lr / (1 - beta1**self.steps))

    def drop(self, count: int) -> None:
        """Forget the first rows: those clients are done (see `stacked`)."""
        if self.first is not None:
            self.first = self.first[count:]
        if self.second is not None:
            self.second = self.second[count:]

    def slots(self) -> State:
        """A copy of the buffers; a Stepper that is given them goes on where this one stops."""
        slots = {"optim/steps": torch.tensor(self.steps), "optim/first": self.first, "optim/second": self.second}
        return {name: value.clone() for name, value in slots.items() if value is not None}
