"""Exact selection for one resource and a dozen groups: all choices of two halves of the groups, listed once.

The paper's blocks of its networks (weights and biases of four or five layers in five blocks each) have ten million
vectors of counts, but only three thousand in each half. Sorted by cost, the best partner of a choice in one half is
the best of a leading part of the other.
"""

from __future__ import annotations

import math

import numpy as np

from pfedgate.gating.selection.costs import Floats, Ints
from pfedgate.gating.selection.problem import Problem

LARGEST_HALF = 16_000


def halves(problem: Problem) -> tuple[list[int], list[int]]:
    """The groups that matter in two parts with about as many vectors of counts each."""
    parts: tuple[list[int], list[int]] = ([], [])
    sizes = [1, 1]
    for g in sorted(problem.costly.tolist(), key=lambda g: -int(problem.counts[g])):
        smaller = int(sizes[1] < sizes[0])
        parts[smaller].append(g)
        sizes[smaller] *= int(problem.counts[g]) + 1
    return parts


def small_enough(problem: Problem) -> bool:
    """True if there is one resource without products of groups, and each half can be listed."""
    if problem.limits.size != 1 or problem.pairs.any():
        return False
    return all(math.prod(int(problem.counts[g]) + 1 for g in part) <= LARGEST_HALF for part in halves(problem))


class Halves:
    """Looks up the best pair of choices, one from each half."""

    def __init__(self, problem: Problem) -> None:
        self._counts = problem.counts
        self._parts = halves(problem)
        width = problem.places.shape[1] + 1
        self._kept: list[Ints] = []
        self._lookup: list[Ints] = []
        costs = []
        for part in self._parts:
            kept = np.indices([int(problem.counts[g]) + 1 for g in part]).reshape(len(part), -1)
            cost = (problem.linear[0, part] * problem.step[part]) @ kept
            order = np.argsort(cost, kind="stable")
            costs.append(cost[order])
            self._kept.append(kept[:, order])
            self._lookup.append(np.array(part, dtype=np.int64)[:, None] * width + kept[:, order])
        units = problem.first + problem.step * problem.counts
        units[problem.costly] = problem.first[problem.costly]
        room = problem.limits[0] - problem.const[0] - problem.linear[0] @ units
        # The first choice of a half is to keep nothing, which always fits.
        self._partners = np.searchsorted(costs[1], np.maximum(room - costs[0], 0.0), side="right") - 1
        fits = costs[0] <= room
        fits[0] = True
        self._kept[0], self._lookup[0] = self._kept[0][:, fits], self._lookup[0][:, fits]
        self._partners = self._partners[fits]

    def solve(self, prefix: Floats) -> Ints:
        one, two = (prefix.ravel()[lookup].sum(0) for lookup in self._lookup)
        total = one + np.maximum.accumulate(two)[self._partners]
        first = int(total.argmax())
        second = int(two[: self._partners[first] + 1].argmax())
        result = self._counts.copy()
        for part, kept, index in zip(self._parts, self._kept, (first, second), strict=True):
            result[part] = kept[:, index]
        return result

    def maximal(self) -> None:
        return None
