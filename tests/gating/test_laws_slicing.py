"""Law 1: sliced execution equals masked execution, in outputs, in all gradients and in running statistics."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tests.support.compare import check_sliced, gated_pair, pretend
from tests.support.zoo import OURS, SMALL, build
from torch import Tensor, nn

from pfedgate import Budget, InfeasibleBudget, models
from pfedgate.core import measure

SHARES = (1.0, 0.7, 0.5, 0.3, 0.1)
# With norms over a batch of three, rounding alone moves gradients in single precision (a ReLU changes its side).
SINGLE = ("cnn_femnist", "cnn_cifar10", "cnn_cifar100", "mlp", "text_cnn", "text_gru")
# Networks with heads or neurons of which the head something of each network; `channel` cuts something of every one.
HEADS = ("cnn_cifar10", "mlp", "vit", "text_gru", "shared", "clash", "attention")


def check_all_budgets(name: str, split: str, dtype: torch.dtype, out: float, grad: float) -> None:
    model, x = build(name)
    model.to(dtype)
    x = x.to(dtype) if x.is_floating_point() else x
    sliced, masked = gated_pair(model, x, 1.0, split=split)
    plan = sliced.plan
    least = max(plan.costs.smallest()[r] / plan.costs.dense()[r] for r in plan.resources)
    # At small budgets the gate of a small network has only one selection left to choose: a warning, not an error.
    warnings.simplefilter("ignore", UserWarning)
    seen = set()
    for share in (*SHARES, min(1.0, least + plan.gate_flops / plan.costs.dense()["flops"] + 1e-6)):
        try:
            for gated in (sliced, masked):
                gated.rebudget(share)
        except InfeasibleBudget:
            assert share < least + plan.gate_flops / plan.costs.dense()["flops"]
            if plan.costs.smallest()["params"] > share * plan.costs.dense()["params"]:
                continue
            for gated in (sliced, masked):  # activations, say, cannot shrink so far: then of the parameters alone
                gated.rebudget(Budget(params=share))
        for training in (True, False):
            sliced.train(training)
            masked.train(training)
            check_sliced(sliced, masked, x, out=out, grad=grad)
        assert sliced.last is not None
        seen.add(sliced.last.kept.tobytes())
    assert len(seen) > 1, "only one selection was compared"


@pytest.mark.parametrize("split", ["unit", "channel"])
@pytest.mark.parametrize("name", SINGLE)
def test_our_networks_in_single_precision(name: str, split: str) -> None:
    check_all_budgets(name, split, torch.float32, out=1e-5, grad=1e-4)


@pytest.mark.parametrize("split", ["unit", "channel"])
@pytest.mark.parametrize("name", [name for name in (*OURS, *SMALL) if name not in SINGLE])
def test_every_operation_in_double_precision(name: str, split: str) -> None:
    check_all_budgets(name, split, torch.float64, out=1e-10, grad=1e-9)


@pytest.mark.parametrize("name", HEADS)
def test_heads_and_neurons(name: str) -> None:
    check_all_budgets(name, "head", torch.float64, out=1e-10, grad=1e-9)


def test_dropped_outputs() -> None:
    model, x = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 60)), torch.randn(4, 8)
    sliced, masked = gated_pair(model, x, Budget(params=0.15), keep_output=False)
    check_sliced(sliced, masked, x)
    assert sliced.last is not None
    assert sliced.last.units["2"] < 30
    assert (sliced(x) == 0).sum() == 4 * (60 - sliced.last.units["2"])


@pytest.mark.parametrize("compensate", ["sqrt", "none"])
def test_compensation(compensate: str) -> None:
    model, x = build("mlp")
    check_sliced(*gated_pair(model, x, 0.5, compensate=compensate), x)


def test_compensation_divides_by_the_live_share_of_inputs() -> None:
    model, x = build("mlp")
    sliced, plain = (gated_pair(model, x, 0.5, compensate=how)[0] for how in ("share", "none"))
    sliced.eval(), plain.eval()
    assert sliced.last is None
    outputs = [gated(x) for gated in (sliced, plain)]
    assert sliced.last is not None
    share = sliced.last.units["fc1"] / 64
    bias = model.out.bias * sliced.last.adapted[sliced.plan.block_index("out.bias", x.device)]
    assert share < 0.5
    assert torch.allclose((outputs[0] - bias) * share, outputs[1] - bias, atol=1e-6)


def test_other_batch_and_image_sizes_than_the_example() -> None:
    model, x = build("resnet")
    sliced, masked = gated_pair(model, x, 0.5)
    check_sliced(sliced, masked, torch.randn(5, 3, 20, 24))
    check_sliced(sliced.eval(), masked.eval(), torch.randn(1, 3, 20, 24))
    model, x = build("one_dimension")
    check_sliced(*gated_pair(model, x, 0.5), torch.randn(2, 3, 8))


@pytest.mark.parametrize("share", [1.0, 0.5, 0.3])
def test_channels_last(share: float) -> None:
    model, x = models.build("cnn_cifar10"), models.example("cnn_cifar10", batch=8)
    model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    check_sliced(*gated_pair(model, x, share), x)


def test_pooling_in_channels_last_needs_no_copies() -> None:
    """A second convolution that is much wider than the first: its gradient is not held in two layouts."""
    model, x = models.build("cnn_cifar10"), torch.randn(64, 3, 32, 32).to(memory_format=torch.channels_last)
    gated = gated_pair(model.to(memory_format=torch.channels_last), x, 0.3)[0]
    wide = [0.9 if block.name.startswith("conv2") else 0.1 for block in gated.plan.blocks]
    pretend(gated, wide)
    gated(x).sum().backward()
    assert gated.last is not None
    assert gated.last.units["conv2"] > 0.7 * 64
    dense = measure.peak_bytes(lambda: model(x).sum().backward())
    assert measure.peak_bytes(lambda: gated(x).sum().backward()) < 0.35 * dense


def test_running_statistics_of_dropped_channels_do_not_move() -> None:
    for execution in ("sliced", "masked"):
        model, x = build("resnet")
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        gated = gated_pair(model, x, 0.3)[execution == "masked"].train()
        assert gated.execution == execution
        gated(x)
        assert gated.last is not None
        for name, buffer in gated.model.named_buffers():
            if name.endswith("num_batches_tracked"):
                assert buffer == 1
                continue
            alive = torch.from_numpy(gated.last.live.elements(f"{name.rpartition('.')[0]}.weight"))
            assert torch.equal(buffer[~alive], before[name][~alive]), (execution, name)
            assert (buffer[alive] != before[name][alive]).all(), (execution, name)


def test_a_submodule_in_evaluation_while_the_rest_trains() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.out(F.dropout(F.relu(m.a(x)), 0.5, m.a.training))

    from tests.support.zoo import Of

    model = Of(forward, a=nn.Linear(8, 40), out=nn.Linear(40, 3))
    x = torch.randn(4, 8)
    sliced, masked = gated_pair(model, x, 0.5)
    for gated in (sliced, masked):
        gated.train()
        gated.model.a.eval()
    with pytest.raises(RuntimeError, match="only some of its submodules are in training"):
        sliced(x)


def test_batch_norms_in_evaluation_while_the_rest_trains_are_sliced() -> None:
    """As one fine-tunes: the pass claims what it takes."""
    model, x = build("resnet")
    sliced, masked = gated_pair(model.double(), x.double(), 0.5)
    for gated in (sliced, masked):
        gated.train()
        for module in gated.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
    check_sliced(sliced, masked, x.double(), out=1e-9, grad=1e-8)
    assert sliced.last is not None
    assert sliced.last.execution == "sliced"
    result = sliced.verify(x.double())
    assert result["counted"] <= 1.02 * result["claimed"] < 0.6
    sliced.plan.lives.clear()
    sliced.execution = "masked"
    assert sliced.verify(x.double())["claimed"] >= 1


# -- random networks
FUNCTIONS = (F.relu, torch.tanh, F.gelu, torch.sigmoid, torch.abs, F.silu)


class Random(nn.Module):
    """Layers in any order over a stack of earlier values: convolutions, norms, functions, sums, products, joins."""

    def __init__(self, steps: list[tuple[int, int, int]]) -> None:
        super().__init__()
        self.layers, self.steps, widths = nn.ModuleList(), [], [3]
        for kind, choice, back in steps:
            source = back % len(widths)
            width = widths[source]
            other = next((i for i in range(len(widths) - 1, -1, -1) if widths[i] == width and i != source), source)
            layer: nn.Module = nn.Identity()
            if kind == 0:
                width = (8, 12, 16, 12)[choice]
                layer = nn.Conv2d(widths[source], width, 1 + 2 * (choice % 2), padding=choice % 2, bias=choice > 0)
            elif kind == 1:
                kinds = (nn.BatchNorm2d(width), nn.GroupNorm(1, width), nn.PReLU(width), nn.InstanceNorm2d(width))
                layer = kinds[choice]
            elif kind == 2 and width % 4 == 0:
                layer = nn.Conv2d(width, width, 3, padding=1, groups=(width, 4, width, 2)[choice])
            elif kind == 5:
                width = widths[source] + widths[other]
            elif kind == 6:
                layer, width = self.rarer(choice, width)
            self.layers.append(layer)
            self.steps.append((kind, source, other))
            widths.append(width)
        self.out = nn.Linear(widths[-1], 4)

    @staticmethod
    def rarer(choice: int, width: int) -> tuple[nn.Module, int]:
        """A layer, and how many channels it writes."""
        if choice == 0:
            return nn.ConvTranspose2d(width, 12, 3, padding=1), 12
        if choice == 1 and width % 2 == 0:
            return nn.GLU(1), width // 2
        if choice == 2 and width % 4 == 0:
            return nn.Sequential(nn.PixelShuffle(2), nn.AvgPool2d(2)), width // 4
        return nn.Sequential(nn.ReflectionPad2d(1), nn.Upsample(scale_factor=2), nn.MaxPool2d(3)), width

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for layer, (kind, source, other) in zip(self.layers, self.steps, strict=True):
            a, b = values[source], values[other]
            if kind == 3:
                values.append(FUNCTIONS[(source + other) % len(FUNCTIONS)](a))
            elif kind == 4:
                values.append(a + b if (source + other) % 3 else a * b)
            elif kind == 5:
                values.append(torch.cat([a, b], 1))
            else:
                values.append(layer(a))
        return self.out(values[-1].mean((2, 3)))


STEPS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3), st.integers(0, 30)), min_size=2, max_size=9)


@given(
    STEPS.map(lambda steps: [(0, 2, 0), *steps, (0, 1, 30)]), st.sampled_from(["unit", "channel"]), st.integers(0, 5)
)
def test_random_networks(steps: list[tuple[int, int, int]], split: str, seed: int) -> None:
    torch.manual_seed(seed)
    model, x = Random(steps).double(), torch.randn(3, 3, 4, 4, dtype=torch.float64)
    sliced, masked = gated_pair(model, x, 1.0, split=split, seed=seed)
    plan = sliced.plan
    for share in (0.6, 0.3):
        least = max(plan.costs.smallest()[r] / plan.costs.dense()[r] for r in plan.resources)
        share = least + share * (1 - least) + plan.gate_flops / plan.costs.dense()["flops"]
        if share < 1 and plan.selector(share).reachable_masks() > 1:
            sliced.rebudget(share)
            masked.rebudget(share)
            check_sliced(sliced, masked, x, out=1e-9, grad=1e-8)
