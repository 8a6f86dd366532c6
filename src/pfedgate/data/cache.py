"""Decoded data sets on disk: `.npy` files, written once, mapped by every process.

An entry is a folder whose name holds a digest of where the data came from (file names, sizes, times, the
columns read), so a changed source makes a new entry and an unchanged one is never decoded twice. It is
filled beside its final place and renamed at the end: a killed decode leaves nothing that looks finished.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from pfedgate.data.pool import Rows

FORMAT = 1  # raise it when what is written changes


def folder(path: str | Path | None = None) -> Path:
    """Where decoded data is kept: the argument, `PFEDGATE_CACHE`, or ~/.cache/pfedgate."""
    place = path or os.environ.get("PFEDGATE_CACHE")
    return Path(place).expanduser() if place else Path.home() / ".cache" / "pfedgate"


def key(*facts: object) -> str:
    """A short digest of whatever identifies a source.

    >>> key("a", 1) == key("a", 1), key("a", 1) == key("a", 2)
    (True, False)
    """
    text = json.dumps([FORMAT, *facts], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def file_facts(paths: Sequence[Path], root: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of every file: cheap, and different when a file was replaced."""
    return [(str(path.relative_to(root)), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]


def entry(name: str, digest: str, build: Callable[[Path], None], root: str | Path | None = None) -> Path:
    """The folder of one entry; `build` fills it if it is not there yet."""
    place = folder(root) / f"{name}-{digest}"
    if place.is_dir():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    work = place.with_name(f".{place.name}-{secrets.token_hex(4)}")
    work.mkdir()
    try:
        build(work)
        try:
            work.rename(place)
        except OSError:
            # Another process finished the same entry first; its content is the same by construction.
            if not place.is_dir():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return place


def read(place: Path) -> tuple[dict[str, Rows], dict[str, Any]]:
    """Arrays of an entry, mapped, and its notes."""
    arrays = {path.stem: Rows.open(path) for path in sorted(place.glob("*.npy"))}
    notes: dict[str, Any] = json.loads((place / "notes.json").read_text(encoding="utf-8"))
    return arrays, notes


class Writer:
    """Fills one entry row block by row block: memory does not grow with the data."""

    def __init__(self, place: Path, rows: int) -> None:
        self.place, self.rows = place, rows
        self._open: dict[str, np.memmap[Any, Any]] = {}

    def put(self, name: str, start: int, block: np.ndarray[Any, Any]) -> None:
        """Write rows start, start + 1, … of one array; the first block fixes type and shape."""
        if name not in self._open:
            self._open[name] = np.lib.format.open_memmap(
                self.place / f"{name}.npy", mode="w+", dtype=block.dtype, shape=(self.rows, *block.shape[1:])
            )
        target = self._open[name]
        if block.shape[1:] != target.shape[1:]:
            raise ValueError(
                f"{name}: row {start} on has shape {block.shape[1:]}, the rows before {target.shape[1:]}; "
                "all inputs must have one size"
            )
        target[start : start + len(block)] = block

    def close(self, notes: dict[str, Any]) -> None:
        """Flush to disk and write the notes."""
        for array in self._open.values():
            array.flush()
        self._open.clear()
        (self.place / "notes.json").write_text(json.dumps(notes, indent=1), encoding="utf-8")


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the number of rows done so far.

    A bar on a terminal, else a plain line at every quarter. All of it goes to standard error.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if console.is_terminal:
        columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as bar:
            task = bar.add_task(title, total=total)
            yield lambda done: bar.update(task, completed=done)
        return
    said = 0

    def line(done: int) -> None:
        nonlocal said
        quarter = 4 * done // max(total, 1)
        if quarter > said:
            said = quarter
            console.print(f"{title}: {done}/{total}", highlight=False, soft_wrap=True)

    yield line
