"""What follows from a selection of blocks: live units, live entries of every parameter, density and cost."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pfedgate.gating.slicing.axes import Part, Parts

if TYPE_CHECKING:
    from pfedgate.gating.plan import BlockPlan

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


def compensation(how: str, share: float) -> float:
    """What a weight is divided by when only `share` of its inputs are live, so that sums keep their size."""
    return {"share": share, "sqrt": math.sqrt(share), "none": 1.0}[how]


@dataclass(frozen=True)
class Scales:
    """M' of the live entries of all parameters: one gather for all of them, because gathers dominate small networks."""

    rows: Tensor  # block of every live row, parameter after parameter
    factor: Tensor | None  # what each is multiplied with to make up for missing inputs
    names: tuple[str, ...]
    lengths: list[int]
    divisors: dict[str, float]

    def of(self, weights: Tensor) -> dict[str, Tensor]:
        """The vector that each parameter is to be multiplied with, along the axis of its blocks."""
        scales = weights.index_select(0, self.rows)
        if self.factor is not None:
            scales = scales * self.factor.to(scales.dtype)
        return dict(zip(self.names, scales.split(self.lengths), strict=True))  # type: ignore[no-untyped-call]


class Live:
    """Everything that follows from a selection; made by `BlockPlan.live` and remembered there."""

    def __init__(self, plan: BlockPlan, kept: Bools) -> None:
        self.plan, self.kept = plan, kept
        self._positions: dict[Parts, Ints | None] = {}
        self._index: dict[tuple[Parts, torch.device], Tensor | None] = {}
        self._cuts: dict[str, tuple[tuple[int, Parts], ...]] = {}
        self._rectangles: dict[str, list[tuple[tuple[slice, ...], tuple[slice, ...]]]] = {}
        self._scales: dict[tuple[str, torch.device], Scales] = {}

    def positions(self, parts: Parts) -> Ints | None:
        """Live positions along an axis; None when all are."""
        if parts not in self._positions:
            alias = {} if self.plan.network is None else self.plan.network.alias
            known = tuple(p if p.space is None else Part(alias.get(p.space, p.space), p.units, p.inner) for p in parts)
            blocks = self.plan.axis_blocks(known)
            alive = (blocks < 0) | self.kept[blocks]
            self._positions[parts] = None if alive.all() else np.flatnonzero(alive)
        return self._positions[parts]

    def index(self, parts: Parts, device: torch.device) -> Tensor | None:
        """The same as a tensor."""
        key = (parts, device)
        if key not in self._index:
            found = self.positions(parts)
            self._index[key] = None if found is None else constant(found, device)
        return self._index[key]

    def rectangles(self, name: str) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """Live entries of a parameter as (slices of it, slices of what is left): blocks are runs, so these are few."""
        if name not in self._rectangles:
            runs = []
            for axis, size in enumerate(self.plan.shapes[name]):
                parts = self.plan.axes.get(name, {}).get(axis)
                positions = None if parts is None else self.positions(parts)
                runs.append([(slice(0, size), slice(0, size))] if positions is None else _runs(positions))
            self._rectangles[name] = [
                (tuple(a for a, _ in sides), tuple(b for _, b in sides)) for sides in itertools.product(*runs)
            ]
        return self._rectangles[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of what is left of a parameter."""
        last = self.rectangles(name)[-1][1]
        return tuple(side.stop for side in last)

    def size(self, name: str) -> int:
        """Number of its live entries."""
        return math.prod(self.shape(name))

    def axes(self, name: str) -> tuple[tuple[int, Parts], ...]:
        """Axes of a parameter on which something is missing, the one that leaves out most first."""
        if name not in self._cuts:
            found = []
            for axis, parts in self.plan.axes.get(name, {}).items():
                if (positions := self.positions(parts)) is not None:
                    found.append((len(positions) / self.plan.shapes[name][axis], axis, parts))
            self._cuts[name] = tuple((axis, parts) for _, axis, parts in sorted(found, key=lambda f: f[:2]))
        return self._cuts[name]

    def share_read(self, name: str) -> float:
        """rho: the live share of the inputs that a parameter is multiplied with."""
        return self._share(name, None if self.plan.network is None else self.plan.network.reads.get(name))

    def share_written(self, name: str) -> float:
        """The live share of the units that a parameter belongs to."""
        return self._share(name, self.plan.owners[name].axis)

    def _share(self, name: str, axis: int | None) -> float:
        parts = None if axis is None else self.plan.axes.get(name, {}).get(axis)
        if axis is None or parts is None:
            return 1.0
        positions = self.positions(parts)
        return 1.0 if positions is None else len(positions) / self.plan.shapes[name][axis]

    def scales(self, how: str, device: torch.device) -> Scales:
        """How to scale what is live, with compensation `how`."""
        key = (how, device)
        if key not in self._scales:
            rows = {name: self._rows(name) for name in self.plan.shapes}
            divisors = {name: compensation(how, self.share_read(name)) for name in rows}
            factor = np.concatenate([np.full(len(row), 1.0 / divisors[name]) for name, row in rows.items()])
            self._scales[key] = Scales(
                constant(np.concatenate(list(rows.values())), device),
                None if (factor == 1.0).all() else constant(factor, device),
                tuple(rows),
                [len(row) for row in rows.values()],
                divisors,
            )
        return self._scales[key]

    def _rows(self, name: str) -> Ints:
        """Block of each live entry of a parameter along its owner's axis; just one where all are in the same block."""
        owner = self.plan.owners[name]
        block = owner.block
        if (block == block[0]).all():
            return block[:1]
        parts = None if owner.axis is None else self.plan.axes.get(name, {}).get(owner.axis)
        positions = None if parts is None else self.positions(parts)
        return block if positions is None else block[positions]

    def elements(self, name: str) -> Bools:
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
        total = 0
        for name, shape in self.plan.shapes.items():
            sizes = list(shape)
            for axis, parts in self.axes(name):
                positions = self.positions(parts)
                sizes[axis] = shape[axis] if positions is None else len(positions)
            total += math.prod(sizes)
        return total

    @cached_property
    def density(self) -> float:
        """Share of the model's parameters that the personal model has; always kept ones included."""
        return self.count / self.plan.size

    @cached_property
    def counts(self) -> list[int]:
        """Kept optional blocks per group of the cost model."""
        sizes = [group.count for group in self.plan.costs.groups]
        chosen = np.split(self.kept[self.plan.optional], np.cumsum(sizes)[:-1]) if sizes else []
        return [int(c.sum()) for c in chosen]

    @cached_property
    def cost(self) -> dict[str, float]:
        """Share of the dense model's cost, for every resource (latency in milliseconds)."""
        spent, dense = self.plan.costs.cost(self.counts), self.plan.costs.dense()
        return {r: amount if r == "latency_ms" else amount / dense[r] for r, amount in spent.items() if dense[r] > 0}

    @cached_property
    def units(self) -> dict[str, int]:
        """Live units of every layer that can lose some."""
        counts: dict[str, int] = {}
        for space, cut in self.plan.cuts.items():
            alive = self.kept[self.plan.first_block[space] + cut.block_of()]
            counts[self.plan.name_of(space)] = int(alive.sum())
        return counts


def constant(values: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """A tensor that may be kept: usable for training even if it was first needed under inference mode."""
    with torch.inference_mode(False):
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)


def _along(axis: int, ndim: int) -> tuple[int, ...]:
    return tuple(-1 if i == axis else 1 for i in range(ndim))


def _runs(positions: Ints) -> list[tuple[slice, slice]]:
    """Maximal runs of consecutive positions, and where they lie when the gaps are closed."""
    edges = [0, *(np.flatnonzero(np.diff(positions) != 1) + 1).tolist(), len(positions)]
    return [(slice(int(positions[a]), int(positions[b - 1]) + 1), slice(a, b)) for a, b in itertools.pairwise(edges)]
