"""Data as users have it, as a federation: what `pfedgate.run(data=…, owner=…)` accepts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pfedgate.core.errors import unknown
from pfedgate.data.federation import Federation
from pfedgate.data.own import from_arrays, from_dataset, from_folder
from pfedgate.data.table import from_columns, from_table, once

OWNERS = ("owner", "client", "client_id", "user", "user_id", "writer_id")  # columns that usually name the client
LABELS = ("label", "labels", "y", "target")
TABLES = (".csv", ".tsv", ".parquet", ".pq")


def adopt(data: Any, *, owner: Any = None, label: str | None = None, **options: Any) -> Any:
    """A federation of whatever it is; one that is one already comes back as it is.

    data     a torch Dataset; a Hugging Face dataset; a DataFrame; a mapping of columns or arrays; a pair (x, y); the
             path of a folder of images or of a CSV or Parquet file
    owner    the column that names each row's client, or one name per row
    label    the column of labels; by default `label`, `y` or `target`
    options  of `from_arrays`: task="regression", partition="dirichlet" and clients=10 instead of owners, …

    >>> adopt({"x": [[0.0, 1.0], [1.0, 0.0]] * 9, "y": [0, 1] * 9, "who": ["ann", "bob"] * 9}, owner="who")
    Federation('data', 2 clients, 18 samples of shape (2,), 2 classes)
    """
    if hasattr(data, "part") and hasattr(data, "clients"):
        if owner is not None or label is not None or options:
            raise ValueError("a federation has owners and labels already: leave out owner=, label= and options of data")
        return data
    if isinstance(data, (str, Path)):
        path = Path(data).expanduser()
        if path.suffix.lower() in TABLES:
            return from_table(path, owner=owner or OWNERS[1], label=label or LABELS[0], **options)
        if not path.is_dir():
            raise FileNotFoundError(f"no data in {path}: give a folder of images or a file {', '.join(TABLES)}")
        return from_folder(path, **options)
    if (columns := _columns(data)) is not None:
        label = label or _usual(columns, LABELS, "label")
        if owner is None and "partition" not in options:
            owner = _usual(columns, OWNERS, "owner")
        inputs = ("x",) if "x" in columns and "features" not in options else None
        named = {"name": "data", "features": inputs, **options}
        return from_columns(columns, "the data", owner, label, **named)
    if isinstance(owner, str):
        raise ValueError(f"owner={owner!r} names a column, which {type(data).__name__} has not: give one owner per row")
    if isinstance(data, tuple) and len(data) == 2:
        if owner is None and "partition" not in options:
            raise ValueError("who owns which sample? Give owner=[one name per row]")
        return from_arrays(*data, owners=owner, **options)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        if owner is None:
            raise ValueError(f"who owns which of {len(data)} samples? Give owner=[one name per sample]")
        return from_dataset(data, owner, **options)
    raise TypeError(
        f"cannot read data from {type(data).__name__}: give a Dataset, a DataFrame, a mapping of columns, a pair "
        "(x, y), a path, or a federation of pfedgate.data"
    )


def _columns(data: Any) -> Mapping[str, Any] | None:
    """The columns of a table in memory, or None for what has none."""
    if isinstance(data, Mapping):
        first = next(iter(data.values()), None)
        if hasattr(first, "column_names"):  # splits of a Hugging Face dataset
            raise ValueError(
                f"the data has the splits {', '.join(map(str, data))}: give one of them, such as data['train']"
            )
        return data
    names = getattr(data, "column_names", None)  # Hugging Face
    if names is not None:
        return {name: _pixels(list(data[name])) for name in names}
    if hasattr(data, "columns") and hasattr(data, "to_numpy"):  # pandas, polars
        once(data.columns, "the data")  # pandas would give all columns of the name at once
        return {str(name): data[name].to_numpy() for name in data.columns}
    return None


def _pixels(values: list[Any]) -> list[Any]:
    """Pictures as arrays; anything else as it is."""
    import numpy as np

    return [np.asarray(value) for value in values] if values and hasattr(values[0], "convert") else values


def _usual(columns: Mapping[str, Any], names: Sequence[str], what: str) -> str:
    present = [name for name in names if name in columns]
    if len(present) != 1:
        reason = f"has {' and '.join(present)}" if present else unknown("column", names[0], map(str, columns))
        raise ValueError(f"which column is the {what}? Give {what}=…: the data {reason}")
    return present[0]


def of_name(data: Any, owner: Any, label: str | None) -> dict[str, Any] | None:
    """A path as a section [data], so that a run of it can be repeated from its recipe; None for anything else."""
    if not isinstance(data, (str, Path)):
        return None
    path = Path(data).expanduser()
    if path.suffix.lower() in TABLES:
        given = {"owner": owner, "label": label}
        return {"name": "table", "path": str(path), **{key: value for key, value in given.items() if value is not None}}
    return {"name": "folder", "path": str(path)} if path.is_dir() else None


__all__ = ["Federation", "adopt", "of_name"]
