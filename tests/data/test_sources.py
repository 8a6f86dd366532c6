"""Real loaders on tiny files with the hub's schemas: pixels survive, the cache is built once and never half."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.files import write_idx, write_images

from pfedgate.data import cache, load, sources
from pfedgate.data.federation import PARTS, Federation

pytest.importorskip("pyarrow")
RNG = np.random.default_rng(0)
pytestmark = pytest.mark.usefixtures("own_cache")


def pool_of(federation: Federation) -> tuple[np.ndarray, np.ndarray]:
    every = torch.arange(len(federation.pool))
    return federation.pool.x(every).permute(0, 2, 3, 1).numpy(), federation.pool.y(every).numpy()


def write_cifar10(root: Path, image: str = "img", n: int = 200) -> tuple[np.ndarray, np.ndarray]:
    x, y = RNG.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8), np.arange(n) % 10
    cut = n * 5 // 6
    write_images(root / "cifar10/plain_text/train-00000-of-00001.parquet", image, x[:cut], label=y[:cut])
    write_images(root / "cifar10/plain_text/test-00000-of-00001.parquet", image, x[cut:], label=y[cut:])
    return x, y


@pytest.mark.parametrize("image", ["img", "image"])
def test_cifar10_round_trip_train_before_test(tmp_path, image):
    x, y = write_cifar10(tmp_path, image)
    federation = load("cifar10", data_dir=tmp_path, clients=4)
    got, labels = pool_of(federation)
    assert np.array_equal(got, x)
    assert np.array_equal(labels, y)
    assert federation.input_shape == (3, 32, 32)
    assert sum(federation.part(c, p).n for c in federation.ids for p in PARTS) == 200


def test_the_environment_or_an_option_names_the_folder(tmp_path, monkeypatch):
    write_cifar10(tmp_path)
    assert len(load("cifar10", data_dir=tmp_path / "cifar10/plain_text", clients=4).pool) == 200
    monkeypatch.setenv("PFEDGATE_DATA", str(tmp_path))
    assert len(load("cifar10", clients=5).clients) == 5
    with pytest.raises(FileNotFoundError, match="no local copy of femnist"):
        load("femnist", source="local")
    with pytest.raises(FileNotFoundError, match=r"no folder .*femnist"):
        load("femnist", data_dir=tmp_path)


def test_cifar100_has_coarse_labels_for_pachinko(tmp_path):
    x, fine = RNG.integers(0, 256, (1000, 32, 32, 3), dtype=np.uint8), np.arange(1000) % 100
    write_images(tmp_path / "cifar100/train-0.parquet", "img", x, fine_label=fine, coarse_label=fine // 5)
    federation = load("cifar100", data_dir=tmp_path, clients=5, partition="pachinko")
    assert federation.sizes("train").sum() == 600
    assert federation.describe()["beta"] == 10.0
    assert pool_of(federation)[1].max() == 99
    write_cifar10(tmp_path)
    with pytest.raises(ValueError, match="no coarse labels"):
        load("cifar10", data_dir=tmp_path, clients=4, partition="pachinko")


@pytest.mark.filterwarnings("ignore:.*owners are left out")
def test_femnist_is_split_by_writer_over_both_files(tmp_path):
    writers = [f"f{i:04d}_{i % 7:02d}" for i in range(9)]
    names = np.array([writers[i % 9] for i in range(180)] + ["tiny", "tiny"])
    x = RNG.integers(0, 256, (182, 28, 28), dtype=np.uint8)
    y = np.arange(182) % 62
    for part, cut in (("train", slice(0, 140)), ("test", slice(140, 182))):
        file = tmp_path / f"femnist/{part}-00000-of-00001.parquet"
        write_images(file, "image", x[cut], writer_id=names[cut], hsf_id=y[cut], character=y[cut])
    federation = load("femnist", data_dir=tmp_path)
    assert list(federation.ids) == writers
    assert federation.input_shape == (1, 28, 28)
    assert federation.describe()["dropped"] == 1
    for writer in writers:
        mine = {row for part in PARTS for row in federation.part(writer, part).rows.tolist()}
        assert mine == set(np.flatnonzero(names == writer).tolist())
        assert [federation.part(writer, part).n for part in PARTS] == [12, 4, 4]
    assert np.array_equal(pool_of(federation)[0][..., 0], x)
    some = load("femnist", data_dir=tmp_path, writers=4, novel=0.25)
    assert (len(some.clients), len(some.novel)) == (3, 1)
    assert set(some.ids) < set(writers)
    assert load("femnist", data_dir=tmp_path, clients=4).ids == some.ids
    with pytest.raises(ValueError, match="another name for clients"):
        load("femnist", data_dir=tmp_path, clients=4, writers=4)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_emnist_reads_idx_files_of_its_own_split_only(tmp_path, suffix):
    folder = tmp_path / "emnist"
    folder.mkdir()
    x, y = RNG.integers(0, 256, (900, 28, 28), dtype=np.uint8), np.arange(900) % 62
    for part, cut in (("test", slice(700, 900)), ("train", slice(0, 700))):
        write_idx(folder / f"emnist-byclass-{part}-images-idx3-ubyte{suffix}", x[cut])
        write_idx(folder / f"emnist-byclass-{part}-labels-idx1-ubyte{suffix}", y[cut])
    write_idx(folder / f"emnist-letters-train-images-idx3-ubyte{suffix}", x)
    write_idx(folder / f"emnist-letters-train-labels-idx1-ubyte{suffix}", y)
    federation = load("emnist", data_dir=tmp_path, clients=3, samples=1.0)
    got, labels = pool_of(federation)
    assert np.array_equal(got[..., 0], x)
    assert np.array_equal(labels, y)
    # The paper's default is a tenth of the pool.
    assert load("emnist", data_dir=tmp_path, clients=3).describe()["samples"] == 90


def test_damaged_idx_files_are_refused(tmp_path):
    folder = tmp_path / "emnist"
    folder.mkdir()
    images, labels = (folder / f"emnist-byclass-train-{k}-ubyte" for k in ("images-idx3", "labels-idx1"))
    damages = {
        r"no emnist-byclass-train-labels-idx1-ubyte beside": lambda: write_idx(images, np.zeros((20, 28, 28))),
        r"holds 20 images, .* 19 labels": lambda: write_idx(labels, np.zeros(19)),
        "cut short": lambda: (write_idx(labels, np.zeros(20)), images.write_bytes(images.read_bytes()[:-1])),
        "not an IDX file": lambda: images.write_bytes(b"not an idx file at all"),
    }
    for message, damage in damages.items():
        damage()
        with pytest.raises((FileNotFoundError, ValueError), match=message):
            load("emnist", data_dir=tmp_path)
    assert list(cache.folder().iterdir()) == []


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "PPM"])
def test_every_lossless_encoding_gives_the_same_pixels(kind):
    from tests.support.files import encoded

    for shape in ((9, 7), (9, 7, 3)):
        if kind == "WEBP" and len(shape) == 2:
            continue  # WebP has no grey
        pixels = RNG.integers(0, 256, shape, dtype=np.uint8)
        assert np.array_equal(sources.decode_image(encoded(pixels, kind)).squeeze(), pixels)


def test_palettes_and_transparency_become_colours():
    from PIL import Image

    for mode in ("P", "RGBA", "CMYK"):
        buffer = io.BytesIO()
        Image.new("RGB", (4, 4), (255, 0, 0)).convert(mode).save(buffer, "TIFF")
        pixels = sources.decode_image(buffer.getvalue())
        assert pixels.shape == (4, 4, 3)
        assert pixels[0, 0].tolist() == pytest.approx([255, 0, 0], abs=2)


def test_a_missing_column_names_what_was_found(tmp_path):
    write_images(tmp_path / "cifar10/train.parquet", "picture", np.zeros((5, 32, 32, 3), np.uint8), label=range(5))
    with pytest.raises(ValueError, match=r"no image column; looked for img or image, found picture, label"):
        load("cifar10", data_dir=tmp_path)


def test_images_of_two_sizes_are_refused_and_leave_no_entry(tmp_path):
    for name, side in (("train", 32), ("test", 30)):
        x = np.zeros((5, side, side, 3), np.uint8)
        write_images(tmp_path / f"cifar10/{name}.parquet", "img", x, label=range(5))
    with pytest.raises(ValueError, match="one size"):
        load("cifar10", data_dir=tmp_path)
    assert list(cache.folder().iterdir()) == []


def test_decoding_happens_once_and_again_when_a_file_changes(tmp_path, monkeypatch):
    write_cifar10(tmp_path)
    calls = []
    real = sources.decode_image
    monkeypatch.setattr(sources, "decode_image", lambda value: calls.append(1) or real(value))
    load("cifar10", data_dir=tmp_path, clients=4)
    assert len(calls) == 200
    load("cifar10", data_dir=tmp_path, clients=2, alpha=0.1)
    assert len(calls) == 200
    file = tmp_path / "cifar10/plain_text/test-00000-of-00001.parquet"
    os.utime(file, ns=(1, file.stat().st_mtime_ns + 10**9))
    load("cifar10", data_dir=tmp_path, clients=4)
    assert len(calls) == 400


def test_a_build_that_dies_leaves_nothing_and_a_race_keeps_the_first(tmp_path):
    def dies(place: Path) -> None:
        (place / "x.npy").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.entry("a", "1", dies, tmp_path)
    assert list(tmp_path.iterdir()) == []

    def loses(place: Path) -> None:
        (tmp_path / "a-1").mkdir()
        (tmp_path / "a-1" / "first").touch()
        (place / "second").touch()

    place = cache.entry("a", "1", loses, tmp_path)
    assert [file.name for file in place.iterdir()] == ["first"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["a-1"]


def test_progress_is_plain_lines_when_not_on_a_terminal(tmp_path, capsys):
    write_cifar10(tmp_path)
    load("cifar10", data_dir=tmp_path, clients=4)
    output = capsys.readouterr()
    assert "decoding cifar10: 200/200" in output.err
    assert output.out == ""


def test_an_absent_package_says_how_to_install_it(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'pfedgate\[data\]'"):
        load("cifar10", source="hub")
