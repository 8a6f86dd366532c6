"""Reading data sets: parquet files of the Hugging Face hub's schema, local or through `datasets`, and IDX.

Whatever the source, the result is a cache entry with `x.npy` (uint8, rows × height × width × channels),
`y.npy` (int64), and where the source has them `owner.npy` (codes into notes["owners"]) and `coarse.npy`.
EMNIST by-class exists on the hub as IDX files only. IDX is MNIST's file format: two zero bytes, type, rank,
big-endian sizes, values.
"""

from __future__ import annotations

import gzip
import importlib
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from pfedgate.data import cache

# What pictures may be, by their content: other formats are rare, and some start programs (PostScript: Ghostscript).
PICTURES = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
PIXELS = 1 << 26  # of a picture: a small file can unpack into any number
INSTALL = "pip install 'pfedgate[data]'"
BATCH = 1000
IDX_BLOCK = 10_000
Pair = tuple[Path, Path]


@dataclass(frozen=True)
class Columns:
    """Names a column may have (they differ between copies of a data set); the first one found is read."""

    image: tuple[str, ...] = ("image", "img")
    label: tuple[str, ...] = ("label",)
    owner: tuple[str, ...] = ()
    coarse: tuple[str, ...] = ()

    def pick(self, present: list[str], where: str) -> dict[str, str]:
        """Which column serves as image, label, owner, coarse."""
        columns = {}
        for role, wanted in vars(self).items():
            candidates = [name for name in wanted if name in present]
            if wanted and not candidates:
                raise ValueError(
                    f"{where}: no {role} column; looked for {' or '.join(wanted)}, found {', '.join(present)}"
                )
            if candidates:
                columns[role] = candidates[0]
        return columns


