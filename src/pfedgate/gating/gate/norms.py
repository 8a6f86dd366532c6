"""Normalisation of the gate: switchable norm at its input, a norm over blocks (or the batch) at its output.

Switchable normalisation (Luo et al. 2019) mixes batch, instance and layer statistics with learned softmax
weights, one mixture for the mean and one for the variance. All three statistics are constant within one
channel of one sample, so normalising commutes with average pooling. The gate uses that: it reads the (large)
input once, keeps pooled values and two numbers per (sample, channel), and normalises the pooled values only.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EPS = 1e-5
MOMENTUM = 0.1


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

    >>> norm = SwitchableNorm(channels=3, rank=4)
    >>> out = norm(5 + torch.randn(8, 3, 6, 6))
    >>> bool(out.mean().abs() < 0.1)
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

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` itself. The gate calls :meth:`pooled` instead, which needs no pass over ``x``."""
        if x.dim() != self.rank or x.shape[1] != self.channels:
            raise ValueError(
                f"SwitchableNorm was built for rank {self.rank} and {self.channels} channels (dimension 1), "
                f"got shape {tuple(x.shape)}"
            )
        x = x.detach().to(self.weight.dtype)
        mean, var = moments(x)
        return self.pooled(x.flatten(2) if self.rank > 2 else x.unsqueeze(2), mean, var).reshape(x.shape)

    def pooled(self, pooled: Tensor, mean: Tensor, var: Tensor) -> Tensor:
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
        if self.training and self.track:
            batch_mean, batch_var = self._observe(mean, var)
        else:
            batch_mean, batch_var = self.running_mean, self.running_var
        means = [batch_mean.expand_as(mean), layer_mean.expand_as(mean)]
        variances = [batch_var.expand_as(var), layer_var.expand_as(var)]
        if self.rank > 2:
            means.append(mean)
            variances.append(var)
        parts = torch.stack(means + variances).view(2, -1, *mean.shape)
        parts[1].add_(EPS)  # shares add up to one, and no gradient is taken here
        return parts

    def _observe(self, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        """Statistics over the batch, also folded into the running ones."""
        alone = len(mean) == 1
        if alone:
            # A batch of one has no spread of its own: measure it around what earlier batches showed.
            batch_mean, batch_var = mean[0], var[0] + (mean[0] - self.running_mean).square()
        else:
            spread, batch_mean = torch.var_mean(mean, 0, correction=0)
            batch_var = var.mean(0) + spread
        _remember(self, batch_mean, batch_var)
        if alone:
            return self.running_mean, self.running_var
        return batch_mean, batch_var

    def extra_repr(self) -> str:
        return f"{self.channels}, rank={self.rank}" + ("" if self.track else ", track=False")


class BlockNorm(nn.Module):
    """The gate's post-norm on values ``[N, paths, L]``, with one weight and bias per path and block.

    ``kind="blocks"`` normalises each path of each sample over its L blocks. ``kind="batch"`` is the paper's
    BatchNorm over the batch: the mean over the batch that follows then hardly depends on the batch any more
    (kept because it is the published choice). A batch of one has no statistics: it uses the running ones.

    >>> z = BlockNorm(2, 5, kind="blocks")(torch.randn(4, 2, 5))
    >>> bool(z.mean(2).abs().max() < 1e-6)
    True
    """

    running_mean: Tensor
    running_var: Tensor
    batches_seen: Tensor

    def __init__(self, paths: int, blocks: int, *, kind: str, track: bool = True) -> None:
        super().__init__()
        self.kind, self.track = kind, track
        self.weight = nn.Parameter(torch.ones(paths, blocks))
        self.bias = nn.Parameter(torch.zeros(paths, blocks))
        if kind == "batch":
            self.register_buffer("running_mean", torch.zeros(paths, blocks))
            self.register_buffer("running_var", torch.ones(paths, blocks))
            self.register_buffer("batches_seen", torch.zeros((), dtype=torch.int64))

    def forward(self, z: Tensor) -> Tensor:
        if self.kind == "blocks":
            z = F.layer_norm(z, z.shape[2:], eps=EPS)
        elif self.training and self.track and len(z) > 1:
            mean = z.mean(0)
            centred = z - mean
            var = centred.square().mean(0)
            _remember(self, mean.detach(), var.detach())
            z = centred * torch.rsqrt(var + EPS)
        else:
            z = (z - self.running_mean) * torch.rsqrt(self.running_var + EPS)
        return torch.addcmul(self.bias, z, self.weight)

    def extra_repr(self) -> str:
        paths, blocks = self.weight.shape
        return f"paths={paths}, blocks={blocks}, kind={self.kind!r}"


def _remember(norm: SwitchableNorm | BlockNorm, mean: Tensor, var: Tensor) -> None:
    """Fold the statistics of a batch into the running ones."""
    # Looking names up in a module takes longer than adding a few numbers.
    seen, running_mean, running_var = norm.batches_seen, norm.running_mean, norm.running_var
    seen.add_(1)
    # A client sees a handful of batches per round. A plain moving average would still be mostly its arbitrary
    # start when the model is first evaluated, so the first batches are averaged evenly.
    step = seen.to(mean.dtype).reciprocal().clamp(min=MOMENTUM)
    running_mean.add_(step * (mean - running_mean))
    running_var.add_(step * (var - running_var))
