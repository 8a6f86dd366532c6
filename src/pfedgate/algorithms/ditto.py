"""Ditto (Li et al. 2021, Ditto: Fair and Robust Federated Learning Through Personalization).

Shared: a model w, trained by FedAvg. Private: a model v_i of the client's own, trained on f_i(v) + (lam/2)·‖v −
w^t‖², w^t the model *received*, and scored. Both branches see the same batches, each with its own optimiser, so w is
FedAvg's whatever lam is, and lam = 0 is Local. v_i starts at the common initial model and moves only when its client
is sampled.

Departures: updates are averaged by sample counts (official: unweighted means of differences under size-proportional
sampling). The order of the two branches, on which references disagree, does not matter because both are held to w^t.
A novel client starts from w and does `adapt_epochs` on its personal objective.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pfedgate.algorithms import register
from pfedgate.algorithms.private_parts import PrivateModel
from pfedgate.core.state import inside, under
from pfedgate.core.types import Local, State, Update
from pfedgate.training.fit import Fit, fit


@register("ditto")
@dataclass(frozen=True)
class Ditto(PrivateModel):
    """FedAvg, and beside it a personal model held near it."""

    lam: float = 0.1  # FederatedScope's default and the middle of pFedGate's grid; official: 1, or chosen from .1, 1, 2
    personal_epochs: int | None = None  # None: as the task says (1 in the benchmark); official: 2 steps
    personal_lr: float | None = None  # None: the task's
    adapt_epochs: int = 1  # a novel client's epochs: the fine-tuning budget of all methods

    paper = "Li et al. 2021, Ditto: Fair and Robust Federated Learning Through Personalization"
    keeps = "a whole model of its own"
    grid: ClassVar[dict[str, tuple[object, ...]]] = {
        "lam": (0.05, 0.1, 0.5, 0.8),
        "personal_lr": (None, 0.003, 0.01, 0.03, 0.1),
    }

    def __post_init__(self) -> None:
        if self.lam < 0:
            raise ValueError(f"lam is the strength of the pull to the shared model, not negative; got {self.lam}")

    def train(self, got: State, private: State, local: Local) -> tuple[Update, State]:
        """FedAvg's epochs for the shared model, then the personal one."""
        shared = fit(self.task, got, local)
        own = self._personal(got, inside("model/", private), local, self.personal_epochs)
        metrics = {"loss": shared.loss, "personal_loss": own.loss, "flops": shared.flops + own.flops}
        return Update(shared.state, local.n, metrics), under("model/", own.state)

    def _personal(self, got: State, model: State, local: Local, epochs: int | None) -> Fit:
        return fit(self.task, model, local, anchor=got, prox=self.lam, epochs=epochs, lr=self.personal_lr)

    def adapt(self, got: State, private: State, local: Local) -> State:
        """A novel client's model starts from the shared one."""
        return under("model/", self._personal(got, got, local, self.adapt_epochs).state)
