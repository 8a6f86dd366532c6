"""FedPer (Arivazhagan et al. 2019, Federated Learning with Personalization Layers).

Shared: the body. Private: the head (the last layer by default). Both are trained jointly; only the body travels.
Clients start with the same head, the one of the common initial model.

A novel client trains that initial head for `adapt_epochs` on the frozen body (the paper is silent; an average of
heads would have to travel).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pfedgate.algorithms import private_parts as parts
from pfedgate.algorithms import register
from pfedgate.core.types import Local, State


@register("fedper")
@dataclass(frozen=True)
class FedPer(parts.PrivatePart):
    """A shared body and a private head, trained together."""

    head: parts.Names | None = None  # private layers; None: the last one with parameters (the paper tries one to four)
    adapt_epochs: int = 1  # a novel client's epochs: the fine-tuning budget of all methods

    paper = "Arivazhagan et al. 2019, Federated Learning with Personalization Layers"
    by_samples = True
    shares = "the body"
    keeps = "the head"
    grid: ClassVar[dict[str, tuple[object, ...]]] = {"own_lr": (None, 0.003, 0.01, 0.03, 0.1)}

    @property
    def own(self) -> parts.Part:
        """The tensors of the head."""
        return parts.head(self.task, self.head)

    def adapt(self, got: State, private: State, local: Local) -> State:
        """A novel client trains a head for the body as it is."""
        return self.adapt_part(got, private, local, self.adapt_epochs)
