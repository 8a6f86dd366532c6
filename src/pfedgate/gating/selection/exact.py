"""Exact selection: `Frontier` for few groups, `Programme` for one resource without products of groups."""

from __future__ import annotations

import math

import numpy as np

from pfedgate.gating.selection.costs import Floats, Ints, Problem

LARGEST_GRID = 2_000_000  # vectors of counts whose cost a Frontier computes once: .2 s at most
LARGEST_TABLE = 300_000  # numbers that a Frontier adds up for every batch: half a millisecond
STATES = (1_000, 10_000, 100_000)  # limits of successive passes of a Programme; almost always the first is enough


class Frontier:
    """Lists all maximal counts once, and looks up the best of them for every batch.

    Costs only grow with every count, so the optimum is one of the vectors that no block can be added to.
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
    """Adds group after group to partial choices, and drops those that cannot become the best.

    The fractional optimum gives a price per unit of cost and an upper bound, a greedy filling a lower
    one. Any part of the optimum loses at most the gap between both at that price. Of two partial choices
    the one that costs more and is worth less is dropped too; with equal costs within a group few remain.
    """

    def __init__(self, problem: Problem) -> None:
        self._counts, self._groups = problem.counts, problem.costly
        self._cost = problem.costs[0].linear[self._groups] * problem.step[self._groups]
        least = problem.counts.copy()
        least[self._groups] = 0
        self._room = float(problem.limits[0] - problem.costs[0](problem.first + problem.step * least))
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
        for most_states in STATES:
            gap = upper - _value(prefix, best)
            if gap <= 0:
                break
            counts, complete = self._pass(prefix, loss, price, gap + 1e-9 * upper, most_states)
            if counts is not None and _value(prefix, counts) > _value(prefix, best):
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

    def _pass(
        self, prefix: Floats, loss: Floats, price: float, gap: float, most_states: int
    ) -> tuple[Ints | None, bool]:
        """The best counts that lose at most `gap` at the price; False if some states were left out."""
        near = loss <= gap
        low, high = near.argmax(1), near.shape[1] - 1 - near[:, ::-1].argmax(1)
        groups = np.flatnonzero(high > low)
        # Groups that lose much by any change come first: they prune most.
        change = [-float(np.partition(loss[g, low[g] : high[g] + 1], 1)[1]) for g in groups]
        groups = groups[np.argsort(change, kind="stable")]
        cost, worth = np.array([self._cost @ low]), np.array([_value(prefix, low)])
        lost = np.array([loss[np.arange(len(low)), low].sum() - loss[groups, low[groups]].sum()])
        span = (self._cost * (high - low))[groups]
        steps: list[tuple[int, Ints, int]] = []
        complete = True
        for g, ahead in zip(groups.tolist(), (span[::-1].cumsum()[::-1] - span).tolist(), strict=True):
            k = np.arange(low[g], high[g] + 1)
            costs = (cost[:, None] + self._cost[g] * (k - low[g])).ravel()
            worths = (worth[:, None] + (prefix[g, k] - prefix[g, low[g]])).ravel()
            losses = (lost[:, None] + loss[g, k]).ravel()
            idle = np.maximum(self._room - ahead - costs, 0.0)  # room that no later group can fill
            states = np.flatnonzero((costs <= self._room) & (losses + price * idle <= gap))
            if not states.size:
                return None, complete
            states = states[np.argsort(costs[states], kind="stable")]
            best = np.maximum.accumulate(worths[states])
            states = states[np.append(True, best[1:] > best[:-1])]
            if states.size > most_states:
                complete = False
                states = states[np.sort(np.argpartition(losses[states], most_states)[:most_states])]
            steps.append((g, states, len(k)))
            cost, worth, lost = costs[states], worths[states], losses[states]
        counts, state = low.copy(), int(worth.argmax())
        for g, states, width in reversed(steps):
            state, more = divmod(int(states[state]), width)
            counts[g] += more
        return counts, complete


def _value(prefix: Floats, counts: Ints) -> float:
    return float(prefix[np.arange(len(counts)), counts].sum())
