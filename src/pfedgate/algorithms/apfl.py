"""APFL (Deng et al. 2020, Adaptive Personalized Federated Learning).

Shared: a model w, trained by FedAvg. Private: a model v and a number alpha. Scored is the mixture m = alpha·v + (1 −
alpha)·w of *parameters*, with the w just received. On each batch w takes FedAvg's step and v a step along
alpha·∇f(m); alpha follows its own gradient ⟨v − w, ∇f(m)⟩, clipped to [0, 1], once a round as in the official code.

Departures: none from the equations; every implementation we read departs from them (PFLlib trains v on its own loss
and mixes afterwards, FL-bench mixes logits, FedEM's average has no effect). v is stepped with the task's optimiser,
as w is. Running statistics are those of the mixture. alpha = 0 never moving is FedAvg, alpha = 1 is Local (up to
dropout: two branches need two streams of it). A novel client starts with v = w and trains v for `adapt_epochs` with w
fixed.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pfedgate.algorithms import register
from pfedgate.algorithms.private_parts import PrivateModel
from pfedgate.core.errors import unknown
from pfedgate.core.modules import module, skeleton
from pfedgate.core.seeds import seeded
from pfedgate.core.state import inside, under
from pfedgate.core.types import Card, Local, State, Update
from pfedgate.training.fit import Batch, Workspace, fit
from pfedgate.training.workspace import Stepper

UPDATES = ("round", "batch", "never")


@register("apfl")
@dataclass(frozen=True)
class APFL(PrivateModel):
    """A personal mixture of a private and the shared model."""

    alpha: float = 0.5  # share of the private model at the start; the paper's are .25 to .75
    update_alpha: str = "round"  # at its first batch (official), at every "batch" (the equations), or "never"
    own_lr: float | None = None  # rate of v; None: the task's
    adapt_epochs: int = 1  # a novel client's epochs: the fine-tuning budget of all methods

    paper = "Deng et al. 2020, Adaptive Personalized Federated Learning"
    keeps = "a whole model of its own and its share in the mixture"
    grid: ClassVar[dict[str, tuple[object, ...]]] = {
        "alpha": (0.25, 0.5, 0.75),
        "own_lr": (None, 0.003, 0.01, 0.03, 0.1),
    }

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha is a share between 0 and 1, got {self.alpha}")
        if self.update_alpha not in UPDATES:
            raise ValueError(unknown("update_alpha", self.update_alpha, UPDATES))

    def init_client(self, got: State, local: Local) -> State:
        """The common initialisation, and the first share."""
        return {**super().init_client(got, local), "alpha": torch.tensor(self.alpha)}

    def train(self, got: State, private: State, local: Local) -> tuple[Update, State]:
        """FedAvg's steps of w; beside each of them one of v."""
        own = _Personal(self, private, local)
        done = fit(self.task, got, local, gradient=own.beside)
        metrics = {**done.metrics, "alpha": float(own.alpha)}
        return Update(done.state, local.n, metrics), own.state()

    def adapt(self, got: State, private: State, local: Local) -> State:
        """A novel client's v starts from w."""
        own = _Personal(self, {**private, **under("model/", got)}, local)
        fit(self.task, got, local, step=own.step, epochs=self.adapt_epochs)
        return own.state()

    def predictor(self, got: State, private: State, card: Card) -> nn.Module:
        """The mixture, with the shared model as just received."""
        own, alpha = inside("model/", private), private["alpha"]
        trained = [name for name, _ in skeleton(self.task.model).named_parameters()]
        return module(self.task, {**own, **{name: torch.lerp(got[name], own[name], alpha) for name in trained}})


class _Personal:
    """The private branch during one call: v, alpha, and a workspace that holds the mixture."""

    def __init__(self, method: APFL, private: State, local: Local) -> None:
        self.task, self.local, self.update = (task := method.task), local, method.update_alpha
        self.work = _twin(task.model, local.device)
        self.work.load(inside("model/", private))
        self.v, self.alpha = self.work.flat.clone(), private["alpha"].clone().to(local.device)
        self.rate = task.optim.lr * local.round.factor
        own_rate = self.rate if method.own_lr is None else method.own_lr * local.round.factor
        self.stepper = Stepper(task.optim, own_rate)
        self.count = 0

    def step(self, work: Workspace, batch: Batch) -> Tensor:
        """One step of v, and of alpha if it is due; `work` holds w and only counts what this costs."""
        mixed, w = self.work, work.flat
        torch.lerp(w, self.v, self.alpha, out=mixed.flat)
        with seeded(self.local.round.seed, "dropout", "v", self.local.round.index, self.local.card.id, self.count):
            loss = mixed.gradient(batch, self.task.loss)
        work.gradients += batch.n
        self.stepper.clip(mixed.grad)
        alpha = self.alpha
        if self.update == "batch" or (self.update == "round" and self.count == 0):
            self.alpha = (alpha - self.rate * torch.dot(self.v - w, mixed.grad)).clamp(0, 1)
        self.stepper.step(self.v, mixed.grad.mul_(alpha))
        self.count += 1
        return loss

    def beside(self, work: Workspace, batch: Batch) -> None:
        """The same, in the middle of a step of w."""
        self.step(work, batch)

    def state(self) -> State:
        """The private State: v with the running statistics of the mixture, and alpha."""
        self.work.flat.copy_(self.v)
        return {**under("model/", self.work.state()), "alpha": self.alpha.cpu()}


@lru_cache(maxsize=8)
def _twin(task_model: Any, device: torch.device) -> Workspace:
    """A second workspace beside the one that `fit` uses."""
    return Workspace(copy.deepcopy(skeleton(task_model)), None, device)
