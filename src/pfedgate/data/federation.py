"""Clients and their data.

What a training engine uses:

    federation.clients                 ids (str) of the clients that train, in order
    federation.novel                   ids of the clients held out of training
    federation.part(id, "train")       a Part: .n, and lazily .x (raw, uint8 or other) and .y (int64)
    federation.prepare(x)              raw batch -> float input, normalised, channels-last for images
    federation.input_shape, .classes, .name
    federation.share()                 before starting workers: then pickling sends paths, not data

The id of a client is the same everywhere: partition, logs, stored state, tables. Samples live once, in one
pool; a client is three ranges of row numbers, so 100,000 clients cost a few megabytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfedgate.core.ids import Ids
from pfedgate.data.pool import Normalise, Pool, Rows

PARTS = ("train", "val", "test")
LONGEST = 255  # bytes of an id: what a file of that name may have, and what fits into logs
Ints = np.ndarray[Any, np.dtype[np.int64]]


def short(names: Iterable[Any], where: str) -> None:
    """Refuse ids that are too long, before an array of texts makes all others as long.

    >>> short(["ann", "x" * 300], "visits.csv")
    Traceback (most recent call last):
    ValueError: visits.csv: a client's id has 300 bytes, at most 255 are allowed: 'xxxxxxxxxxxxxxxxxxxx'…
    """
    for name in names:
        if isinstance(name, str) and len(name) > LONGEST // 4 and (size := len(name.encode())) > LONGEST:
            raise ValueError(f"{where}: a client's id has {size} bytes, at most {LONGEST} are allowed: {name[:20]!r}…")


def _place(part: str) -> int:
    if part not in PARTS:
        raise ValueError(f"no part {part!r}: a client has {', '.join(PARTS)}")
    return PARTS.index(part)


class Part:
    """One part (train, val or test) of one client's data. Nothing is read before `x` or `y` is asked for."""

    def __init__(self, client: str, name: str, rows: tuple[int, int, Rows | None], pool: Pool) -> None:
        self.client, self.name, self._rows, self._pool = client, name, rows, pool
        self.n = rows[1] - rows[0]  # samples in the part

    @classmethod
    def of(cls, like: Any, rows: Tensor) -> Part:
        """A part of the same client with these rows of its pool."""
        return cls(like.client, like.name, (0, len(rows), Rows(rows.numpy())), like._pool)

    @cached_property
    def rows(self) -> Tensor:
        """The numbers of its rows in the pool."""
        first, last, listed = self._rows
        return torch.arange(first, last) if listed is None else listed.tensor[first:last].long()

    @cached_property
    def x(self) -> Tensor:
        """Raw inputs as stored (uint8 images are not normalised: see `Federation.prepare`)."""
        return self._pool.x(self.rows)

    @cached_property
    def y(self) -> Tensor:
        """Labels as whole numbers (int64) from 0."""
        return self._pool.y(self.rows)

    @staticmethod
    def together(parts: Sequence[Any]) -> tuple[Tensor, Tensor] | None:
        """Inputs and labels of several parts, one after the other, in one read; None if they are not of one pool."""
        pool = parts[0]._pool
        if not all(type(part) is Part and part._pool is pool for part in parts):
            return None
        listed = parts[0]._rows[2]
        if not all(part._rows[2] is listed for part in parts):
            return None
        # Counted at once: client by client the numbers of rows cost more than the rows.
        sizes = np.array([part.n for part in parts])
        firsts = np.array([part._rows[0] for part in parts])
        places = torch.from_numpy(np.arange(sizes.sum()) + np.repeat(firsts - sizes.cumsum() + sizes, sizes))
        rows = places if listed is None else listed.tensor[places].long()
        return pool.x(rows), pool.y(rows)

    def __len__(self) -> int:
        return self.n

    def __repr__(self) -> str:
        return f"Part({self.client!r}, {self.name!r}, n={self.n})"


