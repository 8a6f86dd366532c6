"""Laws 2 and 3: never over budget, whatever the gate says; and the best selection that fits."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.support.compare import gated_pair, pretend
from tests.support.zoo import SMALL, build
from torch import Tensor, nn

import pfedgate
from pfedgate import Block, Budget, GatedModel, InfeasibleBudget, Piece, models
from pfedgate.core import measure
from pfedgate.gating.selection.budget import Selector

Floats = npt.NDArray[np.float64]
COUNT = 40  # gates per budget: with six budgets on each of the cases below, two thousand


def many_importances(blocks: int, groups: list[npt.NDArray[np.int64]], count: int, seed: int) -> Iterator[Floats]:
    """Importances of many gates: random at every scale, tied, one layer against all, nearly equal, negative."""
    rng = np.random.default_rng(seed)
    yield np.zeros(blocks)
    yield np.ones(blocks)
    yield np.full(blocks, 1e-30)
    yield np.arange(blocks) * 1e12
    yield -np.ones(blocks)
    yield 0.5 + 1e-7 * rng.standard_normal(blocks)
    for turn in range(count - 6):
        kind = turn % 6
        values = rng.random(blocks)
        if kind == 1:
            values **= 8
        elif kind == 2:  # one layer is worth more than all others together
            values[groups[rng.integers(len(groups))]] += 100
        elif kind == 3:  # or nothing
            values[groups[rng.integers(len(groups))]] *= 1e-9
        elif kind == 4:
            values = np.round(values * 2) / 2
        elif kind == 5:
            values = rng.standard_normal(blocks)
        yield values


def group_blocks(gated: GatedModel) -> list[npt.NDArray[np.int64]]:
    counts = [group.count for group in gated.plan.costs.groups]
    return [g for g in np.split(gated.plan.optional, np.cumsum(counts)[:-1]) if len(g)]


def halves(model: nn.Module) -> list[Block]:
    """A user's own splitter: two blocks of columns per matrix, vectors always kept."""
    blocks = []
    for name, p in model.named_parameters():
        if p.ndim < 2:
            blocks.append(Block(name, (Piece(name, 0, len(p)),), keep=True))
        else:
            half = p.shape[1] // 2
            blocks += [
                Block(f"{name}/0", (Piece(name, 0, half, axis=1),)),
                Block(f"{name}/1", (Piece(name, half, p.shape[1], axis=1),)),
            ]
    return blocks


CASES = [
    ("cnn_cifar10", "unit"), ("cnn_cifar10", "channel"), ("cnn_cifar10", "flat"), ("cnn_cifar10", halves),
    ("cnn_femnist", "unit"), ("mlp", "unit"), ("mlp", "head"), ("mlp", "flat"), ("resnet", "unit"),
    ("vit", "head"), ("vit", "unit"), ("text_gru", "unit"), ("unknown", "channel"),
    ("not_zero", "channel"), ("shared", "unit"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "split"), CASES)
def test_density_and_flops_stay_below_the_budget(name: str, split: Any) -> None:
    model, x = build(name)
    x = x[:1]
    warnings.simplefilter("ignore", UserWarning)  # a relatively large gate, or one selection: both still count
    gated = pfedgate.gate(model, x, 1.0, split=split).train(False)
    aligned = gated.execution == "sliced"
    dense = measure.flops(lambda: model(x))
    # Where everything is kept, the smallest gate of a toy network may be more than 2 % of it (one value per channel).
    extra = {1.0: max(0.02, gated.plan.gate_flops / gated.plan.costs.dense().get("flops", math.inf))}
    assert name in ("not_zero", "shared", "unknown") or extra[1.0] == 0.02
    seen: set[tuple[Any, ...]] = set()
    checked = 0
    for share in (1.0, 0.9, 0.7, 0.5, 0.3, 0.1):
        try:
            gated.rebudget(share)
        except InfeasibleBudget:
            continue
        count = COUNT if gated.selector.solver != "Prices" else COUNT // 4
        for importance in many_importances(len(gated.plan.blocks), group_blocks(gated), count, seed=int(share * 10)):
            pretend(gated, importance)
            selection, _ = gated.select(x)
            real = sum(int(selection.live.elements(n).sum()) for n in gated.plan.shapes) if checked % 20 == 0 else None
            assert real is None or real == selection.live.count
            assert selection.live.count / gated.plan.size == selection.density <= share
            assert all(amount <= share for r, amount in selection.cost.items() if r in gated.plan.resources)
            assert selection.kept[gated.plan.keep].all()
            checked += 1
            key = tuple(selection.live.counts)
            if aligned and key not in seen and len(seen) < 50:
                seen.add(key)
                with torch.no_grad():
                    spent = measure.flops(lambda: gated(x))
                assert spent <= (share + extra.get(share, 0.02)) * dense, (key, spent / dense)
    assert checked >= COUNT
    assert not aligned or len(seen) > 3


