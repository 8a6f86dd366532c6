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

from dataclasses import dataclass
from typing import ClassVar

from pfedgate.algorithms import private_parts as parts
from pfedgate.algorithms import register
from pfedgate.core.state import inside, pick, under
from pfedgate.core.types import Local, State, Update
from pfedgate.training.fit import fit


@register("fedrep")
@dataclass(frozen=True)
class FedRep(parts.PrivatePart):
    """A shared body and a private head, trained one after the other."""

    head: parts.Names | None = None  # private layers; None: the last one with parameters, as in the official networks
    head_epochs: int | None = None  # None: as the task says (1 in the benchmark); official: 10
    body_epochs: int | None = None  # None: as the task says; official: 1 on CIFAR-10, 5 on CIFAR-100 and FEMNIST
    adapt_epochs: int = 1  # a novel client's epochs, the fine-tuning budget of all methods; official: 10

    paper = "Collins et al. 2021, Exploiting Shared Representations for Personalized FL"
    shares = "the body"
    keeps = "the head"
    grid: ClassVar[dict[str, tuple[object, ...]]] = {"own_lr": (0.005, 0.01, 0.05, 0.1, 0.5)}

    @property
    def own(self) -> parts.Part:
        """The tensors of the head."""
        return parts.head(self.task, self.head)

    def train(self, got: State, private: State, local: Local) -> tuple[Update, State]:
        """The head, then the body; the body is sent."""
        head, state = inside(parts.OWN, private), parts.join(got, private)
        phases = (
            (head, parts.parameters(self.task, self.own), self.head_epochs, self.own_lr),
            (got, parts.parameters(self.task, parts.everything(self.task) - self.own), self.body_epochs, None),
        )
        metrics = {"flops": 0.0}
        for part, names, epochs, lr in phases:
            if not names or epochs == 0:
                continue
            done = fit(self.task, state, local, names=names, epochs=epochs, lr=lr)
            state |= pick(done.state, part)
            metrics |= {"loss": done.loss, "flops": metrics["flops"] + done.flops}
            if part is head:
                metrics["head_loss"] = done.loss
        return Update(pick(state, got), local.n, metrics), under(parts.OWN, pick(state, head))

    def adapt(self, got: State, private: State, local: Local) -> State:
        """A novel client trains a head for the body as it is."""
        return self.adapt_part(got, private, local, self.adapt_epochs)
