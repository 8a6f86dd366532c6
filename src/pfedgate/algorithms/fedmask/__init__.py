"""FedMask (Li et al. 2021, FedMask: Joint Computation and Communication-Efficient Personalized FL).

Shared: frozen weights, sent once, and an aggregated binary mask of the top layers. Private: real scores, of which the
client's own mask is 1[score >= threshold], and the structures (filters, neurons) that survived its one-shot pruning:
equal scores are trained for an epoch, the best share `density` of every masked layer is kept for good. Later rounds
set the scores of kept structures to the aggregate, train them straight-through and send one bit per kept entry. The
server averages the bits of entries that two clients of the round kept; their majority goes down.

There is no official code. Ambiguities of the descriptions: s = .5 cannot be the density of the whole model if only the
last layers are masked, so it is the one within these; both are reported. Masks on random weights cannot reach the
published accuracy, so weights are FedAvg's after `warmup` rounds. Of the output layer structures are inputs, as without
a neuron it lacks a class. Bits are weighed by sample counts. A client not yet reached after the warm-up is scored with
the frozen weights; a novel one prunes, takes over the aggregate and trains its scores for an epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from pfedgate.algorithms import private_parts as parts
from pfedgate.algorithms import register
from pfedgate.algorithms.fedmask import structures
from pfedgate.algorithms.fedmask.structures import BITS, KEPT, pack_bits, unpack_bits
from pfedgate.core.algorithm import Algorithm
from pfedgate.core.mergers import Merger, WeightedMean
from pfedgate.core.modules import initial, module
from pfedgate.core.seeds import key
from pfedgate.core.state import inside, under
from pfedgate.core.types import Card, Local, Round, State, Update
from pfedgate.training.fit import fit

MEAN, KNOWN, SERVED = "mask/mean", "mask/known", "mask/served"  # the server's State


@register("fedmask")
@dataclass(frozen=True)
class FedMask(Algorithm):
    """Frozen weights under personal masks; only bits travel."""

    density: float = 0.5  # rho: structures kept of every masked layer (pFedGate: .5, and .3 in its compression study)
    layers: parts.Names | None = None  # masked ones; None: fully connected ones but the first, at least the last
    warmup: float = 0.5  # rounds of FedAvg: a share of all rounds, or their number if 1 or more
    score_lr: float = 10.0  # scores are of the order of 1, their gradients of weight times gradient
    threshold: float = 0.5  # in the middle, because scores are set to bits
    offset: float = 0.01  # scores start this much above the threshold: with everything kept
    init_epochs: int = 1  # epochs before the one-shot pruning
    adapt_epochs: int = 1  # a novel client's epochs on its scores

    paper = "Li et al. 2021, FedMask: Joint Computation and Communication-Efficient Personalized FL"
    shares = "bits of the mask (and the model, before it is frozen)"
    apart = "its clients send bits, of which each has one vote already"
    keeps = "scores of the mask"
    grid: ClassVar[dict[str, tuple[object, ...]]] = {"density": (0.3, 0.5)}

    def __post_init__(self) -> None:
        if not (0 < self.density <= 1 and self.warmup >= 0 and self._structures):  # wrong layers fail here
            raise ValueError(f"FedMask wants 0 < density <= 1 and warmup >= 0; got {self.options()}")

    @property
    def _structures(self) -> structures.Structures:
        return structures.covered(self.task, self.layers)

    def init_server(self, seed: int) -> State:
        """The model, no mask yet, nobody served."""
        of = self._structures
        none = {MEAN: torch.zeros(of.size), KNOWN: torch.zeros(of.count, dtype=torch.bool)}
        return {**initial(self.task, seed), **none, SERVED: torch.zeros(0, dtype=torch.int64)}

    def send(self, server: State, card: Card, round: Round) -> State:
        """The model during the warm-up; then the mask, and with the first one the frozen model."""
        model = {name: value for name, value in server.items() if not name.startswith("mask/")}
        if self._warming_up(server, round):
            return model
        got = {BITS: pack_bits(server[MEAN] >= 0.5), KEPT: pack_bits(server[KNOWN])}
        return got if _mark(card) in server[SERVED] else {**model, **got}

    def _warming_up(self, server: State, round: Round) -> bool:
        rounds = int(self.warmup * round.rounds if self.warmup < 1 else self.warmup)
        return round.index < rounds and not len(server[SERVED])

    def merger(self, server: State, round: Round) -> Merger:
        """FedAvg during the warm-up; then the mean of the bits where enough clients kept them."""
        if self._warming_up(server, round):
            return WeightedMean(server, round.total)
        bits = structures.BitMean(self._structures, server[MEAN])
        return MaskMerger(server, bits, set(server[SERVED].tolist()))

    def train(self, got: State, private: State, local: Local) -> tuple[Update, State]:
        """FedAvg during the warm-up; then the scores, of which the bits are sent."""
        if BITS not in got:
            done = fit(self.task, got, local)
            return Update(done.state, local.n, done.metrics), {}
        private, metrics = self._learn(got, private, local, None)
        return Update(
            structures.pack_mask(self._mask(private), private["kept"], self._structures), local.n, metrics
        ), private

    def _learn(self, got: State, private: State, local: Local, epochs: int | None) -> tuple[State, dict[str, float]]:
        """Prune once, take over the aggregate, train the scores."""
        task, of, rule, flops = self.task, self._structures, (self.score_lr, self.threshold), 0.0
        base = inside("base/", private) or {name: v for name, v in got.items() if not name.startswith("mask/")}
        left, scores = private.get("kept", torch.ones(of.count, dtype=torch.bool)), private.get("scores")
        if scores is None:
            scores = torch.full((of.size,), self.threshold + self.offset)
            scores, done = structures.learn(task, base, of, scores, left, local, rule, self.init_epochs, "prune")
            left, flops = of.best(scores, self.density), done.flops
        aggregate, decided = unpack_bits(got[BITS], of.size).float(), unpack_bits(got[KEPT], of.count)
        scores = torch.where((decided & left)[of.of], aggregate, scores)
        scores, done = structures.learn(task, base, of, scores, left, local, rule, epochs)
        private = {**under("base/", base), "scores": scores, "kept": left}
        return private, {
            "loss": done.loss,
            "flops": flops + done.flops,
            **structures.densities(base, of, self._mask(private)),
        }

    def _mask(self, private: State) -> Tensor:
        return (private["scores"] >= self.threshold) & private["kept"][self._structures.of]

    def adapt(self, got: State, private: State, local: Local) -> State:
        """A novel client prunes and trains its scores, once the model is frozen."""
        return self._learn(got, private, local, self.adapt_epochs)[0] if BITS in got else private

    def predictor(self, got: State, private: State, card: Card) -> nn.Module:
        """The frozen weights under the client's mask; without one, as they are."""
        base, of, own = inside("base/", private) or got, self._structures, "scores" in private
        return structures.MaskedModel(self.task, base, of, self._mask(private)) if own else module(self.task, base)

    def check(self, got: State, update: Update) -> str | None:
        """As many bits as the kept structures have entries."""
        return structures.fault_in_mask(update.shared, self._structures) if BITS in got else super().check(got, update)


@dataclass(frozen=True)
class MaskMerger:
    """The mean of the bits, the structures it is known for, and marks of the clients that have the frozen model."""

    server: State
    bits: structures.BitMean
    marks: set[int]

    def add(self, card: Card, update: Update) -> str | None:
        """Count the client's bits and mark it as served."""
        self.marks.add(_mark(card))
        self.bits.add(update.shared, update.weight)
        return None

    def result(self) -> State:
        """The server's State with the new mean."""
        mean, enough = self.bits.result()
        marks = torch.tensor(sorted(self.marks))
        return {**self.server, MEAN: mean, KNOWN: self.server[KNOWN] | enough, SERVED: marks}


def _mark(card: Card) -> int:
    """A client's fingerprint; 63 bits fit an int64."""
    return key(0, card.id) >> 1
