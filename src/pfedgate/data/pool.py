"""Where samples live: one pool of rows for all clients, read by row number.

A pool is written once and shared: worker processes map the same file or the same shared memory, so nothing
is sent again when a round starts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor


class Pool(Protocol):
    """Samples as a `Federation` reads them: by row number."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input as a model sees it: (channels, height, width) for images."""

    def __len__(self) -> int:
        """Number of rows of all clients."""

    def x(self, rows: Tensor) -> Tensor:
        """Inputs of these rows, in this order."""

    def y(self, rows: Tensor) -> Tensor:
        """Labels of these rows, in this order."""

    def share(self) -> None:
        """Move what is private to this process into memory that others can map."""


class Rows:
    """One array, in memory, in shared memory or mapped from a `.npy` file.

    Pickled, a mapped file is its path: a worker process opens it again instead of receiving the data.

    >>> Rows(np.arange(6).reshape(3, 2)).take(torch.tensor([2, 0])).tolist()
    [[4, 5], [0, 1]]
    """

    def __init__(self, data: np.ndarray[Any, Any] | Tensor, path: Path | None = None) -> None:
        if not isinstance(data, Tensor):
            # torch takes no read-only memory (it could not keep its promise not to write).
            array = np.ascontiguousarray(data)
            data = torch.from_numpy(array if array.flags.writeable else array.copy())
        self.tensor = data
        self.path = path

    @classmethod
    def open(cls, path: str | Path) -> Rows:
        """Map a `.npy` file; nothing is read until rows are taken."""
        # Copy-on-write: torch wants writable memory, and no write may ever reach the file.
        mapped = np.load(path, mmap_mode="c", allow_pickle=False)
        rows = cls(torch.from_numpy(mapped))
        rows.path = Path(path).resolve()
        return rows

    def take(self, rows: Tensor) -> Tensor:
        """The given rows as a new contiguous tensor."""
        return self.tensor.index_select(0, rows)

    def share(self) -> None:
        """Into shared memory, unless a file already backs it."""
        if self.path is None:
            self.tensor.share_memory_()  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return int(self.tensor.shape[0])

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path} if self.path is not None else {"tensor": self.tensor}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "path" in state:
            opened = Rows.open(state["path"])
            self.tensor, self.path = opened.tensor, opened.path
        else:
            self.tensor, self.path = state["tensor"], None


class ArrayPool:
    """Inputs and labels as arrays of rows.

    `image=True` says that `x` is stored (rows, height, width, channels): it is handed out as
    (rows, channels, height, width) in channels-last memory, which costs nothing and which CPUs prefer.
    """

    def __init__(self, x: Rows, y: Rows, *, image: bool) -> None:
        if len(x) != len(y):
            raise ValueError(f"{len(x)} inputs but {len(y)} labels: they must be equally many")
        if image and x.tensor.ndim != 4:
            raise ValueError(f"images are stored as (rows, height, width, channels), got {tuple(x.tensor.shape)}")
        self._x, self._y, self.image = x, y, image

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input as a model sees it."""
        shape = tuple(self._x.tensor.shape[1:])
        return (shape[2], shape[0], shape[1]) if self.image else shape

    def __len__(self) -> int:
        return len(self._x)

    def x(self, rows: Tensor) -> Tensor:
        """Inputs of these rows, in this order."""
        taken = self._x.take(rows)
        return taken.permute(0, 3, 1, 2) if self.image else taken

    def y(self, rows: Tensor) -> Tensor:
        """Labels of these rows, in this order."""
        return self._y.take(rows)

    def share(self) -> None:
        """Into shared memory what no file backs."""
        self._x.share()
        self._y.share()


LOOKS = {"rotate": 4, "negate": 2}  # how domains may differ, and how many there are


class Around:
    """A pool that hands out the samples of another one in a form of its own."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input as a model sees it."""
        return self.pool.input_shape

    def __len__(self) -> int:
        return len(self.pool)

    def x(self, rows: Tensor) -> Tensor:
        """Inputs of these rows, in this order."""
        return self.pool.x(rows)

    def y(self, rows: Tensor) -> Tensor:
        """Labels of these rows, in this order."""
        return self.pool.y(rows)

    def share(self) -> None:
        """Into shared memory what no file backs."""
        self.pool.share()


