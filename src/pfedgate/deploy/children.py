"""Processes of our own: ended with everything they started, and read without waiting for ever.

Flower puts some of its processes into sessions of their own, where a signal to the group does not reach them. So the
tree below a process is noted first, and every process of it that outlives the signal is ended by id.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from queue import Empty, Queue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

Process = subprocess.Popen[bytes]


class FleetError(RuntimeError):
    """A process of the fleet failed; says where its log is."""


def stop(*processes: Process, patience: float = 10.0) -> None:
    """End processes and all below them: ask all at once, then kill the ones that are left."""
    trees = {process: tree(process.pid) if process.poll() is None else [] for process in processes}
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
    until = time.monotonic() + patience
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until - time.monotonic()))
    _end([orphan for below in trees.values() for orphan in below], until)
    for process, below in trees.items():
        _kill(process, below)


def kill(process: Process) -> None:
    """Kill a process and all below it at once, as a loss of power would."""
    _kill(process, tree(process.pid))


def sweep(mark: str, patience: float = 5.0) -> None:
    """End processes that were started with NAME=VALUE in their environment, also those that lost their parent.

    Ray's processes outlive the one that started them for a while.
    """
    _end(_marked(mark), time.monotonic() + patience)
    _signal(_marked(mark), signal.SIGKILL)


def tree(root: int) -> list[psutil.Process]:
    """All processes below one, however deep."""
    import psutil

    try:
        below: list[psutil.Process] = psutil.Process(root).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return below


def _marked(mark: str) -> list[psutil.Process]:
    import psutil

    name, _, value = mark.partition("=")
    marked = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended, or belongs to another user
            if process.pid != os.getpid() and process.environ().get(name) == value:
                marked.append(process)
    return marked


def _end(processes: Sequence[psutil.Process], until: float) -> None:
    _signal(processes, signal.SIGTERM)
    while any(map(alive, processes)) and time.monotonic() < until:
        time.sleep(0.1)


def _kill(process: Process, below: Sequence[psutil.Process]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    _signal(below, signal.SIGKILL)
    process.wait()
    until = time.monotonic() + 5
    while any(map(alive, below)) and time.monotonic() < until:
        time.sleep(0.05)
    if process.stdout is not None:
        process.stdout.close()


def _signal(processes: Sequence[psutil.Process], which: signal.Signals) -> None:
    import psutil

    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # psutil compares start times: ids are used again
            process.send_signal(which)


def alive(process: psutil.Process) -> bool:
    """Whether a process still runs; a zombie does not."""
    import psutil

    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def lines(process: Process, until: float) -> Iterator[str]:
    """Lines of a process as they come, but no longer than `until`: reading alone could wait for ever."""
    queue: Queue[str | None] = Queue()

    def read() -> None:
        assert process.stdout is not None
        with contextlib.suppress(ValueError):  # the pipe was closed meanwhile
            for raw in process.stdout:
                queue.put(re.sub(r"\x1b\[[0-9;]*m", "", raw.decode(errors="replace")).rstrip())
        queue.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = queue.get(timeout=max(0.0, until - time.monotonic()))
        except Empty:
            raise FleetError("the run did not end in time") from None
        if line is None:
            return
        yield line
