"""Independent jobs in worker processes, one torch thread each: the trials of a search, the cells of a study.

    for job, future in completed(work, draw, workers=2):
        ...                                     future.result(), or the error that the job raised

`draw()` hands out the next job when a worker is free, so what is tried next may depend on the results so far. Jobs and
results are pickled; with one worker all jobs run in this process, in order.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from pfedgate.engine.workers import WorkerDied, settle

__all__ = ["completed"]

Job = TypeVar("Job")
Work = Callable[..., Any]  # (job, tick) in this process, (job) in a worker
LOOK = 1.0  # seconds between two calls of `tick` while workers are busy


def _idle() -> None:
    """The usual `tick`, which shows nothing."""


def completed(
    work: Work, draw: Callable[[], Job | None], *, workers: int = 1, tick: Callable[[], None] = _idle
) -> Iterator[tuple[Job, Future[Any]]]:
    """Jobs in the order in which they end, each with its finished future.

    draw   called whenever a worker is free; None: there is nothing to do now. It is asked again when a job has ended
    tick   called now and then while jobs run, to show their progress

    >>> [future.result() for _, future in completed(lambda n, tick: n * n, iter([1, 2, None]).__next__)]
    [1, 4]
    """
    if workers > 1:
        yield from _in_processes(work, draw, workers, tick)
        return
    while (job := draw()) is not None:
        future: Future[Any] = Future()
        try:
            future.set_result(work(job, tick))
        except Exception as error:
            future.set_exception(error)
        yield job, future


def _in_processes(
    work: Work, draw: Callable[[], Job | None], workers: int, tick: Callable[[], None]
) -> Iterator[tuple[Job, Future[Any]]]:
    # A pool that loses a process fails all of its jobs. Pools of one process each lose the one job that was in it.
    workers_end, our_end = multiprocessing.Pipe(duplex=False)
    idle = [_pool(workers_end) for _ in range(workers)]
    busy: dict[Future[Any], tuple[ProcessPoolExecutor, Job]] = {}
    try:
        while True:
            while idle and (job := draw()) is not None:
                pool = idle.pop()
                busy[pool.submit(work, job)] = pool, job
            if not busy:
                return
            ended, _ = concurrent.futures.wait(busy, LOOK, FIRST_COMPLETED)
            for future in ended:
                pool, job = busy.pop(future)
                if isinstance(future.exception(), BrokenProcessPool):
                    pool.shutdown()
                    pool, future = _pool(workers_end), _died()
                idle.append(pool)
                yield job, future
            tick()
    finally:
        our_end.close()  # Workers that still have a job, after an error or Ctrl-C, end at once.
        for pool in [*idle, *(pool for pool, _ in busy.values())]:
            pool.shutdown(cancel_futures=True)
        workers_end.close()


def _pool(lifeline: Connection) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=context, initializer=_begin, initargs=(lifeline,))


def _died() -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(WorkerDied("its worker process died: was it killed, or out of memory?"))
    return future


def _begin(lifeline: Connection) -> None:
    """Prepare a worker process: it ends with its parent, however that ends, even in the middle of a job."""
    settle()
    threading.Thread(target=_follow, args=(lifeline,), daemon=True).start()


def _follow(lifeline: Connection) -> None:
    lifeline.poll(None)  # The parent never writes: only the end of the pipe wakes this thread.
    os._exit(1)