class LookPool(Around):
    """Images of a pool as their domains look: row `r` belongs to domain `domain[r]`.

    "rotate" turns domain k by k quarters, "negate" inverts every second domain. Stored samples stay as they are; a look
    is applied to the rows that are read.
    """

    def __init__(self, pool: Pool, domain: Rows, kinds: tuple[str, ...]) -> None:
        super().__init__(pool)
        self.domain, self.kinds = domain, kinds
        shape = pool.input_shape
        if "rotate" in kinds and shape[1] != shape[2]:
            raise ValueError(f"only square images can be turned by quarters, these are {shape[1]}×{shape[2]}")

    def x(self, rows: Tensor) -> Tensor:
        """Inputs of these rows, in this order, each with the look of its domain."""
        x, domains = self.pool.x(rows), self.domain.take(rows)
        for domain in np.unique(domains.numpy()).tolist():
            mine = domains == domain
            part = x[mine]
            if "rotate" in self.kinds:
                part = part.rot90(domain, (2, 3))
            if "negate" in self.kinds and domain % 2:
                part = 255 - part if part.dtype is torch.uint8 else -part
            x[mine] = part
        return x

    def share(self) -> None:
        """Into shared memory what no file backs."""
        super().share()
        self.domain.share()


class FromPool(Around):
    """Samples of a pool whose labels count from another class on."""

    def __init__(self, pool: Pool, first: int) -> None:
        super().__init__(pool)
        self.first = first

    def y(self, rows: Tensor) -> Tensor:
        """Labels of these rows, in this order."""
        return self.pool.y(rows) - self.first


class Normalise:
    """Raw input to what a model takes, one batch at a time, on the device the batch is on.

    uint8 is scaled to [0, 1]; then `(x - mean) / std` per channel; images come out channels-last.
    Whole numbers other than uint8 (token ids) are left as they are.

    >>> Normalise((0.5,), (0.25,))(torch.tensor([[0, 255]], dtype=torch.uint8)).tolist()
    [[-2.0, 2.0]]
    """

    def __init__(self, mean: tuple[float, ...] = (), std: tuple[float, ...] = ()) -> None:
        if len(mean) != len(std):
            raise ValueError(f"{len(mean)} means but {len(std)} standard deviations")
        if any(value <= 0 for value in std):
            raise ValueError(f"a standard deviation must be positive, got {std}")
        self.mean, self.std = mean, std
        self._constants: dict[tuple[torch.device, bool, int], tuple[Tensor, Tensor]] = {}

    def __call__(self, x: Tensor) -> Tensor:
        """Float input; `x` itself is never changed."""
        if x.dtype is torch.uint8:
            scale, shift = self._on(x.device, True, x.ndim)
            out = torch.mul(x, scale).add_(shift)
        elif x.is_floating_point():
            out = x.to(torch.float32)
            if self.mean:
                scale, shift = self._on(x.device, False, x.ndim)
                out = torch.mul(out, scale).add_(shift)
        else:
            return x
        return out.contiguous(memory_format=torch.channels_last) if out.ndim == 4 else out

    def _on(self, device: torch.device, bytes_in: bool, ndim: int) -> tuple[Tensor, Tensor]:
        # Kept per device: making them for every batch would be a hidden host copy on an accelerator.
        key = (device, bytes_in, ndim)
        if key not in self._constants:
            std = torch.tensor(self.std or (1.0,), dtype=torch.float64)
            mean = torch.tensor(self.mean or (0.0,), dtype=torch.float64)
            scale = 1 / (std * (255 if bytes_in else 1))
            shape = (-1,) + (1,) * (ndim - 2) if ndim > 2 else (-1,)
            self._constants[key] = (
                scale.float().view(shape).to(device),
                (-mean / std).float().view(shape).to(device),
            )
        return self._constants[key]

    def __getstate__(self) -> dict[str, Any]:
        return {"mean": self.mean, "std": self.std, "_constants": {}}
