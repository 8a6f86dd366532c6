"""Sparse updates: a model vector cut into tiles, of which a client sends some.

A tile is any set of positions of the flat parameter vector (a block of units, a tile of a matrix, a slice).
`Tiles.of(owner)` makes the cut from one number per position. A packed update is the State
`{"blocks": int32 ids, "values": their positions' values, tile after tile}`: two arrays, never one per tile.

>>> tiles = Tiles.of(torch.tensor([0, 0, 1, 2, 2]))
>>> packed = pack_tiles(torch.arange(5.0), torch.tensor([0, 2]), tiles)
>>> packed["blocks"].tolist(), packed["values"].tolist()
([0, 2], [0.0, 1.0, 3.0, 4.0])
>>> fault_in_tiles(packed, tiles) is None
True
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from pfedgate.core.types import State

BLOCKS, VALUES = "blocks", "values"


class Tiles:
    """How a vector is cut: `order` lists positions tile by tile, tile t at `starts[t]:starts[t+1]`."""

    def __init__(self, order: Tensor, starts: Tensor) -> None:
        self.order, self.starts = order, starts
        self.sizes = starts.diff()

    @classmethod
    def of(cls, owner: Tensor, count: int | None = None) -> Tiles:
        """From the tile number of every position (0 … count-1)."""
        sizes = torch.bincount(owner, minlength=count or 0)
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
        return cls(torch.argsort(owner, stable=True), starts)

    @property
    def count(self) -> int:
        """Number of tiles."""
        return int(self.sizes.shape[0])

    @property
    def length(self) -> int:
        """Length of the vector."""
        return int(self.order.shape[0])

    @property
    def owner(self) -> Tensor:
        """The tile of every position."""
        owner = torch.empty(self.length, dtype=torch.int64)
        owner[self.order] = torch.repeat_interleave(torch.arange(self.count), self.sizes, output_size=self.length)
        return owner

    def positions(self, ids: Tensor) -> Tensor:
        """Positions in the vector of these tiles, one after the other."""
        return torch.cat([self.order[:0], *(self.order[start:stop] for start, stop in self.runs(ids))])

    def take(self, vector: Tensor, ids: Tensor) -> Tensor:
        """The values of these tiles, run by run: indices of all of them would be twice as large as the values."""
        return torch.cat([vector[:0], *(vector[self.order[start:stop]] for start, stop in self.runs(ids))])

    def runs(self, ids: Tensor) -> Iterator[tuple[int, int]]:
        """Where these tiles lie in `order`, neighbours together."""
        ids = ids.long()
        breaks = (ids.diff() != 1).nonzero()[:, 0] + 1
        edges = [0, *breaks.tolist(), len(ids)]
        starts, stops = self.starts[ids].tolist(), self.starts[ids + 1].tolist()
        for first, after in itertools.pairwise(edges if len(ids) else []):
            yield starts[first], stops[after - 1]


def pack_tiles(vector: Tensor, ids: Tensor, tiles: Tiles) -> State:
    """These tiles of a vector as a sparse update."""
    return {BLOCKS: ids.to(torch.int32), VALUES: tiles.take(vector.detach().cpu(), ids).to(torch.float32)}


def unpack_tiles(packed: State, tiles: Tiles, into: Tensor) -> Tensor:
    """A copy of `into` with the packed tiles put in their places."""
    vector = into.clone()
    vector[tiles.positions(packed[BLOCKS]).to(into.device)] = packed[VALUES].to(into.device, into.dtype)
    return vector


def fault_in_tiles(packed: State, tiles: Tiles) -> str | None:
    """Why a packed update cannot be used, or None: ids in range and unique, as many values as they need."""
    if BLOCKS not in packed or VALUES not in packed:
        return f"a sparse update needs {BLOCKS!r} and {VALUES!r}, got {sorted(packed)}"
    ids, values = packed[BLOCKS], packed[VALUES]
    if ids.dtype is not torch.int32 or ids.ndim != 1:
        return f"{BLOCKS!r} must be a list of int32, got {ids.dtype} {tuple(ids.shape)}"
    if values.dtype is not torch.float32 or values.ndim != 1:
        return f"{VALUES!r} must be a list of float32, got {values.dtype} {tuple(values.shape)}"
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= tiles.count):
        return f"block ids run from {int(ids.min())} to {int(ids.max())}, the model has 0 … {tiles.count - 1}"
    if len(torch.unique(ids)) != len(ids):
        return "a block id occurs twice"
    expected = int(tiles.sizes[ids.long()].sum())
    if len(values) != expected:
        return f"{len(values)} values for blocks of {expected}"
    return None


def merge_tiles(
    server: Tensor,
    updates: Iterable[tuple[float, State]],
    tiles: Tiles,
    *,
    delta: bool = False,
    total: float | None = None,
) -> Tensor:
    """Average each tile over the clients that sent it, weights renormalised; unsent tiles keep their bits.

    `updates` are (weight, packed); values are new values, or differences to `server` with `delta`. With
    `total` (the weight of all clients) clients that did not send a tile count as holding the server's.

    The paper's example, four clients and three blocks (one number each, equal weights):

    >>> tiles = Tiles.of(torch.arange(3))
    >>> sent = [{0: 3.0, 2: 1.0}, {1: 5.0, 2: 1.0}, {0: 6.0, 1: 7.0}, {0: 9.0, 1: 9.0, 2: 4.0}]
    >>> packed = [{"blocks": torch.tensor(list(s), dtype=torch.int32),
    ...            "values": torch.tensor(list(s.values()))} for s in sent]
    >>> merge_tiles(torch.zeros(3), [(1.0, p) for p in packed], tiles).tolist()
    [6.0, 7.0, 2.0]
    """
    ordered = torch.zeros(tiles.length, dtype=torch.float64)  # tile after tile: what is sent lies in few long runs
    weights = torch.zeros(tiles.count, dtype=torch.float64)
    for weight, packed in updates:
        # Ids are unique within an update: every position is added to once, in the order of clients.
        into, values, taken = ordered.numpy(), packed[VALUES].double().numpy(), 0  # numpy: little to do per run
        for start, stop in tiles.runs(packed[BLOCKS]):
            into[start:stop] += values[taken : taken + stop - start] * weight
            taken += stop - start
        weights[packed[BLOCKS].long()] += weight
    sums, each = torch.empty_like(ordered), torch.empty_like(ordered)
    sums[tiles.order] = ordered
    each[tiles.order] = torch.repeat_interleave(weights, tiles.sizes, output_size=tiles.length)
    old = server.detach().cpu().double()
    if delta:
        mean = old + sums / (each if total is None else total)
    elif total is None:
        mean = sums / each
    else:
        mean = (sums + old * (total - each)) / total
    merged = torch.where(each > 0, mean.to(server.dtype), server.detach().cpu())
    return merged.to(server.device)


def cap_upload(delta: Tensor, live: Tensor, tiles: Tiles, room: int) -> tuple[Tensor, Tensor]:
    """Choose tiles whose ids and values fit into `room` bytes; return (their ids, what is left behind).

    Tiles with most squared change per byte go first, the lowest id on a tie, and smaller ones fill the rest.
    The second result is `delta` with the chosen tiles zeroed: keep it and add it to the next round's `delta`
    (error feedback), so that what did not fit now arrives later.

    >>> tiles = Tiles.of(torch.tensor([0, 0, 1, 1]))
    >>> ids, rest = cap_upload(torch.tensor([1., 1., 5., 0.]), torch.tensor([0, 1]), tiles, room=12)
    >>> ids.tolist(), rest.tolist()
    ([1], [1.0, 1.0, 0.0, 0.0])
    """
    live = live.long().cpu().sort().values  # then a stable sort breaks ties by the lowest id
    change = delta.detach().cpu().double()
    energy = torch.zeros(tiles.count, dtype=torch.float64)
    owner = torch.repeat_interleave(torch.arange(tiles.count), tiles.sizes, output_size=tiles.length)
    energy.index_add_(0, owner, change[tiles.order].square())
    cost = 4 + 4 * tiles.sizes[live]  # an id and its values, four bytes each
    order = torch.argsort(energy[live] / cost, descending=True, stable=True)
    fitting, left = [], room
    for tile, price in zip(live[order].tolist(), cost[order].tolist(), strict=True):
        if price <= left:
            fitting.append(tile)
            left -= price
    ids = torch.tensor(sorted(fitting), dtype=torch.int64)
    rest = delta.clone()
    rest[tiles.positions(ids).to(delta.device)] = 0
    return ids, rest
