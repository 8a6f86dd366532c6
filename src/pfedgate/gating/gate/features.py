"""What the gate sees of a batch: a few pooled values per channel, and every channel's mean and variance.

Reading a batch has no parameters and needs no gradient, so its result may be computed once per data set and
kept. The paper feeds all pixels to the gate, which would make it larger than the model (120 % on CIFAR-10); a
coarse average of them was as good when we tried.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfedgate.gating.gate.norms import moments

HASHED = 16  # width of the fixed token embedding: enough to tell topics apart, small enough to pool
# Sizes tried from the left until the gate fits its share of the model.
POOLS = {
    "flat": (64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1),
    "sequence": (8, 6, 4, 3, 2, 1),
    "image": (4, 3, 2, 1),
    "volume": (3, 2, 1),
}
_KINDS = {2: "flat", 3: "sequence", 4: "image", 5: "volume"}


class Features(NamedTuple):
    """A batch as the gate sees it."""

    pooled: Tensor  # [N, C, P]: P averages per channel
    mean: Tensor  # [N, C]: of the raw input, for the normalisation
    var: Tensor  # [N, C]


class Reader:
    """Turns a batch into :class:`Features`. Not a module: it owns no parameter, an embedding is the model's.

    ``patches`` adds the standard deviation within every pooling cell to its mean (twice the features).

    >>> reader = Reader(torch.zeros(2, 3, 32, 32), pool=4)
    >>> reader.features, reader(torch.randn(5, 3, 32, 32)).pooled.shape
    (48, torch.Size([5, 3, 16]))
    """

    def __init__(
        self,
        example: Tensor,
        pool: int,
        *,
        embedding: nn.Embedding | None = None,
        patches: bool = False,
        channels_last: bool = False,
    ) -> None:
        self.kind = kind_of(example)
        self.rank, self.patches, self.channels_last = example.dim(), patches, channels_last
        self.tokens = self.kind == "sequence" and self.rank == 2
        self._embedding = embedding if self.tokens else None
        raw = self._channels_first(example[:1])
        self.width = raw.shape[1]  # channels of the input
        sizes = raw.shape[2:] if raw.dim() > 2 else raw.shape[1:]
        # A cell smaller than one value would only repeat it.
        self.cells = tuple(min(pool, size) if pool else size for size in sizes)
        self.sizes = tuple(sizes) if pool == 0 else None  # without pooling the size must not change
        if self.kind == "flat":
            self.channels, self.positions = self.cells[0], 1
        else:
            self.channels, self.positions = self.width, math.prod(self.cells) * (2 if patches else 1)

    @property
    def features(self) -> int:
        """Number of values per sample: the paper's d_X."""
        return self.channels * self.positions

    @property
    def norm_rank(self) -> int:
        """Rank for the normalisation: flat inputs have no instance statistics."""
        return 2 if self.kind == "flat" else 3

    @torch.no_grad()
    def __call__(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Features:
        """Read a batch; the result has the gate's ``dtype`` whatever that of ``x``."""
        self._check(x)
        x = self._channels_first(x)
        if self.sizes and x.dim() > 2 and x.shape[2:] != self.sizes:
            raise ValueError(f"a gate without pooling needs inputs of size {self.sizes}, got {x.shape[2:]}")
        if not x.is_floating_point() or x.element_size() < 4:
            x = x.to(dtype)
        if self.kind == "flat":
            values = _average(x.unsqueeze(1), self.cells).flatten(1).to(dtype)
            return Features(values.unsqueeze(2), *moments(values))
        if self.kind == "image" and not self.patches and not _ragged(x, self.cells):
            pooled, mean, var = _read_image(x, self.cells)
        else:
            mean, var = moments(x)
            pooled = _average(x, self.cells).flatten(2)
        if self.patches:
            pooled = torch.cat([pooled, self._spread(x, pooled, mean)], 2)
        return Features(pooled.to(dtype), mean.to(dtype), var.to(dtype))

    def _spread(self, x: Tensor, pooled: Tensor, mean: Tensor) -> Tensor:
        """Standard deviation within each cell, ``[N, C, P]``, put on the mean that the norm takes off."""
        # Around the channel's mean, so that a large offset does not eat the digits of the spread.
        centred = x - mean.reshape(*mean.shape, *[1] * (x.dim() - 2))
        offset = pooled - mean.unsqueeze(2)
        variance = _average(centred.pow_(2), self.cells).flatten(2) - offset.pow_(2)
        return variance.clamp(min=0).sqrt_() + mean.unsqueeze(2)

    def _check(self, x: Tensor) -> None:
        wanted = "integer tokens [N, T]" if self.tokens else f"{self.kind} inputs of rank {self.rank}"
        if x.dim() != self.rank or (self.tokens and not is_integer(x)):
            problem = f"{x.dtype} of shape {tuple(x.shape)}"
        elif not self.tokens and x.shape[-1 if self.channels_last else 1] != self.width:
            wanted, problem = f"{wanted} with {self.width} channels", f"shape {tuple(x.shape)}"
            if self.rank > 2 and not self.channels_last:
                problem += " (where channels come last, as in [N, T, C], say gate={'channels_last': True})"
        elif x.numel() == 0:
            problem = f"an empty batch of shape {tuple(x.shape)}"
        else:
            return
        raise ValueError(
            f"the gate was built for {wanted}, got {problem}: wrap the model with an example of its inputs"
        )

    def _channels_first(self, x: Tensor) -> Tensor:
        if not self.tokens:
            return x.detach().movedim(-1, 1) if self.channels_last else x.detach()
        if self._embedding is None:
            return hashed(x).movedim(-1, 1)
        return F.embedding(x, self._embedding.weight.detach()).movedim(-1, 1)


def kind_of(example: Tensor) -> str:
    """``"flat"``, ``"sequence"``, ``"image"`` or ``"volume"``, by rank; integers of rank 2 are tokens.

    >>> kind_of(torch.zeros(4, 10)), kind_of(torch.zeros(4, 10, dtype=torch.int64))
    ('flat', 'sequence')
    """
    if example.dim() not in _KINDS or example.numel() == 0:
        raise ValueError(
            "the gate reads batches of rank 2 to 5 ([N, F], integer tokens [N, T], [N, C, T], [N, C, H, W], "
            f"[N, C, D, H, W]) with at least one value, got an example of shape {tuple(example.shape)}"
        )
    return "sequence" if example.dim() == 2 and is_integer(example) else _KINDS[example.dim()]


def is_integer(x: Tensor) -> bool:
    """Whether ``x`` can hold token numbers."""
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def hashed(tokens: Tensor, width: int = HASHED) -> Tensor:
    """A fixed embedding without a table: every token gets ``width`` values in ±√3, the same on every machine.

    >>> hashed(torch.tensor([[3, 3, 70_000]])).shape
    torch.Size([1, 3, 16])
    """
    # Odd multipliers and two xor-shifts (as in splitmix64), in wrapping int64 arithmetic.
    columns = torch.arange(1, width + 1, dtype=torch.int64, device=tokens.device)
    mixed = (tokens.to(torch.int64).unsqueeze(-1) + 1) * 0x1E3779B97F4A7C15 + columns * 0x3F58476D1CE4E5B9
    mixed = (mixed ^ ((mixed >> 30) & 0x3FFFFFFFF)) * 0x3F58476D1CE4E5B9
    mixed = (mixed ^ ((mixed >> 27) & 0x1FFFFFFFFF)) * 0x14D049BB133111EB
    # The top 24 bits, signed, fit a float exactly; √3 makes the variance one.
    return (mixed >> 40).to(torch.float32) * (math.sqrt(3) / 2**23)


def _average(x: Tensor, cells: tuple[int, ...]) -> Tensor:
    """Adaptive average pooling of everything after the channels."""
    if tuple(x.shape[2:]) == cells:
        return x
    if len(cells) == 1:
        return F.adaptive_avg_pool1d(x, cells[0])
    if len(cells) == 2:
        return F.adaptive_avg_pool2d(x, cells)
    return F.adaptive_avg_pool3d(x, (cells[0], cells[1], cells[2]))


def _ragged(x: Tensor, cells: tuple[int, ...]) -> bool:
    return any(size % cell for size, cell in zip(x.shape[2:], cells, strict=True))


def _read_image(x: Tensor, cells: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Cell averages, mean and variance of images that the cells divide evenly.

    Whole rows are added first, along the memory's order, because that is what vectorises: two to four times
    faster than PyTorch's pooling and mean, and the mean comes from the cells without another pass.
    """
    n, channels, height, width = x.shape
    down, across = cells
    if x.is_contiguous() or not x.is_contiguous(memory_format=torch.channels_last):
        strips = x.reshape(n, channels, down, height // down, width).mean(3)
        pooled = strips.view(n, channels, down * across, width // across).mean(3)
        mean = pooled.mean(2)
        return pooled, mean, (x - mean[:, :, None, None]).pow_(2).mean((2, 3))
    rows = x.permute(0, 2, 3, 1).reshape(n, height, width * channels)
    strips = rows.view(n, down, height // down, width * channels).mean(2)
    pooled = strips.view(n, down * across, width // across, channels).mean(2)
    mean = pooled.mean(1)
    line = mean.unsqueeze(1).expand(n, width, channels).reshape(n, 1, width * channels)
    squares = (rows - line).pow_(2).mean(1)
    return pooled.transpose(1, 2).contiguous(), mean, squares.view(n, width, channels).mean(1)
