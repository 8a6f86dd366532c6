"""What a user is told: where execution is not sliced and why, and what the plan looks like."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.compare import check_sliced, gated_pair
from tests.support.zoo import Of, build
from torch import Tensor, nn

import pfedgate
from pfedgate import Budget

SMALL = {"max_share": 9.0, "pool": 1}


def net(forward: Any) -> nn.Module:
    return Of(forward, a=nn.Linear(8, 40), b=nn.Linear(40, 40), out=nn.Linear(40, 4))


def explain(model: nn.Module, x: Tensor | None = None, **options: Any) -> str:
    x = torch.randn(4, 8) if x is None else x
    return pfedgate.gate(model, x, 1.0, gate=SMALL, **options).explain()


def test_nothing_to_tell() -> None:
    assert explain(*build("resnet")) == "sliced execution everywhere: dropped units are never computed"
    text = explain(*build("resnet"), execution="masked")
    assert text == "masked execution, as asked for; sliced would be everywhere: dropped units are never computed"
    assert explain(*build("mlp"), split="flat") == (
        "masked execution: flat blocks cut through units, so nothing can be left out"
    )


@pytest.mark.parametrize(
    ("forward", "place", "reason"),
    [
        (lambda m, x: m.out(torch.sigmoid(m.a(x))), "out", "dropped units of its input are not zero"),
        (lambda m, x: m.out(F.relu(m.a(x)) + 1), "out", "dropped units of its input are not zero"),
        (lambda m, x: m.out(m.a(x).mul(2).erfc()), "erfc (erfc)", "zeros are not known to stay zero"),
        (lambda m, x: m.out(m.a(x) + x.sum(1, True)), "add (add)", "one side of the sum is complete"),
        (lambda m, x: m.out(m.a(x).t().reshape(-1, 40)), "reshape (reshape)", "the reshape mixes units"),
        (lambda m, x: m.out(m.a(x)[:, ::2].repeat(1, 2)), "getitem (getitem)", "some of the units by number"),
        (lambda m, x: m.out(m.a(x) / m.b(m.a(x)).sum(1, True)), "truediv (truediv)", "the divisor may be zero"),
        (lambda m, x: m.out(m.a(x) - m.a(x).mean(1, keepdim=True)), "sub (sub)", "one side of the sum is complete"),
        (lambda m, x: m.out(F.linear(m.a(x), m.b.weight * 2)), "linear (linear)", "are computed"),
        (lambda m, x: m.out(F.alpha_dropout(m.a(x), 0.5, m.training)), "alpha_dropout", "f(0) may differ"),
        (lambda m, x: m.out(m.a(x).T.T), "getattr (getattr_1)", ".T has no rule"),
        (lambda m, x: m.out(torch.max(torch.zeros(40), m.a(x))), "max (max_1)", "compares complete tensors with units"),
        (lambda m, x: F.relu(m.a(x)), "output (output)", "leaves the network, so it is completed"),
    ],
)
def test_places_and_reasons(forward: Any, place: str, reason: str) -> None:
    model, x = net(forward), torch.randn(4, 8)
    sliced, masked = gated_pair(model.double(), x.double(), 1.0, keep_output=False)
    lines = sliced.explain().splitlines()
    assert lines[0] == "sliced execution everywhere, except at:"
    assert any(place in line and reason in line for line in lines[1:]), lines
    share = 0.5 * (
        1 + max(sliced.plan.costs.smallest()[r] / sliced.plan.costs.dense()[r] for r in sliced.plan.resources)
    )
    for gated in (sliced, masked):
        gated.selector = pfedgate.gating.selection.budget.Selector(gated.plan.costs, gated.plan.budget(share))
        gated.eval()
    check_sliced(sliced, masked, x.double(), out=1e-9, grad=1e-8)
    assert sliced.last is not None
    assert sliced.last.density < 1


def test_modules_without_a_rule_are_named() -> None:
    text = explain(*build("unknown"))
    assert "kept whole: a transposed convolution in groups" in text
    assert "LocalResponseNorm has no rule" in text


def test_layers_with_hooks_run_whole_so_that_hooks_run() -> None:
    model, x = build("cnn_cifar10")
    seen = []
    model.conv2.register_forward_hook(lambda module, args, result: seen.append(tuple(result.shape)))
    sliced, masked = gated_pair(model, x, Budget(params=0.8))
    assert "conv2  kept whole: hooks run around it" in sliced.explain()
    seen.clear()
    check_sliced(sliced, masked, x)
    assert seen == [(3, 64, 10, 10)] * 2


class Branching(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.a, self.out = how, nn.Linear(8, 40), nn.Linear(40, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = F.relu(self.a(x))
        if (self.how == "data" and h.sum() > 0) or (self.how == "mode" and self.training):
            h = h * 2
        elif self.how == "argument":
            h = h[:, 0:40] if self.training else h[:, 0:39].repeat(1, 2)[:, :40]
        elif self.how == "luck":
            h = h * 2 if random.random() < 0.5 else h
        elif self.how == "noise":
            h = h + torch.randn(40)
        elif self.how == "overwrite":
            g = h * 1.5
            g.view(-1, 40).sigmoid_()  # seen through g
            h = h + g
        elif self.how == "counts":
            self.calls += 1
        if mask is not None:
            h = h * mask
        return self.out(h)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("data", "torch.fx cannot trace it"),
        ("argument", "in its graph no units save 100% of the FLOPs"),
        ("luck", "draws random numbers that are no part of its graph"),
        ("overwrite", "writes in place into a tensor that is read again later"),
    ],
)
def test_layers_of_models_that_cannot_be_followed_are_sliced(how: str, reason: str) -> None:
    model, x = Branching(how).double(), torch.randn(4, 8).double()
    sliced, masked = gated_pair(model, x, Budget(params=0.7))
    assert sliced.execution == "sliced"
    assert reason in sliced.explain()
    for training in (True, False):
        state = random.getstate()
        results = []
        for gated in (sliced, masked):
            random.setstate(state)
            results.append(gated.train(training)(x))
        assert torch.allclose(*results, rtol=0, atol=1e-12)
    results[0].sum().backward()


def test_models_of_which_nothing_can_be_followed_are_masked() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 40), nn.Linear(40, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = F.relu(F.linear(x, self.a.weight))
            return F.linear(h if h.sum() > 0 else h * 2, self.b.weight)

    model, x = Bare(), torch.randn(4, 8)
    with pytest.warns(UserWarning, match="binds parameters alone"):
        gated = pfedgate.gate(model, x, 0.7, gate=SMALL)
    assert gated.execution == "masked"
    assert gated.explain().startswith("masked execution: torch.fx cannot trace it")
    with pytest.raises(ValueError, match=r"sliced execution is not possible: .*Use execution='auto'"):
        pfedgate.gate(model, x, 0.7, execution="sliced")
    gated(x).sum().backward()


@pytest.mark.parametrize("how", ["mode", "noise"])
def test_what_differs_between_training_and_evaluation_is_captured_twice(how: str) -> None:
    """A fault: one graph for both modes, or random numbers drawn once."""
    x = torch.randn(4, 8).double()
    sliced, masked = gated_pair(Branching(how).double(), x, Budget(params=0.5))
    for training in (True, False):
        for gated in (sliced.train(training), masked.train(training)):
            torch.manual_seed(0)
            gated.result = gated(x)  # type: ignore[assignment]
        assert torch.allclose(sliced.result, masked.result, atol=1e-12)  # type: ignore[arg-type]
    assert sliced.verify(x)["counted"] < 1


def test_defaults_of_other_arguments_are_followed() -> None:
    sliced, masked = gated_pair(Branching("none").double(), torch.randn(4, 8).double(), 0.5)
    check_sliced(sliced, masked, torch.randn(4, 8).double(), out=1e-9, grad=1e-8)


def test_code_that_a_graph_does_not_show_is_found_out() -> None:
    class Sneaky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.out, self.calls = nn.Linear(8, 40), nn.Linear(40, 4), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.out(F.relu(self.a(x)) * self.calls)

    model = Sneaky()
    gated = pfedgate.gate(model, torch.randn(4, 8), Budget(params=0.7), gate=SMALL)
    assert "its forward runs as it is: its forward sets an attribute (Sneaky.calls)" in gated.explain()
    calls, x = model.calls, torch.randn(4, 8)
    gated(x), gated(x)
    assert model.calls == calls + 2


def test_uncopyable_models_run_masked() -> None:
    class Stubborn(nn.Sequential):
        def __deepcopy__(self, memo: Any) -> Any:
            raise RuntimeError("one of a kind")

    model = Stubborn(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 4))
    gated = pfedgate.gate(model, torch.randn(4, 8), Budget(params=0.5), gate=SMALL)
    assert gated.explain() == "masked execution: it cannot be copied, so it was not traced (one of a kind)"
    gated(torch.randn(4, 8))


# -- the plan
def test_the_plan_is_a_table() -> None:
    model, x = build("cnn_cifar10")
    gated = pfedgate.gate(model, x, 0.3)
    lines = str(gated.plan).splitlines()
    assert lines[0] == "unit blocks"
    assert lines[1].split()[:5] == ["layer", "units", "blocks", "kept", "params"]
    (conv,) = [line for line in lines if line.startswith("conv2")]
    assert conv.split()[1:] == ["64", "11", "1", "51,264", "10,240,000", "57,600"]
    (total,) = [line for line in lines if line.startswith("total")]
    assert total.split()[3] == "256,830"
    (params,) = [line for line in lines if line.startswith("params")]
    assert params.split() == ["params", "256,830", "100.0%", "0.5%"]  # whole, reducible, smallest
    assert lines[-1] == f"gate: {gated.gate.size:,} parameters, {gated.gate.size / 256830:.1%} of the model"
    assert gated.gate.size <= 0.063 * 256830
    assert len({len(line) for line in lines[1 : lines.index(total) + 1]}) == 1


def test_a_table_of_masked_blocks_claims_no_work() -> None:
    def whole(model: nn.Module) -> list[pfedgate.Block]:
        return [
            pfedgate.Block(name, (pfedgate.Piece(name, 0, len(p), 0),), keep=name.startswith("out"))
            for name, p in model.named_parameters()
        ]

    model, x = build("cnn_cifar10")
    lines = str(pfedgate.gate(model, x, 1.0, split=whole).plan).splitlines()
    (layer,) = [line for line in lines if line.startswith("fc1.weight")]  # may be dropped, so it has a line of its own
    assert layer.split() == ["fc1.weight", "1", "192,000", "–", "–"]


@pytest.mark.parametrize(
    "name", ["cnn_femnist", "cnn_cifar10", "cnn_cifar100", "resnet", "vit", "text_cnn", "text_gru"]
)
def test_the_table_adds_up(name: str) -> None:
    model, x = build(name)
    plan = pfedgate.gate(model, x, 1.0).plan
    dense = plan.costs.dense()
    assert sum(row.params for row in plan.rows) == plan.size
    assert sum(row.blocks for row in plan.rows) == len(plan.blocks)
    assert sum(row.flops for row in plan.rows) == pytest.approx(dense["flops"])
    assert sum(row.activation_bytes for row in plan.rows) == pytest.approx(dense["activation_bytes"])
    assert plan.gate_size <= 0.063 * plan.size


@pytest.mark.parametrize("split", ["flat", "head", "channel"])
def test_other_plans_print(split: str) -> None:
    model, x = build("vit")
    text = str(pfedgate.gate(model, x, 1.0, split=split).plan)
    assert text.startswith(f"{split} blocks")
    assert f"{sum(p.numel() for p in model.parameters()):,}" in text


def test_the_model_says_what_it_is() -> None:
    model, x = build("mlp")
    assert "21 unit blocks, sliced, gate 4.5% of the model" in repr(pfedgate.gate(model, x, 0.5))
