"""Your own data in a CSV or parquet file."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pfedgate.core.errors import unknown
from pfedgate.data.federation import Federation, short
from pfedgate.data.own import from_arrays
from pfedgate.data.sources import decode_image, need

Array = np.ndarray[Any, Any]
ROWS = 1000  # of a Parquet file at once
NUMBERS = ("bool", "float", "double", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))
CELL = 64  # bytes that a text, a list or a picture takes beside its content


def from_table(
    path: str | Path,
    *,
    owner: str = "client",
    label: str = "label",
    features: str | Sequence[str] | None = None,
    max_gb: float = 2.0,
    **options: Any,
) -> Federation:
    """A federation of a CSV or parquet file, one sample per line, with a column that names the client.

    `features` are the input columns, in this order (default: all others). They are numbers, or, in a parquet
    file, one column of encoded images or of lists of equal length. Reading stops with an error where the cells would
    take more than `max_gb` gigabytes of memory, because a small file can hold any number of equal ones.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "visits.csv"
    >>> lines = [f"h{i % 3},{i * 0.5},{i % 7},{'ill' if i % 2 else 'well'}" for i in range(30)]
    >>> _ = file.write_text("\\n".join(["hospital,dose,age,outcome", *lines]))
    >>> federation = from_table(file, owner="hospital", label="outcome", standardise=True)
    >>> federation
    Federation('visits', 3 clients, 30 samples of shape (2,), 2 classes)
    >>> list(federation.clients), federation.class_names
    (['h0', 'h1', 'h2'], ('ill', 'well'))
    """
    file = Path(path).expanduser()
    return from_columns(read(file, max_gb), str(file), owner, label, features, **{"name": file.stem, **options})


def from_columns(
    columns: Mapping[str, Any],
    where: str,
    owner: str | Sequence[Any] | None,
    label: str,
    features: str | Sequence[str] | None = None,
    **options: Any,
) -> Federation:
    """A federation of columns by name; `owner` is a column, the owners themselves, or None: a partition decides."""
    wanted = [features] if isinstance(features, str) else features
    named = owner if isinstance(owner, str) else label
    inputs = wanted if wanted is not None else [name for name in columns if name not in (named, label)]
    for column in (named, label, *inputs):
        if column not in columns:
            raise ValueError(f"{where}: {unknown('column', column, map(str, columns))}")
    if isinstance(owner, str):
        short(columns[owner], where)
    return from_arrays(
        stack({name: columns[name] for name in inputs}, where),
        np.asarray(columns[label]),
        owners=np.asarray(columns[owner]) if isinstance(owner, str) else owner,
        **options,
    )


def read(file: Path, max_gb: float = 2.0) -> dict[str, Any]:
    """All columns by name, as arrays where they are numbers, else as lists; CSV cells are text."""
    if not file.is_file():
        raise FileNotFoundError(f"no file {file}")
    limit = max_gb * 1e9
    if file.suffix in (".parquet", ".pq"):
        return _parquet(file, limit)
    if file.suffix not in (".csv", ".tsv"):
        raise ValueError(f"{file}: a table is .csv, .tsv or .parquet")
    with file.open(newline="", encoding="utf-8-sig") as text:
        lines = csv.reader(text, delimiter="\t" if file.suffix == ".tsv" else ",")
        try:
            head = next(lines, [])
            once(head, str(file))
            cells: list[list[Any]] = [[] for _ in head]
            size = 0
            for number, line in enumerate(lines, start=2):
                if not line:
                    continue
                if len(line) != len(head):
                    raise ValueError(f"{file}, line {number}: {len(line)} cells, the first line has {len(head)}")
                size += sum(map(len, line)) + CELL * len(line)
                if size > limit:
                    raise too_large(f"{file}, line {number}", limit)
                for column, cell in zip(cells, line, strict=True):
                    column.append(cell)
        except csv.Error as error:
            raise ValueError(f"{file}, line {lines.line_num}: {error}") from error
    return dict(zip(head, cells, strict=True))


def once(names: Iterable[Any], where: str) -> None:
    """Refuse a name that several columns have, because only one of them could be read."""
    seen: set[Any] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"{where} has two columns {name!r}: rename one of them")
        seen.add(name)


def too_large(where: str, limit: float) -> ValueError:
    """The error of a table that takes more memory than it may."""
    return ValueError(f"{where}: the cells take more than {limit / 1e9:g} GB; if this is right, raise max_gb")


def _parquet(file: Path, limit: float) -> dict[str, Any]:
    parquet = need("pyarrow.parquet")
    with parquet.ParquetFile(file) as source:
        schema, about = source.schema_arrow, source.metadata
        once(schema.names, str(file))
        chunks = [
            about.row_group(group).column(at).total_uncompressed_size
            for group in range(about.num_row_groups)
            for at in range(about.num_columns)
        ]
        if sum(chunks) > limit:
            raise too_large(str(file), limit)
        # A cell is at most as large as the chunk that it repeats, so that a batch of so many rows stays in the limit.
        plain = all(str(kind) in NUMBERS for kind in schema.types)
        rows = ROWS if plain else max(1, min(ROWS, int(limit / (1 + max(chunks, default=0)))))
        pieces: dict[str, list[Any]] = {name: [] for name in schema.names}
        size = 0
        for batch in source.iter_batches(rows):
            for name, column in zip(schema.names, batch.columns, strict=True):
                numbers = str(column.type) in NUMBERS and not column.null_count
                size += column.nbytes + (0 if numbers else CELL * len(column))
                if size > limit:
                    raise too_large(f"{file}, column {name!r}", limit)
                pieces[name].append(column.to_numpy(zero_copy_only=False) if numbers else column.to_pylist())
    return {name: _joined(parts) for name, parts in pieces.items()}


def _joined(parts: list[Any]) -> Any:
    if parts and all(isinstance(part, np.ndarray) for part in parts):
        return np.concatenate(parts)
    return [value for part in parts for value in (part.tolist() if isinstance(part, np.ndarray) else part)]


def stack(columns: Mapping[str, Any], where: str) -> Array:
    """Input columns as one array: images or lists as they are, numbers side by side as float32."""
    if not columns:
        raise ValueError(f"{where}: no feature columns")
    if len(columns) == 1:
        (values,) = columns.values()
        if getattr(values, "ndim", 1) > 1:
            return np.asarray(values)
        if len(values) and isinstance(values[0], (dict, bytes)):
            return np.stack([decode_image(value) for value in values])
        if len(values) and isinstance(values[0], (list, tuple, np.ndarray)):
            return np.stack([np.asarray(value) for value in values])
    return np.stack([_numbers(name, values, where) for name, values in columns.items()], axis=1)


def _numbers(name: str, values: Any, where: str) -> Array:
    try:
        numbers = np.asarray(values, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: column {name!r} is not all numbers ({error}); choose features=…") from error
    if not np.isfinite(numbers).all():
        line = int(np.flatnonzero(~np.isfinite(numbers))[0])
        raise ValueError(f"{where}: column {name!r} has no number in row {line}")
    return numbers
