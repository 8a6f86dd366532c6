"""Where the importances G of a new gate begin: an order of the blocks of each layer, alike for every batch.

With random importances every batch, and every client, keeps other blocks before the gate has learned anything; what one
step has trained the next leaves out. So G begins as a fixed order, and hardly depends on the batch yet:

* ``magnitude``: the blocks with the largest weights first, for a model that was trained before;
* ``nested``: blocks as they stand, for training from scratch. All clients begin with parts of one small model, and live
  channels are neighbours, which run faster.

The selection adds importances up, so the many cheap blocks of one layer would crowd out the dear ones of another (at .3
of all resources, 5 of 32 channels of a first convolution and 58 of 64 of the second). Hence gates begin with the widths
whose live shares have the largest product: doubling a narrow layer counts as much as doubling a wide one. Only if
nothing but parameters is bound, layers whose weights work at many places (convolutions) begin ahead of the others
instead: there a weight does more.

With `candidates` a gate has several such orders to choose among. All keep equally many blocks of a layer, a common core
first; the rest of what each keeps is a window over the other blocks, and the windows lie evenly on a circle, so that
every block has its share of candidates. They are disjoint where there is room. The core grows with depth: clients who
differ in looks need early layers of their own, and late layers have most parameters to learn together.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from pfedgate.gating.gate.network import Gate
from pfedgate.gating.plan import BlockPlan
from pfedgate.gating.selection.budget import Budget

GAP = 2.0  # far enough apart that no cheap blocks together outweigh a dear one, near enough for sigmoids to learn


@torch.no_grad()
def rank(gate: Gate, plan: BlockPlan, budget: Budget, model: nn.Module) -> None:
    """Let a new gate rank the blocks of a plan as its config says; where nothing is dropped, nothing is ranked.

    >>> import pfedgate
    >>> model = nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 2))
    >>> gated = pfedgate.gate(model, (4, 8), budget=0.5, gate={"ranking": "nested", "max_share": 1})
    >>> _ = gated(torch.randn(4, 8))
    >>> gated.last.kept[:10].astype(int)
    array([1, 1, 1, 1, 0, 0, 0, 0, 0, 0])
    """
    config, norm = gate.config, gate.post_norm
    whole = set(budget.bound().values()) == {1.0}
    if config.ranking == "random" or whole or config.paths < 2 or (norm is None and not gate.candidates):
        return
    sizes = _magnitudes(plan, model) if config.ranking == "magnitude" else -np.arange(len(plan.blocks))
    orders, values, first = [], [], 0
    for group, lead in zip(plan.costs.groups, _leads(plan, budget), strict=True):
        blocks = plan.optional[first : first + group.count]
        orders.append(blocks[np.argsort(-sizes[blocks], kind="stable")])
        values.append(torch.linspace(1, -1, group.count) + lead)
        first += group.count
    if not gate.candidates:
        assert norm is not None
        norm.weight[gate.paths - 1] *= config.initial_scale
        for order, value in zip(orders, values, strict=True):
            norm.bias[gate.paths - 1, torch.from_numpy(order)] = value.to(norm.bias)
        return
    counts = _counts(plan, budget, orders, values)
    depths = np.linspace(0, 1, len(orders)) if len(orders) > 1 else [0.0]
    for candidate in range(gate.candidates):
        for order, value, count, depth in zip(orders, values, counts, depths, strict=True):
            order = _turned(order, count, candidate / gate.candidates, config.core * float(depth))
            gate.rankings[candidate, torch.from_numpy(order)] = torch.sigmoid(value).to(gate.rankings)


def _counts(plan: BlockPlan, budget: Budget, orders: list[np.ndarray], values: list[Tensor]) -> list[int]:
    """How many blocks of each group the budget keeps under these values; alike for every candidate."""
    worth = np.zeros(len(plan.blocks))
    for order, value in zip(orders, values, strict=True):
        worth[order] = torch.sigmoid(value).double().numpy()
    mask = plan.keep.copy()
    mask[plan.optional] = plan.selector(budget).select(worth[plan.optional])
    return plan.live(mask).counts


def _turned(order: np.ndarray, count: int, turn: float, core: float) -> np.ndarray:
    """An order whose first `count` blocks are a common core and a window of the others, `turn` of a circle on.

    >>> [_turned(np.arange(10), 4, turn, core=0.5)[:4].tolist() for turn in (0, 0.25, 0.5, 0.75)]
    [[0, 1, 2, 3], [0, 1, 4, 5], [0, 1, 6, 7], [0, 1, 8, 9]]
    """
    common = round(core * count)
    return np.concatenate([order[:common], np.roll(order[common:], -round(turn * (len(order) - common)))])


def _leads(plan: BlockPlan, budget: Budget) -> list[Tensor]:
    """Values to add to those of each group's blocks, in their order."""
    groups, bound = plan.costs.groups, set(budget.bound())
    if bound == {"params"}:
        dense = {row.layer for row in plan.rows if row.flops > 4 * row.params}
        return [torch.full((group.count,), float(group.name in dense)) for group in groups]
    if bound & {"latency_ms", "speedup"} and "latency_ms" not in plan.costs.dense():  # not measured yet
        return [torch.zeros(group.count) for group in groups]
    # The product of all live shares is to be largest: a block adds a logarithm, exactly.
    live = [np.maximum(1, group.first + group.step * np.arange(group.count + 1)) for group in groups]
    wide = plan.selector(budget).select(np.concatenate([np.diff(np.log(units)) for units in live]))
    masks = np.split(wide, np.cumsum([group.count for group in groups])[:-1])
    return [torch.where(torch.from_numpy(mask), GAP, -GAP) for mask in masks]


def _magnitudes(plan: BlockPlan, model: nn.Module) -> np.ndarray:
    """The sum of the absolute weights of every block."""
    sums = np.zeros(len(plan.blocks))
    for name, parameter in model.named_parameters():
        owner = plan.owners[name]
        size: Tensor = parameter.detach().abs().double()
        if owner.axis is not None:
            size = size.movedim(owner.axis, 0).reshape(len(owner.block), -1).sum(1)
        sums += np.bincount(owner.block, weights=size.flatten().cpu().numpy(), minlength=len(sums))
    return sums
