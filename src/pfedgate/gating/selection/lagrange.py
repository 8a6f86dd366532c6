"""The relaxation behind `Deep`: prices instead of budgets, and the best counts at given prices.

With a price per unit of each resource the budgets disappear, and what is left, ``value - prices @ cost``, couples
only groups that share a cost term. In a plain chain of layers every group has two such neighbours; residual
streams make stars. On such graphs the best counts are found exactly by eliminating one group after the other
(dynamic programming), in a chain from both ends at once; on denser ones each group is set to its best in turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from pfedgate.gating.selection.costs import Bools, Floats, Ints
from pfedgate.gating.selection.problem import Problem

LARGEST_TABLE = 20_000  # entries of one elimination step per price vector; 27 kept levels in three groups
SWEEPS = 4


@dataclass(frozen=True)
class Quadratic:
    """Cost as a function of the counts k of the groups that matter: base + slope @ k + k @ curve @ k / 2.

    The groups are sorted by colour: those of one colour share no cost.
    """

    groups: Ints
    colours: list[slice]
    most: Ints
    base: Floats
    slope: Floats  # [resource, group]
    curve: Floats  # [resource, group, group]
    limits: Floats

    @classmethod
    def of(cls, problem: Problem) -> Quadratic:
        both = problem.pairs + problem.pairs.transpose(0, 2, 1)
        costly = problem.costly
        colour = _colours(np.asarray(both.any(0))[costly][:, costly])
        groups = costly[np.argsort(colour, kind="stable")]
        ends = np.cumsum(np.bincount(colour)).tolist()
        kept = problem.counts.copy()
        kept[groups] = 0
        units = problem.first + problem.step * kept
        return cls(
            groups=groups,
            colours=[slice(start, end) for start, end in zip([0, *ends], ends, strict=False)],
            most=problem.counts[groups],
            base=problem.cost(kept),
            slope=((problem.linear + both @ units) * problem.step)[:, groups],
            curve=(both * problem.step[:, None] * problem.step)[:, groups][:, :, groups],
            limits=problem.limits,
        )

    def marginal(self, kept: Floats) -> Floats:
        """Derivative of the cost at one vector of counts or at many: [..., group] -> [..., resource, group]."""
        return self.slope + (kept @ self._flat_curve).reshape(*kept.shape[:-1], *self.slope.shape)

    def cost(self, kept: Floats) -> Floats:
        """Of one vector of counts or of many: [..., group] -> [..., resource]."""
        one, two, weights = self._products
        result: Floats = kept @ self.slope.T
        result += (kept.take(one, -1) * kept.take(two, -1)) @ weights
        result += self.base
        return result

    def alone(self, prefix: Floats, prices: Floats) -> Floats:
        """Value less priced cost of each count of each group, none kept in the others: [group, level]."""
        result: Floats = prefix - (prices @ self._levels).reshape(prefix.shape)
        return result

    @property
    def own(self) -> Floats:
        """Curvature of each group by itself: [resource, group]."""
        return np.diagonal(self.curve, axis1=1, axis2=2)

    @cached_property
    def coupling(self) -> Floats:
        """Curvature between different groups: [resource, group, group]."""
        result = self.curve.copy()
        groups = np.arange(len(self.most))
        result[:, groups, groups] = 0.0
        return result

    @cached_property
    def levels(self) -> Floats:
        """Number of kept blocks per group and level; beyond its last block a group stays where it is."""
        result: Floats = np.minimum(np.arange(int(self.most.max()) + 1), self.most[:, None]).astype(float)
        return result

    @cached_property
    def _levels(self) -> Floats:
        """Cost of each level of each group by itself: [resource, group * level]."""
        k = self.levels
        return (self.slope[:, :, None] * k + self.own[:, :, None] / 2 * (k * k)).reshape(len(self.slope), -1)

    @cached_property
    def _flat_curve(self) -> Floats:
        """Curvature: [group, resource * group]."""
        return np.ascontiguousarray(self.curve.transpose(2, 0, 1).reshape(len(self.most), -1))

    @cached_property
    def _products(self) -> tuple[Ints, Ints, Floats]:
        """Pairs of groups that share a cost, a group with itself too, and what their product costs per resource."""
        one, two = np.nonzero(np.triu(self.curve.any(0)))
        return one, two, (self.curve[:, one, two] * np.where(one == two, 0.5, 1.0)).T


class Inner(Protocol):
    """Finds the counts of the largest value minus priced cost."""

    def best(self, prefix: Floats, prices: Floats) -> Ints:
        """Counts per group at prices per unit of each resource; `prefix` holds the value of the k best blocks."""
        ...


def inner(costs: Quadratic) -> Inner:
    """The exact maximiser if its tables are small enough."""
    linked: Bools = np.asarray(costs.coupling.any(0))
    if not linked.any():
        return Alone(costs)
    order = in_a_row(linked)
    if order is not None and costs.levels.shape[1] ** 2 <= LARGEST_TABLE:
        return Chain(costs, order)
    exact = Elimination(costs)
    return exact if exact.largest <= LARGEST_TABLE else Sweeps(costs)


class Alone:
    """Exact where groups share no cost."""

    def __init__(self, costs: Quadratic) -> None:
        self._costs = costs

    def best(self, prefix: Floats, prices: Floats) -> Ints:
        result: Ints = self._costs.alone(prefix, prices).argmax(1)
        return result


class Chain:
    """Exact where groups in a row share costs with the next one only: eliminates them from both ends at once.

    All tables have the width of the widest group. The levels that a group does not have are as good as its last one,
    but never cheaper for its neighbours, so that the first best level is always a real one.
    """

    def __init__(self, costs: Quadratic, order: list[int]) -> None:
        self._costs = costs
        size = (len(order) + 1) // 2
        left, right = order[:size], order[: size - 1 : -1]
        ghosts = [left[0]] * (size - len(right))  # both lanes are as long: linked by zeros, so without effect
        self._lanes = np.array([left, ghosts + right]).T
        self._place = np.zeros(len(order), dtype=np.int64)
        self._place[left], self._place[right] = 2 * np.arange(size), 2 * np.arange(len(ghosts), size) + 1
        weights = costs.coupling[:, self._lanes[:-1], self._lanes[1:]]
        weights[:, : len(ghosts), 1] = 0.0
        self._weights = weights.reshape(len(weights), -1)
        self._middle = costs.coupling[:, left[-1], right[-1]]
        level = np.arange(float(costs.levels.shape[1]))
        self._products = -(level[:, None] * level)

    def best(self, prefix: Floats, prices: Floats) -> Ints:
        own = self._costs.alone(prefix, prices)[self._lanes]
        links = (prices @ self._weights).reshape(-1, 1, 2, 1)
        tables = links * self._products[:, None]  # [step, level of the group, lane, level of the next one]
        tables += own[:-1].transpose(0, 2, 1)[..., None]
        message = np.zeros(own.shape[1:])
        for table in tables:
            table += message.T[..., None]
            message = np.maximum.reduce(table, 0)
        last = own[-1] + message
        both = float(prices @ self._middle) * self._products + last[0][:, None] + last[1]
        chosen = [divmod(int(both.argmax()), len(both))]
        for left, right in reversed(tables.argmax(1).tolist()):
            a, b = chosen[-1]
            chosen.append((left[a], right[b]))
        result: Ints = np.array(chosen[::-1]).ravel()[self._place]
        return result


class Elimination:
    """Exact, by eliminating groups in an order that keeps the tables small."""

    def __init__(self, costs: Quadratic) -> None:
        self._costs = costs
        self._widths = [int(n) + 1 for n in costs.most]
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
        own = self._costs.alone(prefix, prices)
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
        self._costs = costs
        self._groups = np.arange(len(costs.most))
        # Per colour: its groups, its coupling to all groups (a column per pair) and its levels.
        self._turns = [
            (colour, costs.coupling[:, :, colour].reshape(len(costs.slope), -1), costs.levels[colour])
            for colour in costs.colours
        ]

    def best(self, prefix: Floats, prices: Floats) -> Ints:
        """From none kept and from all kept; the better of the two."""
        most = self._costs.most
        counts = self.better(np.array([np.zeros_like(most), most]), prefix, prices, SWEEPS)
        value = prefix[self._groups, counts].sum(1) - self._costs.cost(counts.astype(float)) @ prices
        best: Ints = counts[int(value.argmax())]
        return best

    def better(self, starts: Ints, prefix: Floats, prices: Floats, sweeps: int = 1) -> Ints:
        """Each of several vectors of counts after some sweeps over all groups, or less if nothing changes."""
        own = self._costs.alone(prefix, prices)
        columns = [(prices @ coupling).reshape(len(own), -1) for _, coupling, _ in self._turns]
        kept = starts.astype(float)
        for left in reversed(range(sweeps)):
            before = kept.copy() if left else kept
            for (colour, _, levels), column in zip(self._turns, columns, strict=True):
                field = (kept @ column)[:, :, None]
                kept[:, colour] = (own[colour] - field * levels).argmax(2)
            if left and (kept == before).all():
                break
        result: Ints = kept.astype(np.int64)
        return result


def in_a_row(linked: Bools) -> list[int] | None:
    """Groups in an order in which only neighbours are linked, if there is one."""
    near = [np.flatnonzero(row).tolist() for row in linked]
    if max(map(len, near)) > 2:
        return None
    order: dict[int, None] = {}
    for start in (g for g, around in enumerate(near) if len(around) < 2):
        after = [start]
        while after and after[0] not in order:
            order[after[0]] = None
            after = [h for h in near[after[0]] if h not in order]
    return list(order) if len(order) == len(near) else None  # what is left is a circle


def _colours(linked: Bools) -> Ints:
    """A colour per group, so that groups that are linked differ; greedily, those with many links first."""
    colour = np.full(len(linked), -1)
    for g in np.argsort(-linked.sum(1), kind="stable"):
        taken = set(colour[linked[g]].tolist())
        colour[g] = next(c for c in range(len(linked)) if c not in taken)
    return colour


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