def need(module: str) -> Any:
    """Import an optional package, or say how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"reading this data needs the package {module!r}: {INSTALL}") from error


def local_folder(name: str, data_dir: str | Path | None) -> Path | None:
    """The folder of a local copy: `data_dir`/name or `data_dir` itself, or `PFEDGATE_DATA`/name."""
    given = data_dir or os.environ.get("PFEDGATE_DATA")
    if not given:
        return None
    root = Path(given).expanduser()
    if (root / name).is_dir():
        return root / name
    # The root itself only if it was named for this data set: under PFEDGATE_DATA it holds many.
    if data_dir and any([*root.glob("*.parquet"), *root.glob("*-ubyte*")]):
        return root
    if data_dir:
        raise FileNotFoundError(f"no folder {root / name} and no parquet or IDX files in {root}")
    return None


def _order(path: Path) -> tuple[int, str]:
    # The pool is train first, then test, as FedEM concatenates them.
    for rank, start in enumerate(("train", "valid", "test")):
        if path.name.startswith(start) or path.parent.name == start:
            return rank, str(path)
    return 3, str(path)


def from_folder(
    name: str, root: Path, columns: Columns, cache_dir: str | Path | None, idx_prefix: str | None = None
) -> Path:
    """Cache entry of a folder of parquet or IDX files."""
    files = sorted(root.rglob("*.parquet"), key=_order)
    if not files:
        pairs = _idx_pairs(root, idx_prefix or "")
        if not pairs:
            raise FileNotFoundError(f"{name}: {root} holds neither parquet nor IDX files")
        digest = cache.key(name, "idx", cache.file_facts([path for pair in pairs for path in pair], root))
        return cache.entry(name, digest, lambda place: _decode_idx(name, place, pairs), cache_dir)
    need("PIL.Image")
    parquet = need("pyarrow.parquet")
    digest = cache.key(name, "parquet", cache.file_facts(files, root), columns.__dict__)

    def build(place: Path) -> None:
        readers = [parquet.ParquetFile(path) for path in files]
        total = sum(reader.metadata.num_rows for reader in readers)

        def batches() -> Iterator[Any]:
            for reader, path in zip(readers, files, strict=True):
                names = columns.pick(reader.schema_arrow.names, str(path))
                for batch in reader.iter_batches(BATCH, columns=sorted(set(names.values()))):
                    yield batch, names

        _decode(name, place, total, batches())

    return cache.entry(name, digest, build, cache_dir)


def from_hub(name: str, repo: str, columns: Columns, cache_dir: str | Path | None, revision: str | None = None) -> Path:
    """Cache entry of a data set of the hub, fetched with the package `datasets`."""
    # Keyed by what was asked for, so that a decoded copy is found again without the network.
    digest = cache.key(name, "hub", repo, revision, columns.__dict__)

    def build(place: Path) -> None:
        need("PIL.Image")
        hub = need("datasets")
        with _explained(name, repo):
            splits = hub.load_dataset(repo, revision=revision)
        names = sorted(splits, key=lambda split: _order(Path(split)))
        total = sum(splits[split].num_rows for split in names)

        def batches() -> Iterator[Any]:
            for split in names:
                picked = columns.pick(splits[split].column_names, f"{repo} ({split})")
                for batch in splits[split].with_format("arrow").iter(BATCH):
                    yield batch, picked

        _decode(name, place, total, batches())

    return cache.entry(name, digest, build, cache_dir)


def _decode(name: str, place: Path, total: int, batches: Iterator[Any]) -> None:
    writer = cache.Writer(place, total)
    owners: dict[str, int] = {}
    done = 0
    with cache.progress(f"decoding {name}", total) as report:
        for batch, columns in batches:
            cells = batch.column(columns["image"]).to_pylist()
            for row, cell in enumerate(cells, start=done):  # one at a time: a thousand large pictures fill the memory
                writer.put("x", row, decode_image(cell)[None])
            for role, target in (("label", "y"), ("coarse", "coarse")):
                if role in columns:
                    values = np.asarray(batch.column(columns[role]).to_pylist(), dtype=np.int64)
                    writer.put(target, done, values)
            if "owner" in columns:
                names = [str(value) for value in batch.column(columns["owner"]).to_pylist()]
                codes = [owners.setdefault(owner, len(owners)) for owner in names]
                writer.put("owner", done, np.asarray(codes, dtype=np.int32))
            done += len(cells)
            report(done)
    writer.close({"name": name, "rows": total, "owners": list(owners)})


def decode_image(value: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Pixels as (height, width, channels) of one cell: hub struct, bytes, or nested lists."""
    if isinstance(value, dict):
        value = value["bytes"] if value.get("bytes") is not None else Path(value["path"])
    if isinstance(value, (bytes, Path)):
        with picture(value) as opened:
            # Palettes, bit masks and transparency become what they look like; grey and colour stay.
            mode = opened.mode if opened.mode in ("L", "RGB") else ("L" if opened.mode in ("1", "I") else "RGB")
            pixels = np.asarray(opened.convert(mode))
    else:
        pixels = np.asarray(value, dtype=np.uint8)
    return pixels[:, :, None] if pixels.ndim == 2 else pixels


@contextmanager
def picture(source: bytes | Path) -> Iterator[Any]:
    """A picture of Pillow, opened by what the content is, whatever a file's name says; not decoded yet."""
    image = need("PIL.Image")
    where = str(source) if isinstance(source, Path) else "a cell"
    if isinstance(source, Path) and not source.is_file():  # a device or a pipe might never end
        raise ValueError(f"{where} is no regular file")
    try:
        opened = image.open(source if isinstance(source, Path) else io.BytesIO(source), formats=PICTURES)
    except image.UnidentifiedImageError:
        raise ValueError(f"{where} holds no picture of a kind that is read: {', '.join(PICTURES)}") from None
    except image.DecompressionBombError as error:
        raise ValueError(f"{where}: {error}") from None
    with opened:
        if opened.width * opened.height > PIXELS:
            raise ValueError(f"{where} has {opened.width} × {opened.height} pixels; at most {PIXELS:,} are read")
        yield opened


