"""Your own data in a CSV or parquet file."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pfedgate.core.errors import unknown
from pfedgate.data.federation import Federation
from pfedgate.data.own import from_arrays
from pfedgate.data.sources import decode_image, need

Array = np.ndarray[Any, Any]


def from_table(
    path: str | Path,
    *,
    owner: str = "client",
    label: str = "label",
    features: str | Sequence[str] | None = None,
    **options: Any,
) -> Federation:
    """A federation of a CSV or parquet file, one sample per line, with a column that names the client.

    `features` are the input columns, in this order (default: all others). They are numbers, or, in a parquet
    file, one column of encoded images or of lists of equal length.

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
    return from_columns(read(file), str(file), owner, label, features, **{"name": file.stem, **options})


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
    return from_arrays(
        stack({name: columns[name] for name in inputs}, where),
        np.asarray(columns[label]),
        owners=np.asarray(columns[owner]) if isinstance(owner, str) else owner,
        **options,
    )


def read(file: Path) -> dict[str, list[Any]]:
    """All columns by name; CSV cells are text."""
    if not file.is_file():
        raise FileNotFoundError(f"no file {file}")
    if file.suffix in (".parquet", ".pq"):
        columns: dict[str, list[Any]] = need("pyarrow.parquet").read_table(file).to_pydict()
        return columns
    if file.suffix not in (".csv", ".tsv"):
        raise ValueError(f"{file}: a table is .csv, .tsv or .parquet")
    with file.open(newline="", encoding="utf-8-sig") as text:
        lines = csv.reader(text, delimiter="\t" if file.suffix == ".tsv" else ",")
        head = next(lines, [])
        cells: list[list[Any]] = [[] for _ in head]
        for number, line in enumerate(lines, start=2):
            if not line:
                continue
            if len(line) != len(head):
                raise ValueError(f"{file}, line {number}: {len(line)} cells, the first line has {len(head)}")
            for column, cell in zip(cells, line, strict=True):
                column.append(cell)
    return dict(zip(head, cells, strict=True))


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
