"""Exact selection: `Frontier` for few groups, `Programme` for one resource without products."""

from __future__ import annotations

import math

import numpy as np

from pfedgate.gating.selection.costs import Floats, Ints, Problem

LARGEST_GRID = 2_000_000  # vectors of counts whose cost a Frontier computes once: .2 s at most
LARGEST_TABLE = 300_000  # numbers that a Frontier adds up for every batch: half a millisecond
STATES = 1_000  # partial choices in one list of a Programme; almost always enough
STATES_OF_HALVES = (10_000, 200_000)  # per half of the groups; beyond, close but perhaps not exact


class Frontier:
    """Lists all maximal counts once, and looks up the best of them for every batch.

    Costs only grow with every count, so the optimum is one of the vectors that no block can be
    added to.
    """

    def __init__(self, problem: Problem) -> None:
        costly = problem.costly
        shape = tuple(int(n) + 1 for n in problem.counts[costly])
        units: list[float | Floats] = list(problem.first + problem.step * problem.counts)
        for axis, g in enumerate(costly):
            along = [-1 if a == axis else 1 for a in range(len(shape))]
            units[g] = (problem.first[g] + problem.step[g] * np.arange(shape[axis])).reshape(along)
        feasible = np.ones(shape, dtype=bool)
        for cost, limit in zip(problem.costs, problem.limits, strict=True):
            feasible &= cost(units) <= limit
        feasible.flat[0] = True  # `Selector` has checked it
        maximal = feasible.copy()
        for axis in range(len(shape)):
            start = (slice(None),) * axis
            maximal[(*start, slice(None, -1))] &= ~feasible[(*start, slice(1, None))]
        rows = np.argwhere(maximal)[::-1]  # more blocks of the first groups first: they win ties
        self.maximal: Ints = np.tile(problem.counts, (len(rows), 1))
        self.maximal[:, costly] = rows
        self._lookup = np.ascontiguousarray((costly * (problem.places.shape[1] + 1) + rows).T)

    @staticmethod
    def suits(problem: Problem) -> bool:
        """True if the grid of all counts is small enough to be listed."""
        return math.prod(int(n) + 1 for n in problem.counts[problem.costly]) <= LARGEST_GRID

    @property
    def quick(self) -> bool:
        """False if the maximal counts are so many that another solver is faster."""
        return self._lookup.size <= LARGEST_TABLE

    def solve(self, prefix: Floats) -> Ints:
        """The best counts; `prefix[g, k]` is the value of the k best blocks of group g."""
        counts: Ints = self.maximal[int(prefix.ravel()[self._lookup].sum(0).argmax())]
        return counts


