"""Where private client state lives between rounds: in memory or on disk. Only `serve` touches it.

New states are *pending* until `commit`. On disk that makes a round atomic: pending files lie under the tag of the
commit they wait for, the checkpoint names the last commit, and whoever opens the store after a crash finishes that
one and forgets all others. `seal` makes pending states durable before the checkpoint names them. Each file holds its
client and a digest of its contents; the checkpoint holds a digest of all files.

    private/current/3f/<client>.safetensors          what the last checkpoint left
    private/pending-12-5e1c/3f/<client>.safetensors  written since, current once commit 12-5e1c is on record
    private/undo-12-5e1c/3f/<client>.safetensors     what commit 12-5e1c replaced, until the next one
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol
from urllib.parse import quote, unquote

from safetensors.numpy import save

from pfedgate.core.state import digest
from pfedgate.core.types import State
from pfedgate.engine import files
from pfedgate.engine.files import PRIVATE, DamagedError, write_atomically

SHARDS = 256  # directories; 100,000 clients are some 400 files in each
LONGEST = 180  # characters of a file's name; longer ids are named by a digest
KEY, KEY_BYTES = "noise.key", 32  # beside the folder of private states
COMMIT = re.compile(r"(\d{1,18})-[0-9a-f]{8}")


class Store(Protocol):
    """Private states by client, pending until `commit`."""

    tag: str  # pending states wait for the commit of this name

    def get(self, client: str) -> State | None:
        """The newest state of a client; None if it has none."""

    def put(self, client: str, state: State) -> None:
        """Keep a state; it counts once `commit` was called."""

    def seal(self) -> str:
        """Make pending states durable, before a checkpoint names their commit; a digest of all states after it."""

    def commit(self) -> None:
        """Make everything that is pending current. Repeating it after a crash is harmless."""

    def clients(self) -> list[str]:
        """Clients that have a state, sorted."""

    def secret(self) -> bytes:
        """The key of the clients' own noise: the same after a crash, and nobody else's."""


class MemoryStore:
    """States in a dictionary: small runs without a folder.

    >>> store = MemoryStore()
    >>> store.put("anna", {}); store.get("ben") is None, store.clients()
    (True, ['anna'])
    """

    def __init__(self, key: bytes = b"") -> None:
        self.tag = "memory"
        self._states: dict[str, State] = {}
        self._key = key or os.urandom(KEY_BYTES)

    def get(self, client: str) -> State | None:
        state = self._states.get(client)
        return None if state is None else dict(state)

    def put(self, client: str, state: State) -> None:
        self._states[client] = {name: value.detach().clone() for name, value in state.items()}

    def seal(self) -> str:
        """Nothing to do, as in `commit`."""
        return ""

    def commit(self) -> None:
        """Nothing to do: a run without a folder cannot be resumed."""

    def clients(self) -> list[str]:
        return sorted(self._states)

    def secret(self) -> bytes:
        return self._key


class DiskStore:
    """States as safetensors files, replaced atomically; memory does not grow with the number of clients.

    `sync` makes each state durable when it is put and each commit when it is made, for stores without checkpoints.
    """

    def __init__(self, root: str | Path, tag: str | None = None, *, sync: bool = False) -> None:
        self.root, self.sync = Path(root), sync
        self.tag = _next_tag(None) if tag is None else tag
        self._all = self._next = (0, 0)  # states, and the sum of their marks: committed, and with those pending
        self._moved: set[Path] = set()  # folders that the last commit changed
        self._past: list[Path] = []  # folders that the next commit removes
        self._key = b""

    @classmethod
    def recover(cls, root: str | Path, committed: str | None, total: str = "", *, undo: bool = False) -> DiskStore:
        """Open after a crash: finish the commit with this tag, drop everything else that is pending.

        committed  None if nothing was ever committed
        total      what `seal` said of all states; an error if they differ now. Not compared if it is empty
        undo       the commit that follows this one is taken back: its checkpoint is damaged
        """
        store = cls(root, committed)
        if store.root.exists():
            store.root.chmod(0o700)
        if committed is None and store.root.exists():
            shutil.rmtree(store.root)
        if committed is not None:
            if undo:
                store._take_back(int(committed.partition("-")[0]) + 1)
            store.commit()
        for path in [*store.root.glob("pending-*"), *store.root.glob("undo-*")]:
            if path not in store._past:
                shutil.rmtree(path)
        store._all = store.verify(total)
        return store

    def verify(self, total: str) -> tuple[int, int]:
        """The number of current states and the sum of their marks; an error if a checkpoint refers to others."""
        found = (0, 0)
        for file in _files(self.root / "current"):
            found = _added(found, file)
        if total and _text(found) != total:
            raise DamagedError(
                f"{self.root / 'current'} is not what the checkpoint refers to: private states were removed, added or "
                f"exchanged ({found[0]} are there, {total.partition(':')[0]} are expected); restore the folder "
                "from a copy, or begin anew in another one"
            )
        return found

    @property
    def total(self) -> str:
        """What `verify` is to find after the last commit."""
        return _text(self._all)

    @staticmethod
    def _file(client: str) -> str:
        # The shard is a checksum, not Python's hash, which differs from process to process.
        name = quote(client, safe="")
        if len(name) > LONGEST:
            name = "~" + hashlib.blake2b(client.encode(), digest_size=16).hexdigest()
        return f"{zlib.crc32(client.encode()) % SHARDS:02x}/{name}.safetensors"

    def _folder(self, kind: str) -> Path:
        return self.root / f"{kind}-{self.tag}"

    def get(self, client: str) -> State | None:
        file = self._file(client)
        for folder in (self._folder("pending"), self.root / "current"):
            with suppress(FileNotFoundError):
                path = folder / file
                state, about = files.tensors(path)
                if about.get("client", client) != client:
                    raise DamagedError(f"{path} is the state of client {about['client']!r}, not that of {client!r}")
                if about.get("digest", "") not in ("", digest(state)):  # files of earlier versions have none
                    raise DamagedError(f"{path} is damaged: its contents are not those that were written")
                return state
        return None

    def put(self, client: str, state: State) -> None:
        path = self._folder("pending") / self._file(client)
        content = pack_file(state, {"client": client, "digest": digest(state)})
        write_atomically(path, content, sync=self.sync, mode=PRIVATE)

    def seal(self) -> str:
        pending, current, self._next = self._folder("pending"), self.root / "current", self._all
        paths = list(_files(pending))
        for path in paths:
            old = current / path.parent.name / path.name
            if old.exists():
                self._next = _added(self._next, old, -1)
            self._next = _added(self._next, path)
        if paths or self._moved:
            files.sync([*paths, *{p.parent for p in paths}, *([pending] if paths else []), self.root, *self._moved])
        self._moved.clear()
        return _text(self._next)

    def commit(self) -> None:
        pending, undo, current = self._folder("pending"), self._folder("undo"), self.root / "current"
        for path in self._past:  # A checkpoint is on record that needs neither of them.
            shutil.rmtree(path)
        self._past = [path for path in (undo, pending) if pending.exists()]
        if pending.exists() and not self.sync:
            undo.mkdir(mode=0o700, exist_ok=True)
        for path in _files(pending):
            target, old = current / path.parent.name / path.name, undo / path.parent.name / path.name
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not (target.exists() and target.samefile(path)):
                if target.exists() and not self.sync:
                    old.parent.mkdir(mode=0o700, exist_ok=True)
                    with suppress(FileExistsError):
                        os.link(target, old)
                # The pending name stays until the new one is durable; a second name costs nothing.
                fresh = target.with_name(f".{path.stem[:150]}.{os.urandom(8).hex()}.new")
                os.link(path, fresh)
                os.replace(fresh, target)
            self._moved |= {target.parent, current, self.root}
        if self.sync:
            files.sync(self._moved)
            self._moved.clear()
            shutil.rmtree(pending, ignore_errors=True)
            self._past = []
        self._all = self._next
        self.tag = _next_tag(self.tag)

    def _take_back(self, number: int) -> None:
        for undo in self.root.glob(f"undo-{number}-*"):
            pending = self.root / undo.name.replace("undo", "pending", 1)
            for path in _files(pending):
                target, old = self.root / "current" / path.parent.name / path.name, undo / path.parent.name / path.name
                if old.exists():
                    os.replace(old, target)
                elif target.exists() and target.samefile(path):
                    target.unlink()
                self._moved |= {target.parent}
        files.sync(path for path in self._moved if path.exists())

    def clients(self) -> list[str]:
        paths = [path for folder in (self._folder("pending"), self.root / "current") for path in _files(folder)]
        # A name that begins so may stand for an id that is too long for one.
        long = {path: files.metadata(path).get("client") for path in paths if path.name[0] == "~"}
        return sorted({long.get(path) or unquote(path.stem) for path in paths})

    def secret(self) -> bytes:
        if not self._key:
            self._key = files.secret(self.root.parent / KEY, os.urandom(KEY_BYTES))
        return self._key

    def snapshot(self, target: str | Path) -> None:
        """A copy of all current states made of hard links: later commits replace files, never change them."""
        target = Path(target)
        fresh = target.with_name(target.name + ".new")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(mode=0o700, parents=True)
        for path in _files(self.root / "current"):
            link = fresh / "current" / path.parent.name / path.name
            link.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.link(path, link)
        files.sync([fresh, *(path for path in fresh.glob("**/") if path != fresh)])
        shutil.rmtree(target, ignore_errors=True)
        os.replace(fresh, target)
        files.sync([target.parent])


class TemporaryStore(DiskStore):
    """A DiskStore in a folder that vanishes with it: for worker processes of a run without a folder."""

    def __init__(self) -> None:
        self._scratch = files.Scratch()
        super().__init__(self._scratch.path / "private")


def _files(folder: Path) -> Iterator[Path]:
    return folder.glob("*/*.safetensors")


def _added(total: tuple[int, int], file: Path, sign: int = 1) -> tuple[int, int]:
    # A sum does not depend on the order of clients, and a round changes it by its own clients only.
    about = files.metadata(file)
    mark = about.get("digest") or digest(files.tensors(file)[0])
    word = hashlib.blake2b(f"{file.name}\x1f{mark}".encode(), digest_size=32).digest()
    return total[0] + sign, (total[1] + sign * int.from_bytes(word, "little")) % 2**256


def _text(total: tuple[int, int]) -> str:
    return f"{total[0]}:{total[1]:064x}"


def _next_tag(tag: str | None) -> str:
    # The second half is new with every process that opens a store: a worker that outlives a killed run for a
    # moment writes where nobody looks any more.
    number = 0 if tag is None else int(tag.partition("-")[0]) + 1
    return f"{number}-{os.urandom(4).hex()}"


def pack_file(state: State, metadata: dict[str, str] | None = None) -> bytes:
    """A State, and some text, as the bytes of a safetensors file."""
    return save({name: value.detach().cpu().contiguous().numpy() for name, value in state.items()}, metadata)
