"""A node's private states: one folder per experiment, atomic, and in step with the server's checkpoints.

What a client keeps after a round is pending under (commit, session): the commit of the server it waits for, and the
start of the server it belongs to. A server that was killed goes back to its last checkpoint; `starts[s]` says from
which commit on start number s + 1 has done the work anew, so what an earlier start left beyond that is dropped, and
the rest is current. Nothing of this is ever sent.

    <state-dir>/<experiment>/<share>/session.json      the last order taken: stale ones are refused
    <state-dir>/<experiment>/<share>/private/…         see `pfedgate.engine.store`
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock

from pfedgate.core.types import State
from pfedgate.engine.store import DiskStore, write_atomically

_PENDING = re.compile(r"pending-(\d+)-(\d+)")
_SAFE = re.compile(r"[0-9a-f]{8,64}")  # an experiment's id becomes the name of a folder


class StaleOrder(RuntimeError):
    """An order that a newer one has overtaken: it came twice, or late, or from a server that is gone."""


@dataclass(frozen=True)
class Order:
    """Where the server is: its start (from 1), the number of the message in it, the commit it works on."""

    session: int
    serial: int
    commit: int


class NodeStore(DiskStore):
    """Private states that can be written only as long as no newer order has been taken."""

    def __init__(self, folder: Path, order: Order) -> None:
        super().__init__(folder / "private", f"{order.commit}-{order.session}", sync=True)
        self.folder, self.order = folder, order

    def put(self, client: str, state: State) -> None:
        """Write a state, unless this process was overtaken: a killed node's last process may still be at work."""
        with _lock(self.folder):
            if _last(self.folder) != self.order:
                raise StaleOrder("a newer order came while this one was at work")
            super().put(client, state)


def take(root: Path, experiment: str, share: str, starts: Sequence[int], serial: int, commit: int) -> NodeStore:
    """The store for an order of the server; what is pending is settled first."""
    if not _SAFE.fullmatch(experiment):
        raise ValueError(f"{experiment!r} is no id of an experiment")
    folder = root / experiment / share
    folder.mkdir(parents=True, exist_ok=True)
    order = Order(len(starts), serial, commit)
    with _lock(folder):
        last = _last(folder)
        if last is not None and (order.session, order.serial) <= (last.session, last.serial):
            raise StaleOrder(
                f"order {order.serial} of start {order.session} came after order {last.serial} of start {last.session}"
            )
        _settle(folder / "private", starts, commit)
        write_atomically(folder / "session.json", json.dumps(asdict(order)).encode(), sync=True)
    return NodeStore(folder, order)


def current(root: str | Path, experiment: str, share: str) -> DiskStore:
    """A node's private states as they are now, for reading."""
    folder = Path(root) / experiment / share
    last = _last(folder)
    return DiskStore(folder / "private", None if last is None else f"{last.commit}-{last.session}")


def _settle(private: Path, starts: Sequence[int], commit: int) -> None:
    session, found = len(starts), []
    for path in private.glob("pending-*"):
        named = _PENDING.fullmatch(path.name)
        if named:
            found.append((int(named[1]), int(named[2]), path))
    for number, start, path in sorted(found):
        redone = starts[start] if start < session else commit + 1  # where the next start of the server began
        if number < commit and number < redone:
            DiskStore(private, f"{number}-{start}", sync=True).commit()
        elif (number, start) != (commit, session):
            shutil.rmtree(path, ignore_errors=True)


def _last(folder: Path) -> Order | None:
    try:
        return Order(**json.loads((folder / "session.json").read_bytes()))
    except FileNotFoundError:
        return None


def _lock(folder: Path) -> FileLock:
    """One process at a time; the system lets go of the lock when a process dies."""
    return FileLock(folder / "lock", mode=0o600)
