"""Values that follow from a choice of blocks: live units and entries (`Live`), the decision (`Selection`), a `Pass`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pfedgate.gating.slicing.axes import Segment, Segments

if TYPE_CHECKING:
    from pfedgate.gating.plan import BlockPlan

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Slices = tuple[slice, ...]

_REMEMBERED = 256  # selections whose consequences are remembered


def compensation(how: str, share: float) -> float:
    """The number that a weight is divided by when only `share` of its inputs are live, so that sums keep their size."""
    return {"share": share, "sqrt": math.sqrt(share), "none": 1.0}[how]


class Extent(NamedTuple):
    """Where the live entries of a parameter lie."""

    rectangles: list[tuple[Slices, Slices]]  # (slices of the parameter, slices of the live part); blocks are runs
    shape: tuple[int, ...]  # shape of the live part
    size: int  # number of live entries
    missing: tuple[tuple[int, Segments], ...]  # axes that lack something, the one that lacks most first


class Scales(NamedTuple):
    """M' of the live entries of all parameters: one gather for all of them, because gathers dominate small networks."""

    rows: Tensor  # block of every live row, parameter after parameter
    factor: Tensor | None  # each row is multiplied with its own, to make up for missing inputs
    names: tuple[str, ...]
    lengths: list[int]
    divisors: dict[str, float]


class Live:
    """Everything that follows from a mask over the blocks; `BlockPlan.lives` makes and remembers them."""

    def __init__(self, plan: BlockPlan, mask: Bools) -> None:
        self.plan, self.mask = plan, mask
        self.scales: dict[tuple[str, torch.device], Scales] = {}  # by compensation and device; see `scales_for`
        self._positions: dict[Segments, Ints | None] = {}
        self._index: dict[tuple[Segments, torch.device], Tensor | None] = {}

    def positions(self, segments: Segments) -> Ints | None:
        """Live positions along an axis; None when all are."""
        if segments not in self._positions:
            alias = {} if self.plan.network is None else self.plan.network.alias
            tied = tuple(
                s if s.space is None else Segment(alias.get(s.space, s.space), s.units, s.inner) for s in segments
            )
            blocks = self.plan.axis_blocks(tied)
            alive = (blocks < 0) | self.mask[blocks]
            self._positions[segments] = None if alive.all() else np.flatnonzero(alive)
        return self._positions[segments]

    def index(self, segments: Segments, device: torch.device) -> Tensor | None:
        """The same as a tensor."""
        key = (segments, device)
        if key not in self._index:
            positions = self.positions(segments)
            self._index[key] = None if positions is None else constant(positions, device)
        return self._index[key]

    @cached_property
    def extents(self) -> dict[str, Extent]:
        """Where the live entries of every parameter lie."""
        extents = {}
        for name, shape in self.plan.shapes.items():
            runs, shares = [], []
            for axis, size in enumerate(shape):
                segments = self.plan.axes.get(name, {}).get(axis)
                positions = None if segments is None else self.positions(segments)
                if segments is None or positions is None:
                    runs.append([(slice(0, size), slice(0, size))])
                else:
                    runs.append(_runs(positions))
                    shares.append((len(positions) / size, axis, segments))
            rectangles = [
                (tuple(a for a, _ in sides), tuple(b for _, b in sides)) for sides in itertools.product(*runs)
            ]
            left = tuple(side.stop for side in rectangles[-1][1])
            missing = tuple((axis, segments) for _, axis, segments in sorted(shares, key=lambda share: share[:2]))
            extents[name] = Extent(rectangles, left, math.prod(left), missing)
        return extents

    def share_read(self, name: str) -> float:
        """rho: the live share of the inputs that a parameter is multiplied with."""
        return self._share(name, None if self.plan.network is None else self.plan.network.reads.get(name))

    def share_written(self, name: str) -> float:
        """The live share of the units that a parameter belongs to."""
        return self._share(name, self.plan.owners[name].axis)

    def _share(self, name: str, axis: int | None) -> float:
        segments = None if axis is None else self.plan.axes.get(name, {}).get(axis)
        positions = None if segments is None else self.positions(segments)
        return 1.0 if axis is None or positions is None else len(positions) / self.plan.shapes[name][axis]

    def scales_for(self, how: str, device: torch.device) -> Scales:
        """How to scale live entries, with compensation `how`; remembered in `scales`."""
        rows = {}
        for name, owner in self.plan.owners.items():
            block = owner.block
            segments = None if owner.axis is None else self.plan.axes.get(name, {}).get(owner.axis)
            positions = None if segments is None else self.positions(segments)
            if (block == block[0]).all():
                rows[name] = block[:1]  # one number scales all entries
            else:
                rows[name] = block if positions is None else block[positions]
        divisors = {name: compensation(how, self.share_read(name)) for name in rows}
        factor = np.concatenate([np.full(len(row), 1.0 / divisors[name]) for name, row in rows.items()])
        self.scales[how, device] = scales = Scales(
            constant(np.concatenate(list(rows.values())), device),
            None if (factor == 1.0).all() else constant(factor, device),
            tuple(rows),
            [len(row) for row in rows.values()],
            divisors,
        )
        return scales

    def elements(self, name: str) -> Bools:
        """Which entries of a parameter are live: its block is kept and what it reads is live."""
        owner, shape = self.plan.owners[name], self.plan.shapes[name]
        if owner.axis is None:
            return self.mask[owner.block].reshape(shape)
        alive = np.broadcast_to(along(self.mask[owner.block], owner.axis, len(shape)), shape).copy()
        for axis, segments in self.plan.axes.get(name, {}).items():
            if (positions := self.positions(segments)) is not None:
                line = np.zeros(shape[axis], bool)
                line[positions] = True
                alive &= along(line, axis, len(shape))
        return alive

    @cached_property
    def count(self) -> int:
        """Number of live parameters of the model."""
        if not self.plan.axes:
            return int(self.plan.sizes[self.mask].sum())
        return sum(extent.size for extent in self.extents.values())

    @cached_property
    def density(self) -> float:
        """Share of the model's parameters that the personal model has; always kept ones included."""
        return self.count / self.plan.size

    @cached_property
    def counts(self) -> list[int]:
        """Kept optional blocks per group of the cost model."""
        sizes = [group.count for group in self.plan.costs.groups]
        masks = np.split(self.mask[self.plan.optional], np.cumsum(sizes)[:-1]) if sizes else []
        return [int(mask.sum()) for mask in masks]

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
            alive = self.mask[self.plan.first_block[space] + cut.block_of()]
            counts[self.plan.name_of(space)] = int(alive.sum())
        return counts


