"""A disk that forgets: at every change of a file, what a power cut might leave of a folder.

Only what was flushed is sure. Contents of a file are sure from its last fsync on, names in a folder from the last
fsync of that folder on; everything else may have reached the disk or not. The disk watches the real folder through the
calls that change it, and writes images of what may be left.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CALLS = ("replace", "rename", "link", "unlink", "remove", "mkdir", "rmdir", "truncate", "ftruncate", "fsync")
MODES = ("lost", "named", "mixed")
KILL = ("kept",)  # what was written is there, as after a kill
Image = dict[str, "Image | bytes"]


class Disk:
    """Watches a folder; `images` holds (operation, mode, what is left) of the operations wanted."""

    def __init__(
        self, root: Path, wanted: Callable[[int], bool] = lambda at: True, modes: tuple[str, ...] = MODES
    ) -> None:
        self.root, self.wanted, self.modes = root, wanted, modes
        self.operations = 0
        self.images: list[tuple[str, str, Image]] = []
        self._data: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {}
        self._open: dict[int, int] = {}  # inodes held open, so that no number is used again
        self._real = {name: getattr(os, name) for name in CALLS}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hear of every change made in this process."""
        self._flushed(self.root)
        for name in CALLS:
            setattr(os, name, self._hook(name))
        try:
            yield
        finally:
            for name, call in self._real.items():
                setattr(os, name, call)
            for handle in self._open.values():
                os.close(handle)

    def _hook(self, name: str) -> Callable[..., Any]:
        call = self._real[name]

        def hooked(*args: Any, **options: Any) -> Any:
            self.operations += 1
            if self.wanted(self.operations):
                for mode in self.modes:
                    dice = random.Random(f"{self.operations} {mode}")
                    left = self._left(self.root, mode, dice)
                    self.images.append((f"{self.operations} {name} {args[0]!s}"[-90:], mode, left))
            result = call(*args, **options)
            if name == "fsync":
                path = Path(os.readlink(f"/proc/self/fd/{args[0]}"))
                if path.is_relative_to(self.root) and path.exists():
                    self._flushed(path)
            return result

        return hooked

    def _number(self, path: Path) -> int:
        number = path.stat().st_ino
        if number not in self._open:
            self._open[number] = os.open(path, os.O_RDONLY)
        return number

    def _flushed(self, path: Path) -> None:
        if path.is_dir():
            self._names[self._number(path)] = {entry.name: self._number(Path(entry)) for entry in os.scandir(path)}
        else:
            self._data[self._number(path)] = path.read_bytes()

    def _left(self, root: Path, mode: str, dice: random.Random) -> Image:
        return self._folder(self._number(root), root, mode, dice)

    def _folder(self, number: int, path: Path | None, mode: str, dice: random.Random) -> Image:
        """Entries of a folder, as flushed or as they are; `path` is where it is now, if it still is anywhere."""
        flushed = mode == "lost" or (mode == "mixed" and dice.random() < 0.5)
        place = Path(f"/proc/self/fd/{self._open[number]}")
        if flushed:
            names = self._names.get(number, {})
        else:
            names = {entry.name: self._number(Path(entry)) for entry in os.scandir(place)}
        image: Image = {}
        for name, inner in sorted(names.items()):
            if os.path.isdir(f"/proc/self/fd/{self._open[inner]}"):
                image[name] = self._folder(inner, None, mode, dice)
            else:
                image[name] = self._content(inner, mode, dice)
        return image

    def _content(self, number: int, mode: str, dice: random.Random) -> bytes:
        now = Path(f"/proc/self/fd/{self._open[number]}").read_bytes()
        sure = self._data.get(number, b"")
        if mode == "kept" or (mode == "mixed" and dice.random() < 0.5):
            return now
        if mode == "lost" or dice.random() < 0.5:
            return sure
        return sure + bytes(max(0, len(now) - len(sure)))  # the length is on the disk, the contents are not


def restore(image: Image, place: Path) -> Path:
    """A folder of these contents."""
    place.mkdir(parents=True)
    for name, content in image.items():
        if isinstance(content, bytes):
            (place / name).write_bytes(content)
        else:
            restore(content, place / name)
    return place
