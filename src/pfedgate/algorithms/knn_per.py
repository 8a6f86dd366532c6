"""kNN-Per (Marfoq et al. 2022, Personalized Federated Learning through Local Memorization).

Shared: a model, trained by FedAvg. Private, made anew for every evaluation: a memory of the client's training samples
as (feature, label), the feature being what enters the head. Prediction: p = lam·p_kNN + (1 − lam)·softmax(model(x)),
where the k nearest memories vote with weights exp(−distance²/(scale·features)), as in the official code.

`lam` is chosen by each client on its validation data from 0, 0.1, …, 1 unless given (0.5 for a client without any).
The predictor returns log-probabilities, so any cross-entropy can score it. Memories are of training data only, so a
scored sample is never its own neighbour. A novel client builds its memory; nothing is trained.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pfedgate.algorithms import private_parts as parts
from pfedgate.algorithms import register
from pfedgate.algorithms.fedavg import FedAvg
from pfedgate.core.modules import module
from pfedgate.core.prior import Added
from pfedgate.core.types import Card, Local, Part, State
from pfedgate.training.fit import Batch, loop

LAMS = tuple(round(0.1 * step, 1) for step in range(11))


@register("knn_per")
@dataclass(frozen=True)
class KNNPer(FedAvg):
    """FedAvg, corrected by the client's nearest training samples."""

    k: int = 10  # neighbours
    scale: float = 1.0  # the kernel's width, in units of the number of features
    lam: float | None = None  # share of the neighbours in the prediction; None: chosen on validation, per client
    layer: str | None = None  # features are what enters this layer; None: the last one with parameters

    paper = "Marfoq et al. 2022, Personalized Federated Learning through Local Memorization"
    keeps = "features of its training data (made anew when needed)"
    adds = True  # to the model's share: neighbours have the client's frequencies already
    grid: ClassVar[dict[str, tuple[object, ...]]] = {
        "k": (5, 7, 10),
        "scale": (0.1, 1.0, 10.0),
    }  # each client chooses lam for itself
    kinds = ("classification",)  # neighbours vote for classes

    def __post_init__(self) -> None:
        if self.k < 1 or self.scale <= 0 or not 0 <= (self.lam or 0) <= 1:
            raise ValueError(
                f"k is at least 1, scale > 0, lam in [0, 1] or None; got {self.k}, {self.scale}, {self.lam}"
            )
        if self.layer is not None:
            parts.choose(self.task, self.layer, "layer")

    def personalise(self, got: State, private: State, local: Local) -> State:
        """The memory, and the share of its vote."""
        if not local.n or self.lam == 0:
            return private
        model = self._model(got, local.device)
        seen: list[tuple[Tensor, Tensor]] = []
        self._see(model, local, local.train, lambda x, y: seen.append((model.features(x)[0], y.flatten())))
        memory = {"knn/features": torch.cat([f for f, _ in seen]), "knn/labels": torch.cat([y for _, y in seen])}
        model.remember(memory)
        memory["knn/lam"] = torch.tensor(self._choose(model, local) if self.lam is None else self.lam)
        return {**private, **memory}

    def _choose(self, model: Neighbours, local: Local) -> float:
        """The share with the best validation accuracy, of equals the one with the best likelihood."""
        if not local.val.n:
            return 0.5
        tallies: list[Tensor] = []

        def score(x: Tensor, y: Tensor) -> None:
            near, far = (p.reshape(-1, p.shape[-1]) for p in model.both(x))
            mixed = torch.stack([lam * near + (1 - lam) * far for lam in LAMS])
            right = mixed.argmax(-1).eq(y.flatten()).double().sum(-1)
            likely = mixed.gather(-1, y.flatten().expand(len(LAMS), -1)[..., None]).clamp_min(1e-12).log().sum((1, 2))
            tallies.append(torch.stack([right, likely.double()]))

        self._see(model, local, local.val, score)
        right, likely = torch.stack(tallies).sum(0).tolist()
        return LAMS[max(range(len(LAMS)), key=lambda at: (right[at], likely[at]))]

    def _see(self, model: nn.Module, local: Local, part: Part, look: Any) -> None:
        @torch.no_grad()
        def step(batch: Batch) -> Tensor:
            look(batch.x, batch.y)
            return batch.x.new_zeros(())

        task = replace(self.task, drop_last=False)
        loop(task, local, step, part=part, batch=self.task.eval_batch, epochs=1, stream="memory")

    def _model(self, got: State, device: torch.device | None = None) -> Neighbours:
        model, layer = module(self.task, got, device), self.layer or parts.head_layer(self.task)
        return Neighbours(model, layer, self.k, self.scale, self.task.added)

    def predictor(self, got: State, private: State, card: Card) -> nn.Module:
        """The model and the memory."""
        if "knn/features" not in private:
            plain = module(self.task, got)
            return plain if self.task.added is None else Added(plain, self.task.added)
        model = self._model(got)
        model.remember(private)
        return model


class Neighbours(nn.Module):
    """A classifier beside the votes of remembered samples; returns log-probabilities."""

    def __init__(self, model: nn.Module, layer: str, k: int, scale: float, added: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("added", added)
        self.model, self.k, self.scale, self.lam = model, k, scale, 0.0
        self.register_buffer("memory", torch.zeros(0, 0))
        self.register_buffer("labels", torch.zeros(0, dtype=torch.int64))
        self.layer = layer

    def remember(self, private: State) -> None:
        """Use the memory in a private State from now on."""
        self.memory, self.labels = private["knn/features"], private["knn/labels"]
        self.lam = float(private.get("knn/lam", torch.tensor(0.0)))

    def features(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What enters the head, one row per prediction, and the model's output."""
        entered, output = parts.features(self.model, self.layer, x)
        rows = entered.reshape(-1, entered.shape[-1])
        if len(rows) != output[..., 0].numel():
            raise ValueError(
                f"the layer that gives features gets {tuple(entered.shape)} for an output of {tuple(output.shape)}; "
                "kNN-Per needs one vector per prediction: choose another one with layer="
            )
        return rows, output

    def both(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities by neighbours and by the model."""
        rows, output = self.features(x)
        distance = torch.cdist(rows, self.memory, compute_mode="donot_use_mm_for_euclid_dist").square()
        near, at = distance.topk(min(self.k, len(self.memory)), largest=False)
        # Softmax is the kernel, normalised; it cannot underflow however far the neighbours are.
        vote = torch.softmax(-near / (self.scale * rows.shape[1]), dim=-1)
        share = torch.zeros(len(rows), output.shape[-1], dtype=vote.dtype, device=vote.device)
        if isinstance(self.added, Tensor):
            output = output + self.added.to(output.device)
        return share.scatter_add_(1, self.labels[at], vote).view(output.shape), output.softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        """Log-probabilities of the mixture of model and neighbours."""
        near, far = self.both(x)
        return (self.lam * near + (1 - self.lam) * far).clamp_min(1e-12).log()

    def stats(self) -> dict[str, float]:
        """The share of the neighbours."""
        return {"lam": self.lam}
