"""Data from anywhere: pictures by content, tables within a bound of memory, names that can be used."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pfedgate.data import from_arrays, from_folder, from_table
from pfedgate.data.adopt import adopt
from pfedgate.data.sources import decode_image

pytestmark = pytest.mark.usefixtures("own_cache")
POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n"


def folder_of(path: Path, content: bytes) -> Path:
    for label in ("cat", "dog"):
        for at in range(4):
            file = path / "ann" / label / f"{at}.gif"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (at, 0, 0)).save(file)
    (path / "ann/dog/3.gif").write_bytes(content)
    return path


def huge_png(side: int) -> bytes:
    """A picture of side × side pixels in a few hundred bytes: its header alone is read."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (POSTSCRIPT, "3.gif holds no picture of a kind that is read: PNG"),
        (huge_png(9000), "3.gif has 9000 × 9000 pixels; at most"),
        (huge_png(60000), "3.gif: .*decompression bomb"),
    ],
    ids=["postscript", "large", "bomb"],
)
@pytest.mark.filterwarnings("ignore:Image size")
def test_pictures_are_opened_by_content_and_up_to_a_size(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_folder(folder_of(tmp_path / "photos", content))
    with pytest.raises(ValueError, match=message.replace("3.gif", "a cell")):
        decode_image({"bytes": content, "path": None})


def test_a_cell_that_names_a_device_is_refused() -> None:
    with pytest.raises(ValueError, match="/dev/zero is no regular file"):
        decode_image({"bytes": None, "path": "/dev/zero"})


def swelling(path: Path, kind: str) -> Path:
    """A table that takes little on disk and much in memory."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    rows = 200_000
    columns = {"client": np.arange(rows) % 3, "label": np.arange(rows) % 2}
    if kind == "numbers":
        columns |= {f"x{at}": np.zeros(rows) for at in range(8)}
    else:
        columns["x"] = pa.DictionaryArray.from_arrays(np.zeros(rows, np.int32), ["z" * 5000])
    pq.write_table(pa.table(columns), path, compression="zstd", store_schema=False)
    return path


@pytest.mark.parametrize("kind", ["numbers", "texts"])
def test_a_small_parquet_file_does_not_fill_the_memory(tmp_path: Path, kind: str) -> None:
    file = swelling(tmp_path / "t.parquet", kind)
    assert file.stat().st_size < 700_000
    with pytest.raises(ValueError, match=r"t\.parquet, column .*: the cells take more than 0.01 GB.*max_gb"):
        from_table(file, max_gb=0.01)
    if kind == "numbers":  # what fits is read as before
        assert from_table(file, max_gb=0.1).input_shape == (8,)


def test_a_csv_file_has_the_same_limit(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("client,x,label\n" + "a,1,0\n" * 1000)
    with pytest.raises(ValueError, match=r"t\.csv, line \d+: the cells take more than 0\.0001 GB"):
        from_table(tmp_path / "t.csv", max_gb=0.0001)
    (tmp_path / "w.csv").write_text("client,x,label\na," + "1" * 200_000 + ",0\n")
    with pytest.raises(ValueError, match=r"w\.csv, line 2: field larger"):
        from_table(tmp_path / "w.csv")


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "t.csv").write_text("client,x,label,x\na,1,0,2\n")
    pq.write_table(pa.table([[1], [2], ["a"], [0]], names=["x", "x", "client", "label"]), tmp_path / "t.parquet")
    for file in ("t.csv", "t.parquet"):
        with pytest.raises(ValueError, match="has two columns 'x': rename"):
            from_table(tmp_path / file)

    class Frame:
        columns = ("x", "x", "label")

        def to_numpy(self) -> None:
            """What makes it a table."""

    with pytest.raises(ValueError, match="two columns 'x'"):
        adopt(Frame(), owner="x")


def test_ids_beyond_255_bytes_are_refused(tmp_path: Path) -> None:
    long = "ü" * 128
    (tmp_path / "t.csv").write_text("client,x,label\n" + f"{long},1,0\na,2,1\n" * 20)
    for read in (
        lambda: from_table(tmp_path / "t.csv"),
        lambda: from_arrays(np.zeros((40, 2)), np.arange(40) % 2, owners=["a", long] * 20),
    ):
        with pytest.raises(ValueError, match="a client's id has 256 bytes, at most 255"):
            read()
    fits = "x" * 255
    assert fits in from_arrays(np.zeros((40, 2)), np.arange(40) % 2, owners=["a", fits] * 20).clients
