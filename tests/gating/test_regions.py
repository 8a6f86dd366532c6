"""Where a forward as a whole cannot be followed, submodules that can are sliced, and the rest runs as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.compare import check_sliced, gated_pair
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import pfedgate
from pfedgate import Budget, CannotCompact

SMALL = {"pool": 1, "max_share": 10.0}


class Odd(torch.autograd.Function):
    """No graph has a gradient like this."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.5

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 0.7


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Conv2d(width, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, width, 1)
        )
        self.mix = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(x)
        if float(x.detach().sum()) > -1e9:  # what a graph cannot hold
            y = Odd.apply(y)
        return F.relu(x + y + self.mix(x))


class Strange(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(3, 24, 3), nn.Sequential(Block(24), Block(24))
        self.head = nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 5))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(F.relu(self.stem(x))).mean((2, 3))) * self.scale


def strange() -> tuple[Strange, Tensor]:
    torch.manual_seed(0)
    return Strange().double(), torch.randn(3, 3, 8, 8, dtype=torch.float64)


def test_regions_are_sliced_exactly_and_counted() -> None:
    model, x = strange()
    sliced, masked = gated_pair(model, x, Budget(params=1.0, flops=1.0))
    least, dense = sliced.plan.costs.smallest(), sliced.plan.costs.dense()
    assert max(least[r] / dense[r] for r in ("params", "flops")) < 0.1
    for share in (0.8, 0.4):
        for gated in (sliced, masked):
            gated.rebudget(Budget(params=share, flops=share))
        for training in (True, False):
            check_sliced(sliced.train(training), masked.train(training), x, out=1e-10, grad=1e-9)
        counts = sliced.verify(x)
        assert counts["counted"] <= counts["claimed"] * (1 + 1e-9)
        assert counts["claimed"] < share + 0.01
    check_sliced(sliced, masked, torch.randn(5, 3, 10, 9, dtype=torch.float64), out=1e-10, grad=1e-9)
    assert all(keep for block, keep in zip(sliced.plan.blocks, sliced.plan.keep, strict=True) if "head.2" in block.name)
    assert not any("forward" in vars(module) for module in sliced.modules())


def test_what_runs_as_it_is_is_explained_with_what_it_costs() -> None:
    model, x = strange()
    text = pfedgate.gate(model, x, Budget(params=1.0), gate=SMALL, modules="blocks.*.mlp").explain()
    assert "(the model itself)" in text
    assert "its forward runs as it is: torch.fx cannot trace it" in text
    mix = next(line for line in text.splitlines() if line.strip().startswith("blocks.0.mix"))
    assert "% of flops" in mix
    gated = pfedgate.gate(model, x, Budget(params=1.0), gate=SMALL, modules="blocks.*.mlp")
    assert {place.rpartition(".")[0] for place in map(gated.plan.name_of, gated.plan.cuts)} == {
        "blocks.0.mlp", "blocks.1.mlp",
    }  # fmt: skip
    with pytest.raises(CannotCompact, match="as a whole"):
        pfedgate.compact(gated, x)


class Reads(Strange):
    """A parent that reads its child's parameters: nothing may stand in the place of the child."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.head[0].weight.sum() + float(x.detach().sum()) * 0


class Later(Strange):
    """Blocks that run once more in the backward pass, when no region stands in their place."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        if float(x.detach().sum()) < 1e9:
            x = checkpoint(self.blocks[0].mlp, x, use_reentrant=False)  # type: ignore[assignment]
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("kind", [Reads, Later])
def test_what_reads_past_regions_is_not_sliced(kind: type[Strange]) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(3, 3, 8, 8)
    with pytest.raises(ValueError, match=r"reads parameters of its submodules, or runs them once more"):
        pfedgate.gate(model, x, Budget(params=0.5), gate=SMALL, execution="sliced")


def test_frozen_and_shared_layers() -> None:
    model, x = strange()
    model.blocks[1].mix = model.blocks[0].mix  # called twice
    model.blocks[0].mlp.requires_grad_(False)
    sliced, masked = gated_pair(model, x, Budget(params=0.5, flops=0.6))
    check_sliced(sliced, masked, x, out=1e-10, grad=1e-9)
    counts = sliced.verify(x)
    assert counts["counted"] <= counts["claimed"] * (1 + 1e-9)


def test_hooks_around_a_container_run_as_ever() -> None:
    model, x = strange()
    seen: list[int] = []
    model.blocks[0].register_forward_hook(lambda module, args, result: seen.append(len(result)))
    sliced, masked = gated_pair(model, x, Budget(params=0.5))
    seen.clear()
    check_sliced(sliced, masked, x, out=1e-10, grad=1e-9)
    assert seen == [3, 3]


class Packed(nn.Module):
    """Sequences of their own lengths: the recurrent layer stays dense, and the rest is sliced."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Embedding(20, 12), nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 12))
        self.rnn = getattr(nn, kind)(12, 20, batch_first=True)
        self.head = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 5))

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x > 0).sum(1).clamp_min(1).cpu()
        packed = pack_padded_sequence(self.embed(x), lengths, batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.head(states.mean(1))


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_packed_sequences(kind: str) -> None:
    torch.manual_seed(0)
    model, x = Packed(kind).double(), torch.randint(1, 20, (3, 7))
    x[1, 5:] = x[2, 3:] = 0
    sliced, masked = gated_pair(model, x, Budget(params=0.9))
    check_sliced(sliced, masked, x, out=1e-10, grad=1e-9)
    assert any("rnn" in place and "runs as it is" in reason for place, reason in sliced.plan.network.notes)  # type: ignore[union-attr]


class Keywords(nn.Module):
    """Regions with several inputs, some of them by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = Joined(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        half = x * 0.5 if float(x.detach().sum()) > -1e9 else x
        return self.out(self.first(x, other=half, nothing=None))


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 30), nn.Linear(30, 8)

    def forward(self, x: Tensor, other: Tensor, nothing: Tensor | None = None) -> Tensor:
        return self.b(F.relu(self.a(x)) * torch.sigmoid(self.a(other)))


def test_regions_with_several_inputs() -> None:
    torch.manual_seed(0)
    model, x = Keywords().double(), torch.randn(4, 8, dtype=torch.float64)
    sliced, masked = gated_pair(model, x, Budget(params=0.6))
    check_sliced(sliced, masked, x, out=1e-10, grad=1e-9)
    check_sliced(sliced, masked, torch.randn(7, 8, dtype=torch.float64), out=1e-10, grad=1e-9)
