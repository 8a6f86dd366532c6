"""FedProx (Li et al. 2020, Federated Optimization in Heterogeneous Networks).

FedAvg whose local objective is f_i(w) + (mu/2)·‖w − w^t‖², w^t the model received. Shared and private as in FedAvg.

Departures: every client does the same epochs (the paper's variable local work is a property of devices, not of the
objective). The proximal gradient is added after clipping and before momentum: FedEM's optimiser adds it to the
momentum buffer, where it keeps acting after the model has moved back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pfedgate.algorithms import register
from pfedgate.core.algorithm import Algorithm
from pfedgate.core.types import Local, State, Update
from pfedgate.training.fit import fit


@register("fedprox")
@dataclass(frozen=True)
class FedProx(Algorithm):
    """FedAvg held near the received model."""

    mu: float = 0.1  # FedEM's search chose it on EMNIST and CIFAR-100; 0.05 and 1 elsewhere

    paper = "Li et al. 2020, Federated Optimization in Heterogeneous Networks"
    by_samples = True
    grid: ClassVar[dict[str, tuple[object, ...]]] = {"mu": (0.01, 0.05, 0.1, 0.5, 1.0)}

    def __post_init__(self) -> None:
        if self.mu < 0:
            raise ValueError(f"mu is the strength of the pull to the received model, not negative; got {self.mu}")

    def train(self, got: State, private: State, local: Local) -> tuple[Update, State]:
        """Local epochs, pulled back to the received model at every step."""
        done = fit(self.task, got, local, anchor=got, prox=self.mu)
        return Update(done.state, local.n, done.metrics), {}
