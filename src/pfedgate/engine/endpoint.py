"""The client's side: the only code that reads or writes private state, or touches a client's data.

    serve(algorithm, got, store, local)        one client's training: its update; its private State is stored
    Endpoint(algorithm, federation, store)     all clients of a process: train, evaluate, adapt
    Serialised(...)                            the same, and every message really becomes bytes

An Endpoint is also the simplest exchange: everything happens here and now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import nn

from pfedgate.core.algorithm import Algorithm
from pfedgate.core.errors import ClientError
from pfedgate.core.seeds import seeded
from pfedgate.core.types import Card, Federation, Local, Part, Round, State, Update
from pfedgate.engine import wire
from pfedgate.engine.store import Store
from pfedgate.training.fit import Score, evaluate

POINTS = ("after_broadcast", "after_local")
NOVEL = "novel"


@dataclass(frozen=True)
class Reply:
    """What the server learns from one client's round. Exchanges yield replies that `checked` has seen."""

    card: Card
    update: Update | None  # None: refused or never came
    down: int = 0  # bytes sent to the client, as serialised
    up: int = 0  # bytes it sent
    reason: str = ""  # why there is no update


def checked(algorithm: Algorithm, got: State, reply: Reply) -> Reply:
    """The reply, without its update if that cannot be used; the one check between a client and the merger."""
    if reply.update is None:
        return reply
    reason = wire.fault(reply.update) or algorithm.check(got, reply.update)
    return replace(reply, update=None, reason=reason) if reason else reply


@dataclass(frozen=True)
class Scored:
    """How good one client's model is, at one point of the protocol."""

    client: str
    point: str
    test: Score
    val: Score
    stats: dict[str, float] = field(default_factory=dict)


@contextmanager
def _named(local: Local, stage: str) -> Iterator[None]:
    try:
        yield
    except ClientError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ClientError(local.card.id, local.round.index + 1, stage, reason) from error


def _private(algorithm: Algorithm, got: State, store: Store, local: Local) -> State:
    """A client's private State, a new one if it has none. A new one is not stored."""
    private = store.get(local.card.id)
    if private is not None:
        return private
    if type(algorithm).init_client is Algorithm.init_client:
        return {}
    # It pretends to be round 0: a client's first state must not depend on when it was first needed.
    first = replace(local, round=replace(local.round, index=0, factor=1.0))
    with _named(local, "init_client"), seeded(local.round.seed, "init_client", local.card.id):
        return algorithm.init_client(got, first)


def serve(algorithm: Algorithm, got: State, store: Store, local: Local) -> Update:
    """Train one client and store its private State; the update is the result."""
    return serve_many(algorithm, [got], store, [local])[0]


def serve_many(algorithm: Algorithm, gots: Sequence[State], store: Store, locals: Sequence[Local]) -> list[Update]:
    """`serve` for clients that are trained together."""
    privates = [_private(algorithm, got, store, local) for got, local in zip(gots, locals, strict=True)]
    first = locals[0]
    with _named(first, "train"), seeded(first.round.seed, "train", first.round.index, first.card.id):
        if len(locals) == 1:
            done = [algorithm.train(gots[0], privates[0], first)]
        else:
            done = algorithm.train_many(gots, privates, locals)
    updates = []
    for local, before, (update, private) in zip(locals, privates, done, strict=True):
        if private or before:
            store.put(local.card.id, private)
        updates.append(update)
    return updates


class _Later:
    """A part that is looked up when it is needed, because most methods never look at validation data."""

    def __init__(self, federation: Federation, client: str, name: str) -> None:
        self._source = (federation, client, name)

    @cached_property
    def _part(self) -> Part:
        federation, client, name = self._source
        return federation.part(client, name)

    @property
    def n(self) -> int:
        return self._part.n

    @property
    def x(self) -> torch.Tensor:
        return self._part.x

    @property
    def y(self) -> torch.Tensor:
        return self._part.y


