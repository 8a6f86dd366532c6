"""Law 6: who decides. Per sample a prediction does not depend on the batch; per client on no batch at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.zoo import build
from torch import Tensor

import pfedgate
from pfedgate import GatedModel


def gated_by(scope: str, name: str = "cnn_cifar10", budget: float = 0.5, **options: Any) -> tuple[GatedModel, Tensor]:
    model, x = build(name)
    gate = {"scope": scope, "max_share": 9.0, "pool": 2, "ranking": "random"}
    return pfedgate.gate(model, x, budget, gate=gate, **options), x


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cnn_cifar10", {}),
        ("cnn_cifar10", {"split": "flat"}),
        ("resnet", {}),
        ("text_gru", {}),
        ("mlp", {"execution": "masked"}),
    ],
)
def test_a_sample_is_judged_alone(name: str, options: dict[str, Any], training: bool) -> None:
    gated, x = gated_by("sample", name, **options)
    gated.train(training)
    with torch.no_grad():
        together = gated(x)
        kept = []
        for i in range(len(x)):
            alone = gated(x[i : i + 1])
            assert torch.allclose(alone[0], together[i], rtol=1e-5, atol=1e-6)
            assert gated.last is not None
            kept.append(gated.last.kept)
            other = torch.cat([x[i : i + 1], x.flip(0).roll(1, -1)])
            assert torch.allclose(gated(other)[0], together[i], rtol=1e-5, atol=1e-6)
    assert all(k.sum() < len(k) for k in kept)


def test_samples_choose_their_own_blocks() -> None:
    gated, x = gated_by("sample")
    x = torch.randn(8, 3, 32, 32) * torch.logspace(-1, 1, 8).reshape(-1, 1, 1, 1)
    masks = set()
    for one in x.split(1):
        gated(one)
        assert gated.last is not None
        masks.add(gated.last.kept.tobytes())
        assert gated.last.density <= 0.5
    assert len(masks) > 1


def test_samples_train_together() -> None:
    gated, x = gated_by("sample")
    gated(x).square().sum().backward()
    assert all(p.grad is not None for p in gated.parameters())


def test_samples_of_models_with_several_results() -> None:
    model, x = build("two_results")
    gated = pfedgate.gate(model, x, 0.5, gate={"scope": "sample", "max_share": 9.0, "pool": 1})
    result = gated(x)
    assert result["logits"].shape == (3, 5)
    assert isinstance(result["more"], tuple)
    assert result["more"][0].shape == (3, 30)


def test_a_batch_is_judged_together() -> None:
    gated, x = gated_by("batch")
    gated.eval()
    with torch.no_grad():
        assert not torch.allclose(gated(x)[0], gated(x[:1])[0], atol=1e-6)


@pytest.mark.parametrize("scope", ["batch", "sample", "client"])
@pytest.mark.parametrize("name", ["cnn_cifar10", "resnet", "vit", "text_cnn", "mlp"])
@pytest.mark.parametrize("training", [True, False])
def test_a_batch_of_one(scope: str, name: str, training: bool) -> None:
    gated, x = gated_by(scope, name)
    if scope == "client":
        gated.gate.remember([x])
    gated.train(training)
    y = gated(x[:1])
    y.sum().backward()
    assert y.shape[0] == 1
    assert bool(torch.isfinite(y).all())


def test_a_client_is_judged_by_its_training_data() -> None:
    gated, x = gated_by("client")
    with pytest.raises(RuntimeError, match=r"gate\.remember"):
        gated(x)
    gated.gate.remember([x])
    gated.eval()
    with torch.no_grad():
        together = gated(x)
        assert gated.last is not None
        kept, weights = gated.last.kept, gated.last.weights
        for i in range(len(x)):
            assert torch.allclose(gated(x[i : i + 1])[0], together[i], rtol=1e-5, atol=1e-6)
            assert (gated.last.kept == kept).all()
            assert torch.equal(gated.last.weights, weights)
        gated.gate.remember([x * 3 + 1])
        gated(x)
        assert not torch.equal(gated.last.weights, weights)


def test_class_shift_is_added() -> None:
    model, x = build("mlp")
    gated = pfedgate.gate(model, x, 0.5, gate={"shift": True})
    before = gated.eval()(x)
    with torch.no_grad():
        gated.gate.fc.bias[-10:] = torch.arange(10.0)
    assert torch.allclose(gated(x), before + torch.arange(10.0), atol=1e-5)
