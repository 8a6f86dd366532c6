"""The half of an algorithm that sends and merges parts of a model: what travels, and what becomes of it.

A client sends the tiles (see `tiles`) that it touched: their values, or under a cap the differences to what it got,
because what is left behind now must add up later. The server averages each tile over its senders.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pfedgate.algorithms.pfedgate.tiles import (
    BLOCKS,
    VALUES,
    Tiles,
    cap_upload,
    fault_in_tiles,
    merge_tiles,
    pack_tiles,
    unpack_tiles,
)
from pfedgate.core.algorithm import Algorithm
from pfedgate.core.state import flat, pick, unflat, weighted_mean
from pfedgate.core.types import Card, Round, State, Update


@dataclass(frozen=True)
class SendsTiles(Algorithm):
    """An algorithm whose updates are tiles of the parameters `names`, and buffers beside them."""

    upload: float | None = None  # hard cap on the upload, as a share of the dense one; the rest is sent later

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters that are cut into tiles, in the order of the vector."""
        raise NotImplementedError

    @property
    def tiles(self) -> Tiles:
        """How that vector is cut."""
        raise NotImplementedError

    def pack(self, got: State, vector: Tensor, ids: Tensor, private: State) -> tuple[State, State]:
        """What to upload of the trained `vector` and, with a cap, what stays behind (private) for later."""
        if self.upload is None:
            return pack_tiles(vector, ids, self.tiles), {}
        difference = vector.cpu() - flat(pick(got, self.names)).cpu()
        difference = difference + private.get("residual", torch.zeros_like(difference))
        waiting = torch.zeros(self.tiles.count, dtype=torch.bool)
        waiting[ids] = True
        waiting[self.tiles.owner[difference != 0]] = True
        room = int(self.upload * 4 * self.tiles.length)
        ids, residual = cap_upload(difference, waiting.nonzero()[:, 0], self.tiles, room)
        return pack_tiles(difference, ids, self.tiles), {"residual": residual}

    def merge(self, server: State, updates: Iterable[tuple[Card, Update]], round: Round) -> State:
        """Each tile: the mean over the clients that sent it, weights renormalised; an unsent one is unchanged."""
        others: list[tuple[Card, Update]] = []

        def packed() -> Iterator[tuple[float, State]]:
            for card, update in updates:
                others.append((card, Update(_rest(update), update.weight)))
                yield update.weight, update.shared

        vector = flat(pick(server, self.names))
        merged = merge_tiles(vector, packed(), self.tiles, delta=self._differences, total=round.total)
        buffers = {name: value for name, value in server.items() if name not in set(self.names)}
        if buffers:
            buffers = weighted_mean(buffers, others, total=round.total)
        return {**self._spread(merged, server), **buffers}

    def landed(self, got: State, update: Update) -> State:
        """The client's copy after training: what it sent, in its places."""
        vector = flat(pick(got, self.names)).cpu()
        if self._differences:
            vector = vector + unpack_tiles(update.shared, self.tiles, torch.zeros_like(vector))
        else:
            vector = unpack_tiles(update.shared, self.tiles, vector)
        return {**got, **self._spread(vector, got), **_rest(update)}

    def check(self, got: State, update: Update) -> str | None:
        """Block ids in range and unique, as many values as they need; buffers as sent."""
        return fault_in_tiles(update.shared, self.tiles) or super().check(got, Update(_rest(update), update.weight))

    @property
    def _differences(self) -> bool:
        return self.upload is not None

    def _spread(self, vector: Tensor, like: State) -> State:
        return unflat(vector, [(name, like[name].shape) for name in self.names])


def _rest(update: Update) -> State:
    """Buffers: what travels beside the packed tiles."""
    return {name: value for name, value in update.shared.items() if name not in (BLOCKS, VALUES)}
