"""FedPAC (Xu et al. 2023, Personalized Federated Learning with Feature Alignment and Classifier Collaboration).

Shared: the body, averaged; the mean features of every class, averaged over the clients that have it; and heads, of
which the server mixes one for each client. A round first trains the head it was sent on the frozen body, then the body
under the frozen head, features pulled to the means of their classes (`lam`). The weights of a client's mixture minimise
an estimate of its test loss: how far other clients' class means lie from its own, and how much each varies (a quadratic
program over the round's clients). Private: nothing; heads lie on the server, by client.

A client's round is PFLlib's, the model bit for bit, statistics to 3e-7. With one client and lam = 0 this is FedRep.
Departures: a class mean weighs as many samples as it has (official: every client alike); weights of the mixture are
exact, by active sets (official: of an interior point, those below 1e-3 cut off). A client without a mixture starts from
the average of all heads; so does a novel one, which then trains it for `adapt_epochs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor, nn

from pfedgate.algorithms import private_parts as parts
from pfedgate.algorithms import register
from pfedgate.core.algorithm import Algorithm
from pfedgate.core.mergers import WeightedMean
from pfedgate.core.modules import initial, module
from pfedgate.core.state import inside, pick
from pfedgate.core.types import Card, Local, Round, State, Update
from pfedgate.training.fit import Batch, fit, forward_flops, scan

HEADS = "heads/"  # in the server's State: heads/CLIENT/name, mixed for that client
MEANS, KNOWN = "pac/means", "pac/known"  # features of classes, everybody's; and how many samples they are of
OWN, COUNTS = "pac/own", "pac/counts"  # what a client sends for them
STATISTICS, SPREAD = "pac/statistics", "pac/spread"  # class means times frequencies, and their variance over n


@register("fedpac")
@dataclass(frozen=True)
class FedPAC(Algorithm):
    """Aligned features, and a head mixed for each client."""

    lam: float = 1.0  # pull of features to their class's mean; the paper's
    head_epochs: int = 1  # the paper's
    head_lr: float | None = None  # None: the task's; the paper's is ten times the body's
    adapt_epochs: int = 1  # a novel client's epochs on its head

    paper = "Xu et al. 2023, Personalized FL with Feature Alignment and Classifier Collaboration"
    apart = "its clients send statistics of their data beside the body"
    shares = "the body, class means of features, and a head mixed for each client"
    kinds = ("classification",)  # it has class means
    grid: ClassVar[dict[str, tuple[object, ...]]] = {"lam": (0.1, 0.5, 1.0, 5.0), "head_lr": (None, 0.03, 0.1)}

    def __post_init__(self) -> None:
        if self.lam < 0:
            raise ValueError(f"lam is not negative, got {self.lam}")
        _ = self._head

    @property
    def _head(self) -> parts.Part:
        return parts.head(self.task, parts.linear_head(self.task)[0])

    def init_server(self, seed: int) -> State:
        """The model, whose head is everybody's at first, and room for class means."""
        head = parts.linear_head(self.task)[1]
        room = {MEANS: torch.zeros(head.out_features, head.in_features), KNOWN: torch.zeros(head.out_features)}
        return {**initial(self.task, seed), **room}

    def send(self, server: State, card: Card, round: Round) -> State:
        """Body, class means, and the head that was mixed for this client."""
        own = inside(f"{HEADS}{card.id}/", server)
        return {n: own.get(n, value) for n, value in server.items() if not n.startswith(HEADS)}

    def _features(self, state: State, local: Local) -> Tensor:
        """The features of all training samples."""
        model = module(self.task, state, local.device)
        layer = parts.linear_head(self.task)[0]
        entered: list[Tensor] = []
        model.get_submodule(layer).register_forward_pre_hook(lambda _, given: entered.append(given[0]))
        return scan(self.task, model, local.train, local, lambda output, y: entered.pop())

    def train(self, got: State, private: State, local: Local) -> tuple[Update, State]:
        """Statistics of the features got, then the head, then the body; the class means of the trained body."""
        layer, head = parts.linear_head(self.task)
        classes = head.out_features
        y = local.train.y.cpu().flatten().long()
        model = {name: value for name, value in got.items() if not name.startswith("pac/")}
        statistics, spread = moments(self._features(model, local).cpu(), y, classes)
        names = [parts.parameters(self.task, part) for part in (self._head, parts.everything(self.task) - self._head)]
        first = fit(
            self.task, model, local, names=names[0], epochs=self.head_epochs, steps=None, lr=self.head_lr
        )  # fmt: skip
        means, known = got[MEANS].to(local.device), (got[KNOWN] > 0).to(local.device)

        def objective(model: nn.Module, batch: Batch) -> Tensor:
            entered, output = parts.features(model, layer, batch.x)
            towards = torch.where(known[batch.y][:, None], means[batch.y], entered.detach())
            return self.task.loss(output, batch.y).mean() + self.lam * (entered - towards).square().mean()

        done = fit(self.task, first.state, local, names=names[1], objective=objective if self.lam else None)
        features = self._features(done.state, local).cpu()
        counts = torch.bincount(y, minlength=classes).float()
        own = torch.zeros(classes, features.shape[1]).index_add_(0, y, features) / counts.clamp(min=1)[:, None]
        flops = first.flops + done.flops + 2 * forward_flops(self.task, local.train, local)
        sent = {**done.state, OWN: own, COUNTS: counts, STATISTICS: statistics, SPREAD: spread}
        return Update(sent, local.n, {**done.metrics, "flops": flops}), {}

    def merger(self, server: State, round: Round) -> Collaboration:
        """Body and head averaged, class means by samples, and a mixture of heads for every client of the round."""
        return Collaboration(server, self._head, round.total)

    def check(self, got: State, update: Update) -> str | None:
        """The model as sent; statistics of the right shapes, and of no more samples than the client counts for."""
        head = parts.linear_head(self.task)[1]
        shapes = {OWN: got[MEANS].shape, STATISTICS: got[MEANS].shape, COUNTS: (head.out_features,), SPREAD: ()}
        for name, shape in shapes.items():
            if name not in update.shared or update.shared[name].shape != torch.Size(shape):
                return f"{name!r} must be there and have shape {tuple(shape)}"
        counts = update.shared[COUNTS].double()
        if float(counts.min()) < 0 or float(counts.sum()) > update.weight * (1 + 1e-6):
            return f"{COUNTS!r} must not be negative, nor more than {update.weight:g} in all"
        model = {name: value for name, value in update.shared.items() if name not in shapes}
        return super().check(got, replace(update, shared=model))

    def landed(self, got: State, update: Update) -> State:
        """The client's own model, as it trained it."""
        return {**got, **{name: value for name, value in update.shared.items() if not name.startswith("pac/")}}

    def adapt(self, got: State, private: State, local: Local) -> State:
        """A novel client trains a head, which it keeps."""
        names = parts.parameters(self.task, self._head)
        done = fit(self.task, got, local, names=names, epochs=self.adapt_epochs, lr=self.head_lr)
        return pick(done.state, sorted(self._head))

    def predictor(self, got: State, private: State, card: Card) -> nn.Module:
        """The body with the client's head."""
        return module(self.task, {**got, **private})


