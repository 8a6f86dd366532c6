"""Clients of a round, or cells of a study, spread over a Ray cluster (extra `ray`), with the bits of one process.

The federation and the algorithm go to each node once, through Ray's object store; a round sends the server's State
once per node. Private states lie in the run's own store and travel with a client's work, so that a node may vanish in
the middle of a round: Ray repeats its work elsewhere, from the same States, with the same result.

`ray.init()` as you need it, or `RAY_ADDRESS`, decides which cluster is used; without either one starts on this machine,
bound to the loopback address.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

import torch

from pfedgate.core.algorithm import Algorithm
from pfedgate.core.errors import ClientError
from pfedgate.core.types import Card, Federation, Round, State
from pfedgate.engine import wire
from pfedgate.engine.endpoint import Endpoint, Reply, Scored
from pfedgate.engine.metrics import resident_bytes
from pfedgate.engine.store import MemoryStore, Store
from pfedgate.engine.workers import LOOK, WorkerDied, settle

Job = TypeVar("Job")
AHEAD = 4  # chunks for each core that wait for one


def connect() -> Any:
    """Ray, connected: to the cluster that this process or RAY_ADDRESS names, or to one started here."""
    # Ray reads it when it is imported: otherwise it listens on the host's address, not on the loopback one.
    if not os.environ.get("RAY_ADDRESS"):
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("the exchange 'ray' needs the extra: pip install 'pfedgate[ray]'") from error
    if not ray.is_initialized():
        here: dict[str, Any] = (
            {} if os.environ.get("RAY_ADDRESS") else {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        )
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **here)
    return ray


class Cluster:
    """An exchange over the cores of a Ray cluster."""

    def __init__(
        self, algorithm: Algorithm, federation: Federation, store: Store, device: torch.device | str = "cpu"
    ) -> None:
        self.store, self.resident_bytes = store, 0
        self._ray = connect()
        self._setting = self._ray.put((algorithm, federation, str(device), store.secret()))
        self._answer = self._ray.remote(num_cpus=1, max_retries=5, retry_exceptions=False)(_answer)

    def train(self, server: State, round: Round, chunks: Iterable[Sequence[Card]]) -> Iterator[Reply]:
        """One training round; replies in the order of the cards, whatever happens to a node."""
        for (replies, messages, privates), cards in self._ask(server, round, chunks):
            for card in cards:
                if card.id in privates:
                    self.store.put(card.id, privates[card.id])
            for reply, message in zip(replies, messages, strict=True):
                yield replace(reply, update=wire.decode(message).update) if message else reply

    def evaluate(self, server: State, round: Round, cards: Iterable[Card], points: Sequence[str]) -> Iterator[Scored]:
        """Scores in the order of the cards."""
        everyone = iter(cards)
        chunks = iter(lambda: list(itertools.islice(everyone, 8)), [])
        for scores, _ in self._ask(server, round, chunks, points):
            yield from scores

    def _ask(
        self, server: State, round: Round, chunks: Iterable[Sequence[Card]], points: Sequence[str] = ()
    ) -> Iterator[tuple[Any, Sequence[Card]]]:
        """Hand chunks out as cores become free; the answers come in the order of the chunks."""
        ray, groups = self._ray, iter(chunks)
        state = ray.put(wire.pack(server))
        waiting: deque[tuple[Any, Sequence[Card]]] = deque()

        def submit(count: int) -> None:
            for cards in itertools.islice(groups, count):
                privates = {card.id: private for card in cards if (private := self.store.get(card.id)) is not None}
                # References in a list are handed over as they are: a worker keeps what it has fetched once.
                answer = self._answer.remote([self._setting, state], round, cards, privates, points)
                waiting.append((answer, cards))

        submit(AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1))))
        while waiting:
            answer, cards = waiting.popleft()
            try:
                result, resident = ray.get(answer)
            except ray.exceptions.RayTaskError as error:
                raise (error.cause if isinstance(error.cause, ClientError) else error) from None
            self.resident_bytes = max(self.resident_bytes, resident)
            yield result, cards
            submit(1)

    def close(self) -> None:
        """Let go of what lies on the nodes; the cluster itself stays for whoever started it."""
        del self._setting


def spread(
    work: Callable[[Job], Any], draw: Callable[[], Job | None], tick: Callable[[], None] = lambda: None
) -> Iterator[tuple[Job, Future[Any]]]:
    """What `workers.completed` does, over the cores of a Ray cluster; a job on a node that vanishes is done again."""
    ray = connect()
    ask = ray.remote(num_cpus=1, max_retries=5, retry_exceptions=False)(_alone)
    busy: dict[Any, Job] = {}
    try:
        while True:
            while len(busy) < int(ray.cluster_resources().get("CPU", 1)) and (job := draw()) is not None:
                busy[ask.remote(work, job)] = job
            if not busy:
                return
            ended, _ = ray.wait(list(busy), timeout=LOOK)
            for answer in ended:
                future: Future[Any] = Future()
                try:
                    future.set_result(ray.get(answer))
                except ray.exceptions.RayTaskError as error:
                    future.set_exception(error.cause)
                except ray.exceptions.RayError as error:
                    future.set_exception(WorkerDied(f"its worker died: {error}"))
                yield busy.pop(answer), future
            tick()
    finally:
        for answer in busy:  # after an error or Ctrl-C
            ray.cancel(answer, force=True)


def _alone(work: Callable[[Job], Any], job: Job) -> Any:
    settle()
    return work(job)


_SEEN: dict[str, Any] = {}  # in a worker: the endpoint of its run, and the State of its round


def _fetched(reference: Any, kind: str, make: Any) -> Any:
    """What a reference stands for, made once for each worker."""
    import ray

    name = reference.hex()
    if _SEEN.get(kind, (None, None))[0] != name:
        _SEEN[kind] = (name, make(ray.get(reference)))
    return _SEEN[kind][1]


def _endpoint(setting: tuple[Algorithm, Federation, str, bytes]) -> Endpoint:
    algorithm, federation, device, key = setting
    settle()
    return Endpoint(algorithm, federation, MemoryStore(key), device)


def _answer(
    references: list[Any], round: Round, cards: Sequence[Card], privates: dict[str, State], points: Sequence[str]
) -> tuple[Any, int]:
    """In a worker: scores at these points, or without points replies, messages and new private States."""
    setting, state = references
    endpoint = _fetched(setting, "setting", _endpoint)
    server = _fetched(state, "state", wire.unpack)
    endpoint.store = store = MemoryStore(endpoint.store.secret())
    for client, private in privates.items():
        store.put(client, private)
    if points:
        return list(endpoint.evaluate(server, round, cards, points)), resident_bytes()
    replies, messages = [], []
    for reply in endpoint.train(server, round, [cards]):
        update = reply.update
        messages.append(wire.encode(update, client=reply.card.id, round=round.index) if update else b"")
        replies.append(replace(reply, update=None))
    return (replies, messages, {card.id: store.get(card.id) for card in cards if store.get(card.id)}), resident_bytes()
