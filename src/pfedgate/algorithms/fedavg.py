"""FedAvg (McMahan et al. 2017, Communication-Efficient Learning of Deep Networks from Decentralized Data).

Shared: the whole model, buffers included (floating ones averaged, counters maxed). Private: nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pfedgate.algorithms import register
from pfedgate.core.algorithm import Algorithm
from pfedgate.core.state import alike
from pfedgate.core.types import Local, State, Update
from pfedgate.training.fit import fit
from pfedgate.training.stacked import fit_many, stackable


@register("fedavg")
@dataclass(frozen=True)
class FedAvg(Algorithm):
    """Train the received model for an epoch; the server averages."""

    paper = "McMahan et al. 2017, Communication-Efficient Learning of Deep Networks"
    by_samples = True

    def train(self, got: State, private: State, local: Local) -> tuple[Update, State]:
        """Local epochs of SGD from the received model."""
        done = fit(self.task, got, local)
        return Update(done.state, local.n, done.metrics), {}

    @property
    def stacks(self) -> bool:
        """Small models are trained for many clients at once."""
        return stackable(self.task.model)

    def train_many(
        self, gots: Sequence[State], privates: Sequence[State], locals: Sequence[Local]
    ) -> list[tuple[Update, State]]:
        """As `train`, for clients side by side."""
        done = fit_many(self.task, gots, locals)
        updates = [Update(d.state, local.n, d.metrics) for d, local in zip(done, locals, strict=True)]
        alike(updates, [d.vector for d in done if d.vector is not None])
        return [(update, {}) for update in updates]
