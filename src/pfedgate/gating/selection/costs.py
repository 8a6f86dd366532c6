"""Costs of a choice of blocks: groups of equal blocks, and cost terms over their live shares.

A layer's output units form a *group*: the first few always stay, the rest are optional blocks of
equal size. A weight matrix costs ``coef * share(outputs) * share(inputs)``, because a dead input
needs no weights and no multiplications; a bias or an activation costs ``coef * share(outputs)``. So
every cost is a polynomial of degree two in the number of blocks per group, and grows with each of
them. The solvers rely on exactly that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pfedgate.core.errors import unknown

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

RESOURCES = ("params", "flops", "activation_bytes", "reducible_bytes", "latency_ms")


@dataclass(frozen=True)
class Group:
    """Blocks of one layer, or of several tied layers.

    The first `first` units always stay, then come `count` optional blocks of `step` units each.

    >>> Group("conv1", units=32, first=5, step=3, count=9).live(4)
    17
    """

    name: str
    units: int
    first: int
    step: int
    count: int

    def __post_init__(self) -> None:
        if self.units < 1 or self.first < 0 or self.count < 0 or self.step < 0 or (self.count and not self.step):
            raise ValueError(f"units and step must be positive, first and count not negative: {self}")
        if self.first + self.step * self.count != self.units:
            raise ValueError(
                f"group {self.name!r}: first + step * count = {self.first + self.step * self.count} "
                f"but it has {self.units} units; put the remainder into `first`"
            )

    def live(self, blocks: int) -> int:
        """Number of live units when so many optional blocks stay."""
        return self.first + self.step * blocks


@dataclass(frozen=True)
class Term:
    """One thing computed or stored: `coef` times the live shares of its groups (none: a constant).

    Naming a group twice squares its share: the weights between two tied layers.
    """

    resource: str
    coef: float
    groups: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.resource not in RESOURCES:
            raise ValueError(unknown("resource", self.resource, RESOURCES))
        if not (math.isfinite(self.coef) and self.coef >= 0):
            raise ValueError(f"a cost must be finite and not negative, got {self.coef!r} for {self.resource}")
        if len(self.groups) > 2:
            raise ValueError(f"a cost term touches at most two groups, got {self.groups}")


@dataclass(frozen=True)
class Polynomial:
    """Cost of one resource in live units: const + linear @ u + sum of pairs[g, h] u_g u_h, g <= h.

    Per unit rather than per share: counts of parameters and FLOPs then stay whole numbers. Their
    sums are exact in floating point in any order, so a budget can be met to the last parameter.
    """

    const: float
    linear: Floats
    pairs: Floats

    def __call__(self, units: Sequence[Any] | Floats) -> Any:
        """Cost at live units: numbers, or arrays that broadcast, added up in the same order."""
        total: Any = self.const
        for g in np.flatnonzero(self.linear).tolist():
            total = total + self.linear[g] * units[g]
        for g, h in np.argwhere(self.pairs).tolist():
            total = total + self.pairs[g, h] * (units[g] * units[h])
        return total

    @cached_property
    def both(self) -> Floats:
        """Second derivatives: `pairs` plus its transpose."""
        return self.pairs + self.pairs.T

    @property
    def whole(self) -> bool:
        """True if every coefficient is a whole number, so that sums of costs are exact."""
        return all(bool(np.all(part == np.rint(part))) for part in (self.const, self.linear, self.pairs))

    def only(self, groups: Sequence[int]) -> Polynomial:
        """The terms of these groups, in their order."""
        square = self.both[np.ix_(groups, groups)]
        return Polynomial(self.const, self.linear[groups], np.triu(square, 1) + np.diag(np.diag(square) / 2))


@dataclass(frozen=True)
class CostModel:
    """Groups and the cost terms over them.

    >>> groups = (Group("hidden", units=10, first=1, step=3, count=3),)
    >>> costs = CostModel(groups, (Term("params", 200.0, (0,)), Term("params", 10.0)))
    >>> costs.cost([1]), costs.dense(), costs.smallest()
    ({'params': 90.0}, {'params': 210.0}, {'params': 30.0})
    """

    groups: tuple[Group, ...]
    terms: tuple[Term, ...]
    dense_ms: float = math.inf  # a pass of the dense model without a gate, once it was measured

    def __post_init__(self) -> None:
        for term in self.terms:
            for g in term.groups:
                if not 0 <= g < len(self.groups):
                    raise ValueError(f"{term} names group {g}, but there are {len(self.groups)}")

    @cached_property
    def polynomials(self) -> dict[str, Polynomial]:
        """The terms of each resource that has any, added up."""
        return {r: self._polynomial(r) for r in RESOURCES if any(term.resource == r for term in self.terms)}

    def _polynomial(self, resource: str) -> Polynomial:
        size = len(self.groups)
        const, linear, pairs = 0.0, np.zeros(size), np.zeros((size, size))
        for term in self.terms:
            if term.resource != resource:
                continue
            if not term.groups:
                const += term.coef
            elif len(term.groups) == 1:
                linear[term.groups[0]] += term.coef / self.groups[term.groups[0]].units
            else:
                g, h = sorted(term.groups)
                pairs[g, h] += term.coef / (self.groups[g].units * self.groups[h].units)
        return Polynomial(const, linear, pairs)

    def cost(self, counts: Sequence[int]) -> dict[str, float]:
        """Cost per resource when `counts[g]` optional blocks of group g stay."""
        if len(counts) != len(self.groups):
            raise ValueError(f"{len(counts)} counts for {len(self.groups)} groups")
        for k, group in zip(counts, self.groups, strict=True):
            if not 0 <= k <= group.count:
                raise ValueError(f"group {group.name!r} has {group.count} optional blocks, asked to keep {k}")
        units = [float(group.live(int(k))) for k, group in zip(counts, self.groups, strict=True)]
        return {resource: float(cost(units)) for resource, cost in self.polynomials.items()}

    def dense(self) -> dict[str, float]:
        """Cost with every block."""
        return self.cost([group.count for group in self.groups])

    def fixed(self, resource: str) -> float:
        """The cost that no block can reduce."""
        return self.polynomials[resource].const if resource in self.polynomials else 0.0

    def smallest(self) -> dict[str, float]:
        """Cost without any optional block."""
        return self.cost([0] * len(self.groups))

    def kept(self, mask: Iterable[bool]) -> tuple[int, ...]:
        """Optional blocks per group of a mask over all of them, concatenated group by group."""
        flags, start, counts = np.asarray(list(mask), dtype=bool), 0, []
        if flags.size != sum(group.count for group in self.groups):
            raise ValueError(f"mask of {flags.size} for {sum(group.count for group in self.groups)} optional blocks")
        for group in self.groups:
            counts.append(int(flags[start : start + group.count].sum()))
            start += group.count
        return tuple(counts)


@dataclass(frozen=True)
class Problem:
    """The selection as arrays; groups have ``first + step * counts`` live units.

    Resources that cannot exceed their limits are left out. Groups whose cost depends only on the
    sum of their counts are joined.
    """

    counts: Ints  # optional blocks per group
    first: Floats
    step: Floats
    costs: tuple[Polynomial, ...]  # per resource
    limits: Floats
    places: Ints  # [group, block] -> index in the importance vector; `size` where there is no block
    size: int

    @classmethod
    def of(cls, model: CostModel, limits: Mapping[str, float]) -> Problem:
        """The problem of staying within `limits`."""
        dense = model.dense()
        bound = [(model.polynomials[r], limit) for r, limit in limits.items() if dense.get(r, 0.0) > limit]
        first = np.array([group.first for group in model.groups], dtype=float)
        step = np.array([group.step for group in model.groups], dtype=float)
        blocks = np.array([group.count for group in model.groups], dtype=np.int64)
        classes = _alike(step, [cost for cost, _ in bound])
        counts = np.array([blocks[members].sum() for members in classes], dtype=np.int64)
        places = np.full((len(classes), max(1, int(counts.max(initial=0)))), int(blocks.sum()))
        inside = np.split(np.arange(blocks.sum()), np.cumsum(blocks)[:-1])
        for row, members, count in zip(places, classes, counts, strict=True):
            row[:count] = np.concatenate([inside[g] for g in members])
        leaders = [members[0] for members in classes]
        return cls(
            counts=counts,
            first=np.array([first[members].sum() for members in classes]),
            step=step[leaders],
            costs=tuple(cost.only(leaders) for cost, _ in bound),
            # Sums of fractions depend on their order; a hair below the limit no order exceeds it.
            limits=np.array([x if cost.whole else max(x * (1 - 1e-12), cost(first)) for cost, x in bound]),
            places=places,
            size=int(blocks.sum()),
        )

    @cached_property
    def costly(self) -> Ints:
        """Groups with optional blocks that cost something; the others are free to keep whole."""
        touched = [cost.linear.astype(bool) | cost.both.any(0) for cost in self.costs]
        return np.flatnonzero(np.any(touched, axis=0) & (self.counts > 0))

    @cached_property
    def least(self) -> Floats:
        """Live units without the optional blocks of costly groups."""
        counts = self.counts.copy()
        counts[self.costly] = 0
        return self.first + self.step * counts

    @property
    def separable(self) -> bool:
        """True for one resource without products of groups."""
        return len(self.costs) == 1 and not self.costs[0].pairs.any()

    def fits(self, counts: Ints) -> bool:
        """True if these counts exceed no limit."""
        units = self.first + self.step * counts
        return all(cost(units) <= limit for cost, limit in zip(self.costs, self.limits, strict=True))

    def rank(self, importance: Floats) -> tuple[Ints, Floats]:
        """`places` with important blocks first, and the value of the best k blocks: [group, k]."""
        padded = np.append(importance, -1.0)
        order = (-padded[self.places]).argsort(axis=1, kind="stable")
        places = np.take_along_axis(self.places, order, axis=1)
        gain = np.maximum(padded[places], 0.0)
        prefix = np.zeros((gain.shape[0], gain.shape[1] + 1))
        # On a grid of whole numbers below 2^52 sums are exact: ties are ties for every solver.
        top = max(gain[:, 0].tolist(), default=0.0)
        bits = 51 - max(1, self.size).bit_length() - math.frexp(top)[1] if top else 0
        np.rint(np.ldexp(gain, bits)).cumsum(axis=1, out=prefix[:, 1:])
        return places, prefix

    def maximal(self) -> Iterator[Ints]:
        """Some counts that no block can be added to: a single vector only if there is no other."""
        unit, seen = np.eye(len(self.counts), dtype=np.int64), set()
        for lead in range(len(unit)):  # each group is filled first once
            counts = np.zeros_like(self.counts)
            for g in [lead, *range(len(unit))]:
                while counts[g] < self.counts[g] and self.fits(counts + unit[g]):
                    counts[g] += 1
            if counts.tobytes() not in seen:
                seen.add(counts.tobytes())
                yield counts


def _alike(step: Floats, costs: Sequence[Polynomial]) -> list[list[int]]:
    """Groups in classes: the cost of a class depends only on the sum of its counts.

    Members have the same step, the same cost per unit and the same coupling to every other group,
    hence none to each other: the inner layers of equal residual blocks, the heads of equal
    transformer layers.
    """
    classes: dict[tuple[object, ...], list[int]] = {}
    for g in range(len(step)):
        alone = g if any(cost.both[g, g] for cost in costs) else -1  # a square is no function of a sum
        key = (alone, step[g], *((cost.linear[g], cost.both[g].tobytes()) for cost in costs))
        classes.setdefault(key, []).append(g)
    return list(classes.values())
