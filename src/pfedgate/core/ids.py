"""Client ids of any number in one array: a million take a few megabytes."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, overload

import numpy as np

Array = np.ndarray[Any, Any]
CHUNK = 65_536  # ids that are texts of their own at a time


class Ids(Sequence[str]):
    """Client ids in order, held as UTF-8 in one array.

    >>> ids = Ids(["a", "c", "b"])
    >>> ids[1], list(ids), "b" in ids, ids.index("b")
    ('c', ['a', 'c', 'b'], True, 2)
    """

    def __init__(self, names: Sequence[str] | Array) -> None:
        self.names = _encoded(names)
        if self.names.ndim != 1:
            raise ValueError("ids must be a flat list")

    @cached_property
    def order(self) -> np.ndarray[Any, np.dtype[np.int64]] | None:
        """The positions in sorted order; None if they are sorted already."""
        return None if bool(np.all(self.names[:-1] <= self.names[1:])) else np.argsort(self.names, kind="stable")

    def places(self, names: Ids) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The position of each of these ids, all of which must be here; a position after the last where one is not.

        >>> Ids(["a", "c", "b"]).places(Ids(["b", "d", "a"])).tolist()
        [2, 3, 0]
        """
        if self is names or np.array_equal(self.names, names.names):
            return np.arange(len(self))
        if not len(self):
            return np.zeros(len(names), dtype=np.int64)
        at = np.searchsorted(self.names, names.names, sorter=self.order)
        inside = np.minimum(at, len(self) - 1)
        where = inside if self.order is None else self.order[inside]
        return np.where(self.names[where] == names.names, where, len(self))

    def find(self, value: object) -> int | None:
        """The position of an id; None if it is not here.

        >>> Ids(["a", "c", "b"]).find("b"), Ids(["a"]).find("bb")
        (2, None)
        """
        if not isinstance(value, str) or len(name := value.encode()) > self.names.itemsize:
            return None
        # numpy's own search for one text is ten times as slow, and so are comparisons of its scalars.
        read, order = self.names.item, self.order
        low, high = 0, len(self)
        while low < high:
            middle = (low + high) // 2
            if read(middle if order is None else order[middle]) < name:
                low = middle + 1
            else:
                high = middle
        if low == len(self):
            return None
        place = low if order is None else int(order[low])
        return place if read(place) == name else None

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        """Position of an id; an unknown one is an error that names the nearest."""
        at = self.find(value)
        if at is None:
            names, wanted = list(self[:10_000]), str(value)
            padded = [name for name in names if wanted.isdecimal() and name.lstrip("0") == wanted.lstrip("0")]
            near = padded or difflib.get_close_matches(wanted, names, n=3, cutoff=0.4)
            hint = f"; did you mean {', '.join(map(repr, near))}?" if near else ""
            raise KeyError(f"no client {value!r} among {len(self)}{hint}")
        return at

    def __contains__(self, value: object) -> bool:
        return self.find(value) is not None

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[str]:
        for at in range(0, len(self), CHUNK):
            yield from np.char.decode(self.names[at : at + CHUNK], "utf-8").tolist()

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice | Array) -> Ids: ...
    def __getitem__(self, at: int | slice | Array) -> str | Ids:
        return Ids(self.names[at]) if isinstance(at, slice | np.ndarray) else bytes(self.names[at]).decode()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Ids):
            return bool(np.array_equal(self.names, other.names))
        return list(self) == list(other) if isinstance(other, (list, tuple)) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.names.tobytes())

    def __repr__(self) -> str:
        few = ", ".join(repr(name) for name in self[:4])
        return f"Ids({few}{', …' if len(self) > 4 else ''}; {len(self)})"

    def __getstate__(self) -> dict[str, Any]:
        return {"names": self.names}


def _encoded(names: Sequence[str] | Array) -> Array:
    """The names as UTF-8, whose order is that of the texts."""
    if isinstance(names, Ids):
        return names.names
    array = np.asarray(names)
    if array.dtype.kind == "S":
        return array
    texts = array.astype(np.str_)
    try:
        return texts.astype(np.bytes_)  # ASCII, and nothing else
    except UnicodeEncodeError:
        return np.char.encode(texts, "utf-8")
