"""How samples are shared out among clients: options, the partition they describe, and each client's three parts.

The order is fixed: partition → clients → samples. Test samples are cut off first, from one unstratified shuffle, so
test sets are the same with and without a validation part.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from pfedgate.core.errors import unknown, warn
from pfedgate.core.ids import Ids
from pfedgate.core.seeds import numpy_generator
from pfedgate.data.federation import PARTS, Federation
from pfedgate.data.partition import Ints, Partition, by_owner, dirichlet, iid, pachinko, pathological
from pfedgate.data.pool import LOOKS, FromPool, LookPool, Normalise, Pool, Rows

VAL = 0.25  # share of the samples that test leaves: 60 / 20 / 20
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
    domains: str | None = None  # clients differ in looks: rotate, negate, or rotate+negate (images only)
    domains_each: int = 1  # domains inside a client; its samples are shared out among them
    # A client becomes one for each of these ranges of classes, such as "0-9", that it has samples of; the rest is left
    # out. Of a single range the labels count from 0.
    tasks: tuple[str, ...] | None = None
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
    names = [option.name for option in dataclasses.fields(cls)]
    for option in given:
        if option not in names:
            raise TypeError(unknown(f"option of {where}", option, names))
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
    return np.sort(numpy_generator(seed, "samples").permutation(pool)[:wanted])


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
        partition = by_owner(owners, keep=clients, min_samples=3 if least is None else least, seed=seed)
        if dropped := partition.about["dropped"]:
            warn(
                f"{where}: {dropped} of {partition.about['owners']} owners are left out, because they have fewer than "
                f"{partition.about['min_samples']} samples (min_samples)"
            )
        return partition
    if clients is None:
        raise ValueError(f"{where}: partition={kind!r} needs clients=…")
    if labels.ndim != 1 and kind != "iid":
        raise ValueError(f"{where}: partition={kind!r} needs one class per sample; use iid or owners")
    number, floor = int(clients), 10 if least is None else least
    if kind == "dirichlet":
        return dirichlet(labels, number, alpha=options.alpha, clusters=options.clusters, min_samples=floor, seed=seed)
    if kind == "pathological":
        return pathological(labels, number, shards=options.shards, seed=seed, min_samples=floor)
    if kind == "pachinko":
        if coarse is None:
            raise ValueError(f"{where} has no coarse labels, which Pachinko needs")
        return pachinko(labels, coarse, number, alpha=options.alpha, beta=options.beta, seed=seed, min_samples=floor)
    return iid(labels, number, seed=seed, min_samples=floor)


def carve(n: Ints, share: float) -> Ints:
    """How many of n are cut off: n - ⌊(1 - share)·n⌋, never fewer than the share.

    >>> carve(np.array([10, 11, 3]), 0.2).tolist()
    [2, 3, 1]
    """
    # The small term keeps exact products such as 0.8 × 15 from falling below the whole number they are.
    rest: Ints = np.floor((1 - share) * n + 1e-9).astype(np.int64)
    return n - rest


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
    keys = numpy_generator(seed, "split").random(pool_size)
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
    novel = np.zeros(clients, dtype=np.bool_)
    novel[numpy_generator(seed, "novel").permutation(clients)[:count]] = True
    return novel


def spread(pool: Pool, partition: Partition, options: Sharing) -> Pool:
    """The same samples, each as its client sees it: clients are dealt to the domains by the seed, evenly.

    A client's domains are neighbours (k, k + 1, …), and its samples are dealt to them by the seed.
    """
    kinds = (options.domains or "").split("+")
    for kind in kinds:
        if kind not in LOOKS:
            raise ValueError(unknown("kind of domain", kind, LOOKS))
    if len(pool.input_shape) != 3:
        raise ValueError(f"domains are for images, not for inputs of shape {pool.input_shape}")
    number = max(LOOKS[kind] for kind in kinds)
    if not 1 <= options.domains_each <= number:
        raise ValueError(f"domains_each must be 1 to {number}, got {options.domains_each}")
    own = dealt(len(partition.ids), number, options.seed)
    domain = np.zeros(len(pool), np.uint8)
    inside = numpy_generator(options.seed, "domains", "samples").integers(options.domains_each, size=len(pool))
    domain[partition.rows] = (np.repeat(own, partition.sizes()) + inside[partition.rows]) % number
    return LookPool(pool, Rows(domain), tuple(kinds))


def dealt(clients: int, domains: int, seed: int) -> np.ndarray:
    """The first domain of every client.

    >>> sorted(dealt(6, 4, seed=0).tolist())
    [0, 0, 1, 1, 2, 3]
    """
    return numpy_generator(seed, "domains").permutation(clients) % domains


def ends(text: str) -> tuple[int, int]:
    """The first and the last class of a range.

    >>> ends("10-35")
    (10, 35)
    """
    first, dash, last = text.partition("-")
    if not (dash and first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise ValueError(f"tasks are ranges of classes such as '0-9', got {text!r}")
    return int(first), int(last)


def by_task(pool: Pool, partition: Partition, options: Sharing) -> tuple[Partition, int]:
    """A client for every client and task, named client/task, and the first class; too few samples make none."""
    least = max(3, options.min_samples or 0)
    ids, groups = [], []
    for client, name in enumerate(partition.ids.tolist()):
        rows = partition.of(client)
        labels = pool.y(torch.from_numpy(rows)).numpy()
        for text in options.tasks or ():
            first, last = ends(text)
            mine = rows[(labels >= first) & (labels <= last)]
            if len(mine) >= least:
                ids.append(f"{name}/{text}")
                groups.append(mine)
    if not ids:
        raise ValueError(f"no client has {least} samples of a task in {', '.join(options.tasks or ())}")
    offsets = np.cumsum([0, *map(len, groups)]).astype(np.int64)
    about = {**partition.about, "clients_before": len(partition.ids)}
    return Partition(np.array(ids), np.concatenate(groups), offsets, about), ends((options.tasks or ("0-0",))[0])[0]


def assemble(
    name: str,
    pool: Pool,
    partition: Partition,
    options: Sharing,
    *,
    classes: int,
    class_names: tuple[str, ...] | None = None,
    task: str = "classification",
    prepare: Normalise | None = None,
    about: Mapping[str, Any] | None = None,
) -> Federation:
    """The last step of every loader: hold out clients, split samples, put it together."""
    if len(set(partition.ids.tolist())) != len(partition.ids):
        raise ValueError("two clients have the same id")
    tasks = {}
    if options.tasks:
        if task != "classification":
            raise ValueError(f"tasks are ranges of classes: {task} has none")
        partition, first = by_task(pool, partition, options)
        tasks = {"tasks": list(options.tasks)}
        if len(options.tasks) == 1:
            pool, (_, last) = FromPool(pool, first), ends(options.tasks[0])
            classes, class_names = last - first + 1, class_names and class_names[first : last + 1]
    held_out = hold_out(len(partition.ids), options.novel, options.seed)
    rows, bounds = split(partition, len(pool), val=options.val, test=options.test, seed=options.seed)
    looks = {}
    if options.domains is not None:
        pool = spread(pool, partition, options)
        looks = {"domains": options.domains, "domains_each": options.domains_each}
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
        task=task,
        prepare=prepare,
        about={**(about or {}), **partition.about, "seed": options.seed, **looks, **tasks},
    )
