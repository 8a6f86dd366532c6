"""Sparse updates of single entries: a bit for every entry of the model, and the values of those kept.

Such masks save storage and traffic, not operations: nothing of a layer can be skipped, so FLOPs are the dense model's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pfedgate.algorithms.fedmask.structures import pack_bits, unpack_bits
from pfedgate.core.mergers import WeightedMean
from pfedgate.core.state import flat, pick, unflat
from pfedgate.core.types import Budget, Card, State, Update

BITS, VALUES = "bits", "values"


def pack(vector: Tensor, mask: Tensor) -> State:
    """The kept entries of a vector.

    >>> packed = pack(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([True, False, True]))
    >>> packed["bits"].tolist(), packed["values"].tolist(), unpack(packed, torch.zeros(3)).tolist()
    ([160], [1.0, 3.0], [1.0, 0.0, 3.0])
    """
    return {BITS: pack_bits(mask), VALUES: vector.detach().cpu()[mask.cpu()]}


def unpack(packed: State, into: Tensor) -> Tensor:
    """A copy of `into` with the packed entries put in their places."""
    vector = into.clone()
    vector[unpack_bits(packed[BITS], len(into)).to(into.device)] = packed[VALUES].to(into.device)
    return vector


def fault_in_entries(packed: State, size: int) -> str | None:
    """Why a packed update cannot be used, or None: a bit for every entry, as many values as bits that are set."""
    if BITS not in packed or VALUES not in packed:
        return f"a sparse update needs {BITS!r} and {VALUES!r}, got {sorted(packed)}"
    bits, values = packed[BITS], packed[VALUES]
    if bits.dtype is not torch.uint8 or bits.ndim != 1 or len(bits) != -(-size // 8):
        return f"{BITS!r} must be {-(-size // 8)} bytes, got {bits.dtype} {tuple(bits.shape)}"
    kept = int(unpack_bits(bits, size).sum())
    if not values.is_floating_point() or values.shape != (kept,):
        return f"{VALUES!r} must be {kept} numbers, got {values.dtype} {tuple(values.shape)}"
    return None


def beside(state: State) -> State:
    """The buffers, which travel beside the packed entries."""
    return {name: value for name, value in state.items() if name not in (BITS, VALUES)}


def share_of(budget: Budget, size: int) -> float:
    """The share of its entries that a client can afford; a budget on anything but parameters is an error."""
    bounds = budget if isinstance(budget, Mapping) else {"params": budget}
    bounds = {name: bound for name, bound in bounds.items() if name != "upload"}
    if set(bounds) != {"params"}:
        raise ValueError(
            f"masks of single entries save parameters, not {', '.join(sorted(set(bounds) - {'params'})) or 'nothing'}: "
            "give a budget as a plain number, or on params"
        )
    return min(1.0, bounds["params"] if bounds["params"] <= 1 else bounds["params"] / size)


class EntryMean:
    """The mean of every entry over the clients that sent it; other entries keep the server's value.

    With `total` (the weight of all clients) clients that sent nothing count as unchanged.

    >>> mean = EntryMean({"w": torch.zeros(2)}, ("w",))
    >>> for value, kept in ((1.0, [True, False]), (3.0, [True, True])):
    ...     _ = mean.add(Card("a", 1), Update(pack(torch.full((2,), value), torch.tensor(kept)), 1.0))
    >>> mean.result()["w"].tolist()
    [2.0, 3.0]
    """

    def __init__(self, server: State, names: Sequence[str], total: float | None = None) -> None:
        self.old, self.total = pick(server, names), total
        size = sum(value.numel() for value in self.old.values())
        self.sums, self.weights = torch.zeros(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
        self.rest = WeightedMean({name: value for name, value in server.items() if name not in self.old}, total)

    def add(self, card: Card, update: Update) -> str | None:
        """Values to sums, buffers to buffers."""
        kept = unpack_bits(update.shared[BITS], len(self.sums))
        self.sums[kept] += update.shared[VALUES].double() * update.weight
        self.weights[kept] += update.weight
        return self.rest.add(card, Update(beside(update.shared), update.weight))

    def around(self, card: Card, update: Update) -> State:
        """What the server holds at the entries that were sent."""
        kept = unpack_bits(update.shared[BITS], len(self.sums))
        return {VALUES: flat(self.old)[kept], **self.rest.around(card, Update(beside(update.shared), update.weight))}

    def lay(self, update: Update) -> State:
        """All entries, NaN where they were not sent; and the buffers."""
        values = torch.full(self.sums.shape, torch.nan)
        values[unpack_bits(update.shared[BITS], len(self.sums))] = update.shared[VALUES]
        return {VALUES: values, **beside(update.shared)}

    def lift(self, state: State) -> State:
        """The entries that have values, packed; and the buffers."""
        return {**state, **pack(state[VALUES], ~state[VALUES].isnan())}

    def result(self) -> State:
        """The server's State, parameters first."""
        old, total = flat(self.old), self.total
        mean = self.sums / self.weights
        if total is not None:
            mean = (self.sums + old.double() * (total - self.weights)) / total
        merged = torch.where(self.weights > 0, mean.to(old.dtype), old)
        return {**unflat(merged, [(name, value.shape) for name, value in self.old.items()]), **self.rest.result()}
