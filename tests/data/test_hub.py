"""The hub path: the package `datasets` itself reads local parquet files, only the download is replaced."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.files import write_idx, write_images

from pfedgate.data import DATASETS, load

hub = pytest.importorskip("datasets", reason="the extra 'data' is not installed")
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _offline(own_cache, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def local_hub(monkeypatch, tmp_path: Path, repo: str) -> list[str]:
    real, asked = hub.load_dataset, []

    def load_dataset(name, revision=None):
        asked.append(name)
        assert name == repo
        files = {split: str(tmp_path / f"{split}.parquet") for split in ("test", "train")}
        present = {split: file for split, file in files.items() if Path(file).exists()}
        return real("parquet", data_files=present, cache_dir=str(tmp_path / "hf"))

    monkeypatch.setattr(hub, "load_dataset", load_dataset)
    return asked


def test_cifar10_from_the_hub_equals_the_local_folder_and_is_fetched_once(tmp_path, monkeypatch):
    x, y = RNG.integers(0, 256, (120, 32, 32, 3), dtype=np.uint8), np.arange(120) % 10
    write_images(tmp_path / "train.parquet", "img", x[:100], label=y[:100])
    write_images(tmp_path / "test.parquet", "img", x[100:], label=y[100:])
    asked = local_hub(monkeypatch, tmp_path, "uoft-cs/cifar10")
    fetched = load("cifar10", clients=3)
    local = load("cifar10", clients=3, data_dir=tmp_path)
    every = torch.arange(120)
    assert np.array_equal(fetched.pool.x(every).permute(0, 2, 3, 1).numpy(), x)
    assert torch.equal(fetched.pool.y(every), local.pool.y(every))
    load("cifar10", clients=2)
    assert asked == ["uoft-cs/cifar10"]


def test_femnist_from_the_hub_has_its_writers(tmp_path, monkeypatch):
    names = [f"f{i % 5:04d}_00" for i in range(50)]
    x = RNG.integers(0, 256, (50, 28, 28), dtype=np.uint8)
    write_images(tmp_path / "train.parquet", "image", x, writer_id=names, hsf_id=[0] * 50, character=range(50))
    local_hub(monkeypatch, tmp_path, "flwrlabs/femnist")
    assert list(load("femnist").clients) == sorted(set(names))


def test_another_repository_may_be_named(tmp_path, monkeypatch):
    x = RNG.integers(0, 256, (90, 28, 28), dtype=np.uint8)
    write_images(tmp_path / "train.parquet", "image", x, label=np.arange(90) % 62)
    asked = local_hub(monkeypatch, tmp_path, "someone/emnist")
    assert len(load("emnist", repo="someone/emnist", samples=1.0, clients=3).pool) == 90
    assert asked == ["someone/emnist"]


def test_emnist_is_fetched_as_idx_files(tmp_path, monkeypatch):
    import huggingface_hub

    x, y = RNG.integers(0, 256, (60, 28, 28), dtype=np.uint8), np.arange(60) % 62
    for part, cut in (("train", slice(0, 40)), ("test", slice(40, 60))):
        write_idx(tmp_path / f"emnist-byclass-{part}-images-idx3-ubyte.gz", x[cut])
        write_idx(tmp_path / f"emnist-byclass-{part}-labels-idx1-ubyte.gz", y[cut])

    def download(repo, file, repo_type):
        assert (repo, repo_type) == (DATASETS["emnist"].repo, "dataset")
        return str(tmp_path / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    federation = load("emnist", samples=1.0, clients=2)
    assert np.array_equal(federation.pool.x(torch.arange(60))[:, 0].numpy(), x)


def test_a_failed_download_says_what_to_do(monkeypatch):
    def fails(name, revision=None):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(hub, "load_dataset", fails)
    with pytest.raises(ConnectionError, match=r"cannot fetch cifar10 .*no route to host.*data_dir or PFEDGATE_DATA"):
        load("cifar10")
