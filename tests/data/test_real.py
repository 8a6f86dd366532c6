"""The real data sets, where a local copy exists (PFEDGATE_DATA, or ../shared/data beside the repository)."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from pfedgate.data import load
from pfedgate.data.federation import PARTS

pytest.importorskip("pyarrow")
ROOT = Path(os.environ.get("PFEDGATE_DATA") or Path(__file__).parents[3] / "shared" / "data")


def folder(name: str) -> Path:
    if not (ROOT / name).is_dir():
        pytest.skip(f"no local copy of {name} in {ROOT}")
    return ROOT


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return os.environ.get("PFEDGATE_CACHE") or tmp_path_factory.mktemp("cache")


@pytest.mark.slow
def test_cifar10_pixels_have_their_known_mean_and_deviation(cache):
    federation = load("cifar10", data_dir=folder("cifar10"), cache_dir=cache)
    assert len(federation.pool) == 60_000
    assert len(federation.clients) == 100
    train = federation.pool.x(torch.arange(50_000)).float() / 255
    assert train.mean((0, 2, 3)).tolist() == pytest.approx([0.4914, 0.4822, 0.4465], abs=1e-3)
    assert train.std((0, 2, 3)).tolist() == pytest.approx([0.2470, 0.2435, 0.2616], abs=1e-3)
    # The first labels of the first training batch and of the test batch, in the original order.
    labels = federation.pool.y(torch.arange(60_000))
    assert labels[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    assert labels[50_000:50_010].tolist() == [3, 8, 8, 0, 6, 6, 1, 6, 3, 1]
    assert torch.bincount(labels).tolist() == [6000] * 10


@pytest.mark.slow
def test_cifar10_ends_at_a_thousand_clients(cache):
    federation = load("cifar10", data_dir=folder("cifar10"), cache_dir=cache, clients=1000, alpha=0.01)
    assert federation.histogram().sum(1).min() >= 10


@pytest.mark.slow
def test_femnist_has_its_writers_and_no_overlap(cache):
    federation = load("femnist", data_dir=folder("femnist"), cache_dir=cache)
    assert len(federation.clients) == 539
    assert federation.classes == 62
    assert list(federation.clients) == sorted(federation.clients)
    seen = np.concatenate([federation.part(c, p).rows.numpy() for c in federation.ids for p in PARTS])
    assert len(np.unique(seen)) == len(seen) == 118_629
    # Dark ink on white paper: the background is the brightest value.
    assert federation.part(federation.clients[0], "train").x.float().mean() > 200


@pytest.mark.slow
def test_the_substitute_for_emnist_has_light_ink_and_62_classes(cache):
    federation = load("emnist_sd19", data_dir=folder("emnist_sd19"), cache_dir=cache)
    assert len(federation.pool) == 81_425
    assert len(federation.clients) == 100
    assert (federation.histogram().sum(0) > 0).sum() == 62
    assert federation.part(federation.clients[0], "train").x.float().mean() < 60
