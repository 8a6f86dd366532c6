"""Public data: samples everybody may see, in the shape of the clients' own, for methods that exchange predictions.

Offline, for any private data: `glyphs` (printed digits 0–9, drawn here: near to digits and letters), `photos` (pieces
of the two photographs that come with scikit-learn: far from them), `noise` (anything). By name: every data set of
`pfedgate.data`, e.g. cifar100 for private cifar10 (near), femnist for cifar10 or cifar10 for femnist (far). Images are
resized, made grey or coloured, and later normalised like the private ones. `+transpose` and `+invert` after a name turn
them: public emnist is near to femnist only as "emnist+transpose+invert". Or bring your own: `Public(x, y)`, without a
sample that any client has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pfedgate.algorithms import private_parts as parts
from pfedgate.core.errors import unknown
from pfedgate.core.modules import initial
from pfedgate.core.seeds import generator
from pfedgate.core.types import Card, Local, Round, State, Task
from pfedgate.training.fit import fit

SAMPLES = 600  # samples in the sets drawn here: enough to agree on, quick to look at
MOST = 20_000  # at most so many samples of a data set by name
EMBEDDED = ("auto", "glyphs", "photos", "noise")
FIXES = ("transpose", "invert")
# Digits of 5×7 dots, a row of five bits each.
_FONT = (
    (14, 17, 19, 21, 25, 17, 14), (4, 12, 4, 4, 4, 4, 14), (14, 17, 1, 2, 4, 8, 31), (31, 2, 4, 2, 1, 17, 14),
    (2, 6, 10, 18, 31, 2, 2), (31, 16, 30, 1, 1, 17, 14), (6, 8, 16, 30, 17, 17, 14), (31, 1, 2, 4, 8, 8, 8),
    (14, 17, 17, 14, 17, 17, 14), (14, 17, 17, 15, 1, 2, 12),
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Public:
    """Public samples: inputs raw, as clients store theirs; labels of their own, or None."""

    x: Tensor = field(repr=False)
    y: Tensor | None = field(default=None, repr=False)
    name: str = "own"

    @property
    def n(self) -> int:
        """The number of public samples."""
        return len(self.x)

    @property
    def classes(self) -> int:
        """Number of classes; 0 without labels."""
        return 0 if self.y is None or not self.n else int(self.y.max()) + 1

    def part(self, rows: Tensor | None = None) -> Rows:
        """These samples as a client's part; without labels they all have 0."""
        y = self.y if self.y is not None else torch.zeros(self.n, dtype=torch.int64)
        return Rows(self.x, y) if rows is None else Rows(self.x[rows], y[rows])


@dataclass(frozen=True)
class Rows:
    """Samples in memory, as a part."""

    x: Tensor
    y: Tensor

    @property
    def n(self) -> int:
        """The number of public samples."""
        return len(self.y)


def public(name: str, like: Tensor, *, tokens: int = 0, seed: int = 0) -> Public:
    """Public samples by name, like the raw samples `like` in shape and kind.

    `tokens` is the size of the vocabulary, for data made of whole numbers.

    >>> public("glyphs", torch.zeros(1, 1, 8, 8, dtype=torch.uint8)).x.shape
    torch.Size([600, 1, 8, 8])
    """
    return _public(name, tuple(like.shape[1:]), like.dtype, tokens, seed)


@lru_cache(maxsize=8)
def _public(name: str, shape: tuple[int, ...], dtype: torch.dtype, tokens: int, seed: int) -> Public:
    from pfedgate.data import DATASETS

    base, *fixes = name.split("+")
    if base not in (*EMBEDDED, *DATASETS):
        raise ValueError(unknown("public data", base, [*EMBEDDED, *DATASETS]))
    for fix in fixes:
        if fix not in FIXES:
            raise ValueError(f"public data {name!r}: {unknown('change', fix, FIXES)}")
    image = dtype is torch.uint8 and len(shape) == 3
    rng = generator(seed, "public", base)
    if base == "noise" or (base == "auto" and not image):
        return Public(_noise(shape, dtype, tokens, rng), None, name)
    if not image:
        raise ValueError(
            f"public data {base!r} are images, the private samples are {dtype} of shape {shape}: use 'noise'"
        )
    if base == "photos":
        x, y = _photos(shape[1:], rng)
    elif base in DATASETS:
        x, y = _dataset(base, rng)
    else:
        x, y = _glyphs(shape[1:], rng)
    x = _fit(x, shape)
    x = x.transpose(2, 3) if "transpose" in fixes else x
    x = 255 - x if "invert" in fixes else x
    return Public(x.contiguous(memory_format=torch.channels_last), y, name)


