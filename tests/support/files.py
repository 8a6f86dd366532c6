"""Tiny files with the schemas of the hub, for tests."""

from __future__ import annotations

import gzip
import io
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image


def encoded(pixels: np.ndarray, kind: str = "PNG") -> dict:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format=kind, lossless=True)
    return {"bytes": buffer.getvalue(), "path": None}


def write_images(file: Path, image: str, pictures: np.ndarray, kind: str = "PNG", **columns) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    cells = pa.array(
        [encoded(picture, kind) for picture in pictures],
        type=pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
    )
    pq.write_table(pa.table({image: cells, **{k: pa.array(list(v)) for k, v in columns.items()}}), file)


def write_idx(file: Path, values: np.ndarray) -> None:
    header = b"\0\0\x08" + bytes([values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    raw = header + values.astype(np.uint8).tobytes()
    file.write_bytes(gzip.compress(raw) if file.suffix == ".gz" else raw)
