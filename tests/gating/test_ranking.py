"""Where importances begin: an order of a layer's blocks, the same for every batch, where blocks are dropped."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.zoo import build
from torch import Tensor, nn

import pfedgate
from pfedgate import Budget, GatedModel


def ranked(how: str, budget: Any = 0.5, name: str = "cnn_cifar10", pool: int = 1) -> tuple[GatedModel, Tensor]:
    model, x = build(name)
    gate = {"ranking": how, "pool": pool, "max_share": 9.0}
    return pfedgate.gate(model, x, budget, gate=gate, generator=torch.Generator().manual_seed(1)), x


def kept(gated: GatedModel, x: Tensor) -> dict[str, list[bool]]:
    gated(x)
    assert gated.last is not None
    layers: dict[str, list[bool]] = {}
    for block, live in zip(gated.plan.blocks, gated.last.kept, strict=True):
        layers.setdefault(block.name.rpartition("/")[0], []).append(bool(live))
    return layers


@pytest.mark.parametrize("name", ["cnn_cifar10", "resnet", "vit", "mlp"])
def test_nested_blocks_are_kept_as_they_stand(name: str) -> None:
    gated, x = ranked("nested", 0.4, name)
    for layer, live in kept(gated, x).items():
        count = sum(live)
        assert sum(live[:count]) >= count - 1, f"{layer}: at most neighbours may have changed places"


def test_the_largest_weights_are_kept_first() -> None:
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3))
    strong = [3, 7, 8]
    with torch.no_grad():
        model[0].weight[strong] *= 100
    gate = {"ranking": "magnitude", "max_share": 9.0, "pool": 1}
    gated = pfedgate.gate(model, torch.randn(4, 8), 0.6, blocks=12, smallest=0.0, gate=gate)
    gated(torch.randn(4, 8))
    assert gated.last is not None
    live = np.flatnonzero(gated.last.kept[:12])
    assert set(strong) <= set(live.tolist())
    assert len(live) < 8


@pytest.mark.parametrize("how", ["nested", "magnitude"])
def test_batches_agree_at_first_and_disagree_without_an_order(how: str) -> None:
    def choices(how: str) -> int:
        gated, _ = ranked(how, pool=4)
        images = torch.randn(8, 1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        return len({str(kept(gated, image)) for image in images})

    assert choices(how) < choices("random")


def test_convolutions_are_ahead_when_only_parameters_are_bound() -> None:
    def width(budget: Budget) -> float:
        layers = kept(*ranked("nested", budget))
        return float(np.mean(layers["conv1"] + layers["conv2"]))

    assert width(Budget(params=0.5)) > width(Budget(params=0.5, flops=1.0))


@pytest.mark.parametrize("budget", [0.5, 0.3, 0.2])
@pytest.mark.parametrize("name", ["cnn_cifar10", "cnn_femnist"])
def test_widths_with_the_largest_product_come_first_when_several_resources_are_bound(name: str, budget: float) -> None:
    gated, x = ranked("nested", budget, name)
    gated(x)
    assert gated.last is not None
    costs, limits = gated.plan.costs, gated.selector.limits
    widths = [
        math.prod(group.live(count) / group.units for group, count in zip(costs.groups, counts, strict=True))
        for counts in itertools.product(*(range(group.count + 1) for group in costs.groups))
        if all(costs.cost(counts)[resource] <= limit for resource, limit in limits.items())
    ]
    units = [gated.last.units[group.name] / group.units for group in costs.groups]
    assert math.prod(units) == pytest.approx(max(widths))


@pytest.mark.parametrize("how", ["nested", "magnitude"])
def test_the_whole_model_is_not_ranked(how: str) -> None:
    gates = [ranked(one, 1.0)[0].gate.state_dict() for one in (how, "random")]
    assert all(torch.equal(gates[0][name], gates[1][name]) for name in gates[0])


@pytest.mark.parametrize("gate", [{"paths": 1}, {"post_norm": "none"}])
@pytest.mark.parametrize("split", ["unit", "flat"])
def test_other_gates_stay_within_their_budget(gate: dict[str, Any], split: str) -> None:
    model, x = build("cnn_cifar10")
    gated = pfedgate.gate(model, x, Budget(params=0.3), split=split, gate={"pool": 1, "max_share": 9.0, **gate})
    gated(x)
    assert gated.last is not None
    assert gated.last.density <= 0.3
