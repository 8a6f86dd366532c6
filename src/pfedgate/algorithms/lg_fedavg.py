"""LG-FedAvg (Liang et al. 2020, Think Locally, Act Globally: Federated Learning with Local and Global Representations).

Private: the lower part of the model, a representation of the client's own. Shared: the upper part. Both are trained
jointly; only the upper part travels.

Ambiguities. Direction: the paper keeps low layers local; its code does so on MNIST (the upper 3 of 5 layers are
shared) but shares the *convolutions* on CIFAR-10. Default "upper" as in the paper: everything after the convolutions,
or the upper half of a model without any; "lower" is the code's CIFAR choice; or name the layers. Warm start: the
official code begins with hundreds of FedAvg rounds; here `warmup_rounds`, none by default. After it every client
starts from the warm model, whose lower part is sent once, with the first contact. Updates are averaged by sample
counts (official: unweighted), and nothing is chosen by test accuracy (official: each client's best model).

A novel client trains its lower part, from the initial or the warm model, under the frozen shared part (the paper
averages the predictions of all clients' models, which would have to travel).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pfedgate.algorithms import private_parts as parts
from pfedgate.algorithms import register
from pfedgate.core.mergers import Merger, WeightedMean
from pfedgate.core.modules import initial
from pfedgate.core.state import split
from pfedgate.core.types import Card, Local, Round, State, Update
from pfedgate.training.fit import fit

SERVED = "lg/served"  # fingerprints of the clients that have their lower part from the warm model


@register("lg_fedavg")
@dataclass(frozen=True)
class LGFedAvg(parts.PrivatePart):
    """A private representation under a shared upper part."""

    global_part: parts.Names = "upper"  # "upper" as in the paper, "lower" as its CIFAR code, or names of layers
    warmup_rounds: int = 0  # rounds of FedAvg first; official: 400 (MNIST), 1200 (CIFAR-10)
    adapt_epochs: int = 1  # a novel client's epochs: the fine-tuning budget of all methods

    paper = "Liang et al. 2020, Think Locally, Act Globally"
    shares = "the upper part (after the convolutions)"
    keeps = "the lower part"

    def __post_init__(self) -> None:
        if self.warmup_rounds < 0:
            raise ValueError(f"warmup_rounds is not negative, got {self.warmup_rounds}")
        super().__post_init__()

    @property
    def own(self) -> parts.Part:
        """The tensors of the lower part."""
        upper = parts.upper(self.task)
        if self.global_part == "lower":
            return upper
        if self.global_part != "upper":
            upper = parts.choose(self.task, self.global_part, "global_part ('upper', 'lower' or layers)")
        return parts.everything(self.task) - upper

    def init_server(self, seed: int) -> State:
        """The shared part; with a warm-up the whole model, and nobody served yet."""
        if self.warmup_rounds:
            return {**initial(self.task, seed), SERVED: torch.zeros(0, dtype=torch.int64)}
        return super().init_server(seed)

    def init_client(self, got: State, local: Local) -> State:
        """The private part of the common initial model; after a warm-up it comes with the first message."""
        return {} if self.warmup_rounds else super().init_client(got, local)

    def send(self, server: State, card: Card, round: Round) -> State:
        """The shared part; the whole model during the warm-up, and once after it."""
        model = {name: value for name, value in server.items() if name != SERVED}
        if round.index < self.warmup_rounds or (self.warmup_rounds and parts.mark(card) not in server[SERVED]):
            return model
        return split(model, self.own.__contains__)[1]

    def train(self, got: State, private: State, local: Local) -> tuple[Update, State]:
        """Both parts together; the shared one is sent. During the warm-up all is shared, as in FedAvg."""
        if local.round.index >= self.warmup_rounds:
            return super().train(got, private, local)
        done = fit(self.task, got, local)
        return Update(done.state, local.n, done.metrics), {}

    def merger(self, server: State, round: Round) -> Merger:
        """The mean of the shared part; after the warm-up also note who has a lower part now."""
        warm = self.warmup_rounds and round.index >= self.warmup_rounds
        return _ServedMean(server, round.total) if warm else WeightedMean(server, round.total)

    def adapt(self, got: State, private: State, local: Local) -> State:
        """A novel client's lower part."""
        return self.adapt_part(got, private, local, self.adapt_epochs)


class _ServedMean(WeightedMean):
    """The weighted mean, and the marks of all clients that have their lower part."""

    def __init__(self, server: State, total: float | None) -> None:
        super().__init__(server, total)
        self.marks = set(server[SERVED].tolist())

    def add(self, card: Card, update: Update) -> str | None:
        """Mark the client: its lower part came with this round's message."""
        self.marks.add(parts.mark(card))
        return super().add(card, update)

    def result(self) -> State:
        """The mean and the marks."""
        return {**super().result(), SERVED: torch.tensor(sorted(self.marks), dtype=torch.int64)}
