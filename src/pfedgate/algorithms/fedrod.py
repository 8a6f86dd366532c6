"""FedRoD (Chen and Chao 2022, On Bridging Generic and Personalized Federated Learning for Image Classification).

Shared: the model, trained by FedAvg under the balanced softmax, which adds the logarithms of the client's class counts
to the logits, so that the shared head forgets whose labels it saw. Private: a second head on the same features,
trained on the usual loss of the sum of both heads' logits; neither features nor shared head get a gradient from it.
Scored is the sum; without the private head this is FedAvg with a balanced loss.

The private head begins as a copy of the shared one, as in PFLlib, whose step this is bit for bit; it has an optimiser
of its own. Departure: no hypernetwork that makes private heads from class counts (the paper's second variant). A novel
client trains a private head for `adapt_epochs` on the model as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pfedgate.algorithms import private_parts as parts
from pfedgate.algorithms import register
from pfedgate.core.state import split, under
from pfedgate.core.types import Card, Local, State, Task, Update
from pfedgate.training.fit import Batch, fit


@register("fedrod")
@dataclass(frozen=True)
class FedRoD(parts.PrivatePart):
    """A balanced shared head, and a private one beside it."""

    adapt_epochs: int = 1  # a novel client's epochs: the fine-tuning budget of all methods

    paper = "Chen and Chao 2022, On Bridging Generic and Personalized Federated Learning"
    keeps = "a second head"
    kinds = ("classification",)  # it counts classes
    grid: ClassVar[dict[str, tuple[object, ...]]] = {"own_lr": (None, 0.003, 0.01, 0.03, 0.1)}

    @property
    def whole(self) -> Task:
        """The model with the private head beside its own."""
        return parts.extended(self.task, with_head)

    @property
    def own(self) -> parts.Part:
        """The tensors of the private head."""
        name, layer = parts.linear_head(self.task)
        return frozenset(f"{name}.personal.{tensor}" for tensor, _ in layer.named_parameters())

    def train(self, got: State, private: State, local: Local) -> tuple[Update, State]:
        """Local epochs of both heads; the private one learns what the balanced one leaves."""
        return self._fit(got, private, local, None, local.train.n > 0)

    def _fit(self, got: State, private: State, local: Local, epochs: int | None, shared: bool) -> tuple[Update, State]:
        layer, head = parts.linear_head(self.task)
        counts = torch.bincount(local.train.y.cpu().flatten().long(), minlength=head.out_features)
        balance = counts.float().log().to(local.device)

        def objective(model: nn.Module, batch: Batch) -> Tensor:
            entered, output = parts.features(model, layer, batch.x)
            personal: Any = model.get_submodule(f"{layer}.personal")
            own = self.task.loss(output.detach() + personal(entered.detach()), batch.y).mean()
            return own + self.task.loss(output + balance, batch.y).mean() if shared else own

        own = parts.parameters(self.whole, self.own)
        names = None if shared else own
        done = fit(
            self.whole, parts.join(got, private), local, names=names, own=own, own_lr=self.own_lr, epochs=epochs,
            objective=objective,
        )  # fmt: skip
        part, model = split(done.state, self.own.__contains__)
        return Update(model, local.n, done.metrics), under(parts.OWN, part)

    def adapt(self, got: State, private: State, local: Local) -> State:
        """A novel client's private head; the model stands still."""
        return self._fit(got, private, local, self.adapt_epochs, shared=False)[1]

    def predictor(self, got: State, private: State, card: Card) -> nn.Module:
        """The model whose head adds the private one's logits."""
        model = super().predictor(got, private, card)
        model.get_submodule(parts.linear_head(self.task)[0]).register_forward_hook(_add_head)
        return model


def with_head(head: nn.Linear) -> None:
    """Give a head a second one, a copy; the forward does not use it."""
    personal = nn.Linear(head.in_features, head.out_features, bias=head.bias is not None)
    personal.load_state_dict(head.state_dict())
    head.register_module("personal", personal)


def _add_head(head: Any, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
    personal: Tensor = head.personal(given[0])
    return output + personal
