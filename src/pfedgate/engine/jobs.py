"""Independent jobs in worker processes, one torch thread each: the trials of a search, the cells of a study.

    run(work, host, workers=2)

`work(job, tell)` does one job, given as plain data, and returns plain data; on the way it may `tell` something and
gets an answer. `host` hands out jobs when a worker is free, so that what is tried next may depend on what is known by
then. A worker whose parent is gone, however it ended, stops at the next thing it tells, and at the latest with its job.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from pfedgate.engine.workers import Worker, WorkerDied, settle, starter

__all__ = ["Failed", "Host", "WorkerDied", "run"]

Job = dict[str, Any]
Tell = Callable[[Any], Any]
Work = Callable[[Job, Tell], Any]


@dataclass(frozen=True)
class Failed:
    """How a job ended that raised: the error in a line, and where it came from."""

    error: str
    trace: str


class Host(Protocol):
    """Who has the jobs; called in the parent's process only."""

    def next(self) -> Job | None:
        """The next job, None if there is nothing (more) to do now; asked again when one has ended."""

    def said(self, job: Job, message: Any) -> Any:
        """Something a job tells; the answer goes back to it."""

    def ended(self, job: Job, result: Any) -> None:
        """A job has returned this, or `Failed`."""


def run(work: Work, host: Host, *, workers: int = 1) -> None:
    """All jobs of a host; with one worker in this process, in order."""
    if workers > 1:
        _Pool(work, host, workers).run()
        return
    while (job := host.next()) is not None:
        host.ended(job, _safely(work, job, partial(host.said, job)))


def _safely(work: Work, job: Job, tell: Tell) -> Any:
    try:
        return work(job, tell)
    except Exception as error:
        return Failed(f"{type(error).__name__}: {error}", traceback.format_exc())


class _Pool:
    def __init__(self, work: Work, host: Host, workers: int) -> None:
        self.host, self._work, self._most = host, work, workers
        # torch loads _dynamo when an optimiser is first made: seconds, once instead of in every worker.
        self._start = starter(["pfedgate.experiment", "torch._dynamo"])
        self._idle: list[Worker] = []
        self._busy: dict[Any, tuple[Worker, Job]] = {}  # by pipe

    def run(self) -> None:
        try:
            self._hand_out()
            while self._busy:
                for ready in wait(list(self._busy)):
                    self._hear(*self._busy[ready])
                self._hand_out()
        finally:
            self._close()

    def _hand_out(self) -> None:
        while len(self._busy) < self._most and (job := self.host.next()) is not None:
            worker = self._idle.pop() if self._idle else self._start(_serve, self._work)
            self._busy[worker.pipe] = worker, job
            worker.pipe.send_bytes(json.dumps(job).encode())

    def _hear(self, worker: Worker, job: Job) -> None:
        try:
            kind, content = json.loads(worker.hear())
        except WorkerDied as error:
            told = "What has ended is kept; start the same again, perhaps with fewer workers"
            raise WorkerDied(f"{error} {told}") from error
        if kind == "said":
            worker.pipe.send_bytes(json.dumps(self.host.said(job, content)).encode())
            return
        del self._busy[worker.pipe]
        self._idle.append(worker)
        self.host.ended(job, Failed(*content) if kind == "failed" else content)

    def _close(self) -> None:
        busy = [worker for worker, _ in self._busy.values()]
        for worker in busy:  # an error or Ctrl-C: nobody waits for the job any more
            worker.process.terminate()
        for worker in [*busy, *self._idle]:
            worker.pipe.close()  # an idle worker reads the end of its orders
        for worker in [*busy, *self._idle]:
            worker.process.join(5)


def _serve(pipe: Connection, work: Work) -> None:
    """A worker: jobs until the parent closes the pipe or is gone."""
    settle()

    def tell(message: Any) -> Any:
        pipe.send_bytes(json.dumps(["said", message]).encode())
        return json.loads(pipe.recv_bytes())

    try:
        while True:
            job: Job = json.loads(pipe.recv_bytes())
            result = _safely(work, job, tell)
            told = ["failed", [result.error, result.trace]] if isinstance(result, Failed) else ["ended", result]
            pipe.send_bytes(json.dumps(told).encode())
    except (EOFError, ConnectionError):
        return
