"""GPFL (Zhang et al. 2023, GPFL: Simultaneously Learning Global and Personalized Feature Information).

Shared: the body, an embedding for every class (GCE), and a conditional valve (CoV), a network that turns a context into
a scale and an offset of features. Private: the head. Features pass the valve twice: in the client's own context, the
mean of the class embeddings by its label frequencies, to the head; and in everybody's, their plain mean, to the
embeddings, which classify by cosine and pull the features of each class to its own (`lam`). Scored is the first path.

An epoch is bit for bit PFLlib's, given its contexts and optimiser. Departures: contexts are made of the embeddings
that came with the round (official: of the client's own of the round before, in the first round zero); embeddings and
valve have the task's optimiser (official: SGD with a decay `mu` of its own). A novel client trains a head for
`adapt_epochs`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pfedgate.algorithms import private_parts as parts
from pfedgate.algorithms import register
from pfedgate.core.state import split, under
from pfedgate.core.types import Card, Local, State, Task, Update
from pfedgate.training.fit import Batch, fit

FREQUENCIES = "frequencies"  # of the client's labels, in its private State


@register("gpfl")
@dataclass(frozen=True)
class GPFL(parts.PrivatePart):
    """Features for everybody's class embeddings and for the client's own head, by a valve with two contexts."""

    lam: float = 0.01  # pull of features to the embedding of their class; the paper searched to .1
    adapt_epochs: int = 1  # a novel client's epochs: the fine-tuning budget of all methods

    paper = "Zhang et al. 2023, GPFL: Learning Global and Personalized Feature Information for PFL"
    shares = "the body, class embeddings and a conditional valve"
    keeps = "the head and the frequencies of its labels"
    kinds = ("classification",)  # it embeds classes
    grid: ClassVar[dict[str, tuple[object, ...]]] = {"lam": (0.0001, 0.001, 0.01, 0.1)}

    def __post_init__(self) -> None:
        if self.lam < 0:
            raise ValueError(f"lam is not negative, got {self.lam}")
        super().__post_init__()

    @property
    def whole(self) -> Task:
        """The model with embeddings and valve before its head."""
        return parts.extended(self.task, with_valve)

    @property
    def _layer(self) -> str:
        return parts.linear_head(self.task)[0]

    @property
    def own(self) -> parts.Part:
        """The tensors of the head, and the context of the client."""
        return parts.head(self.task, None) | {f"{self._layer}.context"}

    def init_client(self, got: State, local: Local) -> State:
        """The common initial head, and the label frequencies."""
        classes = parts.linear_head(self.task)[1].out_features
        counts = torch.bincount(local.train.y.cpu().flatten().long(), minlength=classes).float()
        return {**super().init_client(got, local), FREQUENCIES: counts / counts.sum().clamp(min=1)}

    def _joined(self, got: State, private: State) -> State:
        """The client's model, in its context for the embeddings got."""
        context = private[FREQUENCIES] @ got[f"{self._layer}.embedding.weight"].cpu()
        whole = parts.join(got, private)
        return {n: v for n, v in whole.items() if n != FREQUENCIES} | {f"{self._layer}.context": context}

    def train(self, got: State, private: State, local: Local) -> tuple[Update, State]:
        """Local epochs of everything, on both paths."""
        return self._fit(got, private, local, None, None)

    def _fit(
        self, got: State, private: State, local: Local, names: tuple[str, ...] | None, epochs: int | None
    ) -> tuple[Update, State]:
        layer = self._layer
        frozen = got[f"{layer}.embedding.weight"].to(local.device)
        generic = frozen.mean(0)

        def objective(model: nn.Module, batch: Batch) -> Tensor:
            entered, output = parts.features(model, layer, batch.x)
            loss: Tensor = self.task.loss(output, batch.y).mean()
            if names is not None:
                return loss
            head: Any = model.get_submodule(layer)
            common: Tensor = head.valve(entered, generic)
            cosines = F.linear(F.normalize(common), F.normalize(head.embedding.weight))
            pull: Tensor = torch.linalg.vector_norm(common - frozen[batch.y])
            loss = loss + F.cross_entropy(cosines, batch.y) + self.lam * pull
            return loss

        own = parts.parameters(self.whole, self.own)
        done = fit(
            self.whole, self._joined(got, private), local, names=names, own=own, own_lr=self.own_lr, epochs=epochs,
            objective=objective,
        )  # fmt: skip
        # The path to the embeddings: three products of classes by features for every sample.
        metrics = {**done.metrics, "flops": done.flops + (6.0 * frozen.numel() * done.samples if names is None else 0)}
        part, shared = split(done.state, self.own.__contains__)
        return Update(shared, local.n, metrics), {**under(parts.OWN, part), FREQUENCIES: private[FREQUENCIES]}

    def adapt(self, got: State, private: State, local: Local) -> State:
        """A novel client trains a head; what is shared stands still."""
        return self._fit(got, private, local, parts.parameters(self.whole, self.own), self.adapt_epochs)[1]

    def predictor(self, got: State, private: State, card: Card) -> nn.Module:
        """Body, valve in the client's context, head."""
        whole = self._joined(got, private)
        return super().predictor(
            whole, under(parts.OWN, {f"{self._layer}.context": whole[f"{self._layer}.context"]}), card
        )


class Valve(nn.Module):
    """Scale and offset of features, made of a context."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gamma, self.beta = (
            nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.LayerNorm([size])) for _ in range(2)
        )

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        """The features in this context."""
        return torch.relu(x * (self.gamma(context) + 1) + self.beta(context))


def with_valve(head: nn.Linear) -> None:
    """Give a head class embeddings, and let it read features through a valve in its context."""
    head.register_module("embedding", nn.Embedding(head.out_features, head.in_features))
    head.register_module("valve", Valve(head.in_features))
    head.register_buffer("context", torch.zeros(head.in_features))
    head.register_forward_pre_hook(_through_valve)


def _through_valve(head: Any, given: tuple[Tensor, ...]) -> Tensor:
    features: Tensor = head.valve(given[0], head.context)
    return features
