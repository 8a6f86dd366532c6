"""Law 1 for one operation at a time: it is sliced, as exactly as masked, and takes no more FLOPs than it claims."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.compare import check_sliced, gated_pair
from tests.support.zoo import Of, images
from torch import Tensor, nn

from pfedgate import Budget
from pfedgate.core import measure


class As(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def between(*middle: nn.Module, width: int = 24) -> tuple[nn.Module, Tensor]:
    """Operations between two convolutions; the second one reads `width` channels."""
    return nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1), nn.ReLU(), *middle, nn.Conv2d(width, 20, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(20, 5),
    ), images()  # fmt: skip


def mixed(parts: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([F.relu(part) for part in parts][::-1], 1)


def at_random(m: Any, x: Tensor) -> Tensor:
    """Stochastic depth, written out: in training a sample skips the branch now and then."""
    x = F.relu(m.a(x))
    y = m.c(F.relu(m.b(x)))
    if m.training:
        y = y * torch.empty(len(x), 1, 1, 1, dtype=x.dtype).bernoulli_(0.7) / 0.7
    return m.out((x + y).mean((2, 3)))


FOLLOWED: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "ConvTranspose1d": lambda: (
        nn.Sequential(
            nn.Conv1d(3, 24, 3), nn.ReLU(), nn.ConvTranspose1d(24, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5)
        ),
        torch.randn(3, 3, 8),
    ),
    "ConvTranspose2d": lambda: between(nn.ConvTranspose2d(24, 16, 3, 2, 1, 1), nn.ReLU(), width=16),
    "ConvTranspose2d, depthwise": lambda: between(nn.ConvTranspose2d(24, 24, 4, 2, 1, groups=24), nn.ReLU()),
    "ConvTranspose3d": lambda: (
        nn.Sequential(
            nn.Conv3d(2, 12, 3), nn.ReLU(), nn.ConvTranspose3d(12, 16, 2), nn.ReLU(), nn.Flatten(), nn.Linear(432, 5)
        ),
        torch.randn(3, 2, 4, 4, 4),
    ),
    "InstanceNorm": lambda: between(nn.InstanceNorm2d(24), nn.ReLU()),
    "InstanceNorm, affine": lambda: between(nn.InstanceNorm2d(24, affine=True), nn.ReLU()),
    "Upsample": lambda: between(nn.Upsample(scale_factor=2)),
    "Upsample, bilinear": lambda: between(nn.Upsample(size=(12, 12), mode="bilinear")),
    "interpolate": lambda: between(As(lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"))),
    "interpolate, to a size": lambda: between(As(lambda x: F.interpolate(x, size=x.shape[-2:], mode="nearest"))),
    "pad": lambda: between(As(lambda x: F.pad(x, (1, 1, 2, 0)))),
    "pad, reflect": lambda: between(As(lambda x: F.pad(x, (1, 1, 2, 0), mode="reflect"))),
    "pad, channels": lambda: between(As(lambda x: F.pad(x, (0, 0, 0, 0, 3, 5))), width=32),
    "ZeroPad2d": lambda: between(nn.ZeroPad2d(2)),
    "ReplicationPad2d": lambda: between(nn.ReplicationPad2d(1)),
    "split": lambda: between(As(lambda x: mixed(torch.split(x, [8, 16], 1)))),
    "chunk": lambda: between(As(lambda x: mixed(torch.chunk(x, 3, 1)))),
    "GLU": lambda: between(nn.GLU(1), width=12),
    "PixelShuffle": lambda: between(nn.PixelShuffle(2), width=6),
    "PixelUnshuffle": lambda: between(nn.PixelUnshuffle(2), width=96),
    "stochastic depth": lambda: (
        Of(at_random, a=nn.Conv2d(3, 24, 3), b=nn.Conv2d(24, 20, 3, padding=1), c=nn.Conv2d(20, 24, 1),
           out=nn.Linear(24, 5)),
        images(),
    ),
}  # fmt: skip
# Exact, too, but some of it runs on complete tensors.
COMPLETED: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "ConvTranspose2d, in groups": lambda: between(nn.ConvTranspose2d(24, 48, 2, 2, groups=4), nn.ReLU(), width=48),
    "InstanceNorm with statistics": lambda: between(nn.InstanceNorm2d(24, affine=True, track_running_stats=True)),
    "pad with ones": lambda: between(As(lambda x: F.pad(x, (1, 1, 2, 0), value=1.0))),
    "channel shuffle": lambda: between(
        nn.Conv2d(24, 24, 1, groups=4), nn.ChannelShuffle(4), nn.Conv2d(24, 24, 3, padding=1, groups=24),
        nn.Conv2d(24, 24, 1, groups=4),
    ),
    "groups": lambda: between(nn.Conv2d(24, 48, 3, groups=4), nn.BatchNorm2d(48), nn.ReLU(), width=48),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:under Budget")
@pytest.mark.parametrize("name", [*FOLLOWED, *COMPLETED])
def test_sliced_as_masked(name: str) -> None:
    torch.manual_seed(0)
    model, x = {**FOLLOWED, **COMPLETED}[name]()
    model, x = model.double(), x.double()
    sliced, masked = gated_pair(model, x, Budget(params=1.0))
    costs = sliced.plan.costs
    dense, least = costs.dense(), costs.smallest()
    assert name in COMPLETED or max(least[r] / dense[r] for r in ("params", "flops")) < 0.1
    for share in (0.8, 0.4):
        for gated in (sliced, masked):
            gated.rebudget(Budget(params=max(share, least["params"] / dense["params"] + 0.1)))
        for training in (True, False):
            if not training or name != "stochastic depth":  # which draws, see below
                check_sliced(sliced.train(training), masked.train(training), x, out=1e-10, grad=1e-9)
        with torch.no_grad():
            spent = measure.flops(lambda: sliced(x))
            masked(x)
        assert sliced.last is not None
        assert spent <= (sliced.last.cost["flops"] * dense["flops"] + sliced.plan.gate_flops) * len(x) * (1 + 1e-9)


def test_paths_dropped_at_random_are_the_same_paths() -> None:
    torch.manual_seed(0)
    model, x = FOLLOWED["stochastic depth"]()
    sliced, masked = gated_pair(model.double(), x.double(), Budget(params=0.5))
    results = []
    for gated in (sliced, masked):
        torch.manual_seed(1)
        results.append(gated.train()(x.double()))
    assert torch.allclose(*results, rtol=0, atol=1e-10)
