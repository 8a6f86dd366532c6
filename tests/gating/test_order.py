"""Pooling before a ReLU: the same result and gradients to the last bit, and only where nobody can tell."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import pfedgate
from pfedgate.gating.gate.config import GateConfig
from pfedgate.gating.slicing.rules.operations import PoolRule, Same

X = torch.randn(6, 3, 12, 12, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A convolution, something with a ReLU and a pool, and a layer that reads it."""

    def __init__(self, between: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.relu, self.inplace, self.pool = nn.ReLU(), nn.ReLU(inplace=True), nn.MaxPool2d(2)
        self.head = nn.LazyLinear(4)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.flatten(self.between(self, self.conv(x)), 1))


def two_readers(net: Net, y: Tensor) -> Tensor:
    y = net.relu(y)
    return net.pool(y) + F.avg_pool2d(y, 2)


def seen_later(net: Net, y: Tensor) -> Tensor:
    return net.pool(net.inplace(y)) + F.avg_pool2d(y, 2)


MOVED = {
    "modules": lambda net, y: net.pool(net.relu(y)),
    "in place": lambda net, y: net.pool(net.inplace(y)),
    "functions": lambda net, y: F.max_pool2d(F.relu(y), 3, 2, 1),
    "torch's": lambda net, y: torch.max_pool2d(torch.relu(y), 2),
    "a method": lambda net, y: F.max_pool2d(y.relu(), 2, ceil_mode=True),
}
LEFT = {
    "two readers": two_readers,
    "what it wrote over is read": seen_later,
    "another mean": lambda net, y: F.avg_pool2d(F.relu(y), 2),
    "below zero": lambda net, y: net.pool(F.leaky_relu(y)),
    "pooled before": lambda net, y: net.relu(net.pool(y)),
}


def gated(between: Callable[[Net, Tensor], Tensor]) -> pfedgate.GatedModel:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        net = Net(between)
        net(X)
    return pfedgate.gate(net, X, budget=1.0, gate=GateConfig(init="ones", pool=1, max_share=10.0))


def order(model: pfedgate.GatedModel) -> list[type]:
    assert model.plan.network is not None
    assert model.plan.network.program is not None
    return [type(step.rule) for step in model.plan.network.program.training if type(step.rule) in (PoolRule, Same)]


@pytest.mark.parametrize("name", MOVED)
def test_pool_comes_first(name: str) -> None:
    assert order(gated(MOVED[name])) == [PoolRule, Same]


@pytest.mark.parametrize("name", LEFT)
def test_left_alone(name: str) -> None:
    model = gated(LEFT[name])
    traced = fx.symbolic_trace(model.model).graph.nodes
    told = [n for n in traced if "pool" in n.name or "relu" in n.name or n.name == "inplace"]
    assert [kind is PoolRule for kind in order(model)] == ["pool" in n.name for n in told]


@pytest.mark.parametrize("name", [*MOVED, *LEFT])
def test_same_to_the_last_bit(name: str) -> None:
    model = gated({**MOVED, **LEFT}[name])
    plain = model.model
    weights = list(plain.parameters())

    def both(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        x = torch.where(X.abs() < 0.3, 0.0, X).requires_grad_()  # many ties
        with torch.no_grad():
            plain.conv.bias.zero_()
        y = run(x)
        return [y, *torch.autograd.grad(y.square().sum(), [x, *weights])]

    for mine, theirs in zip(both(model), both(plain), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
