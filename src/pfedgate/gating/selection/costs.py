"""What a choice of blocks costs: groups of equal blocks, and cost terms over their live shares.

A layer's output units form a *group*: the first few are always kept, the rest are optional blocks of equal size. A
weight matrix costs ``coef * share(outputs) * share(inputs)``, because a dead input needs no weights and no
multiplications; a bias or an activation costs ``coef * share(outputs)``. So every cost is a polynomial of degree two in
the number of kept blocks per group, and grows with each of them. The solvers rely on exactly that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

RESOURCES = ("params", "flops", "activation_bytes", "latency_ms")


@dataclass(frozen=True)
class Group:
    """Blocks of one layer, or of several tied layers.

    The first `first` units are always kept, then come `count` optional blocks of `step` units each.

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

    def live(self, kept: int) -> int:
        """Number of live units when `kept` optional blocks stay."""
        return self.first + self.step * kept


@dataclass(frozen=True)
class Term:
    """One thing computed or stored: `coef` times the live shares of the groups it touches (none: a constant).

    Naming a group twice squares its share: the weights between two tied layers.
    """

    resource: str
    coef: float
    groups: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.resource not in RESOURCES:
            raise ValueError(f"unknown resource {self.resource!r} in a cost term; one of {', '.join(RESOURCES)}")
        if not (math.isfinite(self.coef) and self.coef >= 0):
            raise ValueError(f"a cost must be finite and not negative, got {self.coef!r} for {self.resource}")
        if len(self.groups) > 2:
            raise ValueError(f"a cost term touches at most two groups, got {self.groups}")


@dataclass(frozen=True)
class Polynomial:
    """Cost of one resource in live *units*: const + linear @ u + sum over g <= h of pairs[g, h] u_g u_h.

    Per unit rather than per share: counts of parameters and FLOPs then stay whole numbers, whose sums are exact in
    floating point in any order, so that a budget can be met to the last parameter.
    """

    const: float
    linear: Floats
    pairs: Floats

    def __call__(self, units: Sequence[Any] | Floats) -> Any:
        """Cost at live units that are numbers or arrays that broadcast; the same order of additions for both."""
        total: Any = self.const
        for g in np.flatnonzero(self.linear).tolist():
            total = total + self.linear[g] * units[g]
        for g, h in np.argwhere(self.pairs).tolist():
            total = total + self.pairs[g, h] * (units[g] * units[h])
        return total

    @property
    def whole(self) -> bool:
        """True if every coefficient is a whole number, so that all arithmetic on costs is exact."""
        parts = (np.asarray(self.const), self.linear, self.pairs)
        return all(bool(np.all(part == np.rint(part))) for part in parts)


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

    def cost(self, kept: Sequence[int]) -> dict[str, float]:
        """Cost per resource when `kept[g]` optional blocks of group g stay."""
        if len(kept) != len(self.groups):
            raise ValueError(f"{len(kept)} counts for {len(self.groups)} groups")
        for k, group in zip(kept, self.groups, strict=True):
            if not 0 <= k <= group.count:
                raise ValueError(f"group {group.name!r} has {group.count} optional blocks, asked to keep {k}")
        units = [float(group.live(int(k))) for k, group in zip(kept, self.groups, strict=True)]
        return {resource: float(cost(units)) for resource, cost in self.polynomials.items()}

    def dense(self) -> dict[str, float]:
        """Cost with every block."""
        return self.cost([group.count for group in self.groups])

    def smallest(self) -> dict[str, float]:
        """Cost of the blocks that are always kept."""
        return self.cost([0] * len(self.groups))

    def kept(self, mask: Iterable[bool]) -> tuple[int, ...]:
        """Kept optional blocks per group of a mask over all optional blocks, concatenated group by group."""
        flags, start, counts = np.asarray(list(mask), dtype=bool), 0, []
        if flags.size != sum(group.count for group in self.groups):
            raise ValueError(f"mask of {flags.size} for {sum(group.count for group in self.groups)} optional blocks")
        for group in self.groups:
            counts.append(int(flags[start : start + group.count].sum()))
            start += group.count
        return tuple(counts)
