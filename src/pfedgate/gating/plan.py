"""The plan: blocks, what each costs, and what is live once some of them are chosen."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .blocks import Block, Owner, Split, axis_blocks
from .budget import Budget, CostModel, Group, Selector, Term
from .layout import Parts, is_dense

Bools = npt.NDArray[np.bool_]


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


class BlockPlan:
    """How a model is cut into blocks, what they cost, and which resources dropping them saves.

    `blocks` in the order of the gate's outputs; `sizes` counts their parameters; `costs` is the cost model of the
    selection; `resources` are the resources that this plan can reduce, in the order they are bound by a number.
    """

    def __init__(self, split: Split, shapes: Mapping[str, tuple[int, ...]], how: str) -> None:
        self.how, self.blocks, self.owners = how, split.blocks, split.owners
        self.network, self.cuts, self.first_block = split.network, split.cuts, split.first_block
        self.shapes = dict(shapes)
        self.size = sum(math.prod(shape) for shape in shapes.values())
        self.keep = np.array([block.keep for block in self.blocks])
        self.sizes = np.zeros(len(self.blocks), np.int64)
        for name, owner in self.owners.items():
            inner = math.prod(shapes[name]) // len(owner.block)
            self.sizes += np.bincount(owner.block, minlength=len(self.blocks)) * inner
        self.sliceable = self.network is not None and self.network.program is not None
        self.axes: dict[str, dict[int, Parts]] = {}
        if self.network is not None and self.sliceable:
            self.axes = {
                name: {axis: parts for axis, parts in axes.items() if not is_dense(parts)}
                for name, axes in self.network.axes.items()
            }
        if self.cuts:
            groups, terms, self.optional = self._structured()
        else:
            groups, terms, self.optional = self._loose()
        self.costs = CostModel(tuple(groups), tuple(terms))
        self.resources = self._resources()
        self._live: dict[bytes, Live] = {}

    # -- cost model
    def _structured(self) -> tuple[list[Group], list[Term], npt.NDArray[np.int64]]:
        """Products of live shares: a layer's cost depends on what it writes and on what it reads."""
        assert self.network is not None
        number = {space: i for i, space in enumerate(self.cuts)}
        groups, optional = [], []
        for space, cut in self.cuts.items():
            place = self.network.spaces[space].producers[0][1]
            groups.append(Group(place, cut.units, cut.first, cut.step, cut.count))
            optional.extend(range(self.first_block[space] + 1, self.first_block[space] + 1 + cut.count))
        terms: dict[tuple[str, tuple[int, ...]], float] = {}

        def add(resource: str, coefficient: float, axes: Iterable[Parts]) -> None:
            shares: list[tuple[float, tuple[int, ...]]] = [(coefficient, ())]
            for parts in axes:
                total = sum(part.length for part in parts)
                shares = [
                    (c * part.length / total, held if part.space is None else (*held, number[part.space]))
                    for c, held in shares
                    for part in parts
                ]
            for c, held in shares:
                key = (resource, tuple(sorted(held)))
                terms[key] = terms.get(key, 0.0) + c

        for name, shape in self.shapes.items():
            add("params", float(math.prod(shape)), self.axes.get(name, {}).values())
        for operation in self.network.operations:
            add("flops", operation.flops, (operation.written, operation.read))
        for activation in self.network.activations:
            add("activation_bytes", activation.nbytes, (activation.parts,))
        found = [Term(resource, c, held) for (resource, held), c in terms.items()]
        return groups, found, np.array(optional, np.int64)

    def _loose(self) -> tuple[list[Group], list[Term], npt.NDArray[np.int64]]:
        """Blocks that are masked, not skipped: only parameters are saved. Blocks of equal size form a group."""
        groups, terms, optional = [], [Term("params", float(self.sizes[self.keep].sum()), ())], []
        layers: dict[tuple[str, int], list[int]] = {}
        for number, block in enumerate(self.blocks):
            if not block.keep:
                layers.setdefault((block.name.rpartition("/")[0], int(self.sizes[number])), []).append(number)
        for (layer, size), numbers in layers.items():
            terms.append(Term("params", float(size * len(numbers)), (len(groups),)))
            groups.append(Group(layer, len(numbers), 0, 1, len(numbers)))
            optional.extend(numbers)
        return groups, terms, np.array(optional, np.int64)

    def _resources(self) -> tuple[str, ...]:
        dense, smallest = self.costs.dense(), self.costs.smallest()
        return tuple(
            r
            for r in ("params", "flops", "activation_bytes")
            if dense.get(r, 0.0) > 0 and (r == "params" or smallest.get(r, 0.0) < dense[r])
        )

    # -- selection
    def budget(self, value: float | Mapping[str, float | None] | Budget) -> Budget:
        """A budget for this plan; a plain number binds every resource that the plan can reduce."""
        return Budget.of(value, self.resources)

    def reachable_masks(self, budget: float | Mapping[str, float | None] | Budget, limit: int = 10**6) -> int:
        """How many different selections are possible under a budget, counted up to `limit`."""
        return Selector(self.costs, self.budget(budget)).reachable_masks(limit)

    def live(self, kept: Bools) -> Live:
        """What is live under a selection; remembered, because selections repeat from batch to batch."""
        key = np.packbits(kept).tobytes()
        found = self._live.get(key)
        if found is None:
            if len(self._live) >= 256:
                self._live.clear()
            found = self._live[key] = Live(self, kept.copy())
        return found

    def axis_blocks(self, parts: Parts) -> npt.NDArray[np.int64]:
        return axis_blocks(parts, self.cuts, self.first_block)

    # -- printing
    @cached_property
    def rows(self) -> list[Row]:
        flops, activations = np.zeros(len(self.blocks)), np.zeros(len(self.blocks))
        rest = [0.0, 0.0]
        if self.network is not None and self.sliceable:
            for i, (table, entries) in enumerate(
                (
                    (flops, [(o.flops, o.place, o.written) for o in self.network.operations]),
                    (activations, [(a.nbytes, a.place, a.parts) for a in self.network.activations]),
                )
            ):
                for amount, place, parts in entries:
                    blocks = self.axis_blocks(parts)
                    owner = self.owners.get(f"{place}.weight")
                    if (blocks < 0).all() and owner is not None and owner.axis == 0:
                        blocks = owner.block
                    share = amount / len(blocks)
                    np.add.at(table, blocks[blocks >= 0], share)
                    rest[i] += share * int((blocks < 0).sum())
        layers: dict[str, list[int]] = {}
        for number, block in enumerate(self.blocks):
            layers.setdefault(block.name.rpartition("/")[0] or block.name, []).append(number)
        rows = []
        for layer, numbers in layers.items():
            space = next((s for s, b in self.first_block.items() if b == numbers[0]), None)
            units = self.cuts[space].units if space is not None else len(numbers)
            always = int(self.keep[numbers].sum())
            amounts = [float(table[numbers].sum()) for table in (flops, activations)]
            rows.append(Row(layer, units, len(numbers), always, int(self.sizes[numbers].sum()), *amounts))
        if any(rest):
            rows.append(Row("(not in a block)", 0, 0, 0, 0, *rest))
        return rows

    def __str__(self) -> str:
        head = ("layer", "units", "blocks", "kept", "params", "FLOPs/sample", "act. bytes")
        rows = [row for row in self.rows if row.blocks != 1]
        whole = [row for row in self.rows if row.blocks == 1]
        if whole:
            name = whole[0].layer if len(whole) == 1 else f"{len(whole)} more layers"
            totals = [
                sum(getattr(r, f) for r in whole) for f in ("blocks", "always", "params", "flops", "activation_bytes")
            ]
            rows.append(Row(name, 0, *totals))
        total = Row("total", 0, len(self.blocks), int(self.keep.sum()), self.size,
                    sum(r.flops for r in rows), sum(r.activation_bytes for r in rows))  # fmt: skip
        table = [head, *(_cells(row) for row in (*rows, total))]
        widths = [max(len(line[i]) for line in table) for i in range(len(head))]
        lines = [
            "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
            for line in table
        ]
        rule = "-" * len(lines[0])
        smallest, dense = self.costs.smallest(), self.costs.dense()
        floor = ", ".join(f"{r} {smallest[r] / dense[r]:.3f}" for r in self.resources)
        return "\n".join(
            [
                f"{self.how} blocks",
                lines[0],
                rule,
                *lines[1:-1],
                rule,
                lines[-1],
                f"smallest feasible: {floor}",
            ]
        )


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.layer,
        str(row.units or ""),
        str(row.blocks or ""),
        str(row.always or ""),
        f"{row.params:,}",
        f"{row.flops:,.0f}",
        f"{row.activation_bytes:,.0f}",
    )


