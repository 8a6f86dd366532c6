"""Your own data, one line each: arrays, a folder of images, a table, a torch Dataset.

    from_arrays(x, y, owners=names)                        arrays or tensors, and who owns each row
    from_arrays(x, y, partition="dirichlet", clients=50)   or let a partition decide
    from_folder("photos")                                  photos/<client>/<class>/<image>
    from_table("visits.parquet", owner="hospital", label="outcome")
    from_dataset(dataset, owners=names)                    any torch.utils.data.Dataset

All take the options of `Sharing` (`novel`, `val`, `min_samples`, `seed`, …), and `mean`/`std` per channel or
feature, or `standardise=True` to measure them on the training samples of the training clients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pfedgate.core.errors import warn
from pfedgate.core.kinds import KINDS, NOTHING, kind_of
from pfedgate.data import cache
from pfedgate.data.federation import Federation
from pfedgate.data.pool import ArrayPool, Normalise, Rows
from pfedgate.data.sharing import Sharing, assemble, read, sample, share_out
from pfedgate.data.sources import picture

Array = np.ndarray[Any, Any]
CHANNELS = (1, 3, 4)
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm")


class Samples(Protocol):
    """The part of torch's map-style Dataset that is used."""

    def __len__(self) -> int:
        """Number of samples in the data set."""

    def __getitem__(self, at: int, /) -> Any:
        """One sample as a pair (input, label)."""


