"""The data sets by name, and `load`, which makes a federation of one of them."""

from __future__ import annotations

import io
import lzma
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pfedgate.core.errors import unknown
from pfedgate.data import cache, sources
from pfedgate.data.federation import Federation
from pfedgate.data.partition import Ints, Partition, by_owner
from pfedgate.data.pool import ArrayPool, Normalise, Rows
from pfedgate.data.sharing import Options, assemble, read, sample, share_out
from pfedgate.data.sources import Columns

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
            "digits", 10, 20, Normalise((0.3053,), (0.3761,)), class_names=CHARACTERS[:10],
            note="1,797 images of 8×8, part of scikit-learn: no download",
        ),
        Dataset(
            "fashion", 10, 20, Normalise((0.2860,), (0.3530,)),
            class_names=(
                "t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"
            ),
            note="6,000 images of Fashion-MNIST, 28×28, part of pfedgate: no download",
        ),
        Dataset(
            "cifar10", 10, 100, CIFAR, "uoft-cs/cifar10", Columns(image=("img", "image")),
            class_names=("plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
            note="60,000 colour images of 32×32",
        ),
        Dataset(
            "cifar100", 100, 50, CIFAR, "uoft-cs/cifar100",
            Columns(image=("img", "image"), label=("fine_label", "label"), coarse=("coarse_label",)),
            note="60,000 colour images of 32×32, 20 coarse labels",
        ),
        Dataset(
            "emnist", 62, 100, MNIST, "Royc30ne/emnist-byclass", idx_prefix="emnist-byclass", samples=0.1,
            class_names=CHARACTERS,
            note="EMNIST by-class, 814,255 characters of 28×28, of which the paper uses a tenth",
        ),
        Dataset(
            "emnist_sd19", 62, 100, MNIST, class_names=CHARACTERS,
            note="a substitute for EMNIST by-class made from NIST SD19; local folder only, not comparable",
        ),
        Dataset(
            "femnist", 62, 539, MNIST, "flwrlabs/femnist",
            Columns(label=("character", "label"), owner=("writer_id",)), partition="owner", class_names=CHARACTERS,
            note="NIST SD19 by writer: a client is a writer",
        ),
    )
}  # fmt: skip


def load(name: str, **options: Any) -> Federation:
    """A federation of a data set by name; see `DATASETS` for the names and `Options` for the options.

    >>> federation = load("digits", clients=10, alpha=0.4, novel=0.2)
    >>> len(federation.clients), len(federation.novel), federation.input_shape, federation.classes
    (8, 2, (1, 8, 8), 10)
    >>> federation.part(federation.clients[0], "train").x.dtype
    torch.uint8
    """
    data, sharing = find(name), read(Options, options, name)
    arrays, notes = (EMBEDDED[name](), {}) if name in EMBEDDED else cache.read(prepare(name, sharing))
    pool = ArrayPool(arrays["x"], arrays["y"], image=True)
    rows = sample(len(pool), data.samples if sharing.samples is None else sharing.samples, sharing.seed)
    partition = _partition(data, sharing, arrays, notes, rows).over(rows)
    return assemble(
        name,
        pool,
        partition,
        sharing,
        classes=data.classes,
        class_names=data.class_names,
        prepare=data.prepare,
        about={"dataset": name, "pool": len(pool), "used": len(partition.rows), "note": data.note},
    )


def find(name: str) -> Dataset:
    """A data set by name; an unknown name is an error that suggests the nearest."""
    if name not in DATASETS:
        raise ValueError(unknown("data set", name, DATASETS))
    return DATASETS[name]


def prepare(name: str, options: Options | None = None) -> Path:
    """Fetch and decode a data set if that was not done yet; returns its folder in the cache.

    What came from the hub is found again by repository and revision without asking the network; delete the
    folder to fetch it anew.
    """
    data, options = find(name), options or Options()
    if name in EMBEDDED:
        raise ValueError(f"{name} needs no preparation: it is installed already")
    if options.source not in ("auto", "local", "hub"):
        raise ValueError(unknown("source", options.source, ("auto", "local", "hub")))
    folder = sources.local_folder(name, options.data_dir) if options.source != "hub" else None
    if folder is not None:
        return sources.from_folder(name, folder, data.columns, options.cache_dir, data.idx_prefix)
    repo = options.repo or data.repo
    if options.source == "local" or repo is None:
        raise FileNotFoundError(
            f"no local copy of {name}: set data_dir or PFEDGATE_DATA to a folder that holds {name}/*.parquet"
        )
    if data.idx_prefix and options.repo is None:
        return sources.idx_from_hub(name, repo, data.idx_prefix, options.cache_dir)
    return sources.from_hub(name, repo, data.columns, options.cache_dir, options.revision)


def _digits() -> dict[str, Rows]:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    # Values are 0…16; spread over a byte they are exact to half a grey level and stored like all images.
    x = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[..., None]
    return {"x": Rows(x), "y": Rows(bunch.target.astype(np.int64))}


def _fashion() -> dict[str, Rows]:
    """Class after class, as `scripts/embed-fashion.py` wrote them."""
    packed = (Path(__file__).parent / "assets/fashion.npy.xz").read_bytes()
    x = np.load(io.BytesIO(lzma.decompress(packed)), allow_pickle=False)
    return {"x": Rows(x.reshape(-1, *x.shape[2:], 1)), "y": Rows(np.repeat(np.arange(len(x)), x.shape[1]))}


EMBEDDED = {"digits": _digits, "fashion": _fashion}


def _partition(
    data: Dataset, options: Options, arrays: dict[str, Rows], notes: dict[str, Any], rows: Ints
) -> Partition:
    kind = options.partition or data.partition
    if options.writers is not None and (options.clients is not None or kind != "owner"):
        raise ValueError("writers is another name for clients where a client is a writer: give one of them")
    clients = options.writers if options.clients is None else options.clients
    owners = None
    if "owner" in arrays:
        owners = np.asarray(notes["owners"])[arrays["owner"].tensor.numpy()[rows]]
    if clients is None:
        # A local copy may hold fewer writers than the paper's number: then all of them.
        clients = data.clients
        if kind == "owner" and owners is not None:
            least = 3 if options.min_samples is None else options.min_samples
            clients = min(clients, len(by_owner(owners, min_samples=least).ids))
    return share_out(
        options,
        arrays["y"].tensor.numpy()[rows],
        kind=kind,
        clients=clients,
        owners=owners,
        coarse=arrays["coarse"].tensor.numpy()[rows] if "coarse" in arrays else None,
        where=data.name,
    )
