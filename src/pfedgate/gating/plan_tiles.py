"""Tiles of a plan: the smallest parts of the parameters that live and die together.

A weight matrix is cut along what it writes and along what it reads, so its tiles are rectangles (a block of units x
a block of inputs). A tile is live when both of its blocks are; what was never live was never trained, and need not be
sent.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

import numpy as np
import numpy.typing as npt

from pfedgate.gating.plan import BlockPlan

Ints = npt.NDArray[np.int64]


class PlanTiles:
    """The tiles of a plan over its parameters, flattened and joined in the order of `plan.shapes`, but for some."""

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

    def live(self, selections: Iterable[npt.NDArray[np.bool_]]) -> Ints:
        """Tiles that were live under at least one selection."""
        alive = np.zeros(self.count, bool)
        for kept in selections:
            alive |= (kept[self.blocks] | (self.blocks < 0)).all(axis=1)
        return np.flatnonzero(alive)


def _tiles(plan: BlockPlan, name: str, shape: tuple[int, ...]) -> tuple[Ints, Ints]:
    """Tile of every entry of a parameter, numbered from 0, and the blocks each tile needs."""
    owner = plan.owners[name]
    if owner.axis is None:
        found, numbers = np.unique(owner.block, return_inverse=True)
        return numbers.reshape(-1), found[:, None]
    lines = {owner.axis: owner.block}
    lines.update(
        {axis: plan.axis_blocks(parts) for axis, parts in plan.axes.get(name, {}).items() if axis != owner.axis}
    )
    total = np.zeros(shape, np.int64)
    needed: list[list[int]] = [[]]
    for axis, line in sorted(lines.items()):
        found, numbers = np.unique(line, return_inverse=True)
        total = total * len(found) + numbers.reshape([-1 if i == axis else 1 for i in range(len(shape))])
        needed = [[*so_far, int(block)] for so_far in needed for block in found]
    return total.reshape(-1), np.array(needed, np.int64)
