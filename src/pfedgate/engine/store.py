"""Where private client state lives between rounds: in memory or on disk. Only `serve` touches it.

New states are *pending* until `commit`. On disk that makes a round atomic: pending files lie under the tag of the
commit they wait for, the checkpoint names the last commit, and whoever opens the store after a crash finishes that
one and forgets all others.

    private/current/3f/<client>.safetensors          what the last checkpoint left
    private/pending-12-5e1c/3f/<client>.safetensors  written since, current once commit 12-5e1c is on record
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Protocol
from urllib.parse import quote, unquote

from safetensors.numpy import save
from safetensors.torch import load

from pfedgate.core.types import State

SHARDS = 256  # directories; 100,000 clients are some 400 files in each


class Store(Protocol):
    """Private states by client, pending until `commit`."""

    tag: str  # pending states wait for the commit of this name

    def get(self, client: str) -> State | None:
        """The newest state of a client; None if it has none."""

    def put(self, client: str, state: State) -> None:
        """Keep a state; it counts once `commit` was called."""

    def commit(self) -> None:
        """Make everything that is pending current. Repeating it after a crash is harmless."""

    def clients(self) -> list[str]:
        """Clients that have a state, sorted."""


class MemoryStore:
    """States in a dictionary: small runs without a folder.

    >>> store = MemoryStore()
    >>> store.put("anna", {}); store.get("ben") is None, store.clients()
    (True, ['anna'])
    """

    def __init__(self) -> None:
        self.tag = "memory"
        self._states: dict[str, State] = {}

    def get(self, client: str) -> State | None:
        state = self._states.get(client)
        return None if state is None else dict(state)

    def put(self, client: str, state: State) -> None:
        self._states[client] = {name: value.detach().clone() for name, value in state.items()}

    def commit(self) -> None:
        """Nothing to do: a run without a folder cannot be resumed."""

    def clients(self) -> list[str]:
        return sorted(self._states)


class DiskStore:
    """States as safetensors files, replaced atomically; memory does not grow with the number of clients."""

    def __init__(self, root: str | Path, tag: str | None = None, *, sync: bool = False) -> None:
        self.root, self.sync = Path(root), sync
        self.tag = _next_tag(None) if tag is None else tag

    @classmethod
    def recover(cls, root: str | Path, committed: str | None) -> DiskStore:
        """Open after a crash: finish the commit with this tag, drop everything else that is pending.

        `committed` is None if nothing was ever committed.
        """
        store = cls(root, committed)
        if committed is not None:
            store.commit()
        elif store.root.exists():
            shutil.rmtree(store.root)
        for path in store.root.glob("pending-*"):
            shutil.rmtree(path, ignore_errors=True)
        return store

    @staticmethod
    def _file(client: str) -> str:
        # The shard is a checksum, not Python's hash, which differs from process to process.
        return f"{zlib.crc32(client.encode()) % SHARDS:02x}/{quote(client, safe='')}.safetensors"

    def get(self, client: str) -> State | None:
        file = self._file(client)
        for folder in (f"pending-{self.tag}", "current"):
            with suppress(FileNotFoundError):
                return load((self.root / folder / file).read_bytes())
        return None

    def put(self, client: str, state: State) -> None:
        path = self.root / f"pending-{self.tag}" / self._file(client)
        write_atomically(path, pack_file(state), sync=self.sync)

    def commit(self) -> None:
        pending, current = self.root / f"pending-{self.tag}", self.root / "current"
        if pending.exists():
            for shard in os.scandir(pending):
                (current / shard.name).mkdir(parents=True, exist_ok=True)
                for file in os.scandir(shard.path):
                    if not file.name.endswith(".new"):
                        os.replace(file.path, current / shard.name / file.name)
            shutil.rmtree(pending, ignore_errors=True)
        self.tag = _next_tag(self.tag)

    def clients(self) -> list[str]:
        folders = (self.root / f"pending-{self.tag}", self.root / "current")
        return sorted({unquote(path.stem) for folder in folders for path in folder.glob("*/*.safetensors")})

    def snapshot(self, target: str | Path) -> None:
        """A copy of all current states made of hard links: later commits replace files, never change them."""
        target = Path(target)
        fresh = target.with_name(target.name + ".new")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        for path in (self.root / "current").glob("*/*.safetensors"):
            link = fresh / "current" / path.parent.name / path.name
            link.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, link)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(fresh, target)


class TemporaryStore(DiskStore):
    """A DiskStore in a folder that vanishes with it: for worker processes of a run without a folder."""

    def __init__(self) -> None:
        super().__init__(tempfile.mkdtemp(prefix="pfedgate-private-"))
        weakref.finalize(self, shutil.rmtree, self.root, ignore_errors=True)


def _next_tag(tag: str | None) -> str:
    # The second half is new with every process that opens a store: a worker that outlives a killed run for a
    # moment writes where nobody looks any more.
    number = 0 if tag is None else int(tag.partition("-")[0]) + 1
    return f"{number}-{os.urandom(4).hex()}"


def pack_file(state: State, metadata: dict[str, str] | None = None) -> bytes:
    """A State, and some text, as the bytes of a safetensors file."""
    return save({name: value.detach().cpu().contiguous().numpy() for name, value in state.items()}, metadata)


def write_atomically(path: Path, content: bytes, *, sync: bool = False) -> None:
    """A file that is either as it was or complete; `sync` also survives a power cut."""
    fresh = path.with_name(path.name + ".new")
    path.parent.mkdir(parents=True, exist_ok=True)
    with fresh.open("wb") as handle:
        handle.write(content)
        if sync:
            handle.flush()
            os.fsync(handle.fileno())
    os.replace(fresh, path)
    if sync:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
