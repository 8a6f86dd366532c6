"""Local: every client trains alone, from a common initialisation.

Nothing is shared. A client trains when it is sampled, so that all methods see the same number of epochs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pfedgate.algorithms import register
from pfedgate.algorithms.private_parts import PrivateModel
from pfedgate.core.state import inside, under
from pfedgate.core.types import Local, State, Update
from pfedgate.training.fit import fit
from pfedgate.training.stacked import fit_many, stackable


@register("local_only")
@dataclass(frozen=True)
class LocalOnly(PrivateModel):
    """No federation: the yardstick every federated method must beat."""

    adapt_epochs: int = 1  # epochs of a novel client; the fine-tuning budget of the other methods

    paper = "-"
    shares = "nothing"
    keeps = "the whole model"

    def init_server(self, seed: int) -> State:
        """The server has nothing to send."""
        return {}

    def train(self, got: State, private: State, local: Local) -> tuple[Update, State]:
        """Local epochs from where the client was."""
        done = fit(self.task, inside("model/", private), local)
        return Update({}, local.n, done.metrics), under("model/", done.state)

    @property
    def stacks(self) -> bool:
        """Small models are trained for many clients at once."""
        return stackable(self.task.model)

    def train_many(
        self, gots: Sequence[State], privates: Sequence[State], locals: Sequence[Local]
    ) -> list[tuple[Update, State]]:
        """As `train`, for clients side by side."""
        done = fit_many(self.task, [inside("model/", private) for private in privates], locals)
        return [
            (Update({}, local.n, d.metrics), under("model/", d.state)) for d, local in zip(done, locals, strict=True)
        ]

    def adapt(self, got: State, private: State, local: Local) -> State:
        """A novel client trains from the initialisation."""
        done = fit(self.task, inside("model/", private), local, epochs=self.adapt_epochs)
        return under("model/", done.state)
