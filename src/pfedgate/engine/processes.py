"""Clients in worker processes on this machine, one torch thread each.

Workers hold the algorithm and map the data once. A round sends them the cards; the server's State lies in a
memory-backed file that all map; updates come back as wire messages. Private states stay on the workers' side,
in files that only workers read and write. Results have the same bits as in one process.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from pfedgate.core.algorithm import Algorithm
from pfedgate.core.errors import ClientError
from pfedgate.core.types import Card, Federation, Round, State
from pfedgate.engine import wire
from pfedgate.engine.endpoint import Endpoint, Reply, Scored
from pfedgate.engine.files import Scratch, write_atomically
from pfedgate.engine.metrics import resident_bytes
from pfedgate.engine.store import DiskStore, Store, pack_file
from pfedgate.engine.workers import PATIENCE, WorkerDied, cores, settle, status


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
        self.store, self.workers, self._serial = store, workers or cores(), 0
        self.resident_bytes = 0  # the most any worker ever held
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # else the default for temporary files
        self._scratch = Scratch(memory)
        self._folder = self._scratch.path
        getattr(federation, "share", lambda: None)()
        context: Any = multiprocessing.get_context("spawn")
        if "forkserver" in multiprocessing.get_all_start_methods():
            # A clean process loads these modules once for all workers.
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["pfedgate.engine.processes"])
        self._children: list[Any] = []
        self._pool = ProcessPoolExecutor(
            self.workers,
            context,
            initializer=_begin,
            initargs=(algorithm, federation, str(store.root), str(device)),
        )

    def train(self, server: State, round: Round, chunks: Iterable[Sequence[Card]]) -> Iterator[Reply]:
        """One training round; replies in the order of the cards."""
        for reply, message in self._ask(server, round, chunks):
            yield replace(reply, update=wire.decode(message).update) if message else reply

    def evaluate(self, server: State, round: Round, cards: Iterable[Card], points: Sequence[str]) -> Iterator[Scored]:
        """Scores in the order of the cards."""
        everyone = list(cards)
        size = max(1, min(32, len(everyone) // (4 * self.workers)))
        chunks = [everyone[at : at + size] for at in range(0, len(everyone), size)]
        yield from self._ask(server, round, chunks, points)

    def _ask(
        self, server: State, round: Round, chunks: Iterable[Sequence[Card]], points: Sequence[str] = ()
    ) -> Iterator[Any]:
        """Give chunks to workers as they become free; yield the answers in the order of the chunks."""
        self._serial += 1
        state = self._folder / f"server-{self._serial}.safetensors"
        write_atomically(state, pack_file(server))
        groups = iter(chunks)
        answers: deque[Future[tuple[list[Any], int]]] = deque()

        def submit(count: int) -> None:
            for cards in itertools.islice(groups, count):
                answers.append(self._pool.submit(_answer, state, round, cards, points, self.store.tag))

        try:
            # A few chunks ahead keep workers busy while we merge; a bound keeps answers from piling up.
            submit(4 * self.workers)
            self._children = multiprocessing.active_children()
            while answers:
                self._wait(answers)
                answer, resident = answers.popleft().result()
                self.resident_bytes = max(self.resident_bytes, resident)
                submit(1)
                yield from answer
        except BrokenProcessPool as error:
            ends = {child.exitcode for child in self._children} - {None, 0}
            codes = sorted(map(str, ends - {-signal.SIGTERM} or ends))  # the pool terminates the others itself
            raise WorkerDied(
                f"a worker died (exit code {', '.join(codes)}): was it killed, or out of memory?"
            ) from error
        finally:
            # A pool that has lost a process fails all answers; it must not find one cancelled meanwhile.
            wait(answers if self._end_stopped() else [answer for answer in answers if not answer.cancel()])
            state.unlink(missing_ok=True)

    def _wait(self, answers: Sequence[Future[Any]]) -> None:
        """Until the first is there; an error if for PATIENCE seconds no worker has used a processor."""
        before, since = "", time.monotonic()
        while wait([answers[0]], PATIENCE / 10).not_done:
            # Where the system does not tell times, a worker that is stopped is waited for.
            times = "".join(f"{status(child)[11:13]}" for child in self._children)
            if times != before or not times.strip("[]"):
                before, since = times, time.monotonic()
            elif time.monotonic() - since > PATIENCE:
                for child in self._children:
                    child.kill()
                wait(answers)
                raise WorkerDied(
                    f"no worker has done anything for {PATIENCE:.0f} s: was one stopped? `pfedgate resume` goes on"
                )

    def _end_stopped(self) -> bool:
        """Kill all workers if somebody has stopped one: the pool would wait for it for ever."""
        if stopped := any(status(child)[:1] == ["T"] for child in self._children):
            for child in self._children:
                child.kill()
        return stopped

    def close(self) -> None:
        """Stop the workers and remove their files."""
        self._end_stopped()
        self._pool.shutdown(cancel_futures=True)
        self._scratch.close()


# -- in a worker

_ENDPOINTS: list[Endpoint] = []  # the worker's only one, put here when it starts


def _begin(algorithm: Algorithm, federation: Federation, root: str, device: str) -> None:
    settle()
    _ENDPOINTS.append(Endpoint(algorithm, federation, DiskStore(root), device))


def _answer(state: Path, round: Round, cards: Sequence[Card], points: Sequence[str], tag: str) -> tuple[list[Any], int]:
    """Scores at these points, without points trained replies and their messages; and the most memory ever held.

    Private states wait for the commit named `tag`.
    """
    (endpoint,) = _ENDPOINTS
    endpoint.store.tag = tag
    answers: list[Any] = []
    try:
        server = load_file(state)
        if points:
            return list(endpoint.evaluate(server, round, cards, points)), resident_bytes()
        for reply in endpoint.train(server, round, [cards]):
            update = reply.update
            message = wire.encode(update, client=reply.card.id, round=round.index) if update else b""
            answers.append((replace(reply, update=None), message))
        return answers, resident_bytes()
    except ClientError:
        raise
    except Exception:  # an error of a class unknown to the parent could not be read there
        raise RuntimeError(traceback.format_exc()) from None
