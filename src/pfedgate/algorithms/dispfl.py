"""DisPFL (Dai et al. 2022, DisPFL: Towards Communication-Efficient Personalized FL via Decentralized Sparse Training).

Private: a mask over single entries, of the density that the budget allows; layers have densities by ERK, which spares
small ones. Shared: the client's entries, of which the average over the clients that have them comes back. A round
trains the averaged model under the mask; then in every layer the smallest entries leave the mask, a share that falls
from `anneal` to 0 along a cosine, and as many with the largest gradient on one batch come in. With density 1 this is
FedAvg. Scored is the average under the client's own mask.

Decentralised there, clients meet at the server here: a round's average is over all its clients (the paper's fully
connected topology). A client's round, its next mask and ERK are bit for bit the authors'. Departures: sample
counts weigh the average; an entry that nobody of a round has keeps the server's value (official: 0); a novel client
takes the largest entries of every layer. The whole average comes down (official: neighbours' entries). Masks are of
single entries, so they save parameters and uploads, not FLOPs: a budget on anything else is an error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from pfedgate.algorithms import elements, register
from pfedgate.algorithms import private_parts as parts
from pfedgate.algorithms.elements import BITS, VALUES, EntryMean
from pfedgate.algorithms.fedmask.structures import pack_bits, unpack_bits
from pfedgate.core.algorithm import Algorithm
from pfedgate.core.modules import module, skeleton
from pfedgate.core.seeds import generator
from pfedgate.core.state import flat, pick, rebased, unflat
from pfedgate.core.types import Card, Local, Round, State, Update
from pfedgate.training.fit import Batch, fit, loop
from pfedgate.training.workspace import Stepper, Workspace, flops_per_sample, workspace

MASK = "mask"  # in the private State, eight entries a byte


@register("dispfl")
@dataclass(frozen=True)
class DisPFL(Algorithm):
    """A private mask that follows the client's gradients, over a shared model."""

    anneal: float = 0.5  # share of a layer's entries exchanged in the first round; the authors'
    alike: bool = True  # all masks of a density begin alike, as by default in the official code

    paper = "Dai et al. 2022, DisPFL: Communication-Efficient Personalized FL via Decentralized Sparse Training"
    shares = "the entries under the mask"
    keeps = "a mask over single entries"
    budgeted = True
    grid: ClassVar[dict[str, tuple[object, ...]]] = {"anneal": (0.0, 0.3, 0.5)}

    def __post_init__(self) -> None:
        if not 0 <= self.anneal <= 1:
            raise ValueError(f"anneal is a share from 0 to 1, got {self.anneal}")

    @property
    def names(self) -> tuple[str, ...]:
        """All parameters, in the model's order."""
        return parts.parameters(self.task, parts.everything(self.task))

    @property
    def _shapes(self) -> list[tuple[str, torch.Size]]:
        return [(name, value.shape) for name, value in skeleton(self.task.model).named_parameters()]

    @property
    def _size(self) -> int:
        return sum(shape.numel() for _, shape in self._shapes)

    def ready(self, card: Card) -> None:
        """Refuse budgets that masks of single entries cannot keep."""
        elements.share_of(card.budget, self._size)

    def _counts(self, card: Card) -> list[int]:
        """How many entries of every layer a client keeps."""
        shapes = [tuple(shape) for _, shape in self._shapes]
        shares = erk(shapes, elements.share_of(card.budget, self._size))
        return [int(share * math.prod(shape)) for share, shape in zip(shares, shapes, strict=True)]

    def init_client(self, got: State, local: Local) -> State:
        """A mask by chance."""
        path = () if self.alike else (local.card.id,)
        stream, masks = generator(local.round.seed, "dispfl", *path), []
        for count, (_, shape) in zip(self._counts(local.card), self._shapes, strict=True):
            masks.append(torch.zeros(shape.numel(), dtype=torch.bool))
            masks[-1][torch.randperm(shape.numel(), generator=stream)[:count]] = True
        return {MASK: pack_bits(torch.cat(masks))}

    def _masked(self, got: State, private: State) -> State:
        """The model under the mask."""
        vector = flat(pick(got, self.names)) * unpack_bits(private[MASK], self._size)
        return {**got, **unflat(vector, self._shapes)}

    def train(self, got: State, private: State, local: Local) -> tuple[Update, State]:
        """Local epochs under the mask; its values are sent; then the mask moves."""
        mask = unpack_bits(private[MASK], self._size)
        here = mask.to(local.device)
        stepper = Stepper(self.task.optim, self.task.optim.lr * local.round.factor)

        def step(work: Workspace, batch: Batch) -> Tensor:
            loss = work.gradient(batch, self.task.loss)
            stepper.clip(work.grad)
            stepper.step(work.flat, work.grad)
            work.flat.mul_(here)
            return loss

        done = fit(self.task, self._masked(got, private), local, step=step)
        vector = flat(pick(done.state, self.names)).cpu()
        kept = {MASK: pack_bits(self._moved(mask, vector, done.state, local))}
        metrics = {**done.metrics, "density": float(mask.float().mean())}
        if self.anneal:  # the batch whose gradient says what comes in
            x = local.prepare(local.train.x[:1])
            batch = min(self.task.batch, local.n)
            metrics["flops"] += batch * flops_per_sample(self.task.model, None, x.shape[1:], x.dtype, True)
        buffers = {name: value for name, value in done.state.items() if name not in set(self.names)}
        return Update({**elements.pack(vector, mask), **buffers}, local.n, metrics), kept

    def _moved(self, mask: Tensor, vector: Tensor, state: State, local: Local) -> Tensor:
        """The next mask: in every layer the smallest entries leave, those with the largest gradient come in."""
        if not self.anneal:
            return mask
        ratio = self.anneal / 2 * (1 + math.cos(math.pi * local.round.index / local.round.rounds))
        work = workspace(self.task.model, None, local.device)
        work.load(state)
        work.grad.zero_()  # whatever was left there
        work.module.eval()

        def look(batch: Batch) -> Tensor:
            return work.gradient(batch, self.task.loss)

        loop(self.task, local, look, steps=1, stream="grow")
        work.module.train()
        moved, start = mask.clone(), 0
        for _, shape in self._shapes:
            piece = slice(start, start + shape.numel())
            start = piece.stop
            count = math.ceil(ratio * int(mask[piece].sum()))
            sizes = torch.where(mask[piece], vector[piece].abs(), torch.inf)
            moved[piece][sizes.topk(count, largest=False).indices] = False
            slopes = torch.where(moved[piece], -1.0, work.grad[piece].abs().cpu())
            moved[piece][slopes.topk(count).indices] = True
        return moved

    def merger(self, server: State, round: Round) -> EntryMean:
        """Every entry: the mean over the clients that have it."""
        return EntryMean(server, self.names, round.total)

    def own_epochs(self, got: State, private: State, local: Local) -> tuple[State, State, float]:
        """The client's epochs under the mask that it has."""
        update, _ = self.train(got, private, local)
        return self.landed(got, update), private, update.metrics["flops"]

    def landed(self, got: State, update: Update) -> State:
        """The average with the client's entries put in their places."""
        vector = elements.unpack(update.shared, flat(pick(got, self.names)).cpu())
        return {**got, **unflat(vector, self._shapes), **elements.beside(update.shared)}

    def rebase(self, update: Update, sent: Sequence[State], power: float) -> Update:
        """A late update: each entry moves by what others taught it meanwhile."""
        kept = unpack_bits(update.shared[BITS], self._size)
        history = [flat(pick(state, self.names)).cpu()[kept] for state in sent]
        buffers = super().rebase(Update(elements.beside(update.shared), update.weight), sent, power).shared
        packed = {BITS: update.shared[BITS], VALUES: rebased(update.shared[VALUES], history, power)}
        return replace(update, shared={**packed, **buffers})

    def check(self, got: State, update: Update) -> str | None:
        """As many values as bits; buffers as sent."""
        buffers = Update(elements.beside(update.shared), update.weight)
        return elements.fault_in_entries(update.shared, self._size) or super().check(got, buffers)

    def adapt(self, got: State, private: State, local: Local) -> State:
        """A novel client keeps the largest entries of every layer."""
        vector, masks = flat(pick(got, self.names)).cpu(), []
        pieces = torch.split(vector, [shape.numel() for _, shape in self._shapes])
        for piece, count in zip(pieces, self._counts(local.card), strict=True):
            masks.append(torch.zeros(len(piece), dtype=torch.bool))
            masks[-1][piece.abs().topk(count).indices] = True
        return {MASK: pack_bits(torch.cat(masks))}

    def predictor(self, got: State, private: State, card: Card) -> nn.Module:
        """The average under the client's mask."""
        return module(self.task, self._masked(got, private))


def erk(shapes: Sequence[Sequence[int]], density: float) -> list[float]:
    """Densities of layers whose mean over all entries is `density`: small and thin layers keep more (Evci et al. 2020).

    >>> [round(share, 3) for share in erk([(100, 100), (10, 100), (10,)], 0.1)]
    [0.07, 0.387, 1.0]
    """
    sizes = [math.prod(shape) for shape in shapes]
    raw = [sum(shape) / size for shape, size in zip(shapes, sizes, strict=True)]
    dense: set[int] = set()
    while len(dense) < len(shapes):
        rest = [at for at in range(len(shapes)) if at not in dense]
        room = density * sum(sizes) - sum(sizes[at] for at in dense)
        scale = room / sum(raw[at] * sizes[at] for at in rest)
        most = max(raw[at] for at in rest)
        if scale * most <= 1:
            return [1.0 if at in dense else max(0.0, scale * raw[at]) for at in range(len(shapes))]
        dense |= {at for at in rest if raw[at] == most}
    return [1.0] * len(shapes)
