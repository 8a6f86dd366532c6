"""Weights that a layer computes from its parameters: no block may be cut out of those, else a mask makes them NaN."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tests.support.compare import check_sliced, gated_pair
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm

import pfedgate
from pfedgate import Budget, InfeasibleBudget


def weight_norm(layer: nn.Module) -> Any:
    """The old one: a hook that torch has deprecated, and that old models have."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(layer)


KINDS = {
    "weight_norm": weight_norm,
    "spectral_norm": spectral_norm,
    "WeightNorm": parametrizations.weight_norm,
    "SpectralNorm": parametrizations.spectral_norm,
    "Orthogonal": parametrizations.orthogonal,
}


def named(kind: str) -> str:
    return kind.lower().replace("_", "")


def network(kind: str, everywhere: bool) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    last = nn.Linear(24 * 16, 30)
    model = nn.Sequential(
        nn.Conv2d(3, 20, 3), nn.ReLU(), KINDS[kind](nn.Conv2d(20, 24, 3)), nn.ReLU(), nn.Flatten(),
        KINDS[kind](last) if everywhere else last, nn.ReLU(), nn.Linear(30, 5),
    )  # fmt: skip
    return model.double().eval(), torch.randn(4, 3, 8, 8, dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_beside_them_are_sliced_exactly(kind: str) -> None:
    model, x = network(kind, everywhere=False)
    sliced, masked = gated_pair(model, x, Budget(params=0.7))
    check_sliced(sliced.eval(), masked.eval(), x, out=1e-10, grad=1e-9)
    assert any(place == "2" and named(kind) in reason.lower() for place, reason in sliced.plan.network.notes)  # type: ignore[union-attr]


@pytest.mark.parametrize("split", ["unit", "flat"])
@pytest.mark.parametrize("kind", KINDS)
def test_masks_leave_them_whole(kind: str, split: str) -> None:
    model, x = network(kind, everywhere=True)
    with pytest.raises(InfeasibleBudget, match="computed" if split == "flat" else f"(?i){named(kind)}"):
        pfedgate.gate(model, x, Budget(params=0.3), split=split, execution="masked", gate={"max_share": 10.0})
    model, x = network(kind, everywhere=False)
    gated = pfedgate.gate(
        model, x, Budget(params=0.8), split=split, execution="masked", gate={"pool": 1, "max_share": 10.0}
    )
    y = gated(x)
    y.square().sum().backward()
    assert y.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in gated.parameters())
    assert gated.last is not None
    assert not gated.last.kept.all()
