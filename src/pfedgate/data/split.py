"""From a partition to a federation: novel clients, then train, validation and test of every client.

The order is fixed: partition → clients → samples. Test is carved first from one unstratified shuffle, so
test sets are the same with and without a validation part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from pfedgate.data.federation import PARTS, Federation, Ids
from pfedgate.data.options import Sharing
from pfedgate.data.partition import Ints, Partition
from pfedgate.data.pool import Normalise, Pool, Rows
from pfedgate.data.seeds import generator

VAL = 0.25  # of what test leaves: 60 / 20 / 20


def carve(n: Ints, share: float) -> Ints:
    """How many of n are cut off: n - ⌊(1 - share)·n⌋, never fewer than the share.

    >>> carve(np.array([10, 11, 3]), 0.2).tolist()
    [2, 3, 1]
    """
    # The small term keeps exact products such as 0.8 × 15 from falling below the whole number they are.
    kept: Ints = np.floor((1 - share) * n + 1e-9).astype(np.int64)
    return n - kept


def split(
    partition: Partition, pool_size: int, *, val: bool = True, test: float = 0.2, seed: int = 0
) -> tuple[Ints, Ints]:
    """Rows of all clients as train, val, test one after the other, and the bounds of these parts.

    Every row of the pool has one random key and a client's rows are taken in the order of their keys, so a
    client's split does not depend on who else is there.
    """
    if not 0 < test < 1:
        raise ValueError(f"test must be a share between 0 and 1, got {test}")
    sizes = partition.sizes()
    least = 3 if val else 2
    if sizes.min() < least:
        small = int(sizes.argmin())
        raise ValueError(
            f"client {str(partition.ids[small])!r} has {sizes[small]} samples: {least} are needed for "
            f"{' / '.join(PARTS) if val else 'train / test'}; raise min_samples or use fewer clients"
        )
    keys = generator(seed, "split").random(pool_size)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    # Test is the head of the shuffle, then val, then train; stored the other way round: train, val, test.
    rows = partition.rows[np.lexsort((-keys[partition.rows], owner))]
    n_test = carve(sizes, test)
    n_val = carve(sizes - n_test, VAL) if val else np.zeros_like(sizes)
    n_train = sizes - n_test - n_val
    counts = np.stack([n_train, n_val, n_test], axis=1).reshape(-1)
    bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return rows, bounds


def hold_out(clients: int, share: float, seed: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which clients are novel: ⌈share · clients⌉ of them, at random; never all."""
    if not 0 <= share < 1:
        raise ValueError(f"novel must be a share in [0, 1), got {share}")
    count = min(math.ceil(share * clients - 1e-9), clients - 1)
    chosen = np.zeros(clients, dtype=np.bool_)
    chosen[generator(seed, "novel").permutation(clients)[:count]] = True
    return chosen


def assemble(
    name: str,
    pool: Pool,
    partition: Partition,
    options: Sharing,
    *,
    classes: int,
    class_names: tuple[str, ...] | None = None,
    prepare: Normalise | None = None,
    about: Mapping[str, Any] | None = None,
) -> Federation:
    """The last step of every loader: hold out clients, split samples, put it together."""
    if len(set(partition.ids.tolist())) != len(partition.ids):
        raise ValueError("two clients have the same id")
    held_out = hold_out(len(partition.ids), options.novel, options.seed)
    rows, bounds = split(partition, len(pool), val=options.val, test=options.test, seed=options.seed)
    narrow = rows.astype(np.int32) if len(pool) < 2**31 else rows
    return Federation(
        name,
        pool,
        Ids(partition.ids),
        Rows(narrow),
        Rows(bounds),
        held_out,
        classes=classes,
        class_names=class_names,
        prepare=prepare,
        about={**(about or {}), **partition.about, "seed": options.seed},
    )
