"""What a graph does not show, and what changes later: sliced execution still does what the model does."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from tests.support.compare import distance, loss, pretend
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pfedgate
from pfedgate import Budget, GateConfig, GatedModel

SMALL = {"max_share": 100.0, "pool": 1}


class Net(nn.Module):
    """Two layers and a head, with anything in between."""

    def __init__(self, between: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(8, 40), nn.Linear(8, 40), nn.Linear(40, 4)
        self.register_buffer("mean", torch.linspace(0.5, 1.5, 40))
        self.register_buffer("steps", torch.zeros(()))
        self.between = between

    def forward(self, x: Tensor) -> Any:
        return self.out(self.between(self, x) + torch.relu(self.b(x)))


def gated_net(model: nn.Module, x: Tensor, budget: float = 0.6, **options: Any) -> GatedModel:
    given = {"gate": SMALL, "straight_through": "kept", **options}
    return pfedgate.gate(model, x, Budget(params=budget), generator=torch.Generator().manual_seed(0), **given)


def check_net(gated: GatedModel, x: Tensor) -> None:
    """Sliced and masked agree, in results, gradients and buffers."""
    other = copy.deepcopy(gated)
    other.execution = "masked"
    importance = torch.rand(len(gated.plan.blocks), generator=torch.Generator().manual_seed(1))
    found = []
    for one in (gated, other):
        pretend(one, importance)
        one.zero_grad()
        y = one(x.clone())
        loss(y).backward()
        found.append((y, [p.grad for p in one.model.parameters()], list(one.model.buffers())))
    assert gated.last is not None
    assert gated.last.density < 1 or gated.execution == "masked"
    assert distance(found[0][0], found[1][0]) < 1e-9
    for a, b in zip(found[0][1], found[1][1], strict=True):
        assert (a is None) == (b is None) or not (a if b is None else b).any()
        assert a is None or b is None or distance(a, b, floor=1e-3) < 1e-9
    for a, b in zip(found[0][2], found[1][2], strict=True):
        assert distance(a, b) < 1e-9


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return -gradient


def frozen(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = torch.relu(net.a(x))
    return h + torch.relu(net.b(x))


def in_place(function: Callable[[Tensor], Any]) -> Callable[[Net, Tensor], Tensor]:
    def between(net: Net, x: Tensor) -> Tensor:
        y: Tensor = net.a(x)
        function(y)
        return y

    return between


def counted(net: Net, x: Tensor) -> Tensor:
    net.steps += 1
    return torch.relu(net.a(x)) * net.steps


def averaged(net: Net, x: Tensor) -> Tensor:
    h: Tensor = torch.relu(net.a(x))
    net.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
    return h


@pytest.mark.parametrize(
    "between",
    [
        pytest.param(frozen, id="no_grad"),
        pytest.param(lambda net, x: Reverse.apply(torch.relu(net.a(x))), id="autograd.Function"),
        pytest.param(lambda net, x: torch.relu(net.a(x)) - net.mean[None], id="buffer"),
        pytest.param(lambda net, x: torch.relu(net.a(x)) * net.mean[: net.mean.size(0)], id="size of a buffer"),
        pytest.param(counted, id="buffer set"),
        pytest.param(averaged, id="buffer moved"),
        pytest.param(in_place(torch.sigmoid_), id="sigmoid_"),
        pytest.param(in_place(torch.exp_), id="exp_"),
        pytest.param(in_place(lambda y: torch.clamp_(y, min=0.5)), id="clamp_"),
        pytest.param(in_place(F.elu_), id="elu_"),
        pytest.param(lambda net, x: torch.cat([torch.relu(net.a(x)), net.b(x)], axis=1)[:, 20:60], id="cat by axis"),
        pytest.param(lambda net, x: net.a(x[:, None]).amax(axis=1, keepdims=True)[:, 0], id="reduce by axis"),
        pytest.param(lambda net, x: torch.relu(net.a(x))[..., None].squeeze(1)[..., 0], id="squeeze"),
    ],
)
def test_sliced_is_masked(between: Callable[[Net, Tensor], Tensor]) -> None:
    model, x = Net(between).double(), torch.randn(5, 8, dtype=torch.float64)
    plain = copy.deepcopy(model)
    whole = gated_net(copy.deepcopy(model), x, 1.0, gate=GateConfig(init="ones", **SMALL))  # type: ignore[arg-type]
    loss(plain(x.clone())).backward()
    loss(whole(x.clone())).backward()
    for (name, a), b in zip(plain.named_parameters(), whole.model.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None) or not (b.grad if a.grad is None else a.grad).any(), name
        assert a.grad is None or b.grad is None or distance(b.grad, a.grad) < 1e-6, name
    for budget in (0.7, 0.5):
        check_net(gated_net(copy.deepcopy(model), x, budget), x)


def test_an_alias_of_what_a_relu_changes_in_place() -> None:
    class Alias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.out = nn.Conv2d(3, 20, 3), nn.Conv2d(3, 20, 3), nn.Linear(20, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            z = y.add_(self.b(x))
            pooled = F.max_pool2d(F.relu(z, inplace=True), 2)
            result: Tensor = self.out(pooled.mean((2, 3)) + y.mean((2, 3)))
            return result

    x = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    check_net(gated_net(Alias().double(), x, 0.8), x)


def test_buffers_that_are_loaded_anew() -> None:
    model, x = Net(lambda net, x: torch.relu(net.a(x)) * net.mean[None]).double(), torch.randn(5, 8).double()
    gated = gated_net(model, x)
    before = gated(x)
    gated.model.load_state_dict({**gated.model.state_dict(), "mean": torch.linspace(3, 4, 40).double()})
    assert distance(gated(x), before) > 0.1
    check_net(gated, x)
    assert gated_net(Net(model.between), x.float()).half()(x.half()).dtype == torch.float16


def test_hooks() -> None:
    x = torch.randn(5, 8)

    def build() -> nn.Sequential:
        return nn.Sequential(nn.Sequential(nn.Linear(8, 40), nn.ReLU()), nn.Linear(40, 4))

    def double(module: nn.Module, given: Any, result: Tensor) -> Tensor:
        return 2 * result

    model = build()
    model[0].register_forward_hook(double)
    regions = gated_net(model, x)
    assert "its forward runs as it is: hooks run around 0" in regions.explain()
    check_net(regions.double(), x.double())
    model = build()
    model[1].register_forward_hook(double)
    known = gated_net(model, x)
    assert known.execution == "sliced"
    check_net(known.double(), x.double())
    for place in ("", "0", "0.0", "1"):
        gated = gated_net(build(), x)
        assert gated.execution == "sliced"
        before = gated(x)
        heard = Mock(return_value=None)
        handle = gated.model.get_submodule(place).register_forward_hook(heard)
        with pytest.raises(RuntimeError, match=f"a hook was added around {place or 'the model itself'}"):
            gated(x)
        gated.execution = "masked"  # slower, and what it claims
        assert distance(gated(x), before) < 1e-5
        assert (heard.call_count, gated.last.execution) == (1, "masked"), place  # type: ignore[union-attr]
        handle.remove()
        gated.execution = "sliced"
        assert distance(gated(x), before) < 1e-5
        assert (heard.call_count, gated.last.execution) == (1, "sliced"), place  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "join",
    [
        lambda one, two: torch.stack([one, two], 1),
        torch.maximum,
        torch.mul,
        lambda one, two: torch.lerp(one, two, 0.3),
        lambda one, two: torch.where(one > 0, one, two),
    ],
)
def test_no_output_is_dropped_however_outputs_are_joined(join: Callable[[Tensor, Tensor], Tensor]) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.one, self.two = nn.Linear(8, 60), nn.Linear(60, 30), nn.Linear(60, 30)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(self.a(x))
            return join(self.one(h), self.two(h))

    gated = gated_net(Two(), torch.randn(5, 8), 0.5)
    gated(torch.randn(5, 8))
    assert gated.last is not None
    assert set(gated.last.units) == {"a"}


def test_weights_that_are_buffers() -> None:
    """As the error about frozen parameters advises."""
    for layer in (nn.Linear(8, 40), nn.Embedding(9, 40), nn.PReLU()):
        model = nn.Sequential(layer, nn.Linear(40, 30) if not isinstance(layer, nn.PReLU) else nn.Linear(8, 30))
        model.extend([nn.ReLU(), nn.Linear(30, 4)])
        weight = layer.weight.detach()
        del layer.weight
        layer.register_buffer("weight", weight)
        x = torch.randint(0, 9, (5,)) if isinstance(layer, nn.Embedding) else torch.randn(5, 8)
        gated = gated_net(model, x[:, None] if x.ndim == 1 else x, 0.9, gate={**SMALL})
        assert gated(x[:, None] if x.ndim == 1 else x).shape[-1] == 4


def test_checkpointing_is_refused_where_masks_would_be_forgotten() -> None:
    class Again(Net):
        def forward(self, x: Tensor) -> Any:
            return self.out(checkpoint(lambda x: torch.relu(self.a(x)), x, use_reentrant=False))

    with pytest.raises(ValueError, match="switch checkpointing off"):
        gated_net(Again(frozen), torch.randn(5, 8), execution="masked")


def test_another_type_after_wrapping() -> None:
    model, x = nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 4)), torch.randn(5, 8)
    gated = gated_net(model, x).double()
    twin = pickle.loads(pickle.dumps(gated))
    assert twin.execution == "sliced"
    assert torch.equal(twin(x.double()), gated(x.double()))
    small = pfedgate.compact(gated, x.double())
    assert small(x.double()).dtype == torch.float64


# -- the optimiser
def stepped(gated: GatedModel, optimizer: Any, x: Tensor) -> bool:
    """Whether a step moved theta."""
    before = [p.detach().clone() for p in gated.model.parameters()]
    optimizer.zero_grad()
    loss(gated(x)).backward()
    optimizer.step()
    return any(not torch.equal(p, q) for p, q in zip(gated.model.parameters(), before, strict=True))


def small_net() -> tuple[GatedModel, Tensor]:
    model, x = nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 4)), torch.randn(5, 8)
    return gated_net(model, x), x


def test_numbers_that_are_replaced_under_a_parameter() -> None:
    gated, x = small_net()
    optimizer = gated.optimizer("sgd", lr=0.1, momentum=0.9)
    assert stepped(gated, optimizer, x)
    vector = nn.utils.parameters_to_vector(gated.parameters_shared()).detach().clone()
    nn.utils.vector_to_parameters(vector, gated.parameters_shared())
    assert stepped(gated, optimizer, x)
    for p in gated.model.parameters():
        p.data = p.data.clone()
    assert stepped(gated, optimizer, x)


def test_without_its_optimiser_a_model_is_trained_as_any_other() -> None:
    gated, x = small_net()
    optimizer: Any = gated.optimizer("sgd", lr=0.1)
    assert stepped(gated, optimizer, x)
    del optimizer
    gc.collect()
    assert stepped(gated, torch.optim.SGD(gated.parameters(), lr=0.1), x)


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_copies_of_an_optimiser(name: str) -> None:
    gated, x = small_net()
    options = {"momentum": 0.9} if name == "sgd" else {}
    pair = (gated, gated.optimizer(name, lr=0.1, **options))
    assert stepped(*pair, x)
    for twins in (copy.deepcopy(pair), pickle.load(io.BytesIO(pickle.dumps(pair)))):
        assert stepped(*twins, x)
        assert twins[1].gated is twins[0]
        reference = copy.deepcopy(pair)
        assert stepped(*reference, x)
        for a, b in zip(twins[0].parameters(), reference[0].parameters(), strict=True):
            assert torch.equal(a, b)


def test_schedules_that_cycle_momentum() -> None:
    gated, x = small_net()
    optimizer = gated.optimizer("sgd", lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    first = optimizer.param_groups[0]["momentum"]
    assert stepped(gated, optimizer, x)
    schedule.step()
    assert optimizer.param_groups[0]["momentum"] != first
    gated, x = small_net()
    optimizer = gated.optimizer("adam", lr=0.1)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    assert optimizer.param_groups[0]["betas"][0] == 0.95


def test_other_parameters_need_another_optimiser() -> None:
    gated, _ = small_net()
    with pytest.raises(ValueError, match="use another optimiser for the rest"):
        gated.optimizer("sgd", lr=0.1).add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    for lr in (-0.1, float("nan")):
        with pytest.raises(ValueError, match="lr must be a number of at least 0"):
            gated.optimizer("sgd", lr=lr)


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ([torch.zeros(2, 8), torch.zeros(2)], "got list of Tensor; of a pair of inputs and labels give the inputs"),
        ("x", "got str"),
        ((8.7, 64.2), "got tuple of float"),
    ],
)
def test_examples_that_are_none(example: Any, message: str) -> None:
    model, _ = small_net()
    with pytest.raises(TypeError, match=message):
        pfedgate.gate(model.model, example, 0.5)
    with pytest.raises(TypeError, match=r"as a torch\.Tensor, got ndarray"):
        model(torch.zeros(2, 8).numpy())
    empty = nn.Linear(8, 4)
    empty.weight = nn.Parameter(torch.zeros(0, 8))
    with pytest.raises(ValueError, match="has no entries"):
        pfedgate.gate(empty, torch.zeros(2, 8), 0.5)
