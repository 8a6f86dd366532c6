"""The data sets by name, and `load`, which makes a federation of one of them."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pfedgate.data import cache, sources
from pfedgate.data import partition as partitions
from pfedgate.data.federation import Federation
from pfedgate.data.partition import Partition
from pfedgate.data.pool import ArrayPool, Normalise, Rows
from pfedgate.data.seeds import generator
from pfedgate.data.sources import Columns
from pfedgate.data.split import assemble

PARTITIONS = ("dirichlet", "iid", "pathological", "pachinko", "owner")
CHARACTERS = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
# FedEM and pFedGate use the constants of CIFAR-10 for CIFAR-100 too, and those of MNIST for all characters.
CIFAR = Normalise((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
MNIST = Normalise((0.1307,), (0.3081,))
DEFAULT_COLUMNS = Columns()


@dataclass(frozen=True)
class Dataset:
    """One data set: where it comes from, how its columns are called, and the paper's way to share it out."""

    name: str
    classes: int
    clients: int
    prepare: Normalise
    repo: str | None = None  # on the hub
    columns: Columns = DEFAULT_COLUMNS
    idx_prefix: str | None = None  # the hub repository holds IDX files of this name, not parquet
    partition: str = "dirichlet"
    samples: float | None = None  # share of the pool used by default
    class_names: tuple[str, ...] | None = None
    note: str = ""


