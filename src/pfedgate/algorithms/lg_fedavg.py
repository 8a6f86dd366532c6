"""LG-FedAvg (Liang et al. 2020, Think Locally, Act Globally: Federated Learning with Local and Global Representations).

Private: the lower part of the model, a representation of the client's own. Shared: the upper part. Both are trained
jointly; only the upper part travels.

Ambiguities. Direction: the paper keeps low layers local; its code does so on MNIST (the upper 3 of 5 layers are
shared) but shares the *convolutions* on CIFAR-10. Default "upper" as in the paper: everything after the convolutions,
or the upper half of a model without any; "lower" is the code's CIFAR choice; or name the layers.

Departures: no warm start (the official code begins with hundreds of FedAvg rounds). Updates are averaged by sample
counts (official: unweighted), and nothing is chosen by test accuracy (official: each client's best model). A novel
client trains its initial lower part under the frozen shared part (the paper averages the predictions of all clients'
models, which would have to travel).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pfedgate.algorithms import private_parts as parts
from pfedgate.algorithms import register
from pfedgate.core.types import Local, State


@register("lg_fedavg")
@dataclass(frozen=True)
class LGFedAvg(parts.PrivatePart):
    """A private representation under a shared upper part."""

    global_part: parts.Names = "upper"  # "upper" as in the paper, "lower" as its CIFAR code, or names of layers
    adapt_epochs: int = 1  # a novel client's epochs: the fine-tuning budget of all methods

    paper = "Liang et al. 2020, Think Locally, Act Globally"
    shares = "the upper part (after the convolutions)"
    keeps = "the lower part"
    grid: ClassVar[dict[str, tuple[object, ...]]] = {"own_lr": (None, 0.003, 0.01, 0.03, 0.1)}

    @property
    def own(self) -> parts.Part:
        """The tensors of the lower part."""
        upper = parts.upper(self.task)
        if self.global_part == "lower":
            return upper
        if self.global_part != "upper":
            upper = parts.choose(self.task, self.global_part, "global_part ('upper', 'lower' or layers)")
        return parts.everything(self.task) - upper

    def adapt(self, got: State, private: State, local: Local) -> State:
        """A novel client's lower part."""
        return self.adapt_part(got, private, local, self.adapt_epochs)
