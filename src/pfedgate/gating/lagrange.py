"""The relaxation behind `Deep`: prices instead of budgets, and the best counts at given prices.

With a price per unit of each resource the budgets disappear, and what is left, ``value - prices @ cost``, couples
only groups that share a cost term. In a plain chain of layers every group has two such neighbours; residual
streams make stars. On such graphs the best counts are found exactly by eliminating one group after the other
(dynamic programming); on denser ones each group is set to its best in turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .costs import Bools, Floats, Ints
from .problem import Problem

LARGEST_TABLE = 20_000  # entries of one elimination step per price vector; 27 kept levels in three groups
SWEEPS = 4


@dataclass(frozen=True)
class Quadratic:
    """Cost as a function of the counts k of the groups that matter: base + slope @ k + k @ curve @ k / 2."""

    groups: Ints
    most: Ints
    base: Floats
    slope: Floats
    curve: Floats  # [resource * group, group]
    limits: Floats

    @classmethod
    def of(cls, problem: Problem) -> Quadratic:
        groups = problem.costly
        both = problem.pairs + problem.pairs.transpose(0, 2, 1)
        kept = problem.counts.copy()
        kept[groups] = 0
        curve = (both * problem.step[:, None] * problem.step)[:, groups][:, :, groups]
        own = np.diagonal(curve, axis1=1, axis2=2)
        units = problem.first + problem.step * kept
        return cls(
            groups=groups,
            most=problem.counts[groups],
            base=problem.cost(kept),
            slope=((problem.linear + both @ units) * problem.step)[:, groups],
            curve=curve.reshape(own.size, -1),
            limits=problem.limits,
        )

    def marginal(self, kept: Floats) -> Floats:
        """Derivative of the cost at one vector of counts or at many: [..., group] -> [..., resource, group]."""
        return self.slope + (kept @ self.curve.T).reshape(*kept.shape[:-1], *self.slope.shape)

    def cost(self, kept: Floats) -> Floats:
        """Of one vector of counts or of many: [..., group] -> [..., resource]."""
        result: Floats = self.base + (0.5 * (self.slope + self.marginal(kept)) * kept[..., None, :]).sum(-1)
        return result

    @property
    def own(self) -> Floats:
        """Curvature of each group by itself: [resource, group]."""
        groups = np.arange(len(self.most))
        return self.curve.reshape(*self.slope.shape, -1)[:, groups, groups]

    @property
    def coupling(self) -> Floats:
        """Curvature between different groups: [resource, group, group]."""
        result = self.curve.reshape(*self.slope.shape, -1).copy()
        groups = np.arange(len(self.most))
        result[:, groups, groups] = 0.0
        return result


class Inner(Protocol):
    """Finds the counts of the largest value minus priced cost."""

    def best(self, prefix: Floats, prices: Floats) -> Ints:
        """Counts per group at prices per unit of each resource; `prefix` holds the value of the k best blocks."""
        ...


def inner(costs: Quadratic) -> Inner:
    """The exact maximiser if its tables are small enough."""
    exact = Elimination(costs)
    return exact if exact.largest <= LARGEST_TABLE else Sweeps(costs)


class Elimination:
    """Exact, by eliminating groups in an order that keeps the tables small."""

    def __init__(self, costs: Quadratic) -> None:
        self._slope, self._own = costs.slope, costs.own / 2
        self._widths = [int(n) + 1 for n in costs.most]
        self._levels = _levels(costs.most)
        coupling = costs.coupling
        linked: Bools = np.asarray(coupling.any(0))
        self._plan, self.largest = _plan(linked, self._widths)
        # Tables of one shape are filled by one operation. Each has the group eliminated first on its first axis.
        rank = {g: i for i, (g, _) in enumerate(self._plan)}
        shapes: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for g, h in sorted((g, h) for g, h in np.argwhere(linked).tolist() if rank[g] < rank[h]):
            shapes.setdefault((self._widths[g], self._widths[h]), []).append((g, h))
        self._stacks = []
        for (rows, columns), edges in shapes.items():
            weights = np.array([coupling[:, g, h] for g, h in edges]).T
            self._stacks.append((edges, weights, np.arange(rows)[:, None] * np.arange(float(columns))))

    def best(self, prefix: Floats, prices: Floats) -> Ints:
        k = self._levels
        own = prefix - (prices @ self._slope)[:, None] * k - (prices @ self._own)[:, None] * (k * k)
        if not self._stacks:
            alone: Ints = own.argmax(1)
            return alone
        score = [own[g, :width] for g, width in enumerate(self._widths)]
        tables: dict[tuple[int, int], Floats] = {}
        for edges, weights, products in self._stacks:
            tables.update(zip(edges, (prices @ weights)[:, None, None] * -products, strict=True))
        steps = []
        for g, near in self._plan:
            if not near:
                table = score[g]
            elif len(near) == 1:
                table = tables.pop((g, near[0]))
                table += score[g][:, None]
                score[near[0]] += np.maximum.reduce(table, 0)
            else:
                a, b = near
                table = tables.pop((g, a))[:, :, None] + (tables.pop((g, b)) + score[g][:, None])[:, None, :]
                message = np.maximum.reduce(table, 0)
                tables[a, b] = tables[a, b] + message if (a, b) in tables else message
            steps.append((g, near, table))
        level = [0] * len(self._widths)
        for g, near, table in reversed(steps):
            for h in reversed(near):
                table = table[..., level[h]]
            level[g] = int(table.argmax())
        return np.array(level)


class Sweeps:
    """Not exact: groups are set to their best given the others, in turn; those that share no cost at once."""

    def __init__(self, costs: Quadratic) -> None:
        self._slope, self._own, self._coupling = costs.slope, costs.own / 2, costs.coupling
        self._most, self._levels = costs.most, _levels(costs.most)
        self._colours = _colours(np.asarray(self._coupling.any(0)))

    def best(self, prefix: Floats, prices: Floats) -> Ints:
        """From none kept and from all kept; the better of the two."""
        counts = self.better(np.array([np.zeros_like(self._most), self._most]), prefix, prices, SWEEPS)
        own, coupling = self._at(prefix, prices)
        value = own[np.arange(len(self._most)), counts].sum(1) - 0.5 * (counts @ coupling * counts).sum(1)
        best: Ints = counts[int(value.argmax())]
        return best

    def better(self, starts: Ints, prefix: Floats, prices: Floats, sweeps: int = 1) -> Ints:
        """Each of several vectors of counts after some sweeps over all groups, or less if nothing changes."""
        own, coupling = self._at(prefix, prices)
        columns = [coupling[:, groups] for groups in self._colours]
        kept = starts.astype(float)
        for _ in range(sweeps):
            before = kept.copy()
            for groups, column in zip(self._colours, columns, strict=True):
                field = kept @ column
                kept[:, groups] = (own[groups] - field[:, :, None] * self._levels[groups]).argmax(2)
            if (kept == before).all():
                break
        result: Ints = kept.astype(np.int64)
        return result

    def _at(self, prefix: Floats, prices: Floats) -> tuple[Floats, Floats]:
        """Value less priced cost of each group by itself, and the priced coupling of groups."""
        k = self._levels
        own = prefix - (prices @ self._slope)[:, None] * k - (prices @ self._own)[:, None] * (k * k)
        return own, (prices[:, None, None] * self._coupling).sum(0)


def _colours(linked: Bools) -> list[Ints]:
    """Groups in sets without links inside; greedily, those with many links first."""
    colour = np.full(len(linked), -1)
    for g in np.argsort(-linked.sum(1), kind="stable"):
        taken = set(colour[linked[g]].tolist())
        colour[g] = next(c for c in range(len(linked)) if c not in taken)
    return [np.flatnonzero(colour == c) for c in range(int(colour.max()) + 1)]


def _levels(most: Ints) -> Floats:
    """Number of kept blocks per group and level; beyond its last block a group stays where it is."""
    result: Floats = np.minimum(np.arange(int(most.max()) + 1), most[:, None]).astype(float)
    return result


def _plan(linked: Bools, widths: list[int]) -> tuple[list[tuple[int, list[int]]], int]:
    """Order of elimination, fewest neighbours first, and the size of the largest table it needs."""
    near = [set(np.flatnonzero(row).tolist()) for row in linked]
    rank = []
    left, largest = set(range(len(near))), 0
    while left:
        g = min(left, key=lambda q: (len(near[q]), q))
        table = widths[g] * int(np.prod([widths[h] for h in near[g]], dtype=float))
        largest = max(largest, table if len(near[g]) <= 2 else LARGEST_TABLE + 1)
        rank.append((g, near[g]))
        for h in near[g]:
            near[h] = (near[h] | near[g]) - {g, h}
        left.discard(g)
    order = {g: i for i, (g, _) in enumerate(rank)}
    return [(g, sorted(around, key=order.__getitem__)) for g, around in rank], largest
