"""IDX, the file format of MNIST and EMNIST: two zero bytes, type, rank, big-endian sizes, values."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from pfedgate.data import cache

BLOCK = 10_000
Pair = tuple[Path, Path]


def pairs(folder: Path, prefix: str) -> list[Pair]:
    """Files of images and of labels, train before test; a file and its gzipped twin count once."""
    found: dict[str, Path] = {}
    for path in sorted(folder.rglob(f"{prefix}*images-idx3-ubyte*")):
        found.setdefault(path.name.removesuffix(".gz"), path)
    result = []
    for name in sorted(found, key=lambda name: ("-test-" in name or name.startswith("t10k"), name)):
        images = found[name]
        labels = images.with_name(images.name.replace("images-idx3", "labels-idx1"))
        if not labels.is_file():
            raise FileNotFoundError(f"{images} has no {labels.name} beside it")
        result.append((images, labels))
    return result


def entry(name: str, files: list[Pair], root: Path, cache_dir: str | Path | None) -> Path:
    """Cache entry of local files."""
    digest = cache.key(name, "idx", cache.file_facts([path for pair in files for path in pair], root))
    return cache.entry(name, digest, lambda place: decode(name, place, files), cache_dir)


def decode(name: str, place: Path, files: list[Pair]) -> None:
    """Write images and labels into a cache entry, block by block."""
    total = 0
    for images, labels in files:
        counts = [_shape(path)[0] for path in (images, labels)]
        if counts[0] != counts[1]:
            raise ValueError(f"{images} holds {counts[0]} images, {labels.name} {counts[1]} labels")
        total += counts[0]
    writer = cache.Writer(place, total)
    done = 0
    with cache.progress(f"decoding {name}", total) as report:
        for images, labels in files:
            for x, y in zip(blocks(images), blocks(labels), strict=True):
                writer.put("x", done, x[..., None])
                writer.put("y", done, y.astype(np.int64))
                done += len(x)
                report(done)
    writer.close({"name": name, "rows": total, "owners": []})


def blocks(path: Path) -> Iterator[np.ndarray[Any, np.dtype[np.uint8]]]:
    """The values, at most 10,000 rows at a time: EMNIST unpacked would fill half a gigabyte."""
    with _open(path) as file:
        shape = _header(file, path)
        row = int(np.prod(shape[1:]))
        for start in range(0, shape[0], BLOCK):
            rows = min(BLOCK, shape[0] - start)
            raw = file.read(rows * row)
            if len(raw) != rows * row:
                raise ValueError(f"{path} is cut short: its header promises {shape}")
            yield np.frombuffer(raw, np.uint8).reshape(rows, *shape[1:])
        if file.read(1):
            raise ValueError(f"{path} is too long: its header promises {shape}")


def _shape(path: Path) -> tuple[int, ...]:
    with _open(path) as file:
        return _header(file, path)


@contextmanager
def _open(path: Path) -> Iterator[IO[bytes]]:
    with path.open("rb") as file:
        if path.suffix == ".gz":
            with gzip.GzipFile(fileobj=file) as unpacked:
                yield cast(IO[bytes], unpacked)
        else:
            yield file


def _header(file: IO[bytes], path: Path) -> tuple[int, ...]:
    magic = file.read(4)
    if len(magic) < 4 or magic[:3] != b"\0\0\x08" or not magic[3]:
        raise ValueError(f"{path} is not an IDX file of bytes")
    sizes = file.read(4 * magic[3])
    if len(sizes) < 4 * magic[3]:
        raise ValueError(f"{path} is cut short inside its header")
    return tuple(int(size) for size in np.frombuffer(sizes, ">u4"))