class Live:
    """Everything that follows from a selection: live indices, parameter entries, density and cost."""

    def __init__(self, plan: BlockPlan, kept: Bools) -> None:
        self.plan, self.kept = plan, kept
        self._index: dict[tuple[Parts, str], Tensor | None] = {}
        self._rows: dict[tuple[str, str], Tensor] = {}
        self._cuts: dict[str, tuple[tuple[int, Parts], ...]] = {}

    def positions(self, parts: Parts) -> npt.NDArray[np.int64] | None:
        """Live positions along an axis; None when all are."""
        alias = {} if self.plan.network is None else self.plan.network.alias
        parts = tuple(
            type(p)(alias.get(p.space, p.space), p.units, p.inner) if p.space is not None else p for p in parts
        )
        blocks = self.plan.axis_blocks(parts)
        alive = (blocks < 0) | self.kept[blocks]
        return None if alive.all() else np.flatnonzero(alive)

    def index(self, parts: Parts, device: torch.device) -> Tensor | None:
        key = (parts, str(device))
        if key not in self._index:
            found = self.positions(parts)
            self._index[key] = None if found is None else torch.from_numpy(found).to(device)
        return self._index[key]

    def axes(self, name: str) -> tuple[tuple[int, Parts], ...]:
        """Axes of a parameter on which something is missing, the one that leaves out most first."""
        if name not in self._cuts:
            found = []
            for axis, parts in self.plan.axes.get(name, {}).items():
                if (positions := self.positions(parts)) is not None:
                    found.append((len(positions) / self.plan.shapes[name][axis], axis, parts))
            self._cuts[name] = tuple((axis, parts) for _, axis, parts in sorted(found, key=lambda f: f[:2]))
        return self._cuts[name]

    def rows(self, name: str, device: torch.device) -> Tensor:
        """Block of each live entry of a parameter along its owner's axis."""
        key = (name, str(device))
        if key not in self._rows:
            owner: Owner = self.plan.owners[name]
            block = owner.block
            parts = self.plan.axes.get(name, {}).get(owner.axis) if owner.axis is not None else None
            if parts is not None and (positions := self.positions(parts)) is not None:
                block = block[positions]
            self._rows[key] = torch.from_numpy(block).to(device)
        return self._rows[key]

    def share_read(self, name: str) -> float:
        """rho: the live share of the inputs that a parameter is multiplied with."""
        network = self.plan.network
        axis = None if network is None else network.reads.get(name)
        parts = None if axis is None else self.plan.axes.get(name, {}).get(axis)
        if axis is None or parts is None:
            return 1.0
        positions = self.positions(parts)
        return 1.0 if positions is None else len(positions) / self.plan.shapes[name][axis]

    def elements(self, name: str) -> npt.NDArray[np.bool_]:
        """Which entries of a parameter are live: its block is kept and what it reads is live."""
        owner, shape = self.plan.owners[name], self.plan.shapes[name]
        if owner.axis is None:
            return self.kept[owner.block].reshape(shape)
        alive = np.broadcast_to(self.kept[owner.block].reshape(_along(owner.axis, len(shape))), shape).copy()
        for axis, parts in self.plan.axes.get(name, {}).items():
            if (positions := self.positions(parts)) is not None:
                line = np.zeros(shape[axis], bool)
                line[positions] = True
                alive &= line.reshape(_along(axis, len(shape)))
        return alive

    @cached_property
    def count(self) -> int:
        """Number of live parameters."""
        if not self.plan.axes:
            return int(self.plan.sizes[self.kept].sum())
        return sum(
            math.prod(
                n if (i not in lacking or (p := self.positions(lacking[i])) is None) else len(p)
                for i, n in enumerate(shape)
            )
            for name, shape in self.plan.shapes.items()
            for lacking in [self.plan.axes.get(name, {})]
        )

    @cached_property
    def density(self) -> float:
        """Share of the model's parameters that the personal model has; always kept ones included."""
        return self.count / self.plan.size

    @cached_property
    def cost(self) -> dict[str, float]:
        """Share of the dense model's cost, for every resource."""
        sizes = [group.count for group in self.plan.costs.groups]
        chosen = np.split(self.kept[self.plan.optional], np.cumsum(sizes)[:-1]) if sizes else []
        spent, dense = self.plan.costs.cost([int(c.sum()) for c in chosen]), self.plan.costs.dense()
        return {r: amount if r == "latency_ms" else amount / dense[r] for r, amount in spent.items() if dense[r] > 0}

    @cached_property
    def units(self) -> dict[str, int]:
        """Live units of every layer that can lose some."""
        counts: dict[str, Any] = {}
        for space, cut in self.plan.cuts.items():
            assert self.plan.network is not None
            alive = self.kept[self.plan.first_block[space] + cut.block_of()]
            counts[self.plan.network.spaces[space].producers[0][1]] = int(alive.sum())
        return counts


def _along(axis: int, ndim: int) -> tuple[int, ...]:
    return tuple(-1 if i == axis else 1 for i in range(ndim))


__all__ = ["Block", "BlockPlan", "Live"]