def from_arrays(
    x: Array | Tensor | str | Path,
    y: Array | Tensor | Sequence[Any],
    *,
    owners: Array | Sequence[Any] | None = None,
    coarse: Array | Sequence[int] | None = None,
    name: str = "arrays",
    classes: int | None = None,
    channels: str | None = None,
    mean: float | Sequence[float] = (),
    std: float | Sequence[float] = (),
    standardise: bool = False,
    task: str | None = None,
    **options: Any,
) -> Federation:
    """A federation of arrays: one row of `x` and one label of `y` per sample.

    Give `owners`, one name per row, or `partition` and `clients`. `x` may be anything with rows: images
    (four axes, or three if uint8), feature vectors, token ids; a path to a `.npy` file is mapped, not read.
    uint8 images stay uint8 and are scaled per batch. Labels may be names. `channels` ("first" or "last")
    is needed only when the shape of the images leaves it open. `task` says what labels are, where they are no classes:
    "multilabel", "regression", "segmentation" or "language" (see `pfedgate.core.kinds`).

    >>> x, y = np.random.default_rng(0).normal(size=(60, 5)), np.arange(60) % 3
    >>> from_arrays(x, y, owners=["ann", "bob", "eve"] * 20, seed=1)
    Federation('arrays', 3 clients, 60 samples of shape (5,), 3 classes)
    >>> from_arrays(x, y, partition="dirichlet", clients=4, alpha=0.5, novel=0.25)
    Federation('arrays', 3 clients, 1 novel, 60 samples of shape (5,), 3 classes)
    >>> from_arrays(x, x @ np.ones(5), owners=["ann", "bob", "eve"] * 20, task="regression")
    Federation('arrays', 3 clients, 60 samples of shape (5,), regression of 1)
    """
    sharing = read(Sharing, options, "from_arrays")
    rows, image = _inputs(x, channels)
    labels, names, task = _labels(y, task)
    if len(labels) != len(rows):
        raise ValueError(f"{len(rows)} inputs but {len(labels)} labels: they must be equally many")
    seen = int(labels.max()) + 1 if KINDS[task].classes else math.prod(labels.shape[1:])
    if classes is not None and classes < seen:
        raise ValueError(f"classes={classes}, but a label is {seen - 1}" if KINDS[task].classes else
                         f"classes={classes}, but there are {seen} labels in a row")  # fmt: skip
    if names is not None and len(names) > max(20, len(labels) // 2):
        warn(
            f"{name}: {len(names)} classes in {len(labels)} samples, such as {names[0]!r}: is this the right column?",
        )
    if owners is not None and len(owners) != len(rows):
        raise ValueError(f"{len(rows)} inputs but {len(owners)} owners: give one owner per row")
    if owners is not None and any(owner is None or owner != owner for owner in owners):
        raise ValueError("a sample has no owner (None or not a number): name one for every row, or leave it out")
    if owners is None and sharing.partition is None:
        raise ValueError(
            "who owns which sample? Give owners=[one name per row], or partition='dirichlet' (iid, "
            "pathological, …) and clients=…"
        )
    used = sample(len(rows), sharing.samples, sharing.seed)
    partition = share_out(
        sharing,
        (labels if task == "classification" else labels.reshape(len(labels), -1))[used],
        kind=sharing.partition or "owner",
        clients=sharing.clients,
        owners=None if owners is None else np.asarray(owners)[used],
        coarse=None if coarse is None else np.asarray(coarse, dtype=np.int64)[used],
        where=name,
    ).over(used)
    federation = assemble(
        name,
        ArrayPool(rows, Rows(labels), image=image),
        partition,
        sharing,
        classes=classes or seen,
        class_names=names,
        task=task,
        prepare=Normalise(_numbers(mean), _numbers(std)),
        about={"dataset": name, "pool": len(rows), "used": len(partition.rows)},
    )
    if standardise:
        federation.prepare = _measured(federation)
    return federation


def from_folder(
    path: str | Path,
    *,
    size: int | tuple[int, int] | None = None,
    colour: bool = True,
    cache_dir: str | Path | None = None,
    **options: Any,
) -> Federation:
    """A federation of images kept as path/<client>/<class>/<image>.

    All images must have one size, or are resized to `size`: (height, width), or one number. `colour=False` makes them
    grey.
    They are decoded once into the cache.

    >>> import tempfile; from PIL import Image
    >>> folder = Path(tempfile.mkdtemp())
    >>> for client in ("ann", "bob"):
    ...     for label in ("cat", "dog"):
    ...         (folder / client / label).mkdir(parents=True)
    ...         for k in range(5):
    ...             Image.new("RGB", (16, 16), (k, 0, 0)).save(folder / client / label / f"{k}.png")
    >>> federation = from_folder(folder, cache_dir=folder / "cache")
    >>> list(federation.clients), federation.input_shape, federation.class_names
    (['ann', 'bob'], (3, 16, 16), ('cat', 'dog'))
    """
    size = (size, size) if isinstance(size, int) else size
    root = Path(path).expanduser()
    files = sorted(file for file in root.glob("*/*/*") if file.suffix.lower() in IMAGES)
    if not files:
        raise FileNotFoundError(f"no images under {root}: they must lie as <client>/<class>/<image>")
    digest = cache.key("folder", str(root.resolve()), size, colour, cache.file_facts(files, root))

    def build(place: Path) -> None:
        writer = cache.Writer(place, len(files))
        with cache.progress(f"decoding {root.name}", len(files)) as report:
            for row, file in enumerate(files):
                with picture(file) as opened:
                    plain = opened.convert("RGB" if colour else "L")
                    pixels = np.asarray(plain if size is None else plain.resize(size[::-1]))
                try:
                    writer.put("x", row, pixels.reshape(1, *pixels.shape[:2], -1))
                except ValueError as error:
                    raise ValueError(f"{file}: {error}, or give size=(height, width)") from error
                report(row + 1)
        writer.close({"name": root.name, "rows": len(files)})

    place = cache.entry(f"folder-{root.name}", digest, build, cache_dir)
    return from_arrays(
        place / "x.npy",
        [file.parent.name for file in files],
        owners=[file.parent.parent.name for file in files],
        **{"name": root.name, "channels": "last", **options},
    )


def from_dataset(dataset: Samples, owners: Sequence[Any], **options: Any) -> Federation:
    """A federation of any map-style torch Dataset of (input, label) pairs, and one owner per sample.

    Every sample is read once, in order, with whatever transform the dataset applies. Random augmentation
    would therefore be frozen: leave it out.

    >>> from torch.utils.data import TensorDataset
    >>> data = TensorDataset(torch.randn(40, 3, 8, 8), torch.arange(40) % 4)
    >>> from_dataset(data, owners=[f"phone {i % 5}" for i in range(40)])
    Federation('TensorDataset', 5 clients, 40 samples of shape (3, 8, 8), 4 classes)
    """
    total = len(dataset)
    if total != len(owners):
        raise ValueError(f"{total} samples but {len(owners)} owners: give one owner per sample")
    if not total:
        raise ValueError("the dataset is empty")
    labels: list[Any] = []
    store: Array | None = None
    channels: str | None = None
    for row in range(total):
        sample = dataset[row]
        if not isinstance(sample, (tuple, list)) or len(sample) != 2:
            raise ValueError(
                f"sample {row} is {type(sample).__name__}, not a pair (input, label): a data set of columns goes to "
                "pfedgate.run(data=…, owner='its column', label='its column')"
            )
        x, y = sample
        labels.append(np.asarray(y.detach().cpu() if isinstance(y, Tensor) else y))
        # Tensors of three axes are (channels, height, width) by torch's custom, pictures end in channels.
        if isinstance(x, Tensor):
            channels, value = "first", x.detach().cpu().numpy()
        else:
            value = np.asarray(x)
        if store is None:
            store = np.empty((total, *value.shape), dtype=value.dtype)
        if value.shape != store.shape[1:]:
            raise ValueError(f"sample {row} has shape {value.shape}, those before {store.shape[1:]}")
        store[row] = value
    assert store is not None
    if channels and store.ndim == 4 and "channels" not in options:
        options["channels"] = channels
    return from_arrays(store, np.stack(labels), owners=owners, **{"name": type(dataset).__name__, **options})


def _measured(federation: Federation) -> Normalise:
    """Mean and deviation per channel or feature over the training samples of the training clients."""
    raw = Normalise()
    total = square = torch.zeros(1, dtype=torch.float64)
    count = 0
    for client in federation.clients:
        x = raw(federation.part(client, "train").x)
        if not x.is_floating_point():
            raise ValueError("standardise needs numbers as input, not token ids")
        flat = (x.movedim(1, -1) if x.ndim > 2 else x).reshape(-1, x.shape[1]).double()
        total, square, count = total + flat.sum(0), square + flat.square().sum(0), count + len(flat)
    mean = total / count
    std = (square / count - mean.square()).clamp(min=0).sqrt()
    # A constant feature carries nothing: leave its scale alone instead of dividing by zero.
    std = torch.where(std < 1e-8, torch.ones_like(std), std)
    return Normalise(tuple(mean.tolist()), tuple(std.tolist()))


def _inputs(x: Array | Tensor | str | Path, channels: str | None) -> tuple[Rows, bool]:
    """Rows in the layout of the pool, and whether they are images."""
    if isinstance(x, (str, Path)):
        if not Path(x).expanduser().is_file():
            raise FileNotFoundError(f"no file {x}: inputs are an array or the path of a .npy file")
        rows = Rows.open(Path(x).expanduser())
    else:
        rows = Rows(x.detach().cpu() if isinstance(x, Tensor) else _numeric(x))
    data = rows.tensor
    if data.dtype is torch.float64:
        data = data.float()
    if data.ndim < 2:
        raise ValueError(
            f"inputs of shape {tuple(data.shape)}: give rows of features, one per sample, as x[:, None] is"
        )
    if data.ndim == 3 and data.dtype is torch.uint8:
        data, channels = data.unsqueeze(-1), "last"
    if data.ndim != 4:
        return (rows if data is rows.tensor else Rows(data)), False
    if channels is None:
        first, last = data.shape[1] in CHANNELS, data.shape[3] in CHANNELS
        if first == last:
            raise ValueError(
                f"images of shape {tuple(data.shape[1:])}: say channels='first' (channels, height, width) or "
                "channels='last' (height, width, channels)"
            )
        channels = "first" if first else "last"
    if channels not in ("first", "last"):
        raise ValueError(f"channels must be 'first' or 'last', got {channels!r}")
    if channels == "first":
        data = data.permute(0, 2, 3, 1).contiguous()
    return (rows if data is rows.tensor else Rows(data)), True


def _numeric(x: Any) -> Array:
    """Inputs as an array of real numbers."""
    try:
        array = np.asarray(x)
    except ValueError as error:
        raise ValueError(f"inputs must be equally long, one row per sample: {error}") from None
    if array.dtype.kind not in "biuf":
        raise ValueError(f"inputs are numbers, got values of type {array.dtype}, such as {array.flat[0]!r}")
    return array


def _labels(y: Array | Tensor | Sequence[Any], task: str | None) -> tuple[Array, tuple[str, ...] | None, str]:
    """Labels as the kind of task has them, names of classes that were no numbers from 0 on, and the kind.

    Numbers with a fraction are never taken for classes: 600 different ones would be 600 classes.
    """
    values = y.detach().cpu().numpy() if isinstance(y, Tensor) else np.asarray(y)
    if not values.size:
        raise ValueError("there are no labels")
    kind = kind_of("classification" if task is None else task)
    if values.dtype.kind in "USO":  # text, as CSV files have it; names are never all numbers
        with suppress(TypeError, ValueError):
            numbers = values.astype(np.float64)
            values = numbers if not kind.classes or (numbers % 1).any() else values
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise ValueError("a label is missing (not a number)")
    if not kind.classes:
        if values.dtype.kind not in "fiub":
            raise ValueError(f"labels for {kind.name} are numbers, got {str(values.flat[0])!r}")
        return values.astype(np.float32), None, kind.name
    if values.dtype.kind == "f":
        if (values % 1).any():
            raise ValueError(
                f"labels are numbers with a fraction, such as {values[values % 1 != 0][0]:g} ({len(np.unique(values))} "
                f'different ones in {len(values)} rows): give task="regression" to predict numbers, or whole numbers '
                "or names to predict classes"
            )
        values = values.astype(np.int64)
    if task is None and values.ndim > 1:
        others = ", ".join(repr(name) for name in KINDS if name != "classification")
        raise ValueError(f"labels have the shape {values.shape}, not one per row: say what they are with task={others}")
    if values.dtype.kind in "iu" and (values.min() >= 0 or (kind.positions and values.min() >= NOTHING)):
        return values.astype(np.int64), None, kind.name
    names, codes = np.unique(values, return_inverse=True)
    return codes.reshape(values.shape).astype(np.int64), tuple(str(name) for name in names), kind.name


def _numbers(value: float | Sequence[float]) -> tuple[float, ...]:
    """One number or several, as several."""
    return (float(value),) if isinstance(value, (int, float)) else tuple(float(item) for item in value)
