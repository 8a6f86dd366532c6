"""Clients in worker processes on this machine, one torch thread each.

Workers keep the algorithm and map the data once. A round sends them the number of the round and the cards; the
server's State lies in a memory-backed file that all map; updates come back as wire messages. Private states
stay on the workers' side, in files only they read and write. Results have the same bits as in one process.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import struct
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from pfedgate.core.algorithm import Algorithm
from pfedgate.core.types import Card, Federation, Round, State
from pfedgate.engine import wire
from pfedgate.engine.endpoint import ClientError, Endpoint, Reply, Scored
from pfedgate.engine.metrics import peak_bytes
from pfedgate.engine.store import DiskStore, Store, pack_file, write_atomically
from pfedgate.engine.workers import WorkerDied, cores, settle, starter
from pfedgate.training.fit import Score

_HEAD = struct.Struct("<BIIq")  # what it is, number of the job, place within the job, bytes down
UPDATE, SCORE, DONE, FAILED = range(4)
Job = dict[str, Any]


class Processes:
    """An exchange with `workers` processes (default: one per core)."""

    shared_store = True  # private states must lie where every worker can reach them

    def __init__(
        self,
        algorithm: Algorithm,
        federation: Federation,
        store: Store,
        device: torch.device | str = "cpu",
        *,
        workers: int | None = None,
    ) -> None:
        if not isinstance(store, DiskStore):
            raise TypeError("worker processes need a DiskStore: they share private states through files")
        self.store, self._serial = store, 0
        self.peak_bytes = 0  # the most any worker ever held
        self._folder = Path(tempfile.mkdtemp(prefix="pfedgate-", dir=_memory()))
        share = getattr(federation, "share", None)
        if share is not None:
            share()
        start = starter(["pfedgate.engine.processes"])
        given = (algorithm, federation, str(store.root), str(device))
        self._workers = [start(_work, *given) for _ in range(workers or cores())]
        self._pipes = [worker.pipe for worker in self._workers]

    def train(self, server: State, round: Round, chunks: Iterable[Sequence[Card]]) -> Iterator[Reply]:
        """One training round; replies in the order of the cards."""
        for card, kind, number, message in self._ask("train", server, round, list(chunks), ()):
            assert kind == UPDATE
            update = wire.decode(message).update
            yield Reply(card, update, number, len(message) if update.shared else 0)

    def evaluate(self, server: State, round: Round, cards: Iterable[Card], points: Sequence[str]) -> Iterator[Scored]:
        """Scores in the order of the cards."""
        everyone = list(cards)
        size = max(1, min(32, len(everyone) // (4 * len(self._workers))))
        chunks = [everyone[at : at + size] for at in range(0, len(everyone), size)]
        for _, _, _, message in self._ask("evaluate", server, round, chunks, points):
            told = json.loads(message)
            yield Scored(told["client"], told["point"], Score(*told["test"]), Score(*told["val"]), told["stats"])

    def _ask(
        self, stage: str, server: State, round: Round, chunks: Sequence[Sequence[Card]], points: Sequence[str]
    ) -> Iterator[tuple[Card, int, int, bytes]]:
        """Give chunks to workers as they become free; yield what they say in the order of the chunks."""
        self._serial += 1
        state = self._folder / f"server-{self._serial}.safetensors"
        write_atomically(state, pack_file(server))
        jobs: list[Job] = [
            {
                "stage": stage,
                "number": number,
                "state": str(state),
                "round": dataclasses.asdict(round),
                "cards": [dataclasses.asdict(card) for card in chunk],
                "points": list(points),
                "tag": self.store.tag,
            }
            for number, chunk in enumerate(chunks)
        ]
        waiting, busy = deque(jobs), dict.fromkeys(range(len(self._pipes)), 0)
        said: dict[int, list[tuple[int, int, int, bytes]]] = {number: [] for number in range(len(jobs))}
        finished: set[int] = set()
        told = 0  # chunks already handed on
        try:
            while told < len(jobs):
                # Two jobs ahead keep a worker busy while we merge; a bound keeps answers from piling up.
                for index, pipe in enumerate(self._pipes):
                    while waiting and busy[index] < 2 and waiting[0]["number"] < told + 4 * len(self._pipes):
                        pipe.send_bytes(json.dumps(waiting.popleft()).encode())
                        busy[index] += 1
                for ready in wait(self._pipes):
                    index = self._pipes.index(ready)  # type: ignore[arg-type]
                    kind, number, place, down, message = self._hear(index)
                    if kind == DONE:
                        self.peak_bytes = max(self.peak_bytes, down)
                        busy[index] -= 1
                        finished.add(number)
                    else:
                        said[number].append((kind, place, down, message))
                while told in finished:
                    for kind, place, down, message in said.pop(told):
                        yield chunks[told][place], kind, down, message
                    told += 1
        finally:
            self._drain(busy)
            state.unlink(missing_ok=True)

    def _hear(self, index: int) -> tuple[int, int, int, int, bytes]:
        message = self._workers[index].hear()
        kind, number, place, down = _HEAD.unpack_from(message)
        if kind == FAILED:
            told = json.loads(message[_HEAD.size :])
            raise ClientError(*told["error"]) if told["error"] else RuntimeError(told["trace"])
        return kind, number, place, down, message[_HEAD.size :]

    def _drain(self, busy: dict[int, int]) -> None:
        """After an error or an early stop: let workers finish what they were given, unheard."""
        for index, count in busy.items():
            while count > 0:
                try:
                    count -= self._hear(index)[0] == DONE
                except WorkerDied:
                    break
                except (ClientError, RuntimeError):
                    continue  # a failed job ends with DONE like any other

    def close(self) -> None:
        """Stop the workers."""
        for pipe in self._pipes:
            try:
                pipe.send_bytes(b"")
            except OSError:
                continue
        deadline = time.monotonic() + 5
        for process in (worker.process for worker in self._workers):
            process.join(max(0.1, deadline - time.monotonic()))
            if process.is_alive():
                process.terminate()
                process.join()
        for pipe in self._pipes:
            pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _memory() -> str | None:
    """A folder in memory, where there is one; else the default for temporary files."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _work(pipe: Connection, algorithm: Algorithm, federation: Federation, root: str, device: str) -> None:
    """A worker: take jobs until told to stop (an empty message) or until the parent is gone."""
    settle()
    endpoint = Endpoint(algorithm, federation, DiskStore(root), device)
    try:
        while order := pipe.recv_bytes():
            job: Job = json.loads(order)
            try:
                _do(pipe, endpoint, job)
            except Exception as error:
                known = None
                if isinstance(error, ClientError):
                    known = [error.client, error.round, error.stage, error.reason]
                told = json.dumps({"error": known, "trace": traceback.format_exc()})
                pipe.send_bytes(_HEAD.pack(FAILED, job["number"], 0, 0) + told.encode())
            pipe.send_bytes(_HEAD.pack(DONE, job["number"], 0, peak_bytes()))
    except (EOFError, ConnectionError):
        return  # the parent is gone


def _do(pipe: Connection, endpoint: Endpoint, job: Job) -> None:
    endpoint.store.tag = job["tag"]
    server = load_file(job["state"])
    round = Round(**job["round"])
    cards = [Card(**card) for card in job["cards"]]
    if job["stage"] == "train":
        for place, reply in enumerate(endpoint.train(server, round, [cards])):
            assert reply.update is not None
            message = wire.encode(reply.update, client=reply.card.id, round=round.index)
            pipe.send_bytes(_HEAD.pack(UPDATE, job["number"], place, reply.down) + message)
    else:
        places = {card.id: place for place, card in enumerate(cards)}
        for scored in endpoint.evaluate(server, round, cards, job["points"]):
            told = dataclasses.asdict(scored)
            for part in ("test", "val"):
                told[part] = list(told[part].values())
            head = _HEAD.pack(SCORE, job["number"], places[scored.client], 0)
            pipe.send_bytes(head + json.dumps(told).encode())
