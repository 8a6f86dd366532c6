"""Clients in this process, every message really serialised: slower than the default, for checks and taps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from pfedgate.core.algorithm import Algorithm
from pfedgate.core.types import Card, Federation, Round, State
from pfedgate.engine import wire
from pfedgate.engine.endpoint import Endpoint, Reply, serve_many
from pfedgate.engine.store import Store


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
            states = [self.algorithm.send(server, card, round) for card in cards]
            sent = [wire.pack(state) if state else b"" for state in states]
            gots = [wire.unpack(message) if message else {} for message in sent]
            locals = [self.local(card, round) for card in cards]
            updates = serve_many(self.algorithm, gots, self.store, locals)
            for card, down, update in zip(cards, sent, updates, strict=True):
                up = wire.encode(update, client=card.id, round=round.index)
                if self.tap is not None:
                    self.tap(card.id, "down", down)
                    self.tap(card.id, "up", up)
                sent_nothing = not update.shared  # an empty State is not sent at all
                yield Reply(card, wire.decode(up).update, len(down), 0 if sent_nothing else len(up))
