"""The plan: how a model is cut into blocks, what they cost, and which selections fit a budget.

`BlockPlan` holds the blocks and their costs, and prints them as a table of `Row`s. `PlanTiles` cuts the parameters
into the smallest parts that live and die together.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfedgate.gating.gate.network import FLOPS as GATE_SHARE
from pfedgate.gating.selection.budget import Budget, CostModel, Group, InfeasibleBudget, Selector, Term
from pfedgate.gating.slicing.axes import Segments, is_dense
from pfedgate.gating.slicing.live import Bools, Ints, Live, Lives, constant
from pfedgate.gating.splitters import Split, axis_blocks

FOLLOWED = 3  # selections that are tried for the most parameters
STARVED = 0.5  # share of their own budget below which another resource starves the parameters
SHOWN = 0.001  # share of a resource from which on a place that holds it back is listed
_HEAD = ("layer", "units", "blocks", "kept", "params", "FLOPs/sample", "act. bytes")


class BlockPlan:
    """How a model is cut into blocks, what they cost, and which resources dropping them saves.

    `blocks` in the order of the gate's outputs; `sizes` counts their parameters; `costs` is the cost model of the
    selection; `resources` are the resources that this plan can reduce, in the order they are bound by a number.
    Copies of a model share one plan: it knows no weights.
    """

    def __init__(self, split: Split, shapes: Mapping[str, tuple[int, ...]], how: str) -> None:
        self.how, self.blocks, self.owners = how, split.blocks, split.owners
        self.network, self.cuts, self.first_block = split.network, split.cuts, split.first_block
        self.notes = split.notes
        self.shapes = dict(shapes)
        self.size = sum(math.prod(shape) for shape in shapes.values())
        self.wiring: Any = None  # the arguments of `gate`, so that a pickled model can be planned again
        self.gate_size = 0  # parameters of the gate, once there is one
        self.gate_flops = 0.0  # per sample
        self.keep = np.array([block.keep for block in self.blocks])
        self.sizes = np.zeros(len(self.blocks), np.int64)
        for name, owner in self.owners.items():
            inner = math.prod(shapes[name]) // len(owner.block)
            self.sizes += np.bincount(owner.block, minlength=len(self.blocks)) * inner
        self.sliceable = self.network is not None and self.network.parts is not None
        self.axes: dict[str, dict[int, Segments]] = {}  # only those on which something can be missing
        if self.network is not None and self.sliceable:
            for name, axes in self.network.axes.items():
                self.axes[name] = {axis: segments for axis, segments in axes.items() if not is_dense(segments)}
        groups, terms, optional = self._structured() if self.cuts else self._loose()
        self.optional = np.array(optional, np.int64)
        self.costs = CostModel(tuple(groups), tuple(terms))
        dense, smallest = self.costs.dense(), self.costs.smallest()
        able = [r for r, whole in dense.items() if whole > 0 and (r == "params" or smallest[r] < whole)]
        self.resources = tuple(r for r in able if r != "activation_bytes")
        self.lives = Lives(self)
        self._selectors: dict[Budget, Selector] = {}
        self._advice: dict[Budget, list[str]] = {}
        self._blocks: dict[tuple[str, torch.device], Tensor] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockPlan:
        return self

    # -- cost model
    def _structured(self) -> tuple[list[Group], list[Term], list[int]]:
        """Products of live shares: a layer's cost depends on what it writes and on what it reads."""
        assert self.network is not None
        number = {space: i for i, space in enumerate(self.cuts)}
        groups: list[Group] = []
        optional: list[int] = []
        for space, cut in self.cuts.items():
            groups.append(Group(self.name_of(space), cut.units, cut.first, cut.step, cut.count))
            optional.extend(range(self.first_block[space] + 1, self.first_block[space] + 1 + cut.count))
        terms: dict[tuple[str, tuple[int, ...]], float] = {}

        def add(resource: str, coefficient: float, axes: Iterable[Segments]) -> None:
            shares: list[tuple[float, tuple[int, ...]]] = [(coefficient, ())]
            for segments in axes:
                total = sum(segment.length for segment in segments)
                shares = [
                    (c * segment.length / total, spaces if segment.space is None else (*spaces, number[segment.space]))
                    for c, spaces in shares
                    for segment in segments
                ]
            for c, spaces in shares:
                key = (resource, tuple(sorted(spaces)))
                terms[key] = terms.get(key, 0.0) + c

        # What each layer of a transformer adds to, and reads through a layer norm, is thin for all or for none.
        spaces = self.network.spaces
        streams = {s for s in self.cuts if "layer norm" in spaces[s].consumers and len(spaces[s].producers) > 1}
        for name, shape in self.shapes.items():
            add("params", float(math.prod(shape)), self.axes.get(name, {}).values())
        for operation in self.network.operations:
            add("flops", operation.flops, (operation.written, operation.read))
        for activation in self.network.activations:
            add("activation_bytes", activation.nbytes, (activation.segments,))
            alone = [s for s in activation.segments if s.space is not None and s.space not in streams]
            if alone:
                share = sum(s.length for s in alone) / sum(s.length for s in activation.segments)
                add("reducible_bytes", activation.nbytes * share, (tuple(alone),))
        return groups, [Term(resource, c, spaces) for (resource, spaces), c in terms.items()], optional

    def _loose(self) -> tuple[list[Group], list[Term], list[int]]:
        """Blocks that are masked, not skipped: only parameters are saved. Blocks of equal size form a group."""
        groups: list[Group] = []
        terms = [Term("params", float(self.sizes[self.keep].sum()), ())]
        optional: list[int] = []
        layers: dict[tuple[str, int], list[int]] = {}
        for number, block in enumerate(self.blocks):
            if not block.keep:
                layers.setdefault((block.name.rpartition("/")[0], int(self.sizes[number])), []).append(number)
        for (layer, size), numbers in layers.items():
            terms.append(Term("params", float(size * len(numbers)), (len(groups),)))
            groups.append(Group(layer, len(numbers), 0, 1, len(numbers)))
            optional.extend(numbers)
        return groups, terms, optional

    # -- selection
    def budget(self, value: float | Mapping[str, float | None] | Budget) -> Budget:
        """A budget for this plan; a plain number binds every resource that the plan can reduce."""
        if isinstance(value, Budget) and value in self._selectors:
            return value
        budget = Budget.of(value, self.resources)
        work = budget.bound().keys() - {"params", "latency_ms", "speedup"}
        if work and "flops" not in self.costs.dense():
            raise ValueError(
                f"{self.how} blocks are masked, not skipped, so they save no {' or '.join(sorted(work))}: "
                "bind params, or use split='unit' on a model that can be traced"
            )
        return budget

    def selector(self, value: float | Mapping[str, float | None] | Budget) -> Selector:
        """Chooses blocks under a budget; remembered, because making one takes longer than using it.

        FLOPs of the gate beyond 2 % of the dense model's come out of the FLOP budget, unless the whole model fits it.
        """
        budget = self.budget(value)
        if budget not in self._selectors:
            try:
                self._selectors[budget] = self._selector(budget)
            except InfeasibleBudget as error:
                places = self.notes if self.network is None else [f"{a}: {b}" for a, b in self.network.notes]
                if self.network is not None and self.network.reason:
                    places = [self.network.reason]
                listed = f" Not skipped: {'; '.join(places[:3])}." if places else ""
                raise InfeasibleBudget(f"{error}{listed}", error.smallest) from None
        return self._selectors[budget]

    def _selector(self, budget: Budget) -> Selector:
        dense = self.costs.dense().get("flops", 0.0)
        extra = max(0.0, self.gate_flops - GATE_SHARE * dense)
        limit = budget.limits(self.costs).get("flops", math.inf)
        if not extra or limit >= dense:
            return Selector(self.costs, budget)
        least = self.costs.smallest()["flops"] + extra
        if limit < least:
            raise InfeasibleBudget(
                f"the blocks that are always kept, and the gate, exceed the budget: flops: asked {limit / dense:.4f} "
                f"of the dense model, smallest feasible {math.ceil(least / dense * 1e4) / 1e4:.4f} (of which the gate "
                f"{extra / dense:.4f}). Raise the budget, keep less always (smallest=...), or use a smaller gate "
                "(fewer blocks=..., gate={'pool': 1}); in a recipe algorithm.smallest, .blocks and .gate.pool",
                {"flops": least},
            )
        return Selector(self.costs, replace(budget, flops=limit - extra))

    def advice(self, budget: Budget) -> list[str]:
        """What a user should know about a budget: no choice is left, or a resource starves another; remembered."""
        if budget not in self._advice:
            selector, texts = self.selector(budget), []
            if selector.solver != "everything fits" and selector.reachable_masks(2) == 1:
                texts.append(
                    f"under {budget} only one selection of blocks is possible, so the gate cannot choose; "
                    "use more blocks per layer (blocks=...), a smaller first block (smallest=...), in a recipe "
                    "algorithm.blocks and algorithm.smallest, or another budget"
                )
            limits, dense = selector.limits, self.costs.dense()
            if limits.get("params", math.inf) < dense["params"]:
                spent = self._most_params(selector)
                first = max(limits, key=lambda r: spent[r] / limits[r])
                if spent["params"] < STARVED * limits["params"] and first != "params":
                    rest = {name: value for name, value in budget.bound().items() if not name.endswith("_bytes")}
                    remedy = "raise that bound"
                    if first.endswith("_bytes"):
                        remedy = (
                            f"if memory allows it, or with gated.microbatches, bind the others alone: {Budget(**rest)}"
                        )
                    texts.append(
                        f"under {budget} {first} binds first, so that a batch uses at most "
                        f"{spent['params'] / dense['params']:.3f} of the parameters, not the "
                        f"{limits['params'] / dense['params']:.3f} that it may: {remedy}"
                    )
            self._advice[budget] = texts
        return self._advice[budget]

    def _most_params(self, selector: Selector) -> dict[str, float]:
        """What is spent by a selection with about as many parameters as the other resources let it have."""
        cost, groups, best = self.costs.polynomials["params"], self.costs.groups, self.costs.smallest()
        # Weights belong to pairs of layers: begin with equal shares of all, then follow the slope.
        worth = [np.diff(np.log(group.first + group.step * np.arange(group.count + 1) + 1e-9)) for group in groups]
        for _ in range(FOLLOWED):
            counts = self.costs.kept(selector.select(np.concatenate(worth)))
            best = max(best, self.costs.cost(counts), key=lambda spent: spent["params"])
            slope = cost.linear + cost.both @ [group.live(k) for group, k in zip(groups, counts, strict=True)]
            worth = [np.full(group.count, slope[g] * group.step) for g, group in enumerate(groups)]
        return best

    def add_latency(self, terms: tuple[Term, ...], dense_ms: float) -> None:
        """Make latency a resource that can be bound, by terms measured on this device (see `latency.py`)."""
        others = tuple(term for term in self.costs.terms if term.resource != "latency_ms")
        self.costs = replace(self.costs, terms=(*others, *terms), dense_ms=dense_ms)
        self._selectors.clear()
        self._advice.clear()
        self.lives.clear()

    def live(self, mask: Bools) -> Live:
        """Live units and entries when these blocks are kept."""
        return self.lives[mask.tobytes()]

    def axis_blocks(self, segments: Segments) -> Ints:
        """Block of each position along an axis; -1 where it belongs to none."""
        return axis_blocks(segments, self.cuts, self.first_block)

    def block_index(self, name: str, device: torch.device) -> Tensor:
        """Block of each position of a parameter along its owner's axis, as a tensor."""
        key = (name, device)
        if key not in self._blocks:
            self._blocks[key] = constant(self.owners[name].block, device)
        return self._blocks[key]

    @property
    def class_blocks(self) -> Ints | None:
        """The block of each output of the network, where every output has one of its own; None elsewhere."""
        outputs = () if self.network is None else self.network.outputs
        blocks = [self.owners[name].block for name in outputs if self.owners[name].axis == 0]
        if not blocks or any(not np.array_equal(block, blocks[0]) for block in blocks):
            return None
        return blocks[0] if len(set(blocks[0].tolist())) == len(blocks[0]) else None

    def name_of(self, space: int) -> str:
        """The layer that writes a set of units."""
        assert self.network is not None
        return self.network.spaces[space].producers[0][1]

    @cached_property
    def held(self) -> list[tuple[str, str, str]]:
        """Places where nothing, or not all, is skipped: (place, reason, what it holds back), the dearest first."""
        if self.network is None:
            return []
        reasons: dict[str, list[str]] = {}
        for place, reason in self.network.notes:
            reasons.setdefault(place, []).append(reason)
        dense = self.costs.dense()
        spent: dict[str, dict[str, float]] = {place: {} for place in reasons}

        def add(place: str, resource: str, amount: float) -> None:
            row = spent.setdefault(place, {})
            row[resource] = row.get(resource, 0.0) + amount / dense[resource]

        for operation in self.network.operations:
            if is_dense(operation.written) and is_dense(operation.read):
                add(operation.place, "flops", operation.flops)
        for activation in self.network.activations:
            add(activation.place, "activation_bytes", activation.nbytes * is_dense(activation.segments))
        for name, shape in self.shapes.items():
            if not self.axes.get(name):
                add(name.rpartition(".")[0] or name, "params", math.prod(shape))
        rows = []
        for place, shares in sorted(spent.items(), key=lambda row: -max(row[1].values(), default=0.0)):
            texts = [f"{share:.1%} of {r}" for r, share in shares.items() if share >= SHOWN]
            if place in reasons or texts:
                reason = "; ".join(reasons.get(place, ["neither what it reads nor what it writes can be left out"]))
                rows.append((place, reason, f" ({', '.join(texts)})" if texts else ""))
        return rows

    # -- printing
    @property
    def rows(self) -> list[Row]:
        """One line per layer, FLOPs and activations shared out to the blocks that write them."""
        entries: list[list[tuple[float, str, Segments]]] = [[], []]
        if self.network is not None and self.sliceable:
            entries[0] = [(o.flops, o.place, o.written) for o in self.network.operations]
            entries[1] = [(a.nbytes, a.place, a.segments) for a in self.network.activations]
        tables = np.zeros((2, len(self.blocks)))
        rest = [0.0, 0.0]
        for i, amounts in enumerate(entries):
            for amount, place, segments in amounts:
                blocks = self.axis_blocks(segments)
                owner = self.owners.get(f"{place}.weight")
                if (blocks < 0).all() and owner is not None and owner.axis == 0:
                    blocks = owner.block
                share = amount / len(blocks)
                np.add.at(tables[i], blocks[blocks >= 0], share)
                rest[i] += share * int((blocks < 0).sum())
        layers: dict[str, list[int]] = {}
        for number, block in enumerate(self.blocks):
            layers.setdefault(block.name.rpartition("/")[0] or block.name, []).append(number)
        rows = []
        for layer, numbers in layers.items():
            space = next((s for s, b in self.first_block.items() if b == numbers[0]), None)
            units = self.cuts[space].units if space is not None else 0
            always, params = int(self.keep[numbers].sum()), int(self.sizes[numbers].sum())
            rows.append(Row(layer, units, len(numbers), always, params, *(float(t[numbers].sum()) for t in tables)))
        if any(rest):
            rows.append(Row("(not in a block)", 0, 0, 0, 0, *rest))
        return rows

    def __str__(self) -> str:
        """The table, the smallest feasible budget and the gate's size."""
        every = self.rows
        rows = [row for row in every if row.blocks != 1 or not row.always]
        whole = [row for row in every if row.blocks == 1 and row.always]
        if whole:
            name = whole[0].layer if len(whole) == 1 else f"{len(whole)} more layers"
            fields = ("blocks", "always", "params", "flops", "activation_bytes")
            rows.append(Row(name, 0, *(sum(getattr(row, field) for row in whole) for field in fields)))
        flops, nbytes = sum(row.flops for row in rows), sum(row.activation_bytes for row in rows)
        total = Row("total", 0, len(self.blocks), int(self.keep.sum()), self.size, flops, nbytes)
        table = [_HEAD, *(row.cells(self.sliceable) for row in (*rows, total))]
        widths = [max(len(line[i]) for line in table) for i in range(len(_HEAD))]
        lines = [
            "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
            for line in table
        ]
        rule = "-" * len(lines[0])
        smallest, foot = self.costs.smallest(), [f"{'resource':18}{'whole':>14}{'reducible':>11}{'smallest':>10}"]
        for resource, amount in self.costs.dense().items():
            if amount:
                share, least = 1 - self.costs.fixed(resource) / amount, smallest[resource] / amount
                foot.append(f"{resource:18}{amount:14,.0f}{share:11.1%}{least:10.1%}")
        if self.gate_size:
            foot.append(f"gate: {self.gate_size:,} parameters, {self.gate_size / self.size:.1%} of the model")
        return "\n".join([f"{self.how} blocks", lines[0], rule, *lines[1:-1], rule, lines[-1], *foot])


