"""Data sets that come with the package are the real images, whole, and licensed."""

from __future__ import annotations

import hashlib
import importlib.util
import lzma
from pathlib import Path

import numpy as np
import pytest
import torch

from pfedgate.data import load

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "src/pfedgate/data/assets"


def test_fashion_holds_six_hundred_images_of_each_class_as_the_script_drew_them():
    spec = importlib.util.spec_from_file_location("embed_fashion", ROOT / "scripts/embed-fashion.py")
    assert spec is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert hashlib.sha256(lzma.decompress((ASSETS / "fashion.npy.xz").read_bytes())).hexdigest() == script.DIGEST
    federation = load("fashion")
    assert federation.histogram().sum(0).tolist() == [600] * 10
    assert (federation.input_shape, federation.classes, len(federation.clients)) == ((1, 28, 28), 10, 20)
    assert federation.class_names[9] == "ankle boot"
    every = federation.pool.x(torch.arange(6000))
    assert len(np.unique(every.reshape(6000, -1).numpy(), axis=0)) > 5990, "real images hardly repeat"
    ready = federation.prepare(every)
    assert abs(float(ready.mean())) < 0.01
    assert abs(float(ready.std()) - 1) < 0.01


def test_fashion_is_licensed_where_wheels_look_for_it():
    notice = (ASSETS / "fashion.LICENSE.txt").read_text()
    assert "Zalando" in notice
    assert "Permission is hereby granted" in notice
    assert '"src/pfedgate/data/assets/*.LICENSE.txt"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("name", ["digits", "fashion"])
def test_embedded_data_needs_no_preparation(name):
    from pfedgate.data import prepare

    with pytest.raises(ValueError, match="installed already"):
        prepare(name)