def moments(features: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Class means times class frequencies, and how much their sum varies with the sample: trace of covariance over n.

    >>> moments(torch.tensor([[1.0], [3.0], [5.0]]), torch.tensor([0, 0, 1]), 2)
    (tensor([[1.3333],
            [1.6667]]), tensor(2.3704))
    """
    sums = torch.zeros(classes, features.shape[1]).index_add_(0, y, features) / len(y)
    squares = features.square().sum() / len(y)
    return sums, (squares - sums.square().sum()) / len(y)


class Collaboration:
    """A round's body, class means and mixtures of heads."""

    def __init__(self, server: State, head: parts.Part, total: float | None) -> None:
        self.server, self.head = server, sorted(head)
        self.model = WeightedMean({n: v for n, v in server.items() if not n.startswith(("pac/", HEADS))}, total)
        self.heads: dict[str, State] = {}
        self.statistics: list[Tensor] = []
        self.spreads: list[float] = []
        self.sums, self.counts = torch.zeros_like(server[MEANS]).double(), torch.zeros_like(server[KNOWN]).double()

    def add(self, card: Card, update: Update) -> str | None:
        """The model to the mean; head and statistics are kept until all are there."""
        sent = update.shared
        self.heads[card.id] = pick(sent, self.head)
        self.statistics.append(sent[STATISTICS].double())
        self.spreads.append(float(sent[SPREAD]))
        self.sums += sent[OWN].double() * sent[COUNTS].double()[:, None]
        self.counts += sent[COUNTS].double()
        model = {name: value for name, value in sent.items() if not name.startswith("pac/")}
        return self.model.add(card, Update(model, update.weight))

    def result(self) -> State:
        """The server's State; clients of earlier rounds keep their mixtures."""
        means = self.sums / self.counts.clamp(min=1)[:, None]
        seen = self.counts > 0
        merged = {**self.server, **self.model.result()}
        merged[MEANS] = torch.where(seen[:, None], means, self.server[MEANS].double()).float()
        merged[KNOWN] = torch.where(seen, self.counts, self.server[KNOWN].double()).float()
        for at, client in enumerate(self.heads):
            weights = mixture(at, self.statistics, self.spreads)
            for name in self.head:
                mixed = sum(w * head[name].double() for w, head in zip(weights, self.heads.values(), strict=True))
                assert isinstance(mixed, Tensor)
                merged[f"{HEADS}{client}/{name}"] = mixed.float()
        return merged


def mixture(own: int, statistics: Sequence[Tensor], spreads: Sequence[float]) -> list[float]:
    """Weights of all clients' heads for one of them: least bias and variance, not negative, 1 in all.

    >>> alike = [torch.ones(2, 1, dtype=torch.float64)] * 2
    >>> [round(weight, 3) for weight in mixture(0, alike, [1.0, 3.0])]
    [0.75, 0.25]
    """
    away = torch.stack([(statistics[own] - other).flatten() for other in statistics]).double()
    quadratic = (away @ away.T).numpy() + np.diag(np.maximum(np.asarray(spreads, np.float64), 1e-12))
    # min wᵀQw with weights of sum 1: least squares of the root of Q, and of one row that outweighs it.
    try:
        root = np.linalg.cholesky(quadratic).T
    except np.linalg.LinAlgError:  # statistics so far apart that their rounding outweighs the spreads
        values, vectors = np.linalg.eigh(quadratic)
        root = (vectors * np.sqrt(values.clip(min=0))).T
    heavy = 1e4 * float(np.sqrt(np.trace(quadratic)))
    weights, _ = nnls(np.vstack([root, np.full(len(root), heavy)]), np.append(np.zeros(len(root)), heavy))
    return [float(weight) for weight in weights / weights.sum()]
