"""What the server makes of a round's mean: takes it as it is, or as a gradient for an optimiser of its own.

    momentum    FedAvgM (Hsu et al. 2019, Measuring the Effects of Non-Identical Data Distribution)
    adam, yogi  FedAdam, FedYogi (Reddi et al. 2021, Adaptive Federated Optimization, algorithm 2)

The difference between the merged State and the server's is the gradient, so every method whose merge gives a mean can
have one, under every policy. Only parameters of the model move so; buffers and whatever else a method shares stay as
merged. An entry that the merge left as it was takes no step and keeps its moments: nobody trained it, be it a block
that no client kept, a model that no client chose, or a unit without a gradient (the papers, in which every client
trains everything, would go on by momentum there). With rate 1 and momentum 0 the bits are FedAvg's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pfedgate.core.algorithm import Algorithm
from pfedgate.core.modules import skeleton
from pfedgate.core.state import inside
from pfedgate.core.types import ServerOptim, State

SLOTS = "slots/"


class ServerStep:
    """The server's optimiser in a run; its moments are part of the checkpoint, see `slots`."""

    def __init__(self, optim: ServerOptim, algorithm: Algorithm) -> None:
        self.optim, self.algorithm = optim, algorithm
        self.slots: State = {}

    def load(self, tensors: State) -> None:
        """Go on with the moments of a checkpoint."""
        self.slots = inside(SLOTS, tensors)

    def __call__(self, server: State, merged: State) -> State:
        """The server's next State.

        >>> from functools import partial; from pfedgate import algorithms; from pfedgate.core.types import Task
        >>> from pfedgate.models import build
        >>> fedavg = algorithms.get("fedavg")(Task(partial(build, "mlp")))
        >>> step, before = ServerStep(ServerOptim("momentum", momentum=0.5), fedavg), {"out.bias": torch.zeros(10)}
        >>> after = step(before, {"out.bias": torch.ones(10)})
        >>> step(after, {"out.bias": torch.ones(10) * 2})["out.bias"].unique()
        tensor([2.5000])
        """
        if self.optim.optimiser == "none":
            return merged
        own = {name: value.shape for name, value in skeleton(self.algorithm.task.model).named_parameters()}
        names = [n for n, value in merged.items() if n in server and own.get(n.rpartition("/")[2]) == value.shape]
        if not names:
            raise ValueError(
                f"{self.algorithm.name or type(self.algorithm).__name__} does not average parameters of the model, so "
                f"server.optimiser={self.optim.optimiser!r} has nothing to move: leave it out"
            )
        return {**merged, **{name: self._moved(name, server[name], merged[name]) for name in names}}

    def _moved(self, name: str, old: Tensor, mean: Tensor) -> Tensor:
        optim, change = self.optim, mean.double() - old.double()
        rate = optim.lr or 0.0
        touched = mean != old
        first = self.slots.get(f"first/{name}", torch.zeros_like(change))
        if optim.optimiser == "momentum":
            moment = optim.momentum * first + change
            step = rate * moment
        else:
            beta1, beta2 = optim.betas
            second = self.slots.get(f"second/{name}", torch.full_like(change, optim.tau**2))
            square = change.square()
            moment = beta1 * first + (1 - beta1) * change
            towards = square - second if optim.optimiser == "adam" else square * (square - second).sign()
            grown = second + (1 - beta2) * towards
            step = rate * moment / (grown.sqrt() + optim.tau)
            self.slots[f"second/{name}"] = torch.where(touched, grown, second)
        self.slots[f"first/{name}"] = torch.where(touched, moment, first)
        # Relative to the mean, not to the old value: a step as long as the change gives the mean's own bits.
        return torch.where(touched & (step != change), (mean.double() + (step - change)).to(mean.dtype), mean)
