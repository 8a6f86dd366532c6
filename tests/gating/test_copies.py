"""Copies, files, types, devices and modes: what may happen to a gated model between two batches."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from tests.support.compare import loss
from tests.support.gates import milliseconds
from tests.support.zoo import build
from torch import Tensor

import pfedgate
from pfedgate import Budget, GatedModel, models
from pfedgate.gating import latency


def gated_by_name(name: str, **options: Any) -> tuple[GatedModel, Tensor]:
    model, x = build(name)
    return pfedgate.gate(model, x, options.pop("budget", 0.5), **options), x


@pytest.mark.parametrize("name", ["cnn_cifar10", "text_gru", "mlp"])
@pytest.mark.parametrize("split", ["unit", "flat"])
def test_a_deep_copy_is_independent(name: str, split: str) -> None:
    gated, x = gated_by_name(name, split=split, gate={"max_share": 1.0, "pool": 1})
    gated(x).sum().backward()  # a model in use holds graphs, which cannot be copied
    twin = copy.deepcopy(gated)
    assert twin.plan is gated.plan
    assert twin.last is None
    assert torch.equal(twin(x), gated(x))
    optimizer = twin.optimizer("sgd", lr=1.0)
    twin(x).sum().backward()
    optimizer.step()
    assert not torch.equal(twin(x), gated(x))
    assert {id(p) for p in twin.parameters()}.isdisjoint({id(p) for p in gated.parameters()})
    if name == "text_gru":  # the gate reads tokens through the embedding of its own model
        assert twin.gate.reader._embedding is twin.model.embedding


@pytest.mark.parametrize("name", ["cnn_cifar10", "text_gru", "resnet"])
def test_pickling_plans_anew(name: str) -> None:
    gated, x = gated_by_name(name, budget=Budget(params=0.4))
    gated.eval()
    gated(x)
    file = io.BytesIO()
    torch.save(gated, file)
    file.seek(0)
    back = torch.load(file, weights_only=False)
    assert torch.equal(back(x), gated(x))
    assert back.budget == gated.budget
    assert back.execution == "sliced"
    assert not back.training
    assert not back.model.training
    assert torch.equal(pickle.loads(pickle.dumps(copy.deepcopy(gated)))(x), gated(x))


def test_state_dict_round_trip() -> None:
    gated, x = gated_by_name("resnet")
    other, _ = gated_by_name("resnet")
    with torch.no_grad():
        for p in gated.parameters():
            p.mul_(1.1)
    assert not torch.equal(other.eval()(x), gated.eval()(x))
    for assign in (False, True):  # assign=True replaces the parameters themselves
        other.load_state_dict(gated.state_dict(), assign=assign)
        assert torch.equal(other(x), gated(x))
    file = io.BytesIO()
    torch.save(gated.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))


def test_other_types() -> None:
    gated, x = gated_by_name("cnn_cifar10")
    y = gated(x)
    gated.to(torch.float64)
    z = gated(x.double())
    assert z.dtype == torch.float64
    assert torch.allclose(y.double(), z, atol=1e-5)
    loss(z).backward()
    gated.float()
    assert torch.allclose(gated(x), y, atol=1e-6)
    double = pfedgate.gate(models.build("cnn_cifar10").double(), x.double(), 0.5)
    assert double(x.double()).dtype == torch.float64
    assert next(double.parameters_private()).dtype == torch.float64


def test_indices_are_kept_per_device() -> None:
    gated, x = gated_by_name("cnn_cifar10")
    gated(x)
    assert gated.last is not None
    live, parts = gated.last.live, gated.plan.axes["conv1.weight"][0]
    for device in ("cpu", "meta", "cpu"):
        index = live.index(parts, torch.device(device))
        assert index is not None
        assert index.device.type == device
        assert live.scales_for("share", torch.device(device)).rows.device.type == device
    assert torch.equal(gated(x), gated(x))


def test_modes_of_autograd_do_not_stick() -> None:
    """What is first computed without gradients and then kept must be usable with them."""
    model, x = build("cnn_cifar10")
    with torch.inference_mode():
        gated = pfedgate.gate(model, x, 0.5)
        y = gated(x)
    with torch.no_grad():
        assert torch.equal(gated(x), y)
    loss(gated(x)).backward()
    assert all(p.grad is not None for p in gated.parameters())
    optimizer = gated.optimizer("adam", lr=0.01)
    with torch.inference_mode():
        gated(x)
    loss(gated(x)).backward()
    optimizer.step()
    assert not torch.equal(gated(x), y)


@pytest.mark.parametrize("name", ["cnn_digits", "mlp", "text_cnn", "vit"])
def test_a_shape_is_as_good_as_a_batch(name: str) -> None:
    x = models.example(name, batch=5)
    model = models.build(name)
    seeds = [torch.Generator().manual_seed(3) for _ in range(2)]
    by_batch = pfedgate.gate(model, x, 0.5, generator=seeds[0])
    by_shape = pfedgate.gate(model, tuple(x.shape), 0.5, generator=seeds[1])
    assert torch.equal(by_batch(x), by_shape(x))


def test_a_generator_makes_gates_reproducible() -> None:
    model, x = build("cnn_cifar10")
    outputs = [pfedgate.gate(model, x, 0.5, generator=torch.Generator().manual_seed(seed))(x) for seed in (1, 1, 2)]
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


def test_published_variant() -> None:
    model, x = build("cnn_cifar10")
    gated = pfedgate.gate(model, x, 0.5, variant="paper")
    assert gated.plan.how == "flat"
    assert gated.gate.config.activation == "sigmoid"
    assert gated.gate.config.post_norm == "batch"
    gated(x)
    assert gated.last is not None
    assert gated.last.density <= 0.5


# -- latency budgets
@pytest.mark.usefixtures("own_cache")
def test_a_latency_budget_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = models.build("cnn_digits"), models.example("cnn_digits", batch=32)
    warnings.simplefilter("ignore", UserWarning)
    # A busy machine must not decide whether this test passes.
    monkeypatch.setattr(latency, "_milliseconds", milliseconds)
    gated = pfedgate.gate(model, x, Budget(latency_ms=1e6))
    dense, least = (costs["latency_ms"] for costs in (gated.plan.costs.dense(), gated.plan.costs.smallest()))
    assert 0 < least < dense
    gated(x)
    assert gated.last is not None
    assert gated.last.cost["latency_ms"] == dense
    half = (least + dense) / 2
    gated.rebudget(Budget(latency_ms=half, params=0.9))(x)
    assert gated.last.cost["latency_ms"] <= half
    assert gated.last.density <= 0.9
    with pytest.raises(pfedgate.InfeasibleBudget, match="latency_ms: asked 1e-06 ms, smallest feasible"):
        gated.rebudget(Budget(latency_ms=1e-6))

    def never(*args: Any) -> float:
        raise AssertionError("measured again")

    monkeypatch.setattr(latency, "_milliseconds", never)
    again = pfedgate.gate(models.build("cnn_digits"), x, Budget(latency_ms=half))
    assert again.plan.costs.dense()["latency_ms"] == dense
    with pytest.raises(AssertionError, match="measured again"):  # another batch size takes another time
        pfedgate.gate(models.build("cnn_digits"), x[:8], Budget(latency_ms=half))


@pytest.mark.usefixtures("own_cache")
def test_measuring_leaves_the_model_alone() -> None:
    model, x = build("residual")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    gated = pfedgate.gate(model, x, Budget(latency_ms=1e6), gate={"max_share": 9.0, "pool": 1})
    assert 0 < gated.plan.costs.smallest()["latency_ms"] <= gated.plan.costs.dense()["latency_ms"] < 1e5
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_latency_needs_execution_that_saves_time() -> None:
    model, x = build("mlp")
    with pytest.raises(ValueError, match="a latency budget needs execution that saves time, but: masked execution"):
        pfedgate.gate(model, x, Budget(latency_ms=5), split="flat")


@pytest.mark.usefixtures("own_cache")
def test_a_speedup_is_checked_by_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = models.build("cnn_digits"), models.example("cnn_digits", batch=32)
    monkeypatch.setattr(latency, "_milliseconds", milliseconds)
    warnings.simplefilter("ignore", UserWarning)
    overhead = 0.2

    def in_turn(runs: Any, x: Tensor) -> list[float]:
        """A device on which gated passes take longer than the fit says."""
        gated = runs[1]
        gated(x)
        return [2.0, overhead + 1 + gated.last.density]

    monkeypatch.setattr(latency, "_in_turn", in_turn)
    gated = pfedgate.gate(model, x, Budget(speedup=1.25))
    assert gated.budget.speedup is None
    assert gated.budget.latency_ms is not None
    assert gated.budget.latency_ms <= 2.0 / 1.25 - overhead + 0.1
    gated(x)
    assert gated.last is not None
    assert overhead + 1 + gated.last.density <= 2.0 / 1.25
    with pytest.raises(pfedgate.InfeasibleBudget, match="a speedup of 3 is out of reach on this device"):
        gated.rebudget(Budget(speedup=3))


@pytest.mark.usefixtures("own_cache")
def test_a_real_speedup() -> None:
    gated = pfedgate.gate(models.build("cnn_cifar10"), (64, 3, 32, 32), Budget(speedup=1.1))
    x = torch.randn(64, 3, 32, 32)
    assert gated.verify(x)["counted"] < 1
    assert gated.last is not None
    assert gated.last.cost["latency_ms"] <= gated.plan.costs.dense_ms / 1.1
