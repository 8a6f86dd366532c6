"""How the files of a run are written and read, so that a kill or a power cut leaves each as it was or complete.

A checkpoint may refer to a file only after `sync`. Temporary names cannot be guessed and are opened only if they are
new, so a link planted in a folder leads no write out of it.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import stat
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError
from safetensors.torch import load

from pfedgate.core.types import State

_TEMPORARY = re.compile(r"\..*\.[0-9a-f]{16}\.new")
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
PRIVATE = 0o600  # nobody but the owner reads it


class DamagedError(ValueError):
    """A file that is not what was written; the message names it."""


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Let errors of the system, of safetensors and of JSON name this file."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    except DamagedError:
        raise
    except (SafetensorError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{path} cannot be read, it may be damaged: {error or type(error).__name__}") from error


def write_atomically(path: Path, content: bytes, *, sync: bool = False, mode: int = 0o666) -> None:
    """A file that is either as it was or complete; `sync` also survives a power cut."""
    fresh = path.with_name(f".{path.name[:150]}.{secrets.token_hex(8)}.new")
    with naming(path):
        try:
            handle = os.open(fresh, _NEW, mode)
        except FileNotFoundError:
            make_folder(path.parent, mode=0o700 if mode == PRIVATE else 0o777, durable=sync)
            handle = os.open(fresh, _NEW, mode)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                if sync:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(fresh, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(fresh)
            raise
    if sync:
        _fsync(path.parent)


def make_folder(path: Path, *, mode: int = 0o777, durable: bool = False) -> None:
    """A folder and those above it, each of this mode if it is new; `durable` ones survive a power cut."""
    if path.is_dir():
        return
    make_folder(path.parent, mode=mode, durable=durable)
    path.mkdir(mode=mode, exist_ok=True)
    if durable:
        _fsync(path.parent)


@contextmanager
def existing(path: Path, flags: int) -> Iterator[BinaryIO]:
    """A regular file opened without following a link; one that lies elsewhere under a second name is refused."""
    with naming(path):
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        with os.fdopen(handle, "rb+" if flags & os.O_RDWR else "ab" if flags & os.O_APPEND else "rb") as file:
            about = os.fstat(handle)
            if not stat.S_ISREG(about.st_mode) or about.st_nlink > 1:
                raise DamagedError(f"{path} is no file of its own: a run's folder holds no links; copy the folder")
            yield file


def secret(path: Path, fresh: bytes) -> bytes:
    """The key in a file that its owner alone reads; a fresh one is written if there is none."""
    if not path.exists():
        write_atomically(path, fresh, sync=True, mode=PRIVATE)
    with existing(path, os.O_RDONLY) as file:
        key = file.read(len(fresh) + 1)
    if len(key) != len(fresh):
        raise DamagedError(f"{path} has {len(key)} bytes, {len(fresh)} are expected")
    return key


def append(path: Path, text: str, *, sync: bool = False) -> None:
    """Add to a file."""
    with existing(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT) as file:
        file.write(text.encode())
        if sync:
            file.flush()
            os.fsync(file.fileno())


def sync(paths: Iterable[Path]) -> None:
    """Bring files and folders to the disk, together: the system then writes its own journal a few times only."""
    every = list(dict.fromkeys(paths))
    if len(every) < 3:
        for path in every:
            _fsync(path)
        return
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(_fsync, every))


def _fsync(path: Path) -> None:
    with naming(path):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def metadata(path: Path) -> dict[str, str]:
    """The texts in a safetensors file, read without its tensors."""
    with naming(path), path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > os.fstat(file.fileno()).st_size:
            raise ValueError("its header is longer than the file")
        return dict(json.loads(file.read(length)).get("__metadata__", {}))


def tensors(path: Path) -> tuple[State, dict[str, str]]:
    """The State in a safetensors file, and the texts beside it."""
    with naming(path):
        content = path.read_bytes()
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        return load(content), dict(header.get("__metadata__", {}))


def plain(path: Path) -> Any:
    """The values in a JSON file."""
    with naming(path):
        return json.loads(path.read_text(encoding="utf-8"))


class Scratch:
    """A folder for this process alone, which ends with it; those that killed processes left are removed first.

    A process holds a lock in its folder, and the system lets go of the lock however the process ends.
    """

    def __init__(self, root: str | Path | None = None) -> None:
        import fcntl

        root = Path(root or tempfile.gettempdir())
        for lock in root.glob("pfedgate-*/alive"):
            with suppress(OSError):  # it is another user's, or in use, or somebody else removes it now
                handle = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if lock.parent.stat().st_uid == os.getuid() and not lock.parent.is_symlink():
                        shutil.rmtree(lock.parent)
                finally:
                    os.close(handle)
        self.path = Path(tempfile.mkdtemp(prefix="pfedgate-", dir=root))
        self._handle = os.open(self.path / "new", _NEW, PRIVATE)
        fcntl.flock(self._handle, fcntl.LOCK_EX)
        os.rename(self.path / "new", self.path / "alive")
        self.close = weakref.finalize(self, _remove, self.path, self._handle)


def _remove(folder: Path, handle: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(handle)


def settle(folder: Path, below: str) -> None:
    """Refuse a run's folder with links in it, where this run would write; remove what killed writers left.

    below  the folder in it that is searched to the bottom; of the others only the top is
    """
    deep = folder / below
    for place, folders, names in [next(os.walk(folder), (folder, [], [])), *os.walk(deep)]:
        for name in [*folders, *names]:
            path = Path(place, name)
            if path.is_symlink():
                raise DamagedError(f"{path} is a link: a run's folder holds none; copy what it points to in its place")
            if _TEMPORARY.fullmatch(name):
                path.unlink()
