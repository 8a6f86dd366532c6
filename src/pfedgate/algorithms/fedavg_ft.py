"""FedAvg-FT: FedAvg, and every client fine-tunes the model it got before predicting.

Shared and private as in FedAvg. The tuned copy is made anew for every evaluation and thrown away: no momentum
or schedule of its own survives (in the references both do, which handicaps the method).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from pfedgate.algorithms import register
from pfedgate.algorithms.fedavg import FedAvg
from pfedgate.core.modules import module
from pfedgate.core.state import inside, under
from pfedgate.core.types import Card, Local, State
from pfedgate.training.fit import fit


@register("fedavg_ft")
@dataclass(frozen=True)
class FedAvgFT(FedAvg):
    """FedAvg with local fine-tuning before prediction."""

    tune_epochs: int = 1  # the paper's fine-tuning budget
    tune_lr: float | None = None  # default: the rate of training, with the same schedule

    paper = "McMahan et al. 2017, with local fine-tuning before prediction"
    tunes = True
    grid: ClassVar[dict[str, tuple[object, ...]]] = {"tune_lr": (0.003, 0.01, 0.03, 0.05), "tune_epochs": (1, 3)}

    def own_epochs(self, got: State, private: State, local: Local) -> tuple[State, State, float]:
        """Fine-tuning at the rate of these epochs; `personalise` leaves it at that."""
        tuned = fit(self.task, got, local)
        return got, {**private, **under("tuned/", tuned.state)}, tuned.flops

    def personalise(self, got: State, private: State, local: Local) -> State:
        """The received model after `tune_epochs` on the client's training data."""
        if inside("tuned/", private):
            return private
        tuned = fit(self.task, got, local, epochs=self.tune_epochs, lr=self.tune_lr, stream="tune")
        return {**private, **under("tuned/", tuned.state)}

    def predictor(self, got: State, private: State, card: Card) -> nn.Module:
        """The tuned model, or the received one before any tuning."""
        return module(self.task, inside("tuned/", private) or got)
