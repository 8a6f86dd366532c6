"""From what users hold (arrays, tensors, lists, files) to what a pool stores."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfedgate.data.pool import Rows

Array = np.ndarray[Any, Any]
CHANNELS = (1, 3, 4)


def inputs(x: Array | Tensor | str | Path, channels: str | None) -> tuple[Rows, bool]:
    """Rows in the layout of the pool, and whether they are images."""
    rows = Rows.open(x) if isinstance(x, (str, Path)) else Rows(x.detach().cpu() if isinstance(x, Tensor) else x)
    data = rows.tensor
    if data.dtype is torch.float64:
        data = data.float()
    if data.ndim == 3 and data.dtype is torch.uint8:
        data, channels = data.unsqueeze(-1), "last"
    if data.ndim != 4:
        return (rows if data is rows.tensor else Rows(data)), False
    if channels is None:
        first, last = data.shape[1] in CHANNELS, data.shape[3] in CHANNELS
        if first == last:
            raise ValueError(
                f"images of shape {tuple(data.shape[1:])}: say channels='first' (channels, height, width) or "
                "channels='last' (height, width, channels)"
            )
        channels = "first" if first else "last"
    if channels not in ("first", "last"):
        raise ValueError(f"channels must be 'first' or 'last', got {channels!r}")
    if channels == "first":
        data = data.permute(0, 2, 3, 1).contiguous()
    return (rows if data is rows.tensor else Rows(data)), True


def class_labels(y: Array | Tensor | Sequence[Any]) -> tuple[Array, tuple[str, ...] | None]:
    """Labels as int64 from 0, and their names if they were not such numbers already."""
    values = y.detach().cpu().numpy() if isinstance(y, Tensor) else np.asarray(y)
    if not values.size:
        raise ValueError("there are no labels")
    if values.dtype.kind in "iu" and values.min() >= 0:
        return values.astype(np.int64), None
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise ValueError("a label is missing (not a number)")
    names, codes = np.unique(values, return_inverse=True)
    return codes.reshape(values.shape).astype(np.int64), tuple(str(name) for name in names)


def numbers(value: float | Sequence[float]) -> tuple[float, ...]:
    """One number or several, as several."""
    return (float(value),) if isinstance(value, (int, float)) else tuple(float(item) for item in value)