class Federation:
    """Clients with their train, validation and test data, and clients held out of training.

    Made by `load`, `from_arrays` and their kin; rarely by hand. `rows` holds the row numbers of all clients
    one after the other, each client as train, val, test, or is None where they lie so in the pool; `bounds`
    (3 × clients + 1 numbers) says where each part starts; `held_out` marks the novel clients.
    """

    def __init__(
        self,
        name: str,
        pool: Pool,
        ids: Ids,
        rows: Rows | None,
        bounds: Rows,
        held_out: np.ndarray[Any, np.dtype[np.bool_]],
        *,
        classes: int,
        class_names: tuple[str, ...] | None = None,
        task: str = "classification",
        prepare: Normalise | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        if len(bounds) != len(PARTS) * len(ids) + 1:
            raise ValueError(f"{len(ids)} clients need {len(PARTS) * len(ids) + 1} bounds, got {len(bounds)}")
        short(ids, name)
        self.name, self.pool, self.ids, self.classes = name, pool, ids, classes
        self.class_names, self.task = class_names, task
        self.prepare = prepare or Normalise()
        self.about: dict[str, Any] = dict(about or {})
        self._rows, self._bounds, self._held_out = rows, bounds, held_out
        self._last: tuple[str | None, int] = (None, -1)  # the client asked for last, and where it is

    @cached_property
    def clients(self) -> Ids:
        """Ids of the clients that train, in order."""
        return self.ids[~self._held_out] if self._held_out.any() else self.ids

    @cached_property
    def novel(self) -> Ids:
        """Ids of the clients held out of training, in order."""
        return self.ids[self._held_out]

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input as a model sees it."""
        return self.pool.input_shape

    def part(self, client: str, name: str) -> Part:
        """The train, val or test data of one client, training or novel."""
        last = self._last
        if last[0] != client:  # several parts of one client are asked for in turn
            last = self._last = (client, self.ids.index(client))
        at = len(PARTS) * last[1] + _place(name)
        bounds = self._bounds.tensor.numpy()
        return Part(client, name, (bounds.item(at), bounds.item(at + 1), self._rows), self.pool)

    def sizes(self, name: str) -> Ints:
        """Samples in this part for every id of `federation.ids` (training and novel), without reading any."""
        at = _place(name)
        counts = np.diff(self._bounds.tensor.numpy())
        result: Ints = counts[at :: len(PARTS)].astype(np.int64)
        return result

    @property
    def columns(self) -> tuple[str, ...]:
        """What `histogram` counts: the classes by name, or "samples" where labels are no classes."""
        if self.task != "classification":
            return ("samples",)
        return self.class_names or tuple(str(label) for label in range(self.classes))

    def histogram(self, names: Sequence[str] = PARTS) -> Ints:
        """Samples per client (row, in the order of `federation.ids`) and class (column: `columns`) in these parts."""
        bounds = self._bounds.tensor.numpy()
        rows = torch.arange(len(self.pool)) if self._rows is None else self._rows.tensor
        counts = np.diff(bounds)
        wanted = np.tile([part in names for part in PARTS], len(self.ids))
        owner = np.repeat(np.arange(len(self.ids)), counts.reshape(-1, len(PARTS)).sum(1))
        keep = np.repeat(wanted, counts)
        width = len(self.columns)
        flat = owner[keep] * width
        if self.task == "classification":
            labels = self.pool.y(rows[torch.from_numpy(keep)].long())
            if labels.ndim != 1:
                raise ValueError("a histogram needs one label per sample")
            flat = flat + labels.numpy()
        return np.bincount(flat, minlength=len(self.ids) * width).reshape(-1, width)

    def share(self) -> Federation:
        """Put everything where worker processes can map it; returns the federation itself.

        Afterwards pickling it for a process costs the same whatever the amount of data.
        """
        self.pool.share()
        if self._rows is not None:
            self._rows.share()
        self._bounds.share()
        return self

    def describe(self) -> dict[str, Any]:
        """The federation in plain values (fit for JSON): sizes, labels, how samples were shared out."""
        counts = self.histogram()
        totals = counts.sum(1)
        return {
            "name": self.name,
            "clients": len(self.clients),
            "novel": len(self.novel),
            "samples": int(totals.sum()),
            "parts": {part: int(self.sizes(part).sum()) for part in PARTS},
            "smallest": int(totals.min()),
            "median": float(np.median(totals)),
            "largest": int(totals.max()),
            "task": self.task,
            "classes": self.classes,
            "classes_per_client": float((counts > 0).sum(1).mean()),
            "input_shape": list(self.input_shape),
            "histogram": {client: row.tolist() for client, row in zip(self.ids, counts, strict=True)},
            **self.about,
        }

    def __getstate__(self) -> dict[str, Any]:
        # The other side derives clients and novel from the ids again.
        return {key: value for key, value in self.__dict__.items() if key not in ("clients", "novel")}

    def __repr__(self) -> str:
        held = f", {len(self.novel)} novel" if len(self.novel) else ""
        what = f"{self.classes} classes" if self.task == "classification" else f"{self.task} of {self.classes}"
        return (
            f"Federation({self.name!r}, {len(self.clients)} clients{held}, {len(self._rows or self.pool)} samples of "
            f"shape {self.input_shape}, {what})"
        )
