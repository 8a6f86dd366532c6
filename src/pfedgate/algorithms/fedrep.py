"""FedRep (Collins et al. 2021, Exploiting Shared Representations for Personalized Federated Learning).

Shared: the body. Private: the head (the last layer by default, as in the official networks). A round first trains the
head on the frozen body, then the body under the frozen head; the body is sent. Frozen means altogether: no gradient,
no decay, no momentum, no running statistics.

Departures: one head epoch where the official code has ten (the paper's "one local epoch" leaves the split open; set
head_epochs=10 for the official setting). Both phases read the client's batches in the same order, so that without a
head this is FedAvg, and without a body Local. Momentum starts anew in each phase. Heads are not trained once more at
the end, as the official code does before its last evaluation. A novel client trains the common initial head on the
frozen body (the official code starts from the average of all heads, which would have to travel).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from pfedgate.algorithms import private_parts as parts
from pfedgate.algorithms import register
from pfedgate.core.algorithm import Algorithm
from pfedgate.core.modules import module
from pfedgate.core.state import inside, pick, under
from pfedgate.core.types import Card, Local, State, Update
from pfedgate.training.fit import Fit, fit


@register("fedrep")
@dataclass(frozen=True)
class FedRep(Algorithm):
    """A shared body and a private head, trained one after the other."""

    head: parts.Names | None = None  # private layers; None: the last one with parameters, as in the official networks
    head_epochs: int | None = None  # None: as the task says (1 in the benchmark); official: 10
    body_epochs: int | None = None  # None: as the task says; official: 1 on CIFAR-10, 5 on CIFAR-100 and FEMNIST
    head_lr: float | None = None  # None: the task's
    adapt_epochs: int = 1  # of a novel client: the fine-tuning budget of all methods; official: 10

    paper: ClassVar[str] = "Collins et al. 2021, Exploiting Shared Representations for Personalized FL"
    shares: ClassVar[str] = "the body"
    keeps: ClassVar[str] = "the head"
    grid: ClassVar[Mapping[str, Sequence[Any]]] = {"head_lr": (0.005, 0.01, 0.05, 0.1, 0.5)}

    def __post_init__(self) -> None:
        _ = self._own  # a wrong name fails here, not on a client

    @property
    def _own(self) -> parts.Part:
        return parts.head(self.task, self.head)

    def init_server(self, seed: int) -> State:
        """The body."""
        return parts.init_shared(self.task, self._own, seed)

    def init_client(self, got: State, local: Local) -> State:
        """The head of the common initial model."""
        return parts.init_own(self.task, self._own, local.round.seed)

    def train(self, got: State, private: State, local: Local) -> tuple[Update, State]:
        """The head, then the body; the body is sent."""
        own, state, flops = self._own, parts.join(got, private), 0.0
        metrics: dict[str, float] = {}
        head = self._phase(state, local, parts.parameters(self.task, own), self.head_epochs, self.head_lr)
        if head is not None:
            state |= pick(head.state, inside(parts.OWN, private))
            metrics["loss"] = metrics["head_loss"] = head.loss
            flops += head.flops
        body = self._phase(state, local, parts.rest(self.task, own), self.body_epochs, None)
        if body is not None:
            state |= pick(body.state, got)
            metrics["loss"] = body.loss
            flops += body.flops
        update = Update(pick(state, got), local.n, {**metrics, "flops": flops})
        return update, under(parts.OWN, pick(state, inside(parts.OWN, private)))

    def _phase(
        self, state: State, local: Local, names: tuple[str, ...], epochs: int | None, lr: float | None
    ) -> Fit | None:
        if not names or epochs == 0:
            return None
        return fit(self.task, state, local, names=names, epochs=epochs, lr=lr)

    def adapt(self, got: State, private: State, local: Local) -> State:
        """A novel client's head."""
        return parts.adapt_own(self.task, self._own, got, private, local, self.adapt_epochs, self.head_lr)

    def predictor(self, got: State, private: State, card: Card) -> nn.Module:
        """The shared body with the client's head."""
        return module(self.task, parts.join(got, private))
