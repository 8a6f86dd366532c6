"""FedBABU (Oh et al. 2022, FedBABU: Toward Enhanced Representation for Federated Image Classification).

Shared: the body. The head is the common initial one and never trained while the clients federate, so it need not
travel; before a client predicts it fine-tunes the whole model. Private: nothing (the tuned copy is made anew for every
evaluation). Before fine-tuning this is FedAvg with a frozen head.

Frozen means altogether: no gradient, no decay. A step is PFLlib's bit for bit. A novel client fine-tunes as any.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from pfedgate.algorithms import private_parts as parts
from pfedgate.algorithms import register
from pfedgate.core.algorithm import Algorithm
from pfedgate.core.errors import unknown
from pfedgate.core.modules import initial, module
from pfedgate.core.state import inside, split, under
from pfedgate.core.types import Card, Local, State, Update
from pfedgate.training.fit import fit

TUNED = ("all", "head", "body")


@register("fedbabu")
@dataclass(frozen=True)
class FedBABU(Algorithm):
    """A body trained under a head that stands still, and fine-tuned as a whole."""

    head: parts.Names | None = None  # the layers that stand still; None: the last one with parameters
    tune_epochs: int = 1  # the fine-tuning budget of all methods; the paper's: 1 to 5
    tune_lr: float | None = None  # None: the rate of training, with the same schedule
    tune_part: str = "all"  # what is fine-tuned: "all", the "head" or the "body"; the paper's tables 5 and 6

    paper = "Oh et al. 2022, FedBABU: Toward Enhanced Representation for Federated Image Classification"
    shares = "the body"
    keeps = "nothing (the initial head)"
    tunes = True
    grid: ClassVar[dict[str, tuple[object, ...]]] = {
        "tune_epochs": (1, 3, 5),
        "tune_lr": (None, 0.003, 0.01, 0.03, 0.05),
        "tune_part": TUNED,
    }

    def __post_init__(self) -> None:
        if self.tune_part not in TUNED:
            raise ValueError(f"tune_part: {unknown('value', self.tune_part, TUNED)}")
        _ = self._head  # a wrong name fails here, not on a client

    @property
    def _head(self) -> parts.Part:
        return parts.head(self.task, self.head)

    def init_server(self, seed: int) -> State:
        """The body of the initial model."""
        return split(initial(self.task, seed), self._head.__contains__)[1]

    def init_client(self, got: State, local: Local) -> State:
        """The head of the same initial model."""
        return under(parts.OWN, split(initial(self.task, local.round.seed), self._head.__contains__)[0])

    def train(self, got: State, private: State, local: Local) -> tuple[Update, State]:
        """Local epochs of the body."""
        names = parts.parameters(self.task, parts.everything(self.task) - self._head)
        done = fit(self.task, parts.join(got, private), local, names=names)
        body = split(done.state, self._head.__contains__)[1]
        return Update(body, local.n, done.metrics), private

    def own_epochs(self, got: State, private: State, local: Local) -> tuple[State, State, float]:
        """Fine-tuning of the whole model at the rate of these epochs; `personalise` leaves it at that."""
        tuned = fit(self.task, parts.join(got, private), local)
        return got, {**private, **under("tuned/", tuned.state)}, tuned.flops

    def personalise(self, got: State, private: State, local: Local) -> State:
        """The model after fine-tuning on the client's training data."""
        if inside("tuned/", private):
            return private
        part = {"all": parts.everything(self.task), "head": self._head}
        names = parts.parameters(self.task, part.get(self.tune_part, parts.everything(self.task) - self._head))
        state = parts.join(got, private)
        tuned = fit(self.task, state, local, names=names, epochs=self.tune_epochs, lr=self.tune_lr, stream="tune")
        return {**private, **under("tuned/", tuned.state)}

    def predictor(self, got: State, private: State, card: Card) -> nn.Module:
        """The tuned model, or body and initial head before any tuning."""
        return module(self.task, inside("tuned/", private) or parts.join(got, private))
