"""Worker processes: how they start, how they settle, when they end; for clients of a round and for whole runs.

A worker has one torch thread, leaves Ctrl-C to its parent and ends with it, however the parent ends.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

import torch

__all__ = ["Worker", "WorkerDied", "context", "cores", "settle", "starter", "steady"]

_TRIM, _MMAP = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of <malloc.h>
LARGEST_BLOCK = 32 * 1024 * 1024  # blocks up to here come from the heap; glibc accepts no more
KEPT = 512 * 1024 * 1024  # so much free memory may stay at the heap's end

Start = Callable[..., "Worker"]


class WorkerDied(RuntimeError):
    """A worker process ended before it was asked to."""


@dataclass(frozen=True, eq=False)
class Worker:
    """A process and our end of its pipe."""

    process: Any
    pipe: Connection

    def hear(self) -> bytes:
        """What it says next; an error if it is gone."""
        try:
            return self.pipe.recv_bytes()
        except (EOFError, ConnectionError) as error:
            self.process.join(1)
            code = self.process.exitcode
            raise WorkerDied(f"a worker died (exit code {code}): was it killed, or out of memory?") from error


def context(preload: Sequence[str]) -> Any:
    """How this system starts clean processes; a fork server loads the modules `preload` once for all of them."""
    methods = multiprocessing.get_all_start_methods()
    ways: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if "forkserver" in methods:
        ways.set_forkserver_preload(list(preload))
    return ways


def starter(preload: Sequence[str]) -> Start:
    """A function `start(target, *args)` that makes workers; each runs `target(pipe, *args)`.

    preload   modules that all of them need: loaded once where the system can fork from a clean process
    """
    ways = context(preload)

    def start(target: Callable[..., None], *args: Any) -> Worker:
        ours, theirs = ways.Pipe()
        process = ways.Process(target=target, args=(theirs, *args), daemon=True)
        process.start()
        theirs.close()
        return Worker(process, ours)

    return start


def settle() -> None:
    """Prepare a worker: one thread, Ctrl-C left to the parent, an end as soon as the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    torch.set_num_threads(1)
    steady()


def _follow(parent: Any) -> None:
    parent.join()
    os._exit(1)


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
    memory is the same.

    Whoever has set glibc's own variables (MALLOC_…, GLIBC_TUNABLES) knows better: then nothing is changed.
    """
    if not sys.platform.startswith("linux"):
        return False
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    return bool(mallopt(_MMAP, LARGEST_BLOCK)) and bool(mallopt(_TRIM, KEPT))
