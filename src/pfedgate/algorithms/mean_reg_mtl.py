"""Mean-regularised multi-task learning (Evgeniou & Pontil 2004; Hanzely & Richtárik 2020): the surrogate of pFedMe.

Private: a model theta_i that a client keeps for good. A round is an epoch of proximal SGD on f_i(theta) +
(mu/2)·‖theta − w‖² from where it was; the server's w is the mean of what it is sent: theta_i itself, so the server
does see personal models. This, and not Moreau envelopes, is what FedEM's repository (and pFedGate's copy) calls
"pFedMe": no inner loop, no w_i, no beta. The published "pFedMe" rows are probably this; `pfedme` is the real one.

Departures: w is the mean over sampled clients (the references include the old theta_i of all others; agg_norm="all"
counts those as w instead). Momentum is off by default, as in the references' proximal optimiser. A novel client
starts from w and does `adapt_epochs` on the same objective.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from pfedgate.algorithms import register
from pfedgate.algorithms.private_parts import PrivateModel
from pfedgate.core.state import inside, under
from pfedgate.core.types import Local, State, Update
from pfedgate.training.fit import Fit, fit


@register("mean_reg_mtl")
@dataclass(frozen=True)
class MeanRegMTL(PrivateModel):
    """Personal models held near their mean."""

    mu: float = 1.0  # FedEM's search chose it on three of four data sets
    momentum: float = 0.0  # prox_sgd of the references has none; with it the pull outlives its cause
    adapt_epochs: int = 1  # a novel client's epochs: the fine-tuning budget of all methods

    paper = "Hanzely & Richtárik 2020, Federated Learning of a Mixture; FedEM's 'pFedMe'"
    shares = "the whole personal model"
    keeps = "the personal model, never overwritten"
    grid: ClassVar[dict[str, tuple[object, ...]]] = {"mu": (1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0)}

    def __post_init__(self) -> None:
        if self.mu < 0:
            raise ValueError(f"mu is the strength of the pull to the mean model, not negative; got {self.mu}")

    def train(self, got: State, private: State, local: Local) -> tuple[Update, State]:
        """Local epochs from where the client was, pulled to the mean."""
        done = self._fit(got, inside("model/", private), local, None)
        return Update(done.state, local.n, done.metrics), under("model/", done.state)

    def _fit(self, got: State, model: State, local: Local, epochs: int | None) -> Fit:
        task = replace(self.task, optim=replace(self.task.optim, momentum=self.momentum))
        return fit(task, model, local, anchor=got, prox=self.mu, epochs=epochs)

    def adapt(self, got: State, private: State, local: Local) -> State:
        """A novel client's model starts from the mean."""
        return under("model/", self._fit(got, got, local, self.adapt_epochs).state)
