"""FIARSE (Wu et al. 2024, FIARSE: Model-Heterogeneous FL via Importance-Aware Submodel Extraction).

Shared: one model; a client gets, trains and returns the entries of largest magnitude in the whole model, as many as its
budget allows. Private: nothing. Entries below the smallest one sent, the threshold t, are out of the forward pass, also
if they fall below it in training, and the gradient of an entry w that is in is multiplied by 1 + 2t|w|/(|w| + t)²: that
of the mask itself, smoothed (threshold-controlled biased gradient). The server averages every entry over the clients
that had it. With whole budgets t is 0 and this is FedAvg.

An epoch agrees with the authors' layers to 3e-8, once their mask is made of numbers: as released it is of truth values,
through which torch passes no gradient, so that the factor above is 1. Departures: norms are always kept, as there, and
count; sample counts weigh the average (official: clients alike, of whom those count in whom an entry moved); clients
use the task's optimiser (official: SGD without momentum). Masks are of single entries, so they save parameters and
traffic, not FLOPs: a budget on anything else is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from pfedgate.algorithms import elements, register
from pfedgate.algorithms import private_parts as parts
from pfedgate.algorithms.elements import BITS, VALUES, EntryMean
from pfedgate.algorithms.fedmask.structures import unpack_bits
from pfedgate.core.algorithm import Algorithm
from pfedgate.core.modules import module, skeleton
from pfedgate.core.state import flat, pick, rebased, unflat
from pfedgate.core.types import Card, Local, Round, State, Update
from pfedgate.training.fit import Batch, fit
from pfedgate.training.workspace import Stepper, Workspace

NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)


@register("fiarse")
@dataclass(frozen=True)
class FIARSE(Algorithm):
    """Every client has the largest entries of one model."""

    paper = "Wu et al. 2024, FIARSE: Model-Heterogeneous FL via Importance-Aware Submodel Extraction"
    shares = "the entries of largest magnitude, as many as the budget allows"
    budgeted = True

    @property
    def names(self) -> tuple[str, ...]:
        """All parameters, in the model's order."""
        return parts.parameters(self.task, parts.everything(self.task))

    @property
    def _always(self) -> Tensor:
        """Which entries are in every client's part: those of norms."""
        model = skeleton(self.task.model)
        norms = {name for name, layer in model.named_modules() if isinstance(layer, NORMS)}
        each = [torch.full(p.shape, n.rpartition(".")[0] in norms).flatten() for n, p in model.named_parameters()]
        return torch.cat(each)

    def ready(self, card: Card) -> None:
        """Refuse budgets that masks of single entries cannot keep."""
        always, share = self._always, elements.share_of(card.budget, len(self._always))
        if int(always.sum()) > share * len(always):
            raise ValueError(f"norms, which are always kept, are {float(always.float().mean()):.3f} of the parameters")

    def send(self, server: State, card: Card, round: Round) -> State:
        """The largest entries, and all buffers."""
        vector, kept = flat(pick(server, self.names)), self._always
        room = int(elements.share_of(card.budget, len(vector)) * len(vector)) - int(kept.sum())
        sizes = torch.where(kept, -1.0, vector.abs().cpu())
        kept[sizes.topk(max(0, min(room, int((~kept).sum())))).indices] = True
        names = set(self.names)
        return {**elements.pack(vector, kept), **{n: value for n, value in server.items() if n not in names}}

    def _whole(self, got: State, missing: float = 0.0) -> Tensor:
        """The client's part as a vector of the whole model."""
        like = torch.full((len(self._always),), missing, dtype=got[VALUES].dtype)
        return elements.unpack(got, like)

    def _state(self, got: State) -> State:
        """The client's part as a State of the whole model, zeros elsewhere."""
        shapes = [(name, value.shape) for name, value in skeleton(self.task.model).named_parameters()]
        return {**unflat(self._whole(got), shapes), **elements.beside(got)}

    def train(self, got: State, private: State, local: Local) -> tuple[Update, State]:
        """Local epochs of the part."""
        always, kept = self._always, unpack_bits(got[BITS], len(self._always))
        masked = kept & ~always
        whole = bool(kept.all())
        threshold = 0.0 if whole or not masked.any() else float(self._whole(got)[masked].abs().min())
        always, kept = always.to(local.device), kept.to(local.device)
        stepper = Stepper(self.task.optim, self.task.optim.lr * local.round.factor)

        def step(work: Workspace, batch: Batch) -> Tensor:
            values = work.flat.clone()
            sizes = values.abs()
            inside = kept & (always | (sizes >= threshold))
            work.flat.mul_(inside)
            loss = work.gradient(batch, self.task.loss)
            work.flat.copy_(values)
            if not whole:
                smooth = torch.where(always, 1.0, 1 + 2 * threshold * sizes / (sizes + threshold).square())
                work.grad.copy_(torch.where(inside, work.grad * smooth, 0.0))
            stepper.clip(work.grad)
            stepper.step(work.flat, work.grad)
            return loss

        done = fit(self.task, self._state(got), local, step=step)
        packed = elements.pack(flat(pick(done.state, self.names)), kept)
        metrics = {**done.metrics, "density": float(kept.float().mean())}
        return Update({**packed, **pick(done.state, elements.beside(got))}, local.n, metrics), {}

    def merger(self, server: State, round: Round) -> EntryMean:
        """Every entry: the mean over the clients that have it."""
        return EntryMean(server, self.names, round.total)

    def check(self, got: State, update: Update) -> str | None:
        """The entries that were sent; buffers as sent."""
        fault = elements.fault_in_entries(update.shared, len(self._always)) or super().check(got, update)
        if fault is None and not torch.equal(update.shared[BITS], got[BITS]):
            return f"{BITS!r} must be those that were sent"
        return fault

    def rebase(self, update: Update, sent: Sequence[State], power: float) -> Update:
        """A late update: entries of which the client would have been sent all later values move with them."""
        buffers = super().rebase(Update(elements.beside(update.shared), update.weight), sent, power).shared
        kept, values = unpack_bits(update.shared[BITS], len(self._always)), update.shared[VALUES]
        moved = rebased(values, [self._whole(state, float("nan"))[kept] for state in sent], power)
        packed = {BITS: update.shared[BITS], VALUES: torch.where(moved.isnan(), values, moved)}
        return replace(update, shared={**packed, **buffers})

    def predictor(self, got: State, private: State, card: Card) -> nn.Module:
        """The client's part, zeros elsewhere."""
        return module(self.task, self._state(got))
