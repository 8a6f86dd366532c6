"""The gate's view of a batch: a few pooled values per channel, normalised by every channel's mean and variance.

Reading a batch has no parameters and needs no gradient, so its result may be computed once per data set and kept. The
paper feeds all pixels to the gate, which would make it larger than the model (120 % on CIFAR-10); a coarse average of
them was as good when we tried.

Switchable normalisation (Luo et al. 2019) mixes batch, instance and layer statistics with learned softmax weights, one
mixture for the mean and one for the variance. All three statistics are constant within one channel of one sample, so
normalising commutes with average pooling. The gate uses that: it reads the (large) input once, keeps pooled values and
two numbers per (sample, channel), and normalises the pooled values only.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HASHED = 16  # width of the fixed token embedding: enough to tell topics apart, small enough to pool
# Sizes tried from the left until the gate fits its share of the model.
POOLS = {
    "flat": (64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1),
    "sequence": (8, 6, 4, 3, 2, 1),
    "image": (4, 3, 2, 1),
    "volume": (3, 2, 1),
}
EPS = 1e-5
MOMENTUM = 0.1

_KINDS = {2: "flat", 3: "sequence", 4: "image", 5: "volume"}
_POOLING: tuple[Callable[..., Tensor], ...] = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)


class Features(NamedTuple):
    """A batch as the gate sees it."""

    pooled: Tensor  # [N, C, P]: P averages per channel
    mean: Tensor  # [N, C]: of the raw input, for the normalisation
    var: Tensor  # [N, C]


class Reader:
    """Turns a batch into :class:`Features`. Not a module: it owns no parameter, an embedding is the model's.

    >>> reader = Reader(torch.zeros(2, 3, 32, 32), pool=4)
    >>> reader.features, reader(torch.randn(5, 3, 32, 32)).pooled.shape
    (48, torch.Size([5, 3, 16]))
    """

    def __init__(
        self, example: Tensor, pool: int, *, embedding: nn.Embedding | None = None, channels_last: bool = False
    ) -> None:
        self.kind = kind_of(example)
        self.rank, self.channels_last = example.dim(), channels_last
        self.tokens = self.kind == "sequence" and self.rank == 2
        self._embedding = embedding if self.tokens else None
        raw = self._channels_first(example[:1])
        self.width = raw.shape[1]  # channels of the input
        sizes = raw.shape[2:] if raw.dim() > 2 else raw.shape[1:]
        # A cell smaller than one value would only repeat it.
        self.cells = tuple(min(pool, size) if pool else size for size in sizes)
        self.sizes = tuple(sizes) if pool == 0 else None  # without pooling the size must not change
        flat = self.kind == "flat"
        self.channels, self.positions = (self.cells[0], 1) if flat else (self.width, math.prod(self.cells))
        self.features = self.channels * self.positions  # values per sample: the paper's d_X
        self.norm_rank = 2 if flat else 3  # flat inputs have no instance statistics

    @torch.no_grad()
    def __call__(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Features:
        """Read a batch; the result has the gate's ``dtype`` whatever that of ``x``."""
        if self.tokens:
            fits = is_integer(x)
        else:
            fits = x.dim() == self.rank and x.shape[-1 if self.channels_last else 1] == self.width
        if not fits or x.dim() != self.rank or not x.numel():
            raise ValueError(self._refusal(x))
        x = self._channels_first(x)
        if self.sizes and x.dim() > 2 and x.shape[2:] != self.sizes:
            raise ValueError(f"a gate without pooling needs inputs of size {self.sizes}, got {x.shape[2:]}")
        if not x.is_floating_point() or x.element_size() < 4:
            x = x.to(dtype)
        if self.kind == "flat":
            values = _average(x.unsqueeze(1), self.cells).flatten(1).to(dtype)
            return Features(values.unsqueeze(2), *moments(values))
        if self.kind == "image" and not any(map(operator.mod, x.shape[2:], self.cells)):
            pooled, mean, var = _read_image(x, self.cells)
        else:
            mean, var = moments(x)
            pooled = _average(x, self.cells).flatten(2)
        return Features(pooled.to(dtype), mean.to(dtype), var.to(dtype))

    def _refusal(self, x: Tensor) -> str:
        """Says why this gate cannot read a batch."""
        expected = "integer tokens [N, T]" if self.tokens else f"{self.kind} inputs of rank {self.rank}"
        if x.dim() != self.rank or (self.tokens and not is_integer(x)):
            problem = f"{x.dtype} of shape {tuple(x.shape)}"
        elif not self.tokens and x.shape[-1 if self.channels_last else 1] != self.width:
            expected, problem = f"{expected} with {self.width} channels", f"shape {tuple(x.shape)}"
            if self.rank > 2 and not self.channels_last:
                problem += " (where channels come last, as in [N, T, C], say gate={'channels_last': True})"
        else:
            problem = f"an empty batch of shape {tuple(x.shape)}"
        return f"the gate was built for {expected}, got {problem}: wrap the model with an example of its inputs"

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
    return x if tuple(x.shape[2:]) == cells else _POOLING[len(cells) - 1](x, cells)


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


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and (biased) variance of every channel of every sample, ``[N, C]`` each, without a gradient.

    Two passes, because the one-pass formula ``E[x^2] - E[x]^2`` loses all digits on raw pixels, and because
    ``torch.var_mean`` is some twenty times slower than two vectorised passes on a CPU.

    >>> moments(torch.tensor([[[1.0, 3.0], [5.0, 5.0]]]))
    (tensor([[2., 5.]]), tensor([[1., 0.]]))
    """
    with torch.no_grad():
        if x.dim() == 2:
            return x, torch.zeros_like(x)
        dims = tuple(range(2, x.dim()))
        mean = x.mean(dims, keepdim=True)
        return mean.flatten(1), (x - mean).pow_(2).mean(dims)


class SwitchableNorm(nn.Module):
    """Switchable normalisation for inputs of any rank: ``[N, F]``, ``[N, C, T]``, ``[N, C, H, W]``, ...

    Flat features have no instance statistics (one value per sample and channel), so rank 2 mixes batch and
    layer statistics only. The input is data: gradients flow into mixture and affine parameters, not into it.

    ``track=False`` never estimates anything over a batch: the batch part of the mixture is then the stored
    running statistics (mean 0 and variance 1 at first) in training too: samples cannot influence each other.

    >>> norm, x = SwitchableNorm(channels=3, rank=4), 5 + torch.randn(8, 3, 6, 6)
    >>> bool(norm(x.flatten(2), *moments(x)).mean().abs() < 0.1)
    True
    """

    running_mean: Tensor
    running_var: Tensor
    batches_seen: Tensor

    def __init__(self, channels: int, rank: int, *, track: bool = True) -> None:
        super().__init__()
        if channels < 1 or rank < 2:
            raise ValueError(f"SwitchableNorm needs channels >= 1 and rank >= 2, got {channels} and {rank}")
        self.channels, self.rank, self.track = channels, rank, track
        parts = 2 if rank == 2 else 3  # batch, layer, and instance where it exists
        # Logits of the two mixtures: of the means (row 0) and of the variances (row 1).
        self.mixture = nn.Parameter(torch.ones(2, parts))
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.register_buffer("batches_seen", torch.zeros((), dtype=torch.int64))

    def forward(self, pooled: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        """Normalise already pooled values ``[N, C, P]``, given mean and variance ``[N, C]`` of the raw input.

        Equal to pooling after normalising, because both maps are affine per (sample, channel).
        """
        with torch.no_grad():
            statistics = self._statistics(mean, var)
        shares = self.mixture.softmax(1).unsqueeze(1)
        mixed_mean, mixed_var = torch.bmm(shares, statistics.flatten(2)).view(2, *mean.shape).unbind(0)
        scale = torch.rsqrt(mixed_var) * self.weight
        shift = self.bias - mixed_mean * scale
        return torch.addcmul(shift.unsqueeze(2), pooled, scale.unsqueeze(2))

    def _statistics(self, mean: Tensor, var: Tensor) -> Tensor:
        """Means and variances of each part of the mixture, ``[2, parts, N, C]``; updates the running ones."""
        # The law of total variance gives wider statistics from the per-channel ones without cancellation.
        spread, layer_mean = torch.var_mean(mean, 1, correction=0, keepdim=True)
        layer_var = var.mean(1, keepdim=True) + spread
        batch_mean, batch_var = self.running_mean, self.running_var
        if self.training and self.track:
            if len(mean) == 1:
                # A batch of one has no spread of its own: it is measured around the mean of earlier batches.
                fold(self, mean[0], var[0] + (mean[0] - self.running_mean).square())
            else:
                spread, batch_mean = torch.var_mean(mean, 0, correction=0)
                batch_var = var.mean(0) + spread
                fold(self, batch_mean, batch_var)
        means = [batch_mean.expand_as(mean), layer_mean.expand_as(mean)]
        variances = [batch_var.expand_as(var), layer_var.expand_as(var)]
        if self.rank > 2:
            means.append(mean)
            variances.append(var)
        parts = torch.stack(means + variances).view(2, -1, *mean.shape)
        parts[1].add_(EPS)  # shares add up to one, and no gradient is taken here
        return parts

    def extra_repr(self) -> str:
        return f"{self.channels}, rank={self.rank}" + ("" if self.track else ", track=False")


def fold(norm: Any, mean: Tensor, var: Tensor) -> None:
    """Fold the statistics of a batch into the running ones of a norm of the gate."""
    # Looking names up in a module takes longer than adding a few numbers.
    seen, running_mean, running_var = norm.batches_seen.add_(1), norm.running_mean, norm.running_var
    # A client sees a handful of batches per round. A plain moving average would still be mostly its arbitrary
    # start when the model is first evaluated, so the first batches are averaged evenly.
    step = seen.to(mean.dtype).reciprocal().clamp(min=MOMENTUM)  # no number: stacked clients each have their own
    running_mean.add_((mean - running_mean).mul_(step))
    running_var.add_((var - running_var).mul_(step))