DATASETS = {
    data.name: data
    for data in (
        Dataset(
            "digits",
            10,
            20,
            Normalise((0.3053,), (0.3761,)),
            class_names=CHARACTERS[:10],
            note="1,797 images of 8×8, part of scikit-learn: no download",
        ),
        Dataset(
            "cifar10",
            10,
            100,
            CIFAR,
            "uoft-cs/cifar10",
            Columns(image=("img", "image")),
            class_names=("plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
            note="60,000 colour images of 32×32",
        ),
        Dataset(
            "cifar100",
            100,
            50,
            CIFAR,
            "uoft-cs/cifar100",
            Columns(image=("img", "image"), label=("fine_label", "label"), coarse=("coarse_label",)),
            note="60,000 colour images of 32×32, 20 coarse labels",
        ),
        Dataset(
            "emnist",
            62,
            100,
            MNIST,
            "Royc30ne/emnist-byclass",
            idx_prefix="emnist-byclass",
            samples=0.1,
            class_names=CHARACTERS,
            note="EMNIST by-class, 814,255 characters of 28×28, of which the paper uses a tenth",
        ),
        Dataset(
            "emnist_sd19",
            62,
            100,
            MNIST,
            class_names=CHARACTERS,
            note="a substitute for EMNIST by-class made from NIST SD19; local folder only, not comparable",
        ),
        Dataset(
            "femnist",
            62,
            539,
            MNIST,
            "flwrlabs/femnist",
            Columns(label=("character", "label"), owner=("writer_id",)),
            partition="owner",
            class_names=CHARACTERS,
            note="NIST SD19 by writer: a client is a writer",
        ),
    )
}


@dataclass(frozen=True)
class Options:
    """What `load` understands. None means: as in the paper for this data set."""

    clients: int | float | None = None  # how many; for data by owner also a share of the owners
    samples: int | float | None = None  # use so many random samples of the pool, or a share (≤ 1.0)
    partition: str | None = None  # dirichlet, iid, pathological, pachinko, owner
    alpha: float = 0.4  # Dirichlet concentration: smaller is more different
    beta: float = 10.0  # Pachinko: concentration of fine labels inside a coarse one
    clusters: int | None = None  # Dirichlet: merge classes into so many groups (FedEM's n_components)
    shards: int = 2  # pathological: shards per client
    min_samples: int | None = None  # floor per client: 10; by owner 3, and smaller owners are left out
    novel: float = 0.0  # share of clients held out of training (the paper: 0.2)
    val: bool = True  # 60/20/20 with, 80/20 without; the test sets are the same
    test: float = 0.2  # share of a client's samples that is its test set
    seed: int = 0
    source: str = "auto"  # local, hub, or auto: local if there is a copy
    data_dir: str | Path | None = None  # folder of local copies; else PFEDGATE_DATA
    cache_dir: str | Path | None = None  # decoded arrays; else PFEDGATE_CACHE or ~/.cache/pfedgate
    repo: str | None = None  # another repository of the hub with the same schema
    revision: str | None = None  # its revision
    writers: int | float | None = None  # another name for clients where a client is a writer


def unknown(kind: str, got: str, known: Iterable[str]) -> str:
    """Message for a name that does not exist, with the nearest that does."""
    names = list(known)
    near = difflib.get_close_matches(got, names, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown {kind} {got!r}{hint} (known: {', '.join(names)})"


def load(name: str, **options: Any) -> Federation:
    """A federation of a data set by name; see `DATASETS` for the names and `Options` for the options.

    >>> federation = load("digits", clients=10, alpha=0.4, novel=0.2)
    >>> len(federation.clients), len(federation.novel), federation.input_shape, federation.classes
    (8, 2, (1, 8, 8), 10)
    >>> federation.part(federation.clients[0], "train").x.dtype
    torch.uint8
    """
    if name not in DATASETS:
        raise ValueError(unknown("data set", name, DATASETS))
    known = [option.name for option in dataclasses.fields(Options)]
    for option in options:
        if option not in known:
            raise TypeError(unknown(f"option of {name}", option, known))
    chosen = Options(**options)
    data = DATASETS[name]
    place = None if name == "digits" else prepare(name, chosen)
    arrays, notes = _digits() if place is None else cache.read(place)
    pool = ArrayPool(arrays["x"], arrays["y"], image=True)
    labels = arrays["y"].tensor.numpy()
    rows = _sample(len(pool), data.samples if chosen.samples is None else chosen.samples, chosen.seed)
    partition = _partition(data, chosen, labels[rows], arrays, notes, rows).over(rows)
    return assemble(
        name,
        pool,
        partition,
        classes=data.classes,
        val=chosen.val,
        test=chosen.test,
        novel=chosen.novel,
        seed=chosen.seed,
        class_names=data.class_names,
        prepare=data.prepare,
        about={"dataset": name, "pool": len(pool), "used": len(partition.rows), "note": data.note},
    )


def prepare(name: str, options: Options | None = None) -> Path:
    """Fetch and decode a data set if that was not done yet; returns its folder in the cache."""
    data, options = DATASETS[name], options or Options()
    if options.source not in ("auto", "local", "hub"):
        raise ValueError(unknown("source", options.source, ("auto", "local", "hub")))
    folder = sources.local_folder(name, options.data_dir) if options.source != "hub" else None
    if folder is not None:
        return sources.from_folder(name, folder, data.columns, options.cache_dir)
    repo = options.repo or data.repo
    if options.source == "local" or repo is None:
        raise FileNotFoundError(
            f"no local copy of {name}: set data_dir or PFEDGATE_DATA to a folder that holds {name}/*.parquet"
        )
    if data.idx_prefix and options.repo is None:
        return sources.idx_from_hub(name, repo, data.idx_prefix, options.cache_dir)
    return sources.from_hub(name, repo, data.columns, options.cache_dir, options.revision)


def _digits() -> tuple[dict[str, Rows], dict[str, Any]]:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    # Values are 0…16; spread over a byte they are exact to half a grey level and stored like all images.
    x = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[..., None]
    return {"x": Rows(x), "y": Rows(bunch.target.astype(np.int64))}, {}


def _sample(pool: int, samples: int | float | None, seed: int) -> partitions.Ints:
    if samples is None:
        return np.arange(pool)
    wanted = int(pool * samples) if isinstance(samples, float) and samples <= 1 else int(samples)
    if not 1 <= wanted <= pool:
        raise ValueError(f"samples={samples}: the pool has {pool}")
    return np.sort(generator(seed, "samples").permutation(pool)[:wanted])


def _partition(
    data: Dataset,
    options: Options,
    labels: partitions.Ints,
    arrays: dict[str, Rows],
    notes: dict[str, Any],
    rows: partitions.Ints,
) -> Partition:
    kind = options.partition or data.partition
    if kind not in PARTITIONS:
        raise ValueError(unknown("partition", kind, PARTITIONS))
    if options.writers is not None and (options.clients is not None or kind != "owner"):
        raise ValueError("writers is another name for clients where a client is a writer: give one of them")
    clients = options.writers if options.clients is None else options.clients
    seed, least = options.seed, options.min_samples
    if kind == "owner":
        if "owner" not in arrays:
            raise ValueError(f"{data.name} has no owners: use another partition")
        owners = np.asarray(notes["owners"])[arrays["owner"].tensor.numpy()[rows]]
        if clients is None:
            clients = min(data.clients, len(partitions.by_owner(owners, min_samples=least or 3).ids))
        return partitions.by_owner(owners, keep=clients, min_samples=least or 3, seed=seed)
    number = data.clients if clients is None else int(clients)
    floor = 10 if least is None else least
    if kind == "dirichlet":
        return partitions.dirichlet(
            labels, number, alpha=options.alpha, clusters=options.clusters, min_samples=floor, seed=seed
        )
    if kind == "pathological":
        return partitions.pathological(labels, number, shards=options.shards, seed=seed, min_samples=floor)
    if kind == "pachinko":
        if "coarse" not in arrays:
            raise ValueError(f"{data.name} has no coarse labels, which Pachinko needs")
        coarse = arrays["coarse"].tensor.numpy()[rows]
        return partitions.pachinko(
            labels, coarse, number, alpha=options.alpha, beta=options.beta, seed=seed, min_samples=floor
        )
    return partitions.iid(labels, number, seed=seed, min_samples=floor)
