"""FedALA (Zhang et al. 2023, FedALA: Adaptive Local Aggregation for Personalized Federated Learning).

Shared: the model. Private: the upper layers of the client's last model, which it sent, and a weight W in [0, 1] for
each of their parameters. Before it trains, a client mixes: lower layers are those received, upper ones local +
W·(received − local), W trained on part of its data by ∇f·(received − local). Scored is the mixture, as in the authors'
code; with W = 1 this is FedAvg.

W is trained until the loss settles in a client's first mixing, for one pass afterwards. That, and which layers count as
upper (the last `layers` ones), is PFLlib's, with which a mixing agrees to 1e-7; departures: the share of samples is
drawn anew instead of cut from a random place, the mean loss of a pass decides when to stop, and the mixing before
scoring leaves no trace in W. Running statistics are those received. A novel client's first mixing finds its own
initial model, so it is scored after FedAvg's local epochs followed by a mixing.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from pfedgate.algorithms import private_parts as parts
from pfedgate.algorithms import register
from pfedgate.core.algorithm import Algorithm
from pfedgate.core.modules import module
from pfedgate.core.state import inside, pick, under, unflat
from pfedgate.core.types import Card, Local, State, Update
from pfedgate.training.fit import Batch, Workspace, fit

LAST, WEIGHTS, MIXED = "last/", "weights/", "mixed/"


@register("fedala")
@dataclass(frozen=True)
class FedALA(Algorithm):
    """Every client mixes the received model with its last one, element by element."""

    layers: int = 1  # upper layers that are mixed; the paper's p
    share: float = 0.8  # of the training samples, to learn the weights on; the paper's s
    eta: float = 1.0  # rate of the weights; the paper's
    settled: float = 0.1  # the first mixing ends when the loss of ten passes deviates less; official
    most_passes: int = 30  # or after so many passes; official: no limit
    adapt_epochs: int = 1  # a novel client's epochs: the fine-tuning budget of all methods

    paper = "Zhang et al. 2023, FedALA: Adaptive Local Aggregation for Personalized FL"
    keeps = "upper layers of its last model (sent, too) and weights of the mixture"
    grid: ClassVar[dict[str, tuple[object, ...]]] = {
        "layers": (1, 2, 3),
        "share": (0.05, 0.2, 0.5, 0.8, 1.0),
        "eta": (0.1, 1.0, 10.0),
    }

    def __post_init__(self) -> None:
        if self.layers < 1 or not 0 < self.share <= 1 or self.eta < 0:
            raise ValueError(f"layers is at least 1, share in (0, 1], eta not negative; got {self.options()}")

    @property
    def _names(self) -> tuple[str, ...]:
        upper = list(parts.layers(self.task).values())[-self.layers :]
        return parts.parameters(self.task, frozenset(name for names in upper for name in names))

    def train(self, got: State, private: State, local: Local) -> tuple[Update, State]:
        """Mix, then FedAvg's epochs from the mixture."""
        mixed, private, flops = self.mix(got, private, local)
        done = fit(self.task, mixed, local)
        metrics = {**done.metrics, "flops": done.flops + flops}
        return Update(done.state, local.n, metrics), {**private, **self._last(done.state)}

    def _last(self, state: State) -> State:
        return under(LAST, pick(state, self._names))

    def mix(self, got: State, private: State, local: Local) -> tuple[State, State, float]:
        """The mixture, the private State with its weights, and what it took; without a last model: as received."""
        names = self._names
        if not any(name.startswith(LAST) for name in private) or not local.n:
            return got, private, 0.0
        known = all(WEIGHTS + name in private for name in names)
        old = {name: private.get(WEIGHTS + name, torch.ones_like(got[name])) for name in names}
        last, weights = inside(LAST, private), dict(old)
        steps = max(1, round(self.share * -(-local.n // self.task.batch)))
        losses: list[float] = []
        flops = 0.0
        while self.eta and not self._enough(losses, known):
            weights, loss, cost = self._learn(got, last, weights, local, steps, f"weights {len(losses)}")
            losses.append(loss)
            flops += cost
        mixed = {**got, **{name: torch.lerp(last[name], got[name], weights[name]) for name in names}}
        return mixed, {**private, **under(WEIGHTS, weights)}, flops

    def _enough(self, losses: list[float], known: bool) -> bool:
        if known or len(losses) >= self.most_passes:
            return bool(losses)
        return len(losses) > 10 and statistics.pstdev(losses[-10:]) < self.settled

    def _learn(
        self, got: State, last: State, weights: State, local: Local, steps: int, stream: str
    ) -> tuple[State, float, float]:
        """The weights after one pass."""
        vectors: list[Tensor] = []  # last model, received one, weights: the upper layers end to end
        layout: list[tuple[str, torch.Size]] = []

        def step(work: Workspace, batch: Batch) -> Tensor:
            if not vectors:
                vectors.extend(work.vector(state) for state in (last, got, weights))
                layout.extend(work.shapes)
            torch.lerp(vectors[0], vectors[1], vectors[2], out=work.flat)
            loss = work.gradient(batch, self.task.loss)
            vectors[2] = (vectors[2] - self.eta * work.grad * (vectors[1] - vectors[0])).clamp_(0, 1)
            return loss

        done = fit(self.task, got, local, names=self._names, step=step, steps=steps, stream=stream)
        return unflat(vectors[2].cpu(), layout), done.loss, done.flops

    def personalise(self, got: State, private: State, local: Local) -> State:
        """The mixture, learnt anew for the model at hand."""
        mixed = self.mix(got, private, local)[0]
        return {**private, **under(MIXED, mixed)}

    def adapt(self, got: State, private: State, local: Local) -> State:
        """A novel client's last model: the received one after its own epochs."""
        return {**private, **self._last(fit(self.task, got, local, epochs=self.adapt_epochs).state)}

    def predictor(self, got: State, private: State, card: Card) -> nn.Module:
        """The mixture."""
        return module(self.task, inside(MIXED, private) or got)
