"""Arithmetic on States: splitting by name, flat vectors, sizes, digests."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from pfedgate.core.errors import unknown
from pfedgate.core.types import State, Update

Shapes = Sequence[tuple[str, torch.Size]]
Form = tuple[tuple[str, torch.dtype, torch.Size], ...]


def floating(update: Update) -> tuple[State, Tensor | None]:
    """The floating entries of an update, also as one vector (None if there are none); made once per update.

    Checking and averaging both want it, and for small models making it costs more than either.
    """
    pair: tuple[State, Tensor | None] | None = update.__dict__.get("_floating")
    if pair is None:
        floats = {name: value for name, value in update.shared.items() if value.is_floating_point()}
        pair = (floats, flat(floats) if floats else None)
        update.__dict__["_floating"] = pair
    return pair


def form(update: Update) -> Form:
    """Names, types and shapes of what an update shares; made once per update, as everybody asks for it."""
    known: Form | None = update.__dict__.get("_form")
    if known is None:
        known = form_of(update.shared)
        update.__dict__["_form"] = known
    return known


def form_of(state: State) -> Form:
    """Names, types and shapes of a State.

    >>> form_of({"w": torch.ones(2)})
    (('w', torch.float32, torch.Size([2])),)
    """
    return tuple([(name, value.dtype, value.shape) for name, value in state.items()])


def alike(updates: Sequence[Update], vectors: Sequence[Tensor]) -> None:
    """Note that these updates are of one form, and what vector each of them is: found out alone it costs more."""
    known = form(updates[0])
    for update, vector in zip(updates, vectors, strict=True):
        update.__dict__.update(_form=known, _floating=(update.shared, vector))


def flat(state: State) -> Tensor:
    """All tensors of a State end to end in one vector; no copy where they already lie that way.

    >>> whole = torch.arange(5.0)
    >>> flat(unflat(whole, [("a", torch.Size([2])), ("b", torch.Size([3]))])).data_ptr() == whole.data_ptr()
    True
    """
    values = list(state.values())
    first, size = values[0], values[0].element_size()
    address, count = first.data_ptr(), 0
    for value in values:
        if value.data_ptr() != address + count * size or value.dtype != first.dtype or not value.is_contiguous():
            return torch.cat([value.reshape(-1) for value in values])
        count += value.numel()
    if (first.storage_offset() + count) * size > first.untyped_storage().nbytes():  # neighbours by chance
        return torch.cat([value.reshape(-1) for value in values])
    return first.detach().as_strided((count,), (1,))


def unflat(vector: Tensor, shapes: Shapes) -> State:
    """The named pieces of a vector, as views of it."""
    sizes = [shape.numel() for _, shape in shapes]
    if sum(sizes) != vector.numel():
        raise ValueError(f"a vector of {vector.numel()} does not fit shapes of {sum(sizes)} in all")
    pieces = torch.split(vector, sizes)
    return {name: piece.view(shape) for (name, shape), piece in zip(shapes, pieces, strict=True)}


def shapes(state: State) -> list[tuple[str, torch.Size]]:
    """Names and shapes, in order: what `unflat` needs."""
    return [(name, value.shape) for name, value in state.items()]


def split(state: State, first: Callable[[str], bool]) -> tuple[State, State]:
    """(entries whose name `first` accepts, the others); `{**a, **b}` joins them again.

    >>> head, body = split({"fc.w": torch.ones(1), "out.w": torch.ones(1)}, lambda n: n.startswith("out."))
    >>> list(head), list(body)
    (['out.w'], ['fc.w'])
    """
    taken = {name: value for name, value in state.items() if first(name)}
    return taken, {name: value for name, value in state.items() if name not in taken}


def under(prefix: str, state: State) -> State:
    """The State with a prefix before every name: several models in one State.

    >>> list(under("0/", {"w": torch.ones(1)}))
    ['0/w']
    """
    return {prefix + name: value for name, value in state.items()}


def inside(prefix: str, state: State) -> State:
    """The entries under a prefix, the prefix removed: the inverse of `under`."""
    return {name[len(prefix) :]: value for name, value in state.items() if name.startswith(prefix)}


def pick(state: State, names: Iterable[str]) -> State:
    """These names, in this order; a missing one is an error that names the nearest."""
    picked = {}
    for name in names:
        if name not in state:
            raise KeyError(unknown("tensor", name, state))
        picked[name] = state[name]
    return picked


def clone(state: State) -> State:
    """A State of copies of all tensors."""
    return {name: value.clone() for name, value in state.items()}


def to(state: State, device: torch.device) -> State:
    """The State on a device; the same tensors if they are there already."""
    return {name: value.to(device) for name, value in state.items()}


def nbytes(state: State) -> int:
    """Bytes of the values alone (what travels is in `wire`)."""
    return sum(value.numel() * value.element_size() for value in state.values())


def digest(state: State) -> str:
    """A fingerprint of names, types, shapes and bits.

    >>> digest({"w": torch.zeros(2)}) == digest({"w": torch.zeros(2)})
    True
    >>> digest({"w": torch.zeros(2)}) == digest({"w": -torch.zeros(2)})
    False
    """
    total = hashlib.blake2b(digest_size=16)
    for name in sorted(state):
        value = state[name].detach().cpu().contiguous()
        total.update(f"{name}\x1f{value.dtype}\x1f{tuple(value.shape)}\x1f".encode())
        total.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def equal(a: State, b: State) -> bool:
    """Same names, types, shapes and bits."""
    return digest(a) == digest(b)


def finite(state: State) -> bool:
    """No NaN, no infinity. Costs one dot product in the usual case."""
    floats = {name: value for name, value in state.items() if value.is_floating_point() and value.numel()}
    return not floats or finite_vector(flat(floats))


def finite_vector(vector: Tensor) -> bool:
    """Whether a vector has no NaN and no infinity."""
    # A finite dot product has only finite terms; an infinite one may be a mere overflow: look closer.
    return math.isfinite(torch.dot(vector, vector).item()) or bool(vector.isfinite().all())


def staleness(history: Sequence[Tensor]) -> Tensor:
    """For every entry, how many of the steps from one value to the next have changed it.

    >>> staleness([torch.tensor([0.0, 5.0]), torch.tensor([1.0, 5.0]), torch.tensor([2.0, 5.0])]).tolist()
    [2, 0]
    """
    steps = torch.zeros(history[0].shape, dtype=torch.int32, device=history[0].device)
    for before, after in itertools.pairwise(history):
        steps += before != after
    return steps


def rebased(value: Tensor, history: Sequence[Tensor], power: float) -> Tensor:
    """What was learnt from the oldest value of `history`, as a step from its newest, discounted by staleness.

    An entry that nobody has changed meanwhile keeps its bits.

    >>> rebased(torch.tensor([3.0, 7.0]), [torch.tensor([1.0, 5.0]), torch.tensor([2.0, 5.0])], 1.0).tolist()
    [3.0, 7.0]
    """
    stale = staleness(history)
    moved = history[-1] + (value - history[0]) * (1.0 + stale).pow(-power).to(value.dtype)
    return torch.where(stale > 0, moved, value)
