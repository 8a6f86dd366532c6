"""A small world in which every algorithm must obey the laws: six clients, two novel ones, two kinds of network."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from pfedgate import algorithms
from pfedgate.core.algorithm import Algorithm
from pfedgate.core.seeds import generator
from pfedgate.core.state import digest
from pfedgate.core.types import Card, Optim, Round, State, Task
from pfedgate.data import from_arrays
from pfedgate.data.federation import Federation
from pfedgate.data.pool import ArrayPool, Rows
from pfedgate.engine import wire
from pfedgate.engine.endpoint import Endpoint, Reply, checked, serve_many
from pfedgate.engine.server import Options, Result, run
from pfedgate.engine.store import DiskStore
from pfedgate.models import build

ALGORITHMS = algorithms.names()
FEATURES, CLASSES = 8, 3


class Norms(nn.Sequential):
    """Buffers and randomness in the network: BatchNorm (before it a bias would learn nothing) and dropout."""

    def __init__(self) -> None:
        super().__init__(
            nn.Flatten(),
            nn.Linear(FEATURES, 16, bias=False),
            nn.BatchNorm1d(16),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(16, CLASSES),
        )


MODELS = {"plain": partial(build, "mlp", (FEATURES,), CLASSES, hidden=(16,)), "norms": Norms}


def small_task(model: str = "plain", **options: Any) -> Task:
    example = torch.linspace(-1, 1, 4 * FEATURES).view(4, FEATURES)
    return Task(MODELS[model], optim=Optim(lr=0.05, **options), batch=6, example=example)


def federation(seed: int = 0) -> Federation:
    """Eight owners of 21 to 35 samples; labels depend on the owner, so personal models pay."""
    random = np.random.default_rng(seed)
    sizes = 21 + 2 * np.arange(8)
    owners = np.repeat([f"client/{at} é" for at in range(8)], sizes)
    x = random.standard_normal((len(owners), FEATURES)).astype(np.float32)
    turn = np.repeat(np.arange(8) % 2, sizes)
    y = (np.argmax(x[:, :CLASSES], 1) + turn) % CLASSES
    return from_arrays(x, y, owners=owners, novel=0.25, seed=seed)


@dataclass
class Reordered:
    """The same clients, listed the other way round."""

    inner: Federation

    def __post_init__(self) -> None:
        self.clients, self.novel = list(self.inner.clients)[::-1], list(self.inner.novel)[::-1]

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # while being unpickled
            raise AttributeError(name)
        return getattr(self.inner, name)


def scrambled(federation: Federation, part: str, seed: int = 0) -> Federation:
    """A copy with random labels in this part of every client."""
    assert isinstance(federation.pool, ArrayPool)
    labels = federation.pool.y(torch.arange(len(federation.pool))).clone()
    rows = torch.cat([federation.part(client, part).rows for client in federation.ids])
    stream = generator(seed, "scramble", part)
    labels[rows] = torch.randint(federation.classes, (len(rows), *labels.shape[1:]), generator=stream)
    other = copy.copy(federation)
    other.pool = ArrayPool(federation.pool._x, Rows(labels), image=federation.pool.image)
    return other


OPTIONS = Options(rounds=3, sample=0.5, evaluate_every=0, novel=False, seed=3)


def example(name: str, model: str = "plain", **options: Any) -> Algorithm:
    return algorithms.get(name).example(small_task(model, **options))


@dataclass
class Outcome:
    """All that must be the same: the server, every client's private state, every number recorded."""

    result: Result
    server: str = ""
    private: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        store = self.result.store
        assert store is not None
        self.server = digest(self.result.server)
        self.private = {client: digest(store.get(client) or {}) for client in store.clients()}

    def training(self) -> list[dict[str, Any]]:
        """The records without their evaluations."""
        points = ("after_broadcast", "after_local")
        return [{n: v for n, v in record.items() if n not in points} for record in self.result.history]


def go(algorithm: Algorithm, fed: Any = None, options: Options = OPTIONS, **how: Any) -> Outcome:
    return Outcome(run(algorithm, federation() if fed is None else fed, options, **how))


def check_same(a: Outcome, b: Outcome) -> None:
    assert a.server == b.server
    assert a.private == b.private
    assert a.training() == b.training()


def private_digests(folder: Path) -> dict[str, str]:
    """Digests of what a run's folder holds of every client."""
    store = DiskStore(folder / "private", "none")
    return {client: digest(store.get(client) or {}) for client in store.clients()}


class Serialised(Endpoint):
    """An exchange whose messages really become bytes; `tap` sees them (client, direction, message)."""

    def __init__(self, *parts: Any, tap: Callable[[str, str, bytes], None]) -> None:
        super().__init__(*parts)
        self.tap = tap

    def train(self, server: State, round: Round, chunks: Iterable[Sequence[Card]]) -> Iterator[Reply]:
        for cards in chunks:
            states = [self.algorithm.send(server, card, round) for card in cards]
            sent = [wire.pack(state) if state else b"" for state in states]
            gots = [wire.unpack(message) if message else {} for message in sent]
            updates = serve_many(self.algorithm, gots, self.store, [self.local(card, round) for card in cards])
            for card, down, got, update in zip(cards, sent, gots, updates, strict=True):
                up = wire.encode(update, client=card.id, round=round.index)
                self.tap(card.id, "down", down)
                self.tap(card.id, "up", up)
                arrived = wire.decode(up).update  # an empty State is not sent at all
                yield checked(self.algorithm, got, Reply(card, arrived, len(down), len(up) if arrived.shared else 0))