@pytest.mark.parametrize("name", ["cnn_femnist", "cnn_cifar10", "mlp", "resnet", "vit", "text_cnn", "text_gru"])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_flops_of_the_plan_are_those_of_the_counter(name: str, share: float) -> None:
    model, x = build(name)
    gated = pfedgate.gate(model, x, share).train()
    dense = measure.flops(lambda: model.train()(x))
    assert gated.plan.costs.dense()["flops"] * len(x) == dense
    spent = measure.flops(lambda: gated(x))
    assert gated.last is not None
    assert spent == pytest.approx(gated.last.cost["flops"] * dense + len(x) * gated.plan.gate_flops, rel=1e-9)
    assert share < 1 or spent > dense


@pytest.mark.filterwarnings("ignore:under Budget")
@pytest.mark.parametrize("name", SMALL)
def test_no_operation_takes_more_flops_than_the_plan_claims(name: str) -> None:
    model, x = build(name)
    gated = gated_pair(model, x, Budget(flops=1.0))[0]
    dense, least = gated.plan.costs.dense()["flops"], gated.plan.costs.smallest()["flops"]
    for share in (0.7, 0.3):
        if least < dense:
            gated.rebudget(Budget(flops=least / dense + share * (1 - least / dense)))
        for training in (True, False):
            with torch.no_grad():
                spent = measure.flops(lambda training=training: gated.train(training)(x))  # type: ignore[misc]
            assert gated.last is not None
            assert spent <= (gated.last.cost["flops"] * dense + gated.plan.gate_flops) * len(x) * (1 + 1e-9), training


def test_flops_of_modules_without_a_rule_count() -> None:
    model, x = build("unknown")
    gated = pfedgate.gate(model, x, 1.0, gate={"max_share": 9.0}).train()
    assert gated.plan.costs.dense()["flops"] * len(x) == measure.flops(lambda: model(x))


def test_activation_bytes_of_the_plan_follow_the_real_peak() -> None:
    model, x = build("cnn_cifar10")
    x = torch.randn(32, 3, 32, 32)
    peaks = {}
    for share in (1.0, 0.5, 0.3):
        gated = pfedgate.gate(model, x, share)
        gated(x)
        assert gated.last is not None
        peaks[share] = (measure.peak_bytes(lambda: gated(x).sum().backward()), gated.last.cost["activation_bytes"])  # noqa: B023
    for share in (0.5, 0.3):
        assert peaks[share][0] / peaks[1.0][0] == pytest.approx(peaks[share][1], abs=0.08)


# -- law 3
TINY: dict[str, tuple[nn.Module, Tensor, str]] = {
    "two hidden layers": (
        nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3)),
        torch.zeros(2, 5), "unit",
    ),
    "convolution": (
        nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 5, 3), nn.Flatten(),
                      nn.Linear(80, 3)),
        torch.zeros(2, 1, 8, 8), "unit",
    ),
    "inputs": (nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)), torch.zeros(2, 6), "channel"),
    "flat": (nn.Sequential(nn.Linear(5, 8, bias=False), nn.ReLU(), nn.Linear(8, 3)), torch.zeros(2, 5), "flat"),
}  # fmt: skip


