"""Clients in this process, every message really serialised: slower than the default, for checks and taps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from pfedgate import wire
from pfedgate.algorithm import Algorithm
from pfedgate.serve import Endpoint, Reply, serve_many
from pfedgate.store import Store
from pfedgate.types import Card, Federation, Round, State


class InProcess(Endpoint):
    """As `Endpoint`, but what travels goes through bytes, and `tap` sees them (client, direction, message)."""

    def __init__(
        self,
        algorithm: Algorithm,
        federation: Federation,
        store: Store,
        device: torch.device | str = "cpu",
        *,
        tap: Callable[[str, str, bytes], None] | None = None,
    ) -> None:
        super().__init__(algorithm, federation, store, device)
        self.tap = tap

    def train(self, server: State, round: Round, chunks: Iterable[Sequence[Card]]) -> Iterator[Reply]:
        """One training round through bytes."""
        for cards in chunks:
            sent = [wire.pack(self.algorithm.send(server, card, round)) for card in cards]
            gots = [wire.unpack(message) for message in sent]
            locals = [self.local(card, round) for card in cards]
            updates = serve_many(self.algorithm, gots, self.store, locals)
            for card, down, update in zip(cards, sent, updates, strict=True):
                up = wire.encode(update, client=card.id, round=round.index)
                if self.tap is not None:
                    self.tap(card.id, "down", down)
                    self.tap(card.id, "up", up)
                yield Reply(card, wire.decode(up).update, len(down), len(up))
