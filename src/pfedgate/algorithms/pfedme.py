"""pFedMe (Dinh et al. 2020, Personalized Federated Learning with Moreau Envelopes).

The server minimises the mean of F_i(w) = min over theta of f_i(theta) + (lam/2)·‖theta − w‖². Shared: w. Private:
theta_i, kept only to be scored. A round starts with w_i = theta = w; for every batch theta takes `inner_steps`
gradient steps *on that batch*, then w_i moves by eta·lam·(theta − w_i). w_i is sent; the server moves to (1 − beta)·w
+ beta·mean(w_i).

Departures: R, the batches of a round, is the task's epochs (official: 20 steps). Official steps of eta·lam = .15 bring
w_i 96 % of the way to theta in 20 batches; a round here has two or three, so the default is eta·lam = .9 (at 1 the
private theta would be what is sent). Steps are plain gradient steps as in
the paper: no momentum, and no decay (the official optimiser hides a decay of 0.001). Running statistics (BatchNorm)
are shared. Theta is a copy: in the official code and PFLlib it aliases the live model, so that their "personalised"
accuracy is that of w_i. A client that was never sampled is scored with w. A novel client runs the inner loop with w
fixed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from pfedgate.algorithms import register
from pfedgate.algorithms.private_parts import everything, parameters
from pfedgate.core.algorithm import Algorithm
from pfedgate.core.mergers import WeightedMean
from pfedgate.core.modules import module
from pfedgate.core.state import inside, pick, under, unflat
from pfedgate.core.types import Card, Local, Round, State, Update
from pfedgate.training.fit import Batch, Fit, Workspace, fit
from pfedgate.training.workspace import Stepper


@register("pfedme")
@dataclass(frozen=True)
class PFedMe(Algorithm):
    """Personal models as proximal points of a shared one."""

    lam: float = 15.0  # official: 15 to 30
    inner_steps: int = 5  # K, on each batch; official
    inner_lr: float | None = None  # eta_p, official .01 to .1; None: the task's, at most 1/lam (beyond it overshoots)
    outer_lr: float | None = None  # eta, of w_i; official .005 to .01; None: .9/lam, nearly all the way to theta
    beta: float = 1.0  # the server's step towards the mean; official 1, tuned 2
    adapt_epochs: int = 1  # a novel client's epochs: the fine-tuning budget of all methods

    paper = "Dinh et al. 2020, Personalized Federated Learning with Moreau Envelopes"
    shares = "the whole model w"
    keeps = "its proximal point theta, to predict with"
    # The rate that is searched for all methods is the inner one here: no trial is spent on a rate that nothing reads.
    grid: ClassVar[dict[str, tuple[object, ...]]] = {"lam": (1.0, 5.0, 15.0, 30.0)}

    def __post_init__(self) -> None:
        if self.lam < 0 or self.inner_steps < 1:
            raise ValueError(f"lam is not negative and inner_steps at least 1; got {self.lam}, {self.inner_steps}")

    def train(self, got: State, private: State, local: Local) -> tuple[Update, State]:
        """For every batch, theta towards the proximal point of w_i, then w_i towards theta."""
        pull = 0.9 * (self.lam > 0) if self.outer_lr is None else self.outer_lr * self.lam * local.round.factor
        done, w = self._loop(got, local, pull, None)
        return Update({**done.state, **w}, local.n, done.metrics), self._theta(done)

    def _theta(self, done: Fit) -> State:
        return under("theta/", pick(done.state, parameters(self.task, everything(self.task))))

    def _loop(self, got: State, local: Local, pull: float, epochs: int | None) -> tuple[Fit, State]:
        """Theta with the running statistics met on its way, and w_i."""
        optim = replace(self.task.optim, name="sgd", momentum=0.0, weight_decay=0.0)
        rate = min(self.task.optim.lr, 1 / self.lam if self.lam else 1.0) if self.inner_lr is None else self.inner_lr
        stepper = Stepper(optim, rate * local.round.factor)
        own: dict[str, Tensor] = {}
        layout: list[tuple[str, torch.Size]] = []

        def step(work: Workspace, batch: Batch) -> Tensor:
            if not own:
                own["w"] = work.flat.clone()
                layout.extend(work.shapes)
            w = own["w"]
            first: Tensor | None = None
            for _ in range(self.inner_steps):
                loss = work.gradient(batch, self.task.loss)
                first = loss if first is None else first
                stepper.clip(work.grad)
                work.grad.add_(work.flat - w, alpha=self.lam)
                stepper.step(work.flat, work.grad)
            w.add_(work.flat - w, alpha=pull)
            assert first is not None
            return first

        done = fit(self.task, got, local, step=step, epochs=epochs)
        return done, unflat(own["w"], layout) if own else {}

    def merger(self, server: State, round: Round) -> WeightedMean:
        """The server moves a share beta of the way to the mean."""

        def move(mean: State) -> State:
            floats = {n: v for n, v in mean.items() if v.is_floating_point()}
            return {**mean, **{n: server[n] + self.beta * (v - server[n]) for n, v in floats.items()}}

        return WeightedMean(server, round.total) if self.beta == 1 else WeightedMean(server, round.total, move)

    def adapt(self, got: State, private: State, local: Local) -> State:
        """A novel client's proximal point of the shared model."""
        return self._theta(self._loop(got, local, 0.0, self.adapt_epochs)[0])

    def predictor(self, got: State, private: State, card: Card) -> nn.Module:
        """Theta, as the client's last round left it."""
        return module(self.task, {**got, **inside("theta/", private)})
