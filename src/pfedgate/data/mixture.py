"""Clients who see different things: handwritten digits, handwritten letters, or clothes, with labels of their own."""

from __future__ import annotations

from typing import Any

import numpy as np

from pfedgate.core.seeds import numpy_generator
from pfedgate.data import cache
from pfedgate.data.datasets import CHARACTERS, DATASETS, EMBEDDED, MNIST, prepare
from pfedgate.data.federation import Federation
from pfedgate.data.partition import Partition, numbered
from pfedgate.data.pool import ArrayPool, Rows
from pfedgate.data.sharing import Options, assemble, read, share_out


def mixture(clients: int = 30, samples: int = 12_000, **options: Any) -> Federation:
    """A third of the clients has FEMNIST's digits, a third its letters, and a third Fashion-MNIST: 72 classes.

    `samples` are drawn from the three evenly. Other options are those of `load`; each third is partitioned by them
    (default: Dirichlet). FEMNIST is read or fetched as `load("femnist")` does.
    """
    sharing = read(Options, {"clients": clients, "samples": samples, **options}, "mixture")
    if clients < 3 or samples > 18_000:
        raise ValueError(f"a mixture needs at least 3 clients and at most 18,000 samples, got {clients} and {samples}")
    glyphs, _ = cache.read(prepare("femnist", sharing))
    clothes = EMBEDDED["fashion"]()
    characters = glyphs["y"].tensor.numpy()
    sources = (
        (glyphs, np.flatnonzero(characters < 10), 0),
        (glyphs, np.flatnonzero(characters >= 10), 0),
        (clothes, np.arange(len(clothes["y"])), len(CHARACTERS)),
    )
    x, y, rows, sizes, start = [], [], [], [], 0
    for number, (arrays, pool, shift) in enumerate(sources):
        order = numpy_generator(sharing.seed, "mixture", number).permutation(len(pool))
        mine = np.sort(pool[order[: samples // 3]])
        x.append(arrays["x"].tensor.numpy()[mine])
        y.append(arrays["y"].tensor.numpy()[mine] + shift)
        labels = np.unique(y[-1], return_inverse=True)[1]
        some = (clients + 2 - number) // 3
        part = share_out(sharing, labels, kind=sharing.partition or "dirichlet", clients=some, where="mixture")
        rows.append(part.rows + start)
        sizes.append(part.sizes())
        start += len(mine)
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(sizes))])
    about = {"partition": part.about["partition"], "alpha": sharing.alpha}
    partition = Partition(numbered(clients), np.concatenate(rows), offsets, about)
    return assemble(
        "mixture",
        ArrayPool(Rows(np.concatenate(x)), Rows(np.concatenate(y)), image=True),
        partition,
        sharing,
        classes=len(CHARACTERS) + 10,
        class_names=(*CHARACTERS, *(DATASETS["fashion"].class_names or ())),
        prepare=MNIST,
        about={"dataset": "mixture", "pool": start, "used": start},
    )
