"""The client's side: the only code that reads or writes private state, or touches a client's data.

    serve(algorithm, got, store, local)        one client's training: its update; its private State is stored
    Endpoint(algorithm, federation, store)     all clients of a process: train, score, adapt

An Endpoint is also the simplest exchange: everything happens here and now.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from pfedgate.core.algorithm import Algorithm
from pfedgate.core.errors import ClientError
from pfedgate.core.prior import SHIFT, Own, Step
from pfedgate.core.seeds import seeded
from pfedgate.core.types import Card, Federation, Local, Round, State, Update
from pfedgate.engine import boundary, wire
from pfedgate.engine.store import Store
from pfedgate.training.fit import Score, evaluate
from pfedgate.training.workspace import Stepper

# A model as received; after the client's own epochs; as received, one sample at a time; with one decision per client.
POINTS = ("after_broadcast", "after_local", "batch_1", "per_client")
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
    try:
        admitted = boundary.admit(algorithm, got, reply.card, reply.update)
        return reply if admitted is reply.update else replace(reply, update=admitted)
    except boundary.Refused as error:
        return replace(reply, update=None, reason=str(error))


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


def own_part(algorithm: Algorithm, private: State, local: Local) -> tuple[Own, State]:
    """A client's own part of the task, and the rest of its private State, which is the method's."""
    task = algorithm.task

    def step(rate: float) -> Step:
        return Stepper(replace(task.optim, weight_decay=0.0), rate).step

    return Own(task, private, local, step), {name: value for name, value in private.items() if name != SHIFT}


def serve(algorithm: Algorithm, got: State, store: Store, local: Local) -> Update:
    """Train one client and store its private State; the update is the result."""
    return serve_many(algorithm, [got], store, [local])[0]


def serve_many(algorithm: Algorithm, gots: Sequence[State], store: Store, locals: Sequence[Local]) -> list[Update]:
    """`serve` for clients that are trained together."""
    privates = [_private(algorithm, got, store, local) for got, local in zip(gots, locals, strict=True)]
    if algorithm.task.private is not None and algorithm.task.private.secret:
        locals = [replace(local, secret=store.secret()) for local in locals]
    first = locals[0]
    with _named(first, "train"), seeded(first.round.seed, "train", first.round.index, first.card.id):
        parts = [own_part(algorithm, private, local) for private, local in zip(privates, locals, strict=True)]
        methods, rests = [own.method(algorithm) for own, _ in parts], [rest for _, rest in parts]
        if len(locals) == 1 or any(own.trains for own, _ in parts):  # each client has a loss of its own
            done = [m.train(got, rest, at) for m, got, rest, at in zip(methods, gots, rests, locals, strict=True)]
        else:
            done = algorithm.train_many(gots, rests, locals)
    updates = []
    for local, before, (own, _), (update, private) in zip(locals, privates, parts, done, strict=True):
        if (private := {**private, **own.state()}) or before:
            store.put(local.card.id, private)
        updates.append(update)
    return updates


def after_broadcast(algorithm: Algorithm, local: Local) -> tuple[Algorithm, Local]:
    """The method and the client's side for its own epochs: a rate and a number of epochs of their own.

    All rates of a method, also those of private parts, are multiplied by the same factor as the model's.
    """
    task = algorithm.task
    if task.local_lr is not None:
        local = replace(local, round=replace(local.round, factor=task.local_lr / (task.optim.lr or 1.0)))
    if task.local_epochs is None:
        return algorithm, local
    return replace(algorithm, task=replace(task, epochs=task.local_epochs, steps=None)), local


class Endpoint:
    """The clients of this process: trained and scored here and now."""

    def __init__(
        self, algorithm: Algorithm, federation: Federation, store: Store, device: torch.device | str = "cpu"
    ) -> None:
        self.algorithm, self.federation, self.store = algorithm, federation, store
        self.device = torch.device(device)
        self._last: tuple[State, nn.Module] | None = None

    def local(self, card: Card, round: Round) -> Local:
        """A client's view of its own data: training and validation part, never the test part."""
        train, val = (self.federation.part(card.id, name) for name in ("train", "val"))
        return Local(card, train, val, round, self.device, self.federation.prepare)

    def train(self, server: State, round: Round, chunks: Iterable[Sequence[Card]]) -> Iterator[Reply]:
        """One training round: a reply per card, in order. Cards of one chunk are trained together."""
        last, down = None, 0
        for cards in chunks:
            sent: list[tuple[State, int]] = []
            for card in cards:
                got = self.algorithm.send(server, card, round)
                if got is not last:  # most clients get the very same State: it is measured once
                    last, down = got, wire.packed_size(got)
                sent.append((got, down))
            locals = [self.local(card, round) for card in cards]
            updates = serve_many(self.algorithm, [got for got, _ in sent], self.store, locals)
            for card, (got, size), update in zip(cards, sent, updates, strict=True):
                yield checked(self.algorithm, got, Reply(card, update, size, wire.size(update, client=card.id)))

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

    def adapt(self, server: State, card: Card, round: Round) -> State:
        """The private State of a client that took no part, as the method makes it; it is returned, not stored."""
        local, got = self.local(card, round), self.algorithm.send(server, card, round)
        private = _private(self.algorithm, got, self.store, local)
        with _named(local, NOVEL), seeded(round.seed, NOVEL, round.index, card.id):
            own, private = own_part(self.algorithm, private, local)
            private = own.method(self.algorithm).adapt(got, private, local)
            return {**private, **own.state()}

    def model(self, server: State, card: Card, round: Round, point: str = POINTS[0]) -> nn.Module:
        """One client's model as it is scored at a point, a module of its own; it changes nothing."""
        local, got = self.local(card, round), self.algorithm.send(server, card, round)
        private = _private(self.algorithm, got, self.store, local)
        with _named(local, point), seeded(round.seed, point, round.index, card.id):
            return copy.deepcopy(self._model(got, private, local, point)[0])

    def _model(self, got: State, private: State, local: Local, point: str) -> tuple[nn.Module, dict[str, float]]:
        algorithm, card, more = self.algorithm, local.card, dict[str, float]()
        if point == "per_client":
            algorithm = algorithm.per_client()
        if point == "after_local":
            algorithm, local = after_broadcast(algorithm, local)
        own, private = own_part(algorithm, private, local)
        if point == "after_local":
            got, private, more["flops"] = own.method(algorithm).own_epochs(got, private, local)
        elif point == NOVEL:
            private = own.method(algorithm).adapt(got, private, local)
        own.settle()
        private = own.method(algorithm).personalise(got, private, local)
        own.settle()
        # A predictor that depends on `got` alone is shared by all clients who were sent the same.
        shared = type(algorithm).predictor is Algorithm.predictor
        if not shared or self._last is None or self._last[0] is not got:
            self._last = (got, own.method(algorithm).predictor(got, private, card).to(self.device))
        return own.model(algorithm, self._last[1]), more

    def _score(self, got: State, private: State, local: Local, point: str) -> Scored:
        algorithm, card = self.algorithm, local.card
        task, down = algorithm.task, wire.packed_size(got)
        with _named(local, point), seeded(local.round.seed, point, local.round.index, card.id):
            model, more = self._model(got, private, local, point)
            scoring = replace(task, eval_batch=1) if point == "batch_1" and algorithm.reads_batches else task
            val = evaluate(scoring, model, local.val, local)
            test = evaluate(scoring, model, self.federation.part(card.id, "test"), local)
        stats: dict[str, float] = getattr(model, "stats", dict)()
        return Scored(card.id, point, test, val, {"bytes_down": float(down), **more, **stats})

    def close(self) -> None:
        """Do nothing: no process was started."""
