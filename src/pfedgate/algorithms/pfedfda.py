"""pFedFDA (McLaughlin and Su 2024, Personalized Federated Learning via Feature Distribution Adaptation).

Shared: the body, and a generative model of its features: a mean for every class and a covariance for all. The head is
what follows from them and the client's label frequencies by linear discriminant analysis; it is never trained. A round
trains the body under the head of the shared model, then measures means and covariance of the client's features, and
sends a mixture of its own and the shared ones. The shares of its own, one for means and one for the covariance, are
those with the least loss in cross-validation. Private: nothing. Scored is the head of the mixture for the body got.

Statistics and head are the authors' to 1e-6. Departures: folds are ours; statistics are of the trained body
(official: of the features that passed while it was trained); the shared means begin as those of the first round's
clients (official: at random); where the task corrects for label frequencies, the head does not do so again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

from pfedgate.algorithms import private_parts as parts
from pfedgate.algorithms import register
from pfedgate.core.algorithm import Algorithm
from pfedgate.core.modules import initial, module
from pfedgate.core.prior import log_frequencies
from pfedgate.core.state import split
from pfedgate.core.types import Card, Local, State, Update
from pfedgate.training.fit import fit, forward_flops, scan

MEANS, COVARIANCE, READY = "fda/means", "fda/covariance", "fda/ready"
EPS = 1e-4  # of the covariance's mean eigenvalue, and of label frequencies
FOLDS, STEPS = 2, 10  # of the cross-validation, and of the search for the mixture


class Gaussians(NamedTuple):
    """Features of all classes: means ``[classes, D]`` and one covariance."""

    means: Tensor
    covariance: Tensor

    def mixed(self, other: Gaussians, own: Tensor) -> Gaussians:
        """Shares `own[0]` of these means and `own[-1]` of this covariance, the rest the other's."""
        return Gaussians(
            own[0] * self.means + (1 - own[0]) * other.means,
            own[-1] * self.covariance + (1 - own[-1]) * other.covariance,
        )


@register("pfedfda")
@dataclass(frozen=True)
class PFedFDA(Algorithm):
    """A body, and heads that follow from Gaussian features."""

    paper = "McLaughlin and Su 2024, Personalized FL via Feature Distribution Adaptation"
    shares = "the body, class means and a covariance of features"
    kinds = ("classification",)  # it has class means

    def __post_init__(self) -> None:
        _ = self._head

    @property
    def _head(self) -> parts.Part:
        return parts.head(self.task, parts.linear_head(self.task)[0])

    def init_server(self, seed: int) -> State:
        """The body, and room for the Gaussians."""
        head = parts.linear_head(self.task)[1]
        room = {MEANS: torch.zeros(head.out_features, head.in_features), COVARIANCE: torch.eye(head.in_features)}
        return {**split(initial(self.task, seed), self._head.__contains__)[1], **room, READY: torch.tensor(False)}

    def _priors(self, local: Local, corrected: tuple[str, ...] = ("training",)) -> Tensor | None:
        """The client's label frequencies, unless the task corrects for them; by default in training."""
        classes = self.task.classes
        if self.task.correction in corrected and classes and log_frequencies(local.train.y, classes).any():
            return None
        counts = torch.bincount(
            local.train.y.cpu().flatten().long(), minlength=parts.linear_head(self.task)[1].out_features
        )
        shares = counts.double() / counts.sum().clamp(min=1) + EPS
        return shares / shares.sum()

    def _with_head(self, got: State, of: Gaussians, priors: Tensor | None) -> State:
        """The model: body and the head of these Gaussians."""
        layer, head = parts.linear_head(self.task)
        weight, bias = discriminant(of, priors)
        own = {f"{layer}.weight": weight.float()} | ({f"{layer}.bias": bias.float()} if head.bias is not None else {})
        return {**{n: value for n, value in got.items() if not n.startswith("fda/")}, **own}

    def _shared(self, got: State) -> Gaussians:
        return Gaussians(got[MEANS].double().cpu(), got[COVARIANCE].double().cpu())

    def _features(self, state: State, local: Local) -> Tensor:
        model = module(self.task, state, local.device)
        entered: list[Tensor] = []
        layer = model.get_submodule(parts.linear_head(self.task)[0])
        layer.register_forward_pre_hook(lambda _, given: entered.append(given[0]))
        return scan(self.task, model, local.train, local, lambda output, y: entered.pop()).cpu().double()

    def _adapted(self, got: State, features: Tensor, local: Local) -> Gaussians:
        """The mixture for these features of the client."""
        y, priors = local.train.y.cpu().flatten().long(), self._priors(local)
        shared = self._shared(got)
        own = measured(features, y, shared)
        if not bool(got[READY]):
            return own
        return own.mixed(shared, shares_of(features, y, shared, priors, local.generator("folds")))

    def train(self, got: State, private: State, local: Local) -> tuple[Update, State]:
        """The body under the head of the shared Gaussians; then the mixture for its features."""
        start, looks = self._with_head(got, self._shared(got), self._priors(local)), 1
        if not bool(got[READY]):  # no Gaussians yet: those of the client's own features
            features = self._features(
                {**start, **split(initial(self.task, local.round.seed), self._head.__contains__)[0]}, local
            )
            own = measured(features, local.train.y.cpu().flatten().long(), self._shared(got))
            start, looks = self._with_head(got, own, self._priors(local)), 2
        names = parts.parameters(self.task, parts.everything(self.task) - self._head)
        done = fit(self.task, start, local, names=names)
        mixed = self._adapted(got, self._features(done.state, local), local)
        body = split(done.state, self._head.__contains__)[1]
        sent = {MEANS: mixed.means.float(), COVARIANCE: mixed.covariance.float(), READY: torch.tensor(True)}
        flops = done.flops + looks * forward_flops(self.task, local.train, local)
        return Update({**body, **sent}, local.n, {**done.metrics, "flops": flops}), {}

    def check(self, got: State, update: Update) -> str | None:
        """What is sent as a covariance can be one: a head is computed from it on every client."""
        if reason := super().check(got, update):
            return reason
        covariance = update.shared[COVARIANCE].double()
        apart = float((covariance - covariance.T).abs().max())
        if apart > EPS * float(covariance.trace()) or int(torch.linalg.cholesky_ex(ridged(covariance))[1]):
            return f"{COVARIANCE!r} is no covariance: it must be symmetric, and no variance negative"
        return None

    def personalise(self, got: State, private: State, local: Local) -> State:
        """The head of the mixture for the body got."""
        shared = self._shared(got)
        if not local.n:
            of = shared
        else:
            of = self._adapted(got, self._features(self._with_head(got, shared, None), local), local)
        priors = self._priors(local, ("training", "prediction"))
        return split(self._with_head(got, of, priors), self._head.__contains__)[0]

    def predictor(self, got: State, private: State, card: Card) -> nn.Module:
        """The body with the client's head."""
        return module(self.task, {**self._with_head(got, self._shared(got), None), **private})


