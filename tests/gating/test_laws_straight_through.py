"""Law 5, first half: where the gradients of M and G go."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.support.compare import loss
from tests.support.zoo import build
from torch import Tensor, nn

import pfedgate
from pfedgate import GatedModel


def gradients(gated: GatedModel, x: Tensor) -> tuple[Tensor, Tensor, np.ndarray]:
    """Gradients of M and of G, and which blocks were kept."""
    y = gated(x)
    assert gated.last is not None
    weights, importance = torch.autograd.grad(loss(y), [gated.last.weights, gated.last.importance])
    return weights, importance, gated.last.kept


@pytest.mark.parametrize("execution", ["sliced", "masked"])
def test_kept_blocks_get_gradients_of_both(execution: str) -> None:
    model, _ = build("cnn_cifar10")
    # Not the zoo's three samples: in so few, all units of a small block may be dead.
    x = torch.randn(32, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    weights, importance, kept = gradients(pfedgate.gate(model, x, 0.5, execution=execution), x)
    assert 0 < kept.sum() < len(kept)
    assert (weights[kept] != 0).all()
    assert (importance[kept] != 0).all()
    assert (weights[~kept] == 0).all()


def test_dropped_flat_blocks_get_a_gradient_of_their_importance() -> None:
    model, x = build("cnn_cifar10")
    gated = pfedgate.gate(model, x, 0.5, split="flat")
    assert gated.execution == "masked"
    weights, importance, kept = gradients(gated, x)
    assert (importance != 0).float().mean() > 0.9  # a block of a dead ReLU's weights may have none
    assert (importance[~kept] != 0).sum() > 3
    assert (weights[~kept] == 0).all()


def test_dropped_units_get_one_in_masked_execution_where_the_function_lets_it_through() -> None:
    model = nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 3))
    x = torch.randn(4, 8)
    options = {"execution": "masked", "gate": {"max_share": 9.0, "pool": 1}}
    _, importance, kept = gradients(pfedgate.gate(model, x, 0.6, **options), x)
    assert not kept.all()
    assert (importance[~kept] != 0).all()
    _, importance, kept = gradients(pfedgate.gate(model, x, 0.6, straight_through="kept", **options), x)
    assert (importance[~kept] == 0).all()
    assert (importance[kept] != 0).all()


def test_the_gradient_is_that_of_the_adapted_weights() -> None:
    """M' = M (I* - sg(G) + G): dL/dG = M dL/dM', dL/dM = I* dL/dM'."""
    model, x = build("mlp")
    gated = pfedgate.gate(model, x, 0.5, split="flat")
    y = gated(x)
    last = gated.last
    assert last is not None
    outer, inner, importance = torch.autograd.grad(loss(y), [last.adapted, last.weights, last.importance])
    kept = torch.from_numpy(last.kept)
    assert torch.allclose(importance, last.weights * outer)
    assert torch.allclose(inner, kept * outer)
    assert torch.equal(last.adapted, torch.where(kept, last.weights, torch.zeros(())))


def test_gradient_of_the_adapted_weights_is_a_finite_difference() -> None:
    model, x = build("mlp")
    gated = pfedgate.gate(model.double(), x.double(), 0.5)
    y = gated(x.double())
    last = gated.last
    assert last is not None
    (slope,) = torch.autograd.grad(loss(y), [last.weights])
    from tests.support.compare import pretend

    for block in np.flatnonzero(last.kept)[::5]:
        values = []
        for step in (1e-6, -1e-6):
            weights = last.weights.detach().clone()
            weights[block] += step
            pretend(gated, last.importance.detach(), weights)
            values.append(float(loss(gated(x.double())).detach()))
        assert (values[0] - values[1]) / 2e-6 == pytest.approx(float(slope[block]), rel=1e-5)


def test_the_gate_learns_which_blocks_matter() -> None:
    """Two inputs decide; after training, the neurons that see them are kept, at a budget that keeps half."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 20), nn.Tanh(), nn.Linear(20, 2))
    with torch.no_grad():  # odd neurons are blind, and stay so: their importance is all that can be learned
        model[0].weight[1::2] = 0
        model[0].bias[1::2] = 0
        model[2].weight[:, 1::2] = 3.0
    x = torch.randn(64, 4, generator=generator)
    y = (x[:, 0] + x[:, 1] > 0).long()
    gated = pfedgate.gate(
        model, x, 0.6, execution="masked", compensate="share", blocks=20, smallest=0.0,
        gate={"max_share": 9.0, "pool": 1, "ranking": "random"},
        generator=generator,
    )  # fmt: skip
    optimizer = torch.optim.Adam([{"params": gated.parameters_private(), "lr": 0.05}])
    first = None
    for _ in range(60):
        optimizer.zero_grad()
        value = nn.functional.cross_entropy(gated(x), y)
        value.backward()
        optimizer.step()
        first = float(value.detach()) if first is None else first
    assert float(value.detach()) < 0.8 * first
