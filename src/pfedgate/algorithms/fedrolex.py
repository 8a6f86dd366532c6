"""FedRolex (Alam et al. 2022, FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction).

Shared: one wide model; a client gets, trains and returns the part it can afford. In round r that is a window of units
from unit r of every hidden layer, which goes on at the layer's beginning: over the rounds every client trains every
unit. Private: nothing. The server averages every element over the clients that have it. With whole budgets this is
FedAvg. Scaler, masked loss and the reading of budgets are those of HeteroFL, as in the authors' code.

Window and part are those of the authors' server, but that it rolls the other way round (unit -r first); the mean of
weights agrees to 3e-8. Departures: the mean of biases is one, too (official: a count that grows while it is used gives
later clients of a round more weight; without that they agree to 3e-8 as well); sample counts weigh it (official: every
client alike); a client is scored with the window of its round (official: the server's whole model, which no small
client could hold).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from pfedgate.algorithms import register
from pfedgate.algorithms.heterofl import HeteroFL
from pfedgate.algorithms.heterofl.narrow import Narrow
from pfedgate.core.types import Card, Local, Round, State, Update

WINDOW = "window"  # where the window of a State begins


@register("fedrolex")
@dataclass(frozen=True)
class FedRolex(HeteroFL):
    """Narrow models inside a wide one, from another unit on in every round."""

    paper = "Alam et al. 2022, FedRolex: Model-Heterogeneous FL with Rolling Sub-Model Extraction"
    shares = "a window of units of every layer, as many as the budget allows; it rolls on every round"
    grid: ClassVar[dict[str, tuple[object, ...]]] = {"label_mask": ("none", "train")}

    def part(self, card: Card, sent: State) -> Narrow:
        """The client's window in the round of this State."""
        whole = self.width(card)
        return whole if whole.width == 1 else replace(whole, start=int(sent[WINDOW]))

    def send(self, server: State, card: Card, round: Round) -> State:
        """The window of this round, and where it begins."""
        window = {WINDOW: torch.tensor(round.index)}
        return {**self.part(card, window).take(server), **window}

    def train(self, got: State, private: State, local: Local) -> tuple[Update, State]:
        """Local epochs of the window, which is named, as it may arrive rounds later."""
        update, private = super().train(got, private, local)
        return replace(update, shared={**update.shared, WINDOW: got[WINDOW]}), private

    def check(self, got: State, update: Update) -> str | None:
        """As HeteroFL; the window is the one that was sent."""
        if not torch.equal(update.shared.get(WINDOW, torch.tensor(-1)), got[WINDOW]):
            return f"{WINDOW!r} must be the one that was sent"
        return super().check(got, update)
