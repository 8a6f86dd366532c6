"""Worker processes: started once, one torch thread each, reached through a pipe.

What they are told over the pipe is their owner's affair: `processes` sends them clients, `parallel` whole runs.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from pfedgate.training.memory import steady

__all__ = ["Worker", "WorkerDied", "cores", "settle", "starter"]

Start = Callable[..., "Worker"]


class WorkerDied(RuntimeError):
    """A worker process ended without being told to."""


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


def starter(preload: Sequence[str]) -> Start:
    """A function `start(target, *args)` that makes workers; each runs `target(pipe, *args)`.

    preload   modules that all of them need: loaded once where the system can fork from a clean process
    """
    methods = multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if "forkserver" in methods:
        context.set_forkserver_preload(list(preload))

    def start(target: Callable[..., None], *args: Any) -> Worker:
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(theirs, *args), daemon=True)
        process.start()
        theirs.close()
        return Worker(process, ours)

    return start


def settle() -> None:
    """What a worker does first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    torch.set_num_threads(1)
    steady()


def cores() -> int:
    """How many processes this one may keep busy.

    >>> cores() >= 1
    True
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
