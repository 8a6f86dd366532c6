"""FedEM (Marfoq et al. 2021, Federated Multi-Task Learning under a Mixture of Distributions).

Shared: M models ("components"), each averaged by sample counts. Private: pi_i, the client's mixture of them. A round:
the E-step asks every component for its loss on *all* samples (evaluation mode) and sets q_nm ∝ pi_m·exp(−loss);
pi becomes the mean of q, and each component takes its local epochs on losses weighted by q and divided by the size of
the batch. Prediction mixes probabilities, not logits (the predictor returns their logarithm).

All components see the same batches; they differ by their initial values (seed and number; the first one starts where
FedAvg does), without which they would stay equal for ever. The loss must be a negative log-likelihood.

Ambiguities: the pi that predicts was made with the components *before* the round's average; `refresh=True` makes it
anew before every evaluation. A novel client repeats E-step and pi from a uniform start, components untouched (the
reference does one step per evaluation and carries it over). Weights are n_i, not n_i·pi_im (paper and code agree).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from pfedgate.algorithms import register
from pfedgate.core.algorithm import Algorithm
from pfedgate.core.modules import initial, module
from pfedgate.core.prior import Added
from pfedgate.core.state import inside, under
from pfedgate.core.types import Card, Local, State, Update
from pfedgate.training.fit import fit, forward_flops, scan

LEAST = 1e-12  # a share of exactly 0 could never grow again


def responsibilities(pi: Tensor, losses: Tensor) -> Tensor:
    """E-step: q [n, M] from the client's pi [M] and the components' losses [n, M].

    >>> responsibilities(torch.tensor([0.5, 0.5]), torch.tensor([[0.0, 0.0], [0.0, 1000.0]])).tolist()
    [[0.5, 0.5], [1.0, 0.0]]
    """
    return torch.softmax(pi.clamp_min(LEAST).log() - losses, dim=1)


@register("fedem")
@dataclass(frozen=True)
class FedEM(Algorithm):
    """Every client is a mixture of a few shared models."""

    components: int = 3  # M, as in the paper
    refresh: bool = False  # make pi anew, with the components received, before predicting
    adapt_steps: int = 10  # E-steps of a novel client; no gradient in them

    paper = "Marfoq et al. 2021, Federated Multi-Task Learning under a Mixture of Distributions"
    shares = "M whole models"
    keeps = "M mixture weights"
    adds = True
    grid: ClassVar[dict[str, tuple[object, ...]]] = {"components": (3,)}
    kinds = ("classification", "language")  # it mixes probabilities of classes

    def __post_init__(self) -> None:
        if self.components < 1 or self.adapt_steps < 0:
            raise ValueError(f"components is at least 1, adapt_steps not negative; got {self}")

    def init_server(self, seed: int) -> State:
        """M different models; the first is the one FedAvg starts from."""
        server: State = {}
        for m in range(self.components):
            server |= under(f"{m}/", initial(self.task, seed, *([m] if m else [])))
        return server

    def init_client(self, got: State, local: Local) -> State:
        """A mixture of all components alike."""
        return {"pi": torch.full((self.components,), 1 / self.components)}

    def train(self, got: State, private: State, local: Local) -> tuple[Update, State]:
        """E-step, new pi, then every component on its share of the samples."""
        q = responsibilities(private["pi"].to(local.device), self._losses(got, local))
        pi = q.mean(0)
        shared: State = {}
        loss, flops = 0.0, self.components * forward_flops(self.task, local.train, local)
        for m in range(self.components):
            done = fit(self.task, inside(f"{m}/", got), local, weights=q[:, m])
            shared |= under(f"{m}/", done.state)
            loss, flops = loss + done.loss, flops + done.flops
        return Update(shared, local.n, {"loss": loss, "flops": flops}), {"pi": pi.cpu()}

    def personalise(self, got: State, private: State, local: Local) -> State:
        """With `refresh`: pi for the components at hand."""
        if not self.refresh or not local.n:
            return private
        return {**private, "pi": responsibilities(private["pi"], self._losses(got, local).cpu()).mean(0)}

    def adapt(self, got: State, private: State, local: Local) -> State:
        """A novel client's pi; the components stay, so their losses are needed once."""
        if not local.n:
            return private
        losses, pi = self._losses(got, local).cpu(), private["pi"]
        for _ in range(self.adapt_steps):
            pi = responsibilities(pi, losses).mean(0)
        return {"pi": pi}

    def _losses(self, got: State, local: Local) -> Tensor:
        """Loss of every component on every training sample, [n, M]."""
        columns = []
        for m in range(self.components):
            model = module(self.task, inside(f"{m}/", got), local.device)
            columns.append(scan(self.task, model, local.train, local, self.task.loss))
        return torch.stack(columns, dim=1)

    def predictor(self, got: State, private: State, card: Card) -> nn.Module:
        """The client's mixture of the components."""
        models = [module(self.task, inside(f"{m}/", got)) for m in range(self.components)]
        if (added := self.task.added) is not None:  # to each component, as in its loss: probabilities are mixed
            models = [Added(model, added.cpu()) for model in models]
        return Mixture(models, private["pi"])


class Mixture(nn.Module):
    """Log-probabilities of a mixture of classifiers."""

    def __init__(self, models: Sequence[nn.Module], pi: Tensor) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)
        self.register_buffer("pi", pi)

    def forward(self, x: Tensor) -> Tensor:
        """The mixture log Σ_m pi_m·softmax(h_m(x)), stable for small shares."""
        scores = torch.stack([model(x).log_softmax(-1) for model in self.models])
        assert isinstance(self.pi, Tensor)
        log_pi = self.pi.clamp_min(LEAST).log().view(-1, *[1] * (scores.ndim - 1))
        return torch.logsumexp(scores + log_pi, dim=0)

    def stats(self) -> dict[str, float]:
        """How much the client leans on one component."""
        assert isinstance(self.pi, Tensor)
        return {"largest_pi": float(self.pi.max())}