@pytest.mark.parametrize("case", TINY)
@pytest.mark.parametrize("budget", [0.75, 0.5, Budget(params=0.6)])
def test_selection_is_the_best_of_all_selections(case: str, budget: float | Budget) -> None:
    model, x, split = TINY[case]
    gated = pfedgate.gate(model, x, 1.0, split=split, blocks=5, gate={"max_share": 9.0, "pool": 1})
    plan = gated.plan
    # Beside such a tiny network the gate itself would use up the budget.
    gated.selector = Selector(plan.costs, plan.budget(budget))
    limits, bound = gated.selector.limits, set(plan.budget(budget).bound())
    assert 8 <= len(plan.optional) <= 12
    dense = plan.costs.dense()
    allowed = []
    for bits in itertools.product([False, True], repeat=len(plan.optional)):
        kept = plan.keep.copy()
        kept[plan.optional] = bits
        live = plan.live(kept)
        costs = {"params": float(live.count), **{r: v * dense[r] for r, v in live.cost.items() if r != "params"}}
        if all(costs[r] <= limits[r] * (1 + 1e-12) for r in bound):
            allowed.append(kept)
    masks = np.array(allowed)
    rng = np.random.default_rng(1)
    for turn in range(20):
        importance = rng.integers(0, 4, len(plan.blocks)) / 4 if turn % 3 == 0 else rng.random(len(plan.blocks))
        pretend(gated, importance)
        kept = gated.select(x)[0].kept
        values = masks[:, plan.optional] @ importance.astype(np.float32)[plan.optional].astype(np.float64)
        best = np.isclose(values, values.max(), rtol=0, atol=1e-9)
        assert (masks[best] == kept).all(1).any(), (kept, masks[best])


def test_importances_reach_their_own_blocks() -> None:
    model, x, _ = TINY["two hidden layers"]
    gated = pfedgate.gate(model, x, Budget(params=0.5), blocks=5, gate={"max_share": 9.0, "pool": 1})
    for block in gated.plan.optional:
        importance = np.full(len(gated.plan.blocks), 0.01)
        importance[block] = 1.0
        pretend(gated, importance)
        assert gated.select(x)[0].kept[block]


# -- counting selections
def test_a_single_reachable_selection_is_warned_of() -> None:
    model, x = build("mlp")
    with pytest.warns(UserWarning, match="only one selection of blocks is possible"):
        gated = pfedgate.gate(model, x, 0.15, blocks=5)
    assert gated.plan.selector(0.15).reachable_masks() == 1
    assert gated.plan.selector(0.5).reachable_masks() > 1
    gated.rebudget(0.5)
    gated.rebudget(1.0)  # all fits: one selection, and nothing to warn of
    assert gated.plan.selector(0.5).reachable_masks(3) == 3


@pytest.mark.parametrize("name", [*models.names()])
def test_flops_of_the_default_gate_are_small(name: str) -> None:
    """So that at s = 1, where everything is kept, the gated model costs at most 2 % more than the dense one."""
    model, x = models.build(name), models.example(name)
    gated = pfedgate.gate(model, x, 1.0).eval()
    assert gated.gate.size <= 0.063 * gated.plan.size
    assert measure.flops(lambda: gated(x)) <= 1.02 * measure.flops(lambda: model.eval()(x))


def test_flops_of_a_large_gate_come_out_of_the_budget() -> None:
    model, x = build("mlp")
    gated = pfedgate.gate(model, x, 0.5, gate={"pool": 6, "max_share": 9.0})
    dense = gated.plan.costs.dense()["flops"]
    assert gated.plan.gate_flops > 0.02 * dense
    assert gated.selector.limits["flops"] + gated.plan.gate_flops == pytest.approx(0.52 * dense)
    assert gated.rebudget(1.0).selector.limits["flops"] == dense
    with pytest.raises(InfeasibleBudget, match="and the gate, exceed the budget") as caught:
        gated.rebudget(Budget(flops=0.06))
    least = caught.value.smallest["flops"] / dense
    warnings.simplefilter("ignore", UserWarning)
    gated.rebudget(Budget(flops=least))
    assert measure.flops(lambda: gated(x)) <= (least + 0.02) * dense * len(x) + 1
