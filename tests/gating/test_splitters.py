"""What a block is: sizes of blocks, who owns which parameter, what stays, and splitters of one's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tests.support.compare import check_sliced, gated_pair, pretend
from tests.support.zoo import build
from torch import nn

import pfedgate
from pfedgate import Block, Budget, Piece
from pfedgate.gating.splitters import cut

SMALL = {"max_share": 9.0, "pool": 1}


@given(st.integers(1, 3000), st.integers(2, 40), st.floats(0, 0.9))
def test_units_are_cut_into_equal_blocks(units: int, blocks: int, smallest: float) -> None:
    found = cut(units, blocks, smallest)
    assert found.first + found.step * found.count == units
    assert found.first >= max(1, int(units * smallest))
    assert found.count + 1 <= blocks + 2
    numbers = found.block_of()
    assert (np.diff(numbers) >= 0).all()
    assert (np.bincount(numbers)[1:] == found.step).all()
    if smallest <= 0.2 and units >= 4 * blocks:
        assert found.count >= blocks / 2 - 3


@pytest.mark.parametrize("units", [32, 64, 96, 120, 128, 256, 512, 2048])
def test_numbers_of_live_units_are_multiples_of_four(units: int) -> None:
    found = cut(units, 10, 0.1)
    assert found.first % 4 == found.step % 4 == 0
    assert units * 0.1 - 1 <= found.first <= units * 0.15


def test_flat_is_the_rule_of_the_paper() -> None:
    """floor(d s_min) always kept, the rest in B - 1 equal pieces, the last may be smaller."""
    model = nn.Linear(10, 11)  # 110 weights and 11 biases
    gated = pfedgate.gate(model, torch.zeros(2, 10), 0.5, split="flat", blocks=5, smallest=0.1, gate=SMALL)
    weights = [b for b in gated.plan.blocks if b.pieces[0].parameter == "weight"]
    assert [b.pieces[0].stop - b.pieces[0].start for b in weights] == [11, 25, 25, 25, 24]
    assert [b.keep for b in weights] == [True, False, False, False, False]
    assert gated.plan.resources == ("params",)


@pytest.mark.parametrize("split", ["unit", "channel", "flat", "head"])
@pytest.mark.parametrize("name", ["cnn_cifar10", "shared", "lstm", "attention", "two_results"])
def test_every_parameter_is_in_exactly_one_block(name: str, split: str) -> None:
    model, x = build(name)
    plan = pfedgate.gate(model, x, 1.0, split=split, gate=SMALL).plan
    counts = {parameter: np.zeros(p.shape, int) for parameter, p in model.named_parameters()}
    for block in plan.blocks:
        for piece in block.pieces:
            if piece.axis is None:
                counts[piece.parameter].reshape(-1)[piece.start : piece.stop] += 1
            else:
                place = [slice(None)] * piece.axis + [slice(piece.start, piece.stop)]
                counts[piece.parameter][tuple(place)] += 1
    assert all((count == 1).all() for count in counts.values())
    assert plan.sizes.sum() == plan.size == sum(p.numel() for p in model.parameters())
    whole = plan.live(np.ones(len(plan.blocks), bool))
    assert whole.count == plan.size
    assert all(whole.elements(parameter).all() for parameter in counts)


def test_a_unit_owns_its_bias_and_its_norm() -> None:
    model, x = build("resnet")
    plan = pfedgate.gate(model, x, 0.5).plan
    for conv, norm in (("conv", "bn"), ("stage1.0.conv1", "stage1.0.bn1"), ("stage2.0.conv2", "stage2.0.bn2")):
        assert (plan.owners[f"{conv}.weight"].block == plan.owners[f"{norm}.weight"].block).all()
        assert (plan.owners[f"{conv}.weight"].block == plan.owners[f"{norm}.bias"].block).all()
    # What a residual sum adds up is cut together.
    assert (plan.owners["conv.weight"].block == plan.owners["stage1.0.conv2.weight"].block).all()
    assert (plan.owners["stage2.0.shortcut.0.weight"].block == plan.owners["stage2.0.conv2.weight"].block).all()
    assert not set(plan.owners["conv.weight"].block) & set(plan.owners["stage1.0.conv1.weight"].block)


def test_heads_are_whole() -> None:
    model, x = build("vit")
    plan = pfedgate.gate(model, x, 0.9, split="head").plan
    rows = plan.owners["blocks.0.attention.in_proj_weight"].block.reshape(3, 4, 16)
    assert (rows == rows[:1, :, :1]).all()  # query, key and value of a head, all its dimensions
    assert len(np.unique(rows)) == 4
    assert (plan.owners["blocks.0.attention.out_proj.weight"].block.reshape(4, 16) == rows[0]).all()
    assert (plan.owners["blocks.0.fc1.weight"].block == plan.owners["blocks.0.fc2.weight"].block).all()
    kept = {block.name for block in plan.blocks if block.keep}
    assert {"patches", "norm", "blocks.1.norm1"} <= kept


def test_outputs_are_kept_but_weighed_one_by_one() -> None:
    model, x = build("cnn_femnist")
    plan = pfedgate.gate(model, x, 0.3).plan
    outputs = [block for block in plan.blocks if block.name.startswith("out outputs")]
    assert len(outputs) == 62
    assert all(block.keep for block in outputs)
    assert len(pfedgate.gate(model, x, 0.3, output_blocks=7).plan.blocks) == len(plan.blocks) - 55


@pytest.mark.parametrize("end", ["softmax", "sum", "scale"])
def test_outputs_are_kept_behind_functions(end: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.out, self.more = nn.Linear(8, 30), nn.Linear(30, 12), nn.Linear(30, 12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(self.a(x))
            if end == "sum":
                return self.out(x) + self.more(x)
            return torch.softmax(self.out(x) * self.more.bias, 1) if end == "softmax" else self.out(x) * 2

    gated = pfedgate.gate(Net(), torch.zeros(2, 8), 1.0, gate=SMALL)
    assert list(gated.plan.cuts) and set(gated.plan.live(gated.plan.keep).units) == {"a"}  # noqa: PT018


def test_a_splitter_of_ones_own() -> None:
    def by_layer(model: nn.Module) -> list[Block]:
        names: dict[str, list[Piece]] = {}
        for name, p in model.named_parameters():
            names.setdefault(name.split(".")[0], []).append(Piece(name, 0, p.shape[0]))
        return [Block(layer, tuple(pieces), keep=layer == "out") for layer, pieces in names.items()]

    model, x = build("cnn_cifar10")
    gated = pfedgate.gate(model, x, Budget(params=0.23), split=by_layer, gate=SMALL)
    pretend(gated, [0.1, 0.9, 0.9, 0.2, 0.9])  # conv1, conv2, fc1 (three quarters of all), fc2, out
    y = gated(x)
    assert gated.last is not None
    assert y.shape == (3, 10)
    assert gated.execution == "masked"
    assert gated.plan.how == "by_layer"
    assert gated.last.density <= 0.23
    kept = [block.name for block, k in zip(gated.plan.blocks, gated.last.kept, strict=True) if k]
    assert kept == ["conv1", "conv2", "out"]


def test_a_model_that_cannot_be_traced_is_cut_by_rows() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm, self.out = nn.Linear(8, 40), nn.BatchNorm1d(40), nn.Linear(40, 4)
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # It reads what its layers hold: nothing may stand in their place.
            h = torch.relu(self.norm(F.linear(x, self.a.weight, self.a.bias))) * self.scale
            return F.linear(h if h.sum() > 0 else -h, self.out.weight, self.out.bias)

    x = torch.randn(4, 8)
    gated = pfedgate.gate(Branching(), x, 0.7, gate=SMALL, execution="masked")
    assert gated.plan.resources == ("params",)
    gated(x).sum().backward()
    assert gated.last is not None
    assert 0.3 < gated.last.density <= 0.7
    before = {n: p.detach().clone() for n, p in gated.model.named_parameters()}
    optimizer = gated.optimizer("sgd", lr=0.1, momentum=0.9, weight_decay=0.1)
    gated(x).sum().backward()
    optimizer.step()
    for name, p in gated.model.named_parameters():
        alive = torch.from_numpy(gated.last.live.elements(name))
        assert torch.equal(p[~alive], before[name][~alive])
        assert not torch.equal(p, before[name])


def test_weights_from_other_parameters_are_kept_whole() -> None:
    from torch.nn.utils.parametrizations import weight_norm

    model = nn.Sequential(nn.Linear(8, 60), nn.ReLU(), weight_norm(nn.Linear(60, 4)), nn.ReLU(), nn.Linear(4, 4))
    x = torch.randn(3, 8)
    sliced, masked = gated_pair(model, x, Budget(params=0.8))
    assert "kept whole" in sliced.explain()
    check_sliced(sliced, masked, x)
