"""Exact selection for few groups: all maximal vectors of counts, listed once, then looked up for every batch."""

from __future__ import annotations

import math

import numpy as np

from pfedgate.gating.selection.costs import Bools, Floats, Ints
from pfedgate.gating.selection.problem import Problem

LARGEST_GRID = 2_000_000  # vectors of counts whose cost is computed once, when the selector is built: .2 s at most
LARGEST_TABLE = 300_000  # numbers added up for every batch: half a millisecond


def small_enough(problem: Problem) -> bool:
    """True if all vectors of counts can be listed."""
    return math.prod(int(n) + 1 for n in problem.counts[problem.costly]) <= LARGEST_GRID


class Frontier:
    """Costs only grow with every count, so the optimum is one of the vectors that no single block can be added to."""

    def __init__(self, problem: Problem) -> None:
        costly = problem.costly
        shape = tuple(int(n) + 1 for n in problem.counts[costly])
        units: list[float | Floats] = list(problem.first + problem.step * problem.counts)
        for axis, g in enumerate(costly):
            along = [-1 if a == axis else 1 for a in range(len(shape))]
            units[g] = (problem.first[g] + problem.step[g] * np.arange(shape[axis])).reshape(along)
        feasible = np.ones(shape, dtype=bool)
        for r, limit in enumerate(problem.limits):
            feasible &= problem.polynomial(r)(units) <= limit
        feasible.flat[0] = True  # checked when the budget was
        rows = np.argwhere(_maximal(feasible))[::-1]  # more blocks of the first groups first: they win ties
        self._kept: Ints = np.tile(problem.counts, (len(rows), 1))
        self._kept[:, costly] = rows
        width = problem.places.shape[1] + 1
        self._costly = costly
        self._lookup = np.ascontiguousarray((costly * width + rows).T)

    @property
    def quick(self) -> bool:
        """False if there are so many maximal vectors that another solver is faster."""
        return self._lookup.size <= LARGEST_TABLE

    def solve(self, prefix: Floats) -> Ints:
        value = prefix.ravel()[self._lookup].sum(0)
        kept: Ints = self._kept[int(value.argmax())]
        return kept

    def maximal(self) -> Ints:
        return self._kept


def _maximal(feasible: Bools) -> Bools:
    """Feasible points of a grid none of whose upper neighbours is feasible."""
    result = feasible.copy()
    for axis in range(feasible.ndim):
        below = [slice(None)] * feasible.ndim
        above = list(below)
        below[axis], above[axis] = slice(None, -1), slice(1, None)
        result[tuple(below)] &= ~feasible[tuple(above)]
    return result