def discriminant(of: Gaussians, priors: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weight and bias of the head that these Gaussians and label frequencies give.

    >>> weight, bias = discriminant(Gaussians(torch.eye(2), torch.eye(2)), None)
    >>> [[round(value, 3) for value in row] for row in weight.tolist()], [round(value, 3) for value in bias.tolist()]
    ([[1.0, 0.0], [0.0, 1.0]], [-0.5, -0.5])
    """
    weight = torch.linalg.solve(ridged(of.covariance), of.means.T).T
    bias = -0.5 * (of.means * weight).sum(1)
    return weight, bias if priors is None else bias + priors.log()


def ridged(covariance: Tensor) -> Tensor:
    """A covariance with a little of its mean variance in every direction."""
    size = len(covariance)
    return (1 - EPS) * covariance + EPS * covariance.trace() / size * torch.eye(size, dtype=covariance.dtype)


def measured(features: Tensor, y: Tensor, shared: Gaussians) -> Gaussians:
    """Means and covariance of these features; a class that is not there has the shared mean."""
    classes = len(shared.means)
    counts = torch.bincount(y, minlength=classes).to(features)[:, None]
    sums = torch.zeros_like(shared.means, dtype=features.dtype).index_add_(0, y, features)
    means = torch.where(counts > 0, sums / counts.clamp(min=1), shared.means.to(features))
    centred = features - means[y]
    scatter = centred.T @ centred / max(1, len(features) - 1)
    return Gaussians(means, scatter + EPS + torch.eye(features.shape[1], dtype=features.dtype))


def shares_of(features: Tensor, y: Tensor, shared: Gaussians, priors: Tensor | None, stream: torch.Generator) -> Tensor:
    """The client's own shares of means and covariance, of least loss on folds that were not measured."""
    counts = torch.bincount(y)
    keep = counts[y] >= FOLDS
    if not keep.any():
        return torch.zeros(2, dtype=features.dtype)
    features, y = features[keep], y[keep]
    order = torch.randperm(len(y), generator=stream)
    order = order[y[order].argsort(stable=True)]
    fold = torch.empty_like(y)
    fold[order] = torch.arange(len(y)) % FOLDS
    halves = [
        (measured(features[fold != k], y[fold != k], shared), features[fold == k], y[fold == k]) for k in range(FOLDS)
    ]

    def loss(values: Any) -> tuple[float, Any]:
        own = torch.tensor(values, dtype=features.dtype, requires_grad=True)
        total = torch.zeros((), dtype=features.dtype)
        with torch.enable_grad():
            for part, x, labels in halves:
                weight, bias = discriminant(part.mixed(shared, own), priors)
                total = total + nn.functional.cross_entropy(x @ weight.T + bias, labels)
        (slope,) = torch.autograd.grad(total, own)
        return float(total.detach()), slope.numpy()

    start: Sequence[float] = (0.5, 0.5)
    found = minimize(
        loss, np.array(start), jac=True, method="L-BFGS-B", bounds=[(0, 1)] * 2, options={"maxiter": STEPS}
    )
    return torch.tensor(found.x, dtype=features.dtype)