class Endpoint:
    """The clients of this process: trained and scored here and now."""

    def __init__(
        self,
        algorithm: Algorithm,
        federation: Federation,
        store: Store,
        device: torch.device | str = "cpu",
    ) -> None:
        self.algorithm, self.federation, self.store = algorithm, federation, store
        self.device = torch.device(device)
        self._last: tuple[State, nn.Module] | None = None
        self._measured: tuple[State, int] = ({}, 0)

    def local(self, card: Card, round: Round) -> Local:
        """A client's view of its own data: training and validation part, never the test part."""
        train, val = self.federation.part(card.id, "train"), _Later(self.federation, card.id, "val")
        return Local(card, train, val, round, self.device, self.federation.prepare)

    def train(self, server: State, round: Round, chunks: Iterable[Sequence[Card]]) -> Iterator[Reply]:
        """One training round: a reply per card, in order. Cards of one chunk are trained together."""
        for cards in chunks:
            sent = [self._down(card, self.algorithm.send(server, card, round)) for card in cards]
            gots, locals = [got for got, _ in sent], [self.local(card, round) for card in cards]
            updates = serve_many(self.algorithm, gots, self.store, locals)
            for card, (got, down), update in zip(cards, sent, updates, strict=True):
                arrived, up = self._up(card, update, round)
                yield checked(self.algorithm, got, Reply(card, arrived, down, up))
        self._measured = ({}, 0)

    def _down(self, card: Card, state: State) -> tuple[State, int]:
        """A State on its way to a client, and its bytes."""
        if self._measured[0] is not state:  # most clients get the very same State: measure it once
            self._measured = (state, wire.packed_size(state))
        return self._measured

    def _up(self, card: Card, update: Update, round: Round) -> tuple[Update, int]:
        """An update on its way to the server, and its bytes."""
        return update, wire.size(update, client=card.id)

    def evaluate(
        self, server: State, round: Round, cards: Iterable[Card], points: Sequence[str] = POINTS[:1]
    ) -> Iterator[Scored]:
        """Score every card's personal model at the given points; it changes nothing."""
        for card in cards:
            yield from self.score(self.algorithm.send(server, card, round), card, round, points)
        self._last = None

    def score(self, got: State, card: Card, round: Round, points: Sequence[str]) -> Iterator[Scored]:
        """Score one client's personal model with the State it was sent; it changes nothing."""
        local = self.local(card, round)
        private = _private(self.algorithm, got, self.store, local)
        for point in points:
            yield self._score(got, private, local, point)

    def _score(self, got: State, private: State, local: Local, point: str) -> Scored:
        algorithm, card = self.algorithm, local.card
        with _named(local, point), seeded(local.round.seed, point, local.round.index, card.id):
            if point == "after_local":
                update, private = algorithm.train(got, private, local)
                got = algorithm.landed(got, update)
            elif point == NOVEL:
                private = algorithm.adapt(got, private, local)
            private = algorithm.personalise(got, private, local)
            model = self._model(got, private, card)
            val = evaluate(algorithm.task, model, local.val, local)
            test = evaluate(algorithm.task, model, self.federation.part(card.id, "test"), local)
        stats: dict[str, float] = getattr(model, "stats", dict)()
        return Scored(card.id, point, test, val, {"bytes_down": float(wire.packed_size(got)), **stats})

    def _model(self, got: State, private: State, card: Card) -> nn.Module:
        """The client's predictor. Where it depends on what was got alone, all who got the same share it."""
        if type(self.algorithm).predictor is not Algorithm.predictor:
            return self.algorithm.predictor(got, private, card).to(self.device)
        if self._last is None or self._last[0] is not got:
            self._last = (got, self.algorithm.predictor(got, private, card).to(self.device))
        return self._last[1]

    def close(self) -> None:
        """Do nothing: no process was started."""


class Serialised(Endpoint):
    """An `Endpoint` whose messages go through bytes, for checks; `tap` sees them (client, direction, message)."""

    def __init__(
        self,
        algorithm: Algorithm,
        federation: Federation,
        store: Store,
        device: torch.device | str = "cpu",
        *,
        tap: Callable[[str, str, bytes], None] = lambda client, way, message: None,
    ) -> None:
        super().__init__(algorithm, federation, store, device)
        self.tap = tap

    def _down(self, card: Card, state: State) -> tuple[State, int]:
        message = wire.pack(state) if state else b""
        self.tap(card.id, "down", message)
        return wire.unpack(message) if message else {}, len(message)

    def _up(self, card: Card, update: Update, round: Round) -> tuple[Update, int]:
        message = wire.encode(update, client=card.id, round=round.index)
        self.tap(card.id, "up", message)
        arrived = wire.decode(message).update
        return arrived, len(message) if arrived.shared else 0  # an empty State is not sent at all
