"""Sparse updates: a model vector cut into tiles, of which a client sends some and the server averages each.

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pfedgate.core.mergers import WeightedMean
from pfedgate.core.state import unflat
from pfedgate.core.types import Card, State, Update

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
        """The number of tiles in the cut."""
        return int(self.sizes.shape[0])

    @property
    def length(self) -> int:
        """The length of the vector that is cut."""
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


class TileMean:
    """Average each tile of a vector over the clients that sent it; unsent tiles keep their bits.

    Values are new values, or differences to `server` with `delta`. With `total` (the weight of all
    clients) clients that did not send a tile count as holding the server's.

    The paper's example, four clients and three blocks (one number each, equal weights):

    >>> mean = TileMean(torch.zeros(3), Tiles.of(torch.arange(3)))
    >>> for sent in ({0: 3.0, 2: 1.0}, {1: 5.0, 2: 1.0}, {0: 6.0, 1: 7.0}, {0: 9.0, 1: 9.0, 2: 4.0}):
    ...     blocks = torch.tensor(list(sent), dtype=torch.int32)
    ...     mean.add({"blocks": blocks, "values": torch.tensor(list(sent.values()))}, 1.0)
    >>> mean.result().tolist()
    [6.0, 7.0, 2.0]
    """

    def __init__(self, server: Tensor, tiles: Tiles, *, delta: bool = False, total: float | None = None) -> None:
        self.server, self.tiles, self.delta, self.total = server, tiles, delta, total
        # Tile after tile: what is sent lies in few long runs.
        self._ordered = torch.zeros(tiles.length, dtype=torch.float64)
        self._weights = torch.zeros(tiles.count, dtype=torch.float64)

    def add(self, packed: State, weight: float) -> None:
        """Add a packed update. Its ids are unique, so every position is added to once, in the order of clients."""
        into, values, taken = self._ordered.numpy(), packed[VALUES].double().numpy(), 0  # numpy: little to do per run
        for start, stop in self.tiles.runs(packed[BLOCKS]):
            into[start:stop] += values[taken : taken + stop - start] * weight
            taken += stop - start
        self._weights[packed[BLOCKS].long()] += weight

    def result(self) -> Tensor:
        """The server's next vector, of its own dtype."""
        tiles, total = self.tiles, self.total
        sums, each = torch.empty_like(self._ordered), torch.empty_like(self._ordered)
        sums[tiles.order] = self._ordered
        each[tiles.order] = torch.repeat_interleave(self._weights, tiles.sizes, output_size=tiles.length)
        old = self.server.detach().cpu().double()
        if self.delta:
            mean = old + sums / (each if total is None else total)
        elif total is None:
            mean = sums / each
        else:
            mean = (sums + old * (total - each)) / total
        merged = torch.where(each > 0, mean.to(self.server.dtype), self.server.detach().cpu())
        return merged.to(self.server.device)


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


@dataclass(frozen=True)
class SparseMean:
    """A merger of tiles and of the buffers beside them."""

    server: State
    names: tuple[str, ...]  # the parameters that the tiles are cut from
    tiles: TileMean
    buffers: WeightedMean

    def add(self, card: Card, update: Update) -> str | None:
        """Tiles to tiles, buffers to buffers."""
        self.tiles.add(update.shared, update.weight)
        return self.buffers.add(card, Update(beside(update), update.weight))

    def around(self, card: Card, update: Update) -> State:
        """What the server holds in these tiles; with differences, zeros."""
        values = update.shared[VALUES]
        if not self.tiles.delta:
            values = self.tiles.tiles.take(self.tiles.server.detach().cpu(), update.shared[BLOCKS])
        else:
            values = torch.zeros_like(values)
        return {VALUES: values, **self.buffers.around(card, Update(beside(update), update.weight))}

    def lay(self, update: Update) -> State:
        """All tiles one after the other, NaN where they were not sent; and the buffers."""
        tiles, ids = self.tiles.tiles, update.shared[BLOCKS].long()
        sent = torch.zeros(tiles.count, dtype=torch.bool)
        sent[ids] = True
        values = torch.full((tiles.length,), torch.nan)
        # In the order of the tiles, whatever the order in which they came.
        whole = torch.zeros(tiles.length)
        whole[tiles.positions(ids)] = update.shared[VALUES]
        mask = torch.repeat_interleave(sent, tiles.sizes, output_size=tiles.length)
        values[mask] = whole[tiles.order][mask]
        return {VALUES: values, **beside(update)}

    def lift(self, state: State) -> State:
        """The tiles that have values, packed; and the buffers."""
        values, tiles = state[VALUES], self.tiles.tiles
        filled = torch.nonzero(tiles.sizes > 0)[:, 0]
        ids = filled[~values[tiles.starts[filled]].isnan()]
        mask = torch.zeros(tiles.count, dtype=torch.bool)
        mask[ids] = True
        sent = values[torch.repeat_interleave(mask, tiles.sizes, output_size=tiles.length)]
        return {**state, BLOCKS: ids.to(torch.int32), VALUES: sent}

    def result(self) -> State:
        """The server's State, parameters first."""
        return {**shaped(self.tiles.result(), self.names, self.server), **self.buffers.result()}


def shaped(vector: Tensor, names: Sequence[str], like: State) -> State:
    """A vector as these parameters, with the shapes that they have in `like`."""
    return unflat(vector, [(name, like[name].shape) for name in names])


def beside(update: Update) -> State:
    """The buffers, which travel beside the packed tiles."""
    return {name: value for name, value in update.shared.items() if name not in (BLOCKS, VALUES)}
