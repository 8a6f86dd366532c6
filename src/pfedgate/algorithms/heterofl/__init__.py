"""HeteroFL (Diao et al. 2021, HeteroFL: Computation and Communication Efficient FL for Heterogeneous Clients).

Shared: one wide model; a client gets, trains and returns the part it can afford: the first units of every hidden layer
(see `narrow`; flattened maps keep all positions of kept channels). Private: nothing. The server averages every element
over the clients that have it; what nobody has keeps its value. Rates are fixed for a client: its budget decides.

Ambiguity: "50 % of the parameters" is not half the width, which leaves 25 % of them. A budget is a share of parameters
here, as pFedGate's text says: 0.5 is a width of about 0.69. `level="b"` is the other reading, HeteroFL's own levels of
width (a = 1, b = 1/2, … e = 1/16), for all clients with a budget below 1. "10 % full, 90 % half" is the distribution
of budgets {1.0: 0.1, 0.5: 0.9}.

Departures: sample counts weigh the average (official: every client alike). A client is scored with its own part, which
is all that travels (official: the whole model). The Scaler divides weights by the share
of their inputs that exist, in training and in prediction: the official 1/r on activations, up to whole units. Norms
keep their running statistics (official: static). A novel client is scored as it is, or after `adapt_epochs`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from pfedgate.algorithms import register
from pfedgate.algorithms.heterofl.narrow import INNER, LABELS, Narrow, NarrowClients
from pfedgate.core.errors import unknown
from pfedgate.core.state import inside, under
from pfedgate.core.types import Card, Local, State, Update
from pfedgate.training.fit import Batch, fit

LEVELS = {"a": 1.0, "b": 1 / 2, "c": 1 / 4, "d": 1 / 8, "e": 1 / 16}


@register("heterofl")
@dataclass(frozen=True)
class HeteroFL(NarrowClients):
    """Narrow models inside a wide one, averaged element by element."""

    level: str | None = None  # "a" … "e": this width for every budget below 1; None: widths by share of parameters
    scaler: bool = True  # make up for missing inputs, as the official code does
    label_mask: str = "none"  # "train": logits of classes the client lacks are 0 in training; "both": when scored, too
    adapt_epochs: int = 0  # a novel client's epochs; 0: it is scored as it is

    paper = "Diao et al. 2021, HeteroFL: Computation and Communication Efficient FL"
    shares = "the first units of every layer, as many as the budget allows"
    grid: ClassVar[dict[str, tuple[object, ...]]] = {"level": (None, "b"), "label_mask": ("none", "train")}

    def __post_init__(self) -> None:
        choices = {"level": [*LEVELS], "label_mask": ["none", "train", "both"]}
        for name, words in choices.items():
            if (value := getattr(self, name)) not in words and (name, value) != ("level", None):
                raise ValueError(f"{name}: {unknown('value', str(value), words)}")
        if self.label_mask != "none" and self.task.kind != "classification":
            raise ValueError(f"label_mask needs classes, which {self.task.kind} has not: leave it out")

    def width(self, card: Card) -> Narrow:
        """The client's part of the model."""
        if self.level is not None and card.budget != 1:
            return Narrow(self.task.model, self.task.inputs, LEVELS[self.level], self.scaler)
        return replace(super().width(card), scaler=self.scaler)

    def init_client(self, got: State, local: Local) -> State:
        """The classes of the client's training data, if they are to mask others."""
        if self.label_mask == "none":
            return {}
        if not (outputs := (narrow := self.width(local.card)).outputs):
            raise ValueError("label_mask needs a model that ends with a layer of one output per class")
        present = torch.zeros(narrow.plan.shapes[outputs[0]][0], dtype=torch.bool)
        present[local.train.y.cpu().long()] = True
        return {LABELS: present}

    def train(self, got: State, private: State, local: Local) -> tuple[Update, State]:
        """Local epochs of the narrow model."""
        narrow = self.part(local.card, got)
        labels = {LABELS: private[LABELS]} if LABELS in private else {}
        present = private.get(LABELS, torch.tensor(True)).to(local.device)

        def masked(model: nn.Module, batch: Batch) -> Tensor:
            return self.task.loss(torch.where(present, model(batch.x), 0.0), batch.y).mean()

        task = replace(self.task, model=narrow)
        done = fit(task, under(INNER, got), local, objective=masked if labels else None)
        metrics = {**done.metrics, "density": narrow.density}
        return Update({**inside(INNER, done.state), **labels}, local.n, metrics), labels

    def adapt(self, got: State, private: State, local: Local) -> State:
        """A novel client's part, tuned if wanted."""
        if not self.adapt_epochs:
            return private
        longer = replace(self, task=replace(self.task, epochs=self.adapt_epochs, steps=None))
        return {**private, **under("tuned/", longer.train(got, private, local)[0].shared)}

    def predictor(self, got: State, private: State, card: Card) -> nn.Module:
        """The client's part."""
        state = inside("tuned/", private) or got
        model = super().predictor(state, private, card)
        return Masked(model, private[LABELS]) if self.label_mask == "both" else model

    def check(self, got: State, update: Update) -> str | None:
        """As for any model; labels are one truth value per class."""
        labels = update.shared.get(LABELS)
        if (labels is None) != (self.label_mask == "none") or (labels is not None and labels.dtype is not torch.bool):
            return f"{LABELS!r} must be there, as truth values, if and only if label_mask is on"
        return super().check(got, replace(update, shared={n: v for n, v in update.shared.items() if n != LABELS}))


class Masked(nn.Module):
    """Logits of absent classes set to 0 (not to minus infinity: as in the official code)."""

    def __init__(self, model: nn.Module, present: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("present", present)

    def forward(self, x: Tensor) -> Tensor:
        """Logits, 0 for absent classes."""
        assert isinstance(self.present, Tensor)
        return torch.where(self.present, self.model(x), 0.0)
