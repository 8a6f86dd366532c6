"""Worker processes: how they start and end, and independent jobs in them (trials of a search, cells of a study).

    for job, future in completed(work, draw, workers=2):
        ...                                     future.result(), or the error that the job raised

A worker has one torch thread, leaves Ctrl-C to its parent and ends with it, however the parent ends.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch

_TRIM, _MMAP = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of <malloc.h>
LARGEST_BLOCK = 32 * 1024 * 1024  # blocks up to here come from the heap; glibc accepts no more
SPARE = 512 * 1024 * 1024  # so much free memory may stay at the heap's end
LOOK = 1.0  # seconds between two calls of `tick` while workers are busy
PATIENCE = 300.0  # seconds that a worker may do nothing

Job = TypeVar("Job")
Work = Callable[..., Any]  # (job, tick) in this process, (job) in a worker


class WorkerDied(RuntimeError):
    """A worker process ended before it was asked to."""


def settle(lifeline: Connection | None = None) -> None:
    """Prepare a worker: one thread, Ctrl-C left to the parent, an end as soon as the parent or `lifeline` is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    ends: list[Any] = [end for end in (parent and parent.sentinel, lifeline) if end is not None]
    if ends:
        threading.Thread(target=_end_with, args=(ends,), daemon=True).start()
    torch.set_num_threads(1)
    steady()


def _end_with(ends: list[Any]) -> None:
    multiprocessing.connection.wait(ends)  # Nobody writes to a lifeline: only its end wakes this thread.
    os._exit(1)


def status(child: Any) -> list[str]:
    """What the system says of a process, from its state ("T" is stopped) on; empty where it says nothing."""
    try:
        return Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def end_stopped(since: dict[Any, float], patience: float) -> None:
    """Kill worker processes that somebody stopped and that stay so; `since` remembers when each was seen first."""
    for child in multiprocessing.active_children():
        if status(child)[:1] != ["T"]:
            since.pop(child.pid, None)
        elif time.monotonic() - since.setdefault(child.pid, time.monotonic()) >= patience:
            child.kill()


def cores() -> int:
    """How many processes this one may keep busy.

    >>> cores() >= 1
    True
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@lru_cache(maxsize=1)
def steady() -> bool:
    """Ask the C library to keep freed memory; once per process. False where that is not possible or not wanted.

    A batch of a convolutional network frees and asks for the same hundred megabytes again and again. By default
    glibc returns large blocks at once and the kernel clears every page anew: a sixth of a training step. Peak
    memory is the same. If glibc's own variables (MALLOC_…, GLIBC_TUNABLES) are set, nothing is changed.
    """
    if not sys.platform.startswith("linux") or "GLIBC_TUNABLES" in os.environ:
        return False
    if any(name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    return bool(mallopt(_MMAP, LARGEST_BLOCK)) and bool(mallopt(_TRIM, SPARE))


def completed(
    work: Work, draw: Callable[[], Job | None], *, workers: int = 1, tick: Callable[[], None] = lambda: None
) -> Iterator[tuple[Job, Future[Any]]]:
    """Jobs in the order in which they end, each with its finished future.

    draw   called whenever a worker is free; None: there is nothing to do now. It is asked again when a job has
           ended, so what is tried next may depend on the results so far
    tick   called now and then while jobs run, to show their progress

    Jobs and results are pickled; with one worker all jobs run in this process, in order.

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
    context = multiprocessing.get_context("spawn")
    workers_end, our_end = context.Pipe(duplex=False)

    def pool() -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, mp_context=context, initializer=settle, initargs=(workers_end,))

    # A pool that loses a process fails all of its jobs. Pools of one process each lose the one job that was in it.
    idle = [pool() for _ in range(workers)]
    stopped: dict[Any, float] = {}
    busy: dict[Future[Any], tuple[ProcessPoolExecutor, Job]] = {}
    try:
        while True:
            while idle and (job := draw()) is not None:
                worker = idle.pop()
                busy[worker.submit(work, job)] = worker, job
            if not busy:
                return
            ended, _ = concurrent.futures.wait(busy, LOOK, FIRST_COMPLETED)
            for future in ended:
                worker, job = busy.pop(future)
                if isinstance(future.exception(), BrokenProcessPool):
                    worker.shutdown()
                    worker, future = pool(), Future()
                    reason = "its worker process died: was it killed or stopped, or out of memory?"
                    future.set_exception(WorkerDied(reason))
                idle.append(worker)
                yield job, future
            end_stopped(stopped, PATIENCE)
            tick()
    finally:
        our_end.close()  # Workers that still have a job, after an error or Ctrl-C, end at once.
        end_stopped({}, 0.0)
        for worker in [*idle, *(worker for worker, _ in busy.values())]:
            worker.shutdown(cancel_futures=True)
        workers_end.close()
