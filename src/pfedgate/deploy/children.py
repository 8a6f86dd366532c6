"""Processes of our own: ended with everything they started, and read without waiting for ever.

Flower puts some of its processes into sessions of their own, where a signal to the group does not reach them; so the
tree below a process is noted first (where the system shows it), and what is left of it is ended by id.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, Queue

Process = subprocess.Popen[bytes]
Known = tuple[int, str]  # a process id and when it started: ids are used again


class FleetError(RuntimeError):
    """A process of the fleet failed; says where its log is."""


def stop(*processes: Process, patience: float = 10.0) -> None:
    """End processes and all below them: asked first, all at once, then made to."""
    below = {process: tree(process.pid) if process.poll() is None else [] for process in processes}
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
    until = time.monotonic() + patience
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until - time.monotonic()))
    orphans = [one for known in below.values() for one in known]
    _signal(orphans, signal.SIGTERM)
    while any(_alive(one) for one in orphans) and time.monotonic() < until:
        time.sleep(0.1)
    for process, known in below.items():
        _end(process, known)


def kill(process: Process) -> None:
    """As if the machine had lost power: the process and all below it at once, unasked."""
    _end(process, tree(process.pid))


def sweep(mark: str, patience: float = 5.0) -> None:
    """End what is left of processes started with NAME=VALUE in their environment, also if nobody is their parent.

    Ray's processes outlive the one that started them for a while.
    """
    until = time.monotonic() + patience
    known = _marked(mark.encode())
    _signal(known, signal.SIGTERM)
    while any(_alive(one) for one in known) and time.monotonic() < until:
        time.sleep(0.1)
    _signal(_marked(mark.encode()), signal.SIGKILL)


def _marked(mark: bytes) -> list[Known]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone meanwhile, or somebody else's
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                fields = _fields(int(entry.name))
                found += [] if fields is None else [(int(entry.name), fields[19])]
    return [one for one in found if one[0] != os.getpid()]


def _end(process: Process, below: list[Known]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    _signal(below, signal.SIGKILL)
    process.wait()
    until = time.monotonic() + 5
    while any(_alive(one) for one in below) and time.monotonic() < until:
        time.sleep(0.05)
    if process.stdout is not None:
        process.stdout.close()


def _signal(known: list[Known], which: signal.Signals) -> None:
    for one in known:
        if _alive(one):
            with contextlib.suppress(ProcessLookupError):
                os.kill(one[0], which)


def tree(root: int) -> list[Known]:
    """Everything below a process; empty on systems that do not show it in /proc."""
    children: dict[int, list[Known]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        fields = _fields(int(entry.name))
        if fields is not None:
            children.setdefault(int(fields[1]), []).append((int(entry.name), fields[19]))
    found, ahead = [], [root]
    while ahead:
        below = children.get(ahead.pop(), [])
        found += below
        ahead += [pid for pid, _ in below]
    return found


def _fields(pid: int) -> list[str] | None:
    """Of /proc/<pid>/stat, after the name: state, parent, …, at 19 the time of its start; None if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields


def _alive(one: Known) -> bool:
    fields = _fields(one[0])
    return fields is not None and fields[19] == one[1]


def lines(process: Process, until: float) -> Iterator[str]:
    """Lines of a process as they come, but no longer than `until`: reading alone could wait for ever."""
    queue: Queue[str | None] = Queue()

    def read() -> None:
        assert process.stdout is not None
        with contextlib.suppress(ValueError):  # closed under our hands
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