def _noise(shape: tuple[int, ...], dtype: torch.dtype, tokens: int, rng: torch.Generator) -> Tensor:
    if dtype.is_floating_point:
        return torch.randn(SAMPLES, *shape, generator=rng, dtype=dtype)
    most = 256 if dtype is torch.uint8 else tokens
    if most < 1:
        raise ValueError("the samples are whole numbers, but the model has no embedding that says how many there are")
    return torch.randint(most, (SAMPLES, *shape), generator=rng).to(dtype)


def _glyphs(size: tuple[int, ...], rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Printed digits, shifted, scaled, turned and slanted at random."""
    bits = torch.tensor([[[row >> at & 1 for at in range(4, -1, -1)] for row in digit] for digit in _FONT])
    y = torch.arange(SAMPLES) % 10
    shapes = F.pad(bits[y].float(), (2, 2, 1, 1))[:, None]  # a margin, 9×9 in all
    angle, slant, stretch = ((torch.rand(SAMPLES, generator=rng) - 0.5) * width for width in (0.5, 0.5, 0.5))
    shift = (torch.rand(SAMPLES, 2, generator=rng) - 0.5) * 0.4
    cos, sin = angle.cos(), angle.sin()
    turn = torch.stack([cos, slant - sin, shift[:, 0], sin, cos, shift[:, 1]], 1).view(-1, 2, 3)
    turn[:, :, :2] *= (1.1 + stretch)[:, None, None]
    grid = F.affine_grid(turn, [SAMPLES, 1, *size], align_corners=False)
    return F.grid_sample(shapes, grid, align_corners=False) * 255, y


def _photos(size: tuple[int, ...], rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Square pieces of two photographs, of many sizes; the label says of which one."""
    from sklearn.datasets import load_sample_images

    photos = [torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in load_sample_images().images]
    pieces = []
    for at in range(SAMPLES):
        photo = photos[at % 2]
        side = int(torch.randint(24, 128, (), generator=rng))
        top, left = (int(torch.randint(length - side, (), generator=rng)) for length in photo.shape[1:])
        piece = photo[None, :, top : top + side, left : left + side].float()
        pieces.append(F.interpolate(piece, size, mode="bilinear", antialias=True))
    return torch.cat(pieces), torch.arange(SAMPLES) % 2


def _dataset(name: str, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    from pfedgate.data import load

    pool = load(name, clients=1, partition="iid", samples=1.0).pool
    rows = torch.randperm(len(pool), generator=rng)[:MOST]
    return pool.x(rows), pool.y(rows)


def _fit(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Images with these channels and this size, as bytes."""
    x = x.float()
    if x.shape[1] != shape[0]:
        x = x.mean(1, keepdim=True).expand(-1, shape[0], -1, -1)
    if tuple(x.shape[2:]) != shape[1:]:
        x = F.interpolate(x, shape[1:], mode="bilinear", antialias=True)
    return x.round().clamp(0, 255).to(torch.uint8)


@dataclass(frozen=True)
class WithHead:
    """A model whose last layer is replaced by one for other classes."""

    model: Any
    layer: str
    classes: int

    def __call__(self) -> nn.Module:
        model: nn.Module = self.model()
        place, _, name = self.layer.rpartition(".")
        old = model.get_submodule(self.layer)
        if not isinstance(old, nn.Linear):
            raise TypeError(f"the last layer, {self.layer!r}, is replaced for public classes: it must be linear")
        setattr(model.get_submodule(place), name, nn.Linear(old.in_features, self.classes))
        return model


@lru_cache(maxsize=8)
def pretrained(
    task: Task, samples: Public, seed: int, epochs: int, device: torch.device, prepare: Callable[[Tensor], Tensor]
) -> State:
    """The initial model, trained on the public set under a head of its own, cached because all clients share it."""
    layer, part = parts.head_layer(task), samples.part()
    other = replace(task, model=WithHead(task.model, layer, samples.classes))
    everybody = Local(Card("public", part.n), part, part, Round(seed=seed), device, prepare)
    done = fit(other, initial(other, seed), everybody, epochs=epochs, stream="public")
    own = {name: value for name, value in done.state.items() if name not in parts.layers(task)[layer]}
    return {**initial(task, seed), **own}