class Lives(dict[bytes, Live]):
    """`Live` for a mask, by the mask's bytes; remembered, because selections repeat from batch to batch."""

    def __init__(self, plan: BlockPlan) -> None:
        super().__init__()
        self.plan = plan

    def __missing__(self, mask: bytes) -> Live:
        if len(self) >= _REMEMBERED:
            self.clear()
        self[mask] = live = Live(self.plan, np.frombuffer(mask, np.bool_))
        return live


@dataclass(frozen=True)
class Selection:
    """The gate's decision for a batch: I*, M, G and M' (eq. 5-7 of the paper), and what they cost."""

    kept: Bools  # I*, over all blocks
    weights: Tensor  # M
    importance: Tensor  # G
    adapted: Tensor  # M', zero for dropped blocks
    live: Live
    shift: Tensor | None = None  # added to the outputs (GateConfig.shift)
    execution: str = "sliced"  # or "masked": how the model runs on it
    limits: Mapping[str, float] = field(default_factory=dict)  # of each bound resource, as an absolute cost

    @property
    def density(self) -> float:
        """Share of the model's parameters in use, always-kept ones included."""
        return self.live.density

    @property
    def cost(self) -> dict[str, float]:
        """Share of the dense model's cost per resource (latency in milliseconds)."""
        return self.live.cost

    @property
    def units(self) -> dict[str, int]:
        """Number of live units per layer."""
        return self.live.units

    @property
    def binds(self) -> str:
        """The resource that is nearest to its limit; nothing if all blocks are kept."""
        spent = self.live.plan.costs.cost(self.live.counts)
        return "" if self.kept.all() else max(self.limits, key=lambda r: spent[r] / self.limits[r], default="")

    def __str__(self) -> str:
        """What ran, and every resource beside its limit."""
        dense, binds = self.live.plan.costs.dense(), self.binds
        lines = [f"{self.execution}, {int(self.kept.sum())} of {len(self.kept)} blocks kept"]
        lines.append(f"{'resource':18}{'used':>8}{'limit':>8}")
        for resource, share in self.cost.items():
            whole = 1.0 if resource == "latency_ms" else dense[resource]
            limit = f"{self.limits[resource] / whole:8.3f}" if resource in self.limits else f"{'free':>8}"
            lines.append(f"{resource:18}{share:8.3f}{limit}{'  binds' * (resource == binds)}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Pass:
    """A forward pass with gradients, or all microbatches of one batch: what an optimiser needs to step on it."""

    live: Live
    leaves: dict[str, Tensor]  # live entries of theta that were read; empty where gradients go to theta itself


def constant(values: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """A tensor that may be kept: usable for training even if it was first needed under inference mode."""
    with torch.inference_mode(False):
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)


def along(line: Bools, axis: int, ndim: int) -> Bools:
    """A line of values as an array of `ndim` axes, along one of them."""
    return line.reshape([-1 if i == axis else 1 for i in range(ndim)])


def _runs(positions: Ints) -> list[tuple[slice, slice]]:
    """Maximal runs of consecutive positions, and where they lie when the gaps are closed."""
    edges = [0, *(np.flatnonzero(np.diff(positions) != 1) + 1).tolist(), len(positions)]
    return [(slice(int(positions[a]), int(positions[b - 1]) + 1), slice(a, b)) for a, b in itertools.pairwise(edges)]