@dataclass(frozen=True)
class Row:
    """One line of the printed plan."""

    layer: str
    units: int
    blocks: int
    always: int
    params: int
    flops: float
    activation_bytes: float

    def cells(self, measured: bool = True) -> tuple[str, ...]:
        """The line as text; blocks that are masked, not skipped, save no work that could be measured."""
        return (
            self.layer,
            str(self.units or ""),
            str(self.blocks or ""),
            str(self.always or ""),
            f"{self.params:,}",
            f"{self.flops:,.0f}" if measured else "–",
            f"{self.activation_bytes:,.0f}" if measured else "–",
        )


class PlanTiles:
    """The tiles of a plan: the smallest parts of the parameters that live and die together.

    A weight matrix is cut along what it writes and along what it reads, so its tiles are rectangles (a block of units
    x a block of inputs). A tile is live when both of its blocks are; what was never live was never trained, and need
    not be sent. Parameters are flattened and joined in the order of `plan.shapes`, `without` some.
    """

    def __init__(self, plan: BlockPlan, without: Collection[str] = ()) -> None:
        shapes = {name: shape for name, shape in plan.shapes.items() if name not in without}
        self.owner = np.empty(sum(map(math.prod, shapes.values())), np.int64)  # tile of every parameter entry
        blocks: list[Ints] = []  # for each tile, the blocks that must be kept for it to be live (-1: none)
        start = count = 0
        for name, shape in shapes.items():
            numbers, needed = _tiles(plan, name, shape)
            size = math.prod(shape)
            self.owner[start : start + size] = numbers + count
            blocks.append(needed)
            start, count = start + size, count + len(needed)
        self.count = count
        width = max(needed.shape[1] for needed in blocks)
        self.blocks = np.concatenate(
            [np.pad(needed, ((0, 0), (0, width - needed.shape[1])), constant_values=-1) for needed in blocks]
        )
        self.sizes = np.bincount(self.owner, minlength=count)

    def live(self, masks: Iterable[Bools]) -> Ints:
        """Tiles that were live under at least one selection."""
        alive = np.zeros(self.count, bool)
        for mask in masks:
            alive |= (mask[self.blocks] | (self.blocks < 0)).all(axis=1)
        return np.flatnonzero(alive)


def _tiles(plan: BlockPlan, name: str, shape: tuple[int, ...]) -> tuple[Ints, Ints]:
    """Tile of every entry of a parameter, numbered from 0, and the blocks each tile needs."""
    owner = plan.owners[name]
    if owner.axis is None:
        blocks, numbers = np.unique(owner.block, return_inverse=True)
        return numbers.reshape(-1), blocks[:, None]
    lines = {axis: plan.axis_blocks(segments) for axis, segments in plan.axes.get(name, {}).items()}
    lines[owner.axis] = owner.block
    total = np.zeros(shape, np.int64)
    needed: list[list[int]] = [[]]
    for axis, line in sorted(lines.items()):
        blocks, numbers = np.unique(line, return_inverse=True)
        total = total * len(blocks) + numbers.reshape([-1 if i == axis else 1 for i in range(len(shape))])
        needed = [[*before, int(block)] for before in needed for block in blocks]
    return total.reshape(-1), np.array(needed, np.int64)