class Programme:
    """Builds partial choices group by group, without those that cannot become the best.

    The fractional optimum gives a price per unit of cost and an upper bound, a greedy filling a
    lower one. No part of the optimum loses more than the gap between both at that price. Of two
    partial choices the one that costs more and is worth no more is dropped too; few remain, since
    blocks of a group cost the same. Where many remain, each half of the groups gets its own list,
    and the best pair wins.
    """

    def __init__(self, problem: Problem) -> None:
        self._counts, self._groups = problem.counts, problem.costly
        self._cost = problem.costs[0].linear[self._groups] * problem.step[self._groups]
        self._room = float(problem.limits[0] - problem.costs[0](problem.least))
        self._most = problem.counts[self._groups]
        self._levels = np.arange(int(self._most.max()) + 1)
        self._item_group, self._item_rank = np.nonzero(self._levels[:-1] < self._most[:, None])
        self._item_cost = self._cost[self._item_group]

    def solve(self, prefix: Floats) -> Ints:
        """The best counts; `prefix[g, k]` is the value of the k best blocks of group g."""
        prefix = prefix[self._groups, : len(self._levels)]
        best, price, upper = self._bounds(np.diff(prefix, axis=1)[self._item_group, self._item_rank])
        worth = prefix - price * self._cost[:, None] * self._levels
        loss = np.where(self._levels <= self._most[:, None], worth.max(1, keepdims=True) - worth, np.inf)
        for halves, most in ((False, STATES), *((True, most) for most in STATES_OF_HALVES)):
            gap = upper - _value(prefix, best)
            if gap <= 0:
                break
            counts, complete = self._pass(prefix, loss, gap + 1e-9 * upper, halves, most)
            if _value(prefix, counts) > _value(prefix, best):
                best = counts
            if complete:
                break
        result = self._counts.copy()
        result[self._groups] = best
        return result

    def _bounds(self, value: Floats) -> tuple[Ints, float, float]:
        """The counts of a greedy filling, the price at the fractional optimum, and its value."""
        order = np.argsort(-value / self._item_cost, kind="stable")
        used = np.cumsum(self._item_cost[order])
        split = int(np.searchsorted(used, self._room, side="right"))
        room = self._room - (float(used[split - 1]) if split else 0.0)
        price = float(value[order[split]] / self._item_cost[order[split]])
        upper = float(value[order[:split]].sum()) + price * room
        items = order[:split].tolist()
        for item, cost in zip(order[split:].tolist(), self._item_cost[order[split:]].tolist(), strict=True):
            if cost <= room:
                room -= cost
                items.append(item)
        return np.bincount(self._item_group[items], minlength=len(self._cost)), price, upper

    def _pass(self, prefix: Floats, loss: Floats, gap: float, halves: bool, most: int) -> tuple[Ints, bool]:
        """The best counts that lose at most `gap`; False if some partial choices were left out."""
        near = loss <= gap
        low, high = near.argmax(1), near.shape[1] - near[:, ::-1].argmax(1)
        groups = np.flatnonzero(high - low > 1)
        # Groups that lose much by any change come first: they prune most.
        groups = groups[np.argsort(-np.sort(loss[groups], axis=1)[:, 1], kind="stable")]
        room = self._room - self._cost @ low
        parts = (groups[::2], groups[1::2]) if halves else (groups, groups[:0])
        one, two = (_Front(room, gap, most), _Front(room, gap, most))
        for part, front in zip(parts, (one, two), strict=True):
            for g in part.tolist():
                k = np.arange(low[g], high[g])
                front.add(self._cost[g] * (k - low[g]), prefix[g, k] - prefix[g, low[g]], loss[g, k])
        counts, complete = low.copy(), one.complete and two.complete
        if not (one.cost.size and two.cost.size):
            return counts, complete  # the choices that fit were left out
        partners = np.searchsorted(two.cost, room - one.cost, side="right") - 1
        total = np.where(partners >= 0, one.worth + two.worth[partners], -1.0)
        first = int(total.argmax())
        if total[first] >= 0:
            counts[parts[0]] += one.levels(first)
            counts[parts[1]] += two.levels(int(partners[first]))
        return counts, complete


class _Front:
    """Partial choices over some groups, by increasing cost and worth."""

    def __init__(self, room: float, gap: float, most: int) -> None:
        self.cost = self.worth = self._lost = np.zeros(1)
        self._room, self._gap, self._most = room, gap, most
        self._steps: list[tuple[Ints, int]] = []
        self.complete = True

    def add(self, cost: Floats, worth: Floats, loss: Floats) -> None:
        """Extends every choice by every level of one more group."""
        costs, worths, losses = (
            np.add.outer(old, new).ravel() for old, new in ((self.cost, cost), (self.worth, worth), (self._lost, loss))
        )
        states = np.flatnonzero((costs <= self._room) & (losses <= self._gap))
        states = states[np.argsort(costs[states], kind="stable")]
        best = np.maximum.accumulate(worths[states])
        states = states[np.diff(best, prepend=-1.0) > 0]
        if states.size > self._most:
            self.complete = False
            states = states[np.sort(np.argpartition(losses[states], self._most)[: self._most])]
        self._steps.append((states, len(cost)))
        self.cost, self.worth, self._lost = costs[states], worths[states], losses[states]

    def levels(self, state: int) -> Ints:
        """The level of every group in one choice."""
        levels = []
        for states, width in reversed(self._steps):
            state, level = divmod(int(states[state]), width)
            levels.append(level)
        return np.array(levels[::-1], dtype=np.int64)


def _value(prefix: Floats, counts: Ints) -> float:
    return float(prefix[np.arange(len(counts)), counts].sum())
