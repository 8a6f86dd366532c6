"""How samples are shared out among clients: the options, and the partition they describe."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from pfedgate.core.errors import unknown
from pfedgate.data import partition as partitions
from pfedgate.data.partition import Ints, Partition
from pfedgate.data.seeds import generator

PARTITIONS = ("dirichlet", "iid", "pathological", "pachinko", "owner")


@dataclass(frozen=True)
class Sharing:
    """Options of every loader. None means: the data set's own default."""

    clients: int | float | None = None  # how many; where a client is an owner also a share of the owners
    samples: int | float | None = None  # use so many random samples of the pool, or a share (≤ 1.0)
    partition: str | None = None  # dirichlet, iid, pathological, pachinko, owner
    alpha: float = 0.4  # Dirichlet and Pachinko: smaller makes clients more different
    beta: float = 10.0  # Pachinko: concentration of fine labels inside a coarse one
    clusters: int | None = None  # Dirichlet: merge classes into so many groups (FedEM's n_components)
    shards: int = 2  # pathological: shards per client
    min_samples: int | None = None  # floor per client: 10; owners with fewer than 3 are left out
    novel: float = 0.0  # share of clients held out of training (the paper: 0.2)
    val: bool = True  # 60/20/20 with, 80/20 without; the test sets are the same
    test: float = 0.2  # share of a client's samples that is its test set
    seed: int = 0


@dataclass(frozen=True)
class Options(Sharing):
    """Options of `load`: those of `Sharing`, and where the data comes from."""

    writers: int | float | None = None  # another name for clients where a client is a writer
    source: str = "auto"  # local, hub, or auto: local if there is a copy
    data_dir: str | Path | None = None  # folder of local copies; else PFEDGATE_DATA
    cache_dir: str | Path | None = None  # decoded arrays; else PFEDGATE_CACHE or ~/.cache/pfedgate
    repo: str | None = None  # another repository of the hub with the same schema
    revision: str | None = None  # its revision


T = TypeVar("T", bound=Sharing)


def read(cls: type[T], given: Mapping[str, Any], where: str) -> T:
    """Options from keyword arguments; a name that does not exist is an error."""
    known = [option.name for option in dataclasses.fields(cls)]
    for option in given:
        if option not in known:
            raise TypeError(unknown(f"option of {where}", option, known))
    return cls(**given)


def sample(pool: int, samples: int | float | None, seed: int) -> Ints:
    """Rows of the pool that are used, in order.

    >>> len(sample(100, 0.1, 0)), len(sample(100, 30, 0)), len(sample(100, None, 0))
    (10, 30, 100)
    """
    if samples is None:
        return np.arange(pool)
    wanted = count(samples, pool)
    if not 1 <= wanted <= pool:
        raise ValueError(f"samples={samples}: the pool has {pool}")
    return np.sort(generator(seed, "samples").permutation(pool)[:wanted])


def count(wanted: int | float, of: int) -> int:
    """A number as it is, a fraction (a float up to 1.0) of the whole."""
    return int(of * wanted + 1e-9) if isinstance(wanted, float) and wanted <= 1 else int(wanted)


def share_out(
    options: Sharing,
    labels: Ints,
    *,
    kind: str,
    clients: int | float | None,
    owners: np.ndarray[Any, Any] | None = None,
    coarse: Ints | None = None,
    where: str,
) -> Partition:
    """The partition these options describe, over positions in `labels`."""
    if kind not in PARTITIONS:
        raise ValueError(unknown("partition", kind, PARTITIONS))
    seed, least = options.seed, options.min_samples
    if kind == "owner":
        if owners is None:
            raise ValueError(f"{where} has no owners: use another partition")
        return partitions.by_owner(owners, keep=clients, min_samples=3 if least is None else least, seed=seed)
    if clients is None:
        raise ValueError(f"{where}: partition={kind!r} needs clients=…")
    if labels.ndim != 1 and kind != "iid":
        raise ValueError(f"{where}: partition={kind!r} needs one label per sample; use iid or owners")
    number, floor = int(clients), 10 if least is None else least
    if kind == "dirichlet":
        return partitions.dirichlet(
            labels, number, alpha=options.alpha, clusters=options.clusters, min_samples=floor, seed=seed
        )
    if kind == "pathological":
        return partitions.pathological(labels, number, shards=options.shards, seed=seed, min_samples=floor)
    if kind == "pachinko":
        if coarse is None:
            raise ValueError(f"{where} has no coarse labels, which Pachinko needs")
        return partitions.pachinko(
            labels, coarse, number, alpha=options.alpha, beta=options.beta, seed=seed, min_samples=floor
        )
    return partitions.iid(labels, number, seed=seed, min_samples=floor)
