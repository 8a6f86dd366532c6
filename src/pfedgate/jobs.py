"""Independent jobs in worker processes, one torch thread each: the trials of a search, the cells of a study.

    run(work, host, workers=2)

`work(job, tell)` does one job, given as plain data, and returns plain data; on the way it may `tell` something and
gets an answer. `host` hands out jobs when a worker is free, so that what is tried next may depend on what is known by
then. A worker whose parent is gone, however it ended, stops at the next thing it tells, and at the latest with its job.
"""

from __future__ import annotations

import json
import multiprocessing
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

import torch

from pfedgate.memory import steady

__all__ = ["Failed", "Host", "WorkerDied", "run"]

Job = dict[str, Any]
Tell = Callable[[Any], Any]
Work = Callable[[Job, Tell], Any]


class WorkerDied(RuntimeError):
    """A worker process ended without being told to."""


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
        given = job
        host.ended(job, _safely(work, job, lambda message, given=given: host.said(given, message)))  # type: ignore[misc]


def _safely(work: Work, job: Job, tell: Tell) -> Any:
    try:
        return work(job, tell)
    except Exception as error:
        return Failed(f"{type(error).__name__}: {error}", traceback.format_exc())


class _Pool:
    def __init__(self, work: Work, host: Host, workers: int) -> None:
        self.host = host
        methods = multiprocessing.get_all_start_methods()
        self._context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        if "forkserver" in methods:
            # torch loads _dynamo when an optimiser is first made: seconds, once instead of in every worker.
            self._context.set_forkserver_preload(["pfedgate.experiment", "torch._dynamo"])
        self._work, self._most = work, workers
        self._processes: dict[Connection, Any] = {}
        self._busy: dict[Connection, Job] = {}

    def run(self) -> None:
        try:
            self._hand_out()
            while self._busy:
                for ready in wait(list(self._busy)):
                    self._hear(ready)  # type: ignore[arg-type]
                self._hand_out()
        finally:
            self._close()

    def _hand_out(self) -> None:
        while len(self._busy) < self._most and (job := self.host.next()) is not None:
            idle = [pipe for pipe in self._processes if pipe not in self._busy]
            pipe = idle[0] if idle else self._start()
            self._busy[pipe] = job
            pipe.send_bytes(json.dumps(job).encode())

    def _start(self) -> Connection:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, self._work), daemon=True)
        process.start()
        theirs.close()
        self._processes[ours] = process
        pipe: Connection = ours
        return pipe

    def _hear(self, pipe: Connection) -> None:
        job = self._busy[pipe]
        try:
            kind, content = json.loads(pipe.recv_bytes())
        except (EOFError, ConnectionError) as error:
            process = self._processes[pipe]
            process.join(1)
            raise WorkerDied(
                f"a worker died (exit code {process.exitcode}): was it killed, or out of memory? What has ended is "
                "kept; start the same again, perhaps with fewer workers"
            ) from error
        if kind == "said":
            pipe.send_bytes(json.dumps(self.host.said(job, content)).encode())
            return
        del self._busy[pipe]
        self.host.ended(job, Failed(*content) if kind == "failed" else content)

    def _close(self) -> None:
        for pipe, process in self._processes.items():
            if pipe in self._busy:  # an error or Ctrl-C: nobody waits for the job any more
                process.terminate()
            pipe.close()  # an idle worker reads the end of its orders
        for process in self._processes.values():
            process.join(5)


def _serve(pipe: Connection, work: Work) -> None:
    """A worker: jobs until the parent closes the pipe or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    torch.set_num_threads(1)
    steady()

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
