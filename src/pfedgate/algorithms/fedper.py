"""FedPer (Arivazhagan et al. 2019, Federated Learning with Personalization Layers).

Shared: the body. Private: the head (the last layer by default). Both are trained jointly; only the body travels.
Clients start with the same head, the one of the common initial model.

A novel client trains that initial head for `adapt_epochs` on the frozen body (the paper is silent; an average of
heads would have to travel).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from pfedgate.algorithms import private_parts as parts
from pfedgate.algorithms import register
from pfedgate.core.algorithm import Algorithm
from pfedgate.core.modules import module
from pfedgate.core.types import Card, Local, State, Update


@register("fedper")
@dataclass(frozen=True)
class FedPer(Algorithm):
    """A shared body and a private head, trained together."""

    head: parts.Names | None = None  # private layers; None: the last one with parameters (the paper tries one to four)
    adapt_epochs: int = 1  # of a novel client: the fine-tuning budget of all methods

    paper: ClassVar[str] = "Arivazhagan et al. 2019, Federated Learning with Personalization Layers"
    shares: ClassVar[str] = "the body"
    keeps: ClassVar[str] = "the head"

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
        """Body and head together; the body is sent."""
        return parts.train_jointly(self.task, self._own, got, private, local)

    def adapt(self, got: State, private: State, local: Local) -> State:
        """A novel client's head."""
        return parts.adapt_own(self.task, self._own, got, private, local, self.adapt_epochs)

    def predictor(self, got: State, private: State, card: Card) -> nn.Module:
        """The shared body with the client's head."""
        return module(self.task, parts.join(got, private))