def idx_from_hub(name: str, repo: str, prefix: str, cache_dir: str | Path | None) -> Path:
    """Cache entry of IDX files kept on the hub (`prefix`-train-images-idx3-ubyte.gz and its three kin)."""
    digest = cache.key(name, "hub-idx", repo, prefix)

    def build(place: Path) -> None:
        hub = need("huggingface_hub")
        files = []
        for part in ("train", "test"):
            names = [f"{prefix}-{part}-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1")]
            with _explained(name, repo):
                images, labels = (Path(hub.hf_hub_download(repo, file, repo_type="dataset")) for file in names)
            files.append((images, labels))
        _decode_idx(name, place, files)

    return cache.entry(name, digest, build, cache_dir)


@contextmanager
def _explained(name: str, repo: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # the hub's packages raise these for network, name and access
        raise ConnectionError(
            f"cannot fetch {name} from the hub ({repo}): {error}. Put the repository's files in a folder "
            f"{name}/ and name its parent with data_dir or PFEDGATE_DATA."
        ) from error


def _idx_pairs(folder: Path, prefix: str) -> list[Pair]:
    """Files of images and of labels, train before test; a file and its gzipped twin count once."""
    files: dict[str, Path] = {}
    for path in sorted(folder.rglob(f"{prefix}*images-idx3-ubyte*")):
        files.setdefault(path.name.removesuffix(".gz"), path)
    result = []
    for name in sorted(files, key=lambda name: ("-test-" in name or name.startswith("t10k"), name)):
        images = files[name]
        labels = images.with_name(images.name.replace("images-idx3", "labels-idx1"))
        if not labels.is_file():
            raise FileNotFoundError(f"{images} has no {labels.name} beside it")
        result.append((images, labels))
    return result


def _decode_idx(name: str, place: Path, files: list[Pair]) -> None:
    """Write images and labels into a cache entry, block by block: EMNIST unpacked would fill half a gigabyte."""
    total = 0
    for pair in files:
        counts = []
        for path in pair:
            with _idx(path) as (_, shape):
                counts.append(shape[0])
        if counts[0] != counts[1]:
            raise ValueError(f"{pair[0]} holds {counts[0]} images, {pair[1].name} {counts[1]} labels")
        total += counts[0]
    writer = cache.Writer(place, total)
    done = 0
    with cache.progress(f"decoding {name}", total) as report:
        for images, labels in files:
            for x, y in zip(_idx_blocks(images), _idx_blocks(labels), strict=True):
                writer.put("x", done, x[..., None])
                writer.put("y", done, y.astype(np.int64))
                done += len(x)
                report(done)
    writer.close({"name": name, "rows": total, "owners": []})


def _idx_blocks(path: Path) -> Iterator[np.ndarray[Any, np.dtype[np.uint8]]]:
    with _idx(path) as (file, shape):
        row = int(np.prod(shape[1:]))
        for start in range(0, shape[0], IDX_BLOCK):
            rows = min(IDX_BLOCK, shape[0] - start)
            raw = file.read(rows * row)
            if len(raw) != rows * row:
                raise ValueError(f"{path} is cut short: its header promises {shape}")
            yield np.frombuffer(raw, np.uint8).reshape(rows, *shape[1:])
        if file.read(1):
            raise ValueError(f"{path} is too long: its header promises {shape}")


@contextmanager
def _idx(path: Path) -> Iterator[tuple[IO[bytes], tuple[int, ...]]]:
    """An IDX file behind its header, and the shape that the header promises."""
    with cast(IO[bytes], gzip.open(path) if path.suffix == ".gz" else path.open("rb")) as file:
        magic = file.read(4)
        if len(magic) < 4 or magic[:3] != b"\0\0\x08" or not magic[3]:
            raise ValueError(f"{path} is not an IDX file of bytes")
        sizes = file.read(4 * magic[3])
        if len(sizes) < 4 * magic[3]:
            raise ValueError(f"{path} is cut short inside its header")
        yield file, tuple(int(size) for size in np.frombuffer(sizes, ">u4"))
