"""IFCA (Ghosh et al. 2020, An Efficient Framework for Clustered Federated Learning).

Shared: a model per cluster. A client takes the one with the lowest loss on its own training data, trains that one and
sends it back; each is averaged over the clients that took it. Private: the number of the cluster, nothing else. With
one cluster this is FedAvg. Scored, and given to novel clients, is the model with the lowest loss at that time.

The paper's two tricks for networks: model averaging (local epochs, here always) and weight sharing (`share`: one body,
a head per cluster). Models begin apart (seed and number), the first where FedAvg does. The choice goes over all local
training data in evaluation mode, its forward passes are counted; it and the step agree with the authors' code to 1e-7.
Departure: averages are weighted by sample counts (official: alike).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from pfedgate.algorithms import private_parts as parts
from pfedgate.algorithms import register
from pfedgate.core.algorithm import Algorithm
from pfedgate.core.modules import initial, module
from pfedgate.core.state import inside, split, under
from pfedgate.core.types import Card, Local, State, Update
from pfedgate.training.fit import fit, forward_flops, scan


@register("ifca")
@dataclass(frozen=True)
class IFCA(Algorithm):
    """Clients gather in clusters by the loss of each cluster's model."""

    clusters: int = 4  # the paper's for rotated images; 2 and 3 elsewhere
    share: bool = False  # one body for all, a head per cluster: the paper's for FEMNIST

    paper = "Ghosh et al. 2020, An Efficient Framework for Clustered Federated Learning"
    shares = "a model per cluster down, one of them up"
    keeps = "the number of its cluster"
    grid: ClassVar[dict[str, tuple[object, ...]]] = {"clusters": (2, 3, 4), "share": (False, True)}

    def __post_init__(self) -> None:
        if self.clusters < 1:
            raise ValueError(f"clusters is at least 1, got {self.clusters}")

    @property
    def _common(self) -> parts.Part:
        return parts.everything(self.task) - parts.head(self.task, None) if self.share else frozenset()

    def init_server(self, seed: int) -> State:
        """Different models; the first is the one FedAvg starts from, its body is everybody's if that is shared."""
        server: State = {}
        for m in range(self.clusters):
            common, own = split(initial(self.task, seed, *([m] if m else [])), self._common.__contains__)
            server |= {**({} if m else common), **under(f"{m}/", own)}
        return server

    def model_of(self, got: State, cluster: int) -> State:
        """The model of a cluster."""
        return {**{name: value for name, value in got.items() if name in self._common}, **inside(f"{cluster}/", got)}

    def choose(self, got: State, local: Local) -> int:
        """The cluster whose model has the lowest loss on the client's training data."""
        if not local.n or self.clusters == 1:
            return 0
        models = (module(self.task, self.model_of(got, m), local.device) for m in range(self.clusters))
        losses = [scan(self.task, model, local.train, local, self.task.loss).mean() for model in models]
        return int(torch.stack(losses).argmin())

    def train(self, got: State, private: State, local: Local) -> tuple[Update, State]:
        """Choose a cluster, train its model, send that one."""
        cluster = self.choose(got, local)
        done = fit(self.task, self.model_of(got, cluster), local)
        common, own = split(done.state, self._common.__contains__)
        looks = self.clusters * forward_flops(self.task, local.train, local) if self.clusters > 1 else 0.0
        metrics = {**done.metrics, "flops": done.flops + looks}
        return Update({**common, **under(f"{cluster}/", own)}, local.n, metrics), {"cluster": torch.tensor(cluster)}

    def personalise(self, got: State, private: State, local: Local) -> State:
        """The cluster for the models at hand."""
        return {**private, "cluster": torch.tensor(self.choose(got, local))}

    def landed(self, got: State, update: Update) -> State:
        """All models, the client's own as it trained it: so that it chooses among them."""
        return {**got, **update.shared}

    def predictor(self, got: State, private: State, card: Card) -> nn.Module:
        """The model of the client's cluster."""
        return module(self.task, self.model_of(got, int(private.get("cluster", 0))))
