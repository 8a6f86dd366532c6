"""FedDBE (Zhang et al. 2023, Eliminating Domain Bias for Federated Learning in Representation Space).

Shared: the model, and a consensus: the mean of the features that enter the head. Private: a mean of the client's own,
which is added to its features (PRBM), so that the shared ones need not hold what is common to this client alone. The
loss pulls the running mean of a client's features to the consensus, (kappa/2)·mean((z − consensus)²) (MR).

The first round is the initialisation: clients train as in FedAvg and send the mean of their features; their average is
the consensus for good. Departures: the training of that round counts (official: it is thrown away), and the consensus
is that of the clients sampled then (official: of all). The private mean has an optimiser of its own (official: SGD
without momentum or decay). A step agrees with PFLlib's bit for bit. A novel client trains its mean for `adapt_epochs`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pfedgate.algorithms import private_parts as parts
from pfedgate.algorithms import register
from pfedgate.core.state import split, under
from pfedgate.core.types import Local, State, Task, Update
from pfedgate.training.fit import Batch, fit

CONSENSUS, READY = "dbe/consensus", "dbe/ready"


@register("feddbe")
@dataclass(frozen=True)
class FedDBE(parts.PrivatePart):
    """A private mean in feature space, and a pull of the shared features to a consensus."""

    kappa: float = 50.0  # strength of the pull; the paper's for its convolutional network
    momentum: float = 1.0  # of the running mean of features: 1 is the batch's; the paper's for the same network
    adapt_epochs: int = 1  # a novel client's epochs: the fine-tuning budget of all methods

    paper = "Zhang et al. 2023, Eliminating Domain Bias for Federated Learning in Representation Space"
    shares = "the whole model (and once a mean of features)"
    keeps = "a mean of features"
    kinds = ("classification", "multilabel", "regression", "language")  # it needs a linear head
    grid: ClassVar[dict[str, tuple[object, ...]]] = {
        "kappa": (0.1, 1.0, 5.0, 10.0, 50.0, 100.0),
        "momentum": (0.1, 0.5, 1.0),
    }

    def __post_init__(self) -> None:
        if self.kappa < 0 or not 0 < self.momentum <= 1:
            raise ValueError(f"kappa is not negative and momentum in (0, 1]; got {self.kappa}, {self.momentum}")
        super().__post_init__()

    @property
    def whole(self) -> Task:
        """The model with the private mean before its head."""
        return parts.extended(self.task, with_mean)

    @property
    def own(self) -> parts.Part:
        """The mean alone."""
        return frozenset([f"{parts.linear_head(self.task)[0]}.mean"])

    def init_server(self, seed: int) -> State:
        """The model, and room for the consensus."""
        room = torch.zeros(parts.linear_head(self.task)[1].in_features)
        return {**super().init_server(seed), CONSENSUS: room, READY: torch.tensor(False)}

    def train(self, got: State, private: State, local: Local) -> tuple[Update, State]:
        """Local epochs with the client's mean; in the first round without, to send the mean of its features."""
        layer, _ = parts.linear_head(self.task)
        consensus, ready = got[CONSENSUS].to(local.device), bool(got[READY])
        running = torch.zeros_like(consensus)

        def objective(model: nn.Module, batch: Batch) -> Tensor:
            nonlocal running
            entered, output = parts.features(model, layer, batch.x)
            mean = entered.flatten(0, -2).mean(0)
            running = (1 - self.momentum) * running.detach() + self.momentum * mean
            loss = self.task.loss(output, batch.y).mean()
            if not ready or not self.kappa:
                return loss
            return loss + self.kappa * 0.5 * (running - consensus).square().mean()

        shared = parts.parameters(self.whole, parts.everything(self.task))
        own = tuple(self.own) if ready else ()
        done = fit(
            self.whole, parts.join(got, private), local, names=(*shared, *own), own=own, own_lr=self.own_lr,
            objective=objective,
        )  # fmt: skip
        mean, model = split(done.state, self.own.__contains__)
        first = {} if ready else {CONSENSUS: running.detach().cpu(), READY: torch.tensor(True)}
        return Update({**model, **first}, local.n, done.metrics), under(parts.OWN, mean)

    def adapt(self, got: State, private: State, local: Local) -> State:
        """A novel client's mean, for the model as it is."""
        return self.adapt_part(got, private, local, self.adapt_epochs)


def with_mean(head: nn.Linear) -> None:
    """Let a head add a mean of its own to what enters it."""
    head.register_parameter("mean", nn.Parameter(torch.zeros(head.in_features)))
    head.register_forward_pre_hook(_add_mean)


def _add_mean(head: Any, given: tuple[Tensor, ...]) -> Tensor:
    mean: Tensor = head.mean
    return given[0] + mean
